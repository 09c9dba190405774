"""Observations of a topic: plain values in time order. `examination` records them, `rules` judges them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from chronik.client.transactions import OpenTransaction, TransactionDescription
from chronik.observe.traces import Trace

DOCTOR_CLIENT_ID = "chronik-doctor"


@dataclass(frozen=True, slots=True)
class PartitionSample:
    """One partition at one moment. `error` is why its leader returned no offsets: a Kafka or a network error.

    `high_watermark` is what consumers see. A new leader may not know it yet while `log_end_offset` is known.
    `answer_ms` is the leader's response time. read_committed consumers see records below `last_stable_offset`.
    """

    at_s: float
    leader: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    log_start_offset: int | None = None
    high_watermark: int | None = None
    log_end_offset: int | None = None
    error: str | None = None
    answer_ms: float = 0.0
    last_stable_offset: int | None = None

    @property
    def has_leader(self) -> bool:
        """Return whether a leader answers for the partition, regardless of the metadata.

        Only a leader returns its log start to consumers. Any replica returns its log end to a debugging consumer.
        """
        return self.leader >= 0 and (self.error is None or self.log_start_offset is not None)


@dataclass(frozen=True, slots=True)
class Fetch:
    """A fetch from an offset that has records, by the doctor or a traced consumer. It still runs unless `is_over`."""

    at_s: float
    partition: int
    node: int
    offset: int
    elapsed_ms: float
    is_over: bool = True
    client: str = "the doctor"


@dataclass(frozen=True, slots=True)
class Member:
    member_id: str
    client_id: str
    host: str
    partitions: tuple[int, ...]
    """Assigned partitions of the examined topic."""
    epoch: int | None = None
    """In a consumer group (KIP-848)."""


@dataclass(frozen=True, slots=True)
class GroupSample:
    """One group at one moment: its committed offsets in the topic, and its members with their assignments."""

    at_s: float
    state: str
    members: tuple[Member, ...]
    committed: Mapping[int, int]
    assignment_epoch: int | None = None
    """The epoch of the target assignment, in a consumer group (KIP-848)."""


@dataclass(frozen=True, slots=True)
class ShareSeen:
    """What the leader of a partition reports of a share group (`/api/topics/{name}`)."""

    group: str
    partition: int
    in_flight: int
    delivered: int
    exhausted: int
    exhausted_offset: int
    suspect_offset: int
    suspect_deliveries: int
    delivery_limit: int
    node: int = -1


@dataclass(frozen=True, slots=True)
class RejectionSample:
    """How often each node has rejected requests for each partition since it started, because it is not the leader."""

    at_s: float
    counts: Mapping[tuple[int, int], int]
    """By node and partition."""


@dataclass(frozen=True, slots=True)
class DamageSeen:
    """Damage that a node found in its own replica. `state` is waiting, fetching or healed."""

    node: int
    partition: int
    offset: int
    how: str
    reason: str
    state: str
    waits_for: str = ""


@dataclass(frozen=True, slots=True)
class BlockingTransaction:
    """A transaction that read_committed consumers wait for. `coordinated` is None if no coordinator knows it."""

    open: OpenTransaction
    coordinated: TransactionDescription | None


@dataclass(frozen=True, slots=True)
class ConnectionFault:
    """Why a connection cannot be made, although a broker answers. `node` is None for a bootstrap address."""

    kind: Literal["expired-certificate", "wrong-listener"]
    text: str
    node: int | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """An operation that the doctor was refused; `error` is the broker's error code."""

    operation: str
    resource: str
    error: str
    node: int | None = None
    group: str | None = None


@dataclass(frozen=True, slots=True)
class Throttle:
    """A quota delayed a request of the doctor."""

    at_s: float
    node: int
    delay_ms: float


@dataclass(slots=True)
class Observations:
    """Everything observed so far. `requested_group` is None unless the caller named a group."""

    topic: str
    requested_group: str | None = None
    seconds: float = 0.0
    min_insync_replicas: int | None = None
    silent_nodes: Mapping[int, str] = field(default_factory=dict)
    """Nodes that did not answer the latest request, with the reason."""
    partitions: dict[int, list[PartitionSample]] = field(default_factory=dict)
    fetches: list[Fetch] = field(default_factory=list)
    groups: dict[str, list[GroupSample]] = field(default_factory=dict)
    rejections: list[RejectionSample] = field(default_factory=list)
    replica_ends: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    """The log end offset of each reachable replica, by partition and node."""
    shares: Sequence[ShareSeen] = ()
    """Of all responding nodes: each of the partitions that it leads."""
    damages: Sequence[DamageSeen] = ()
    """Of all responding nodes; newest first for each node."""
    watermark_age_s: Mapping[int, float] = field(default_factory=dict)
    traces: Sequence[Trace] = ()
    """Of all responding nodes, ordered by node and number."""
    node_clocks_ms: Mapping[int, float] = field(default_factory=dict)
    """Each node's own clock when its traces were read, because clocks differ."""
    transactions: Sequence[BlockingTransaction] = ()
    """The first open transaction of each partition whose last stable offset stalls."""
    wall_ms: int = 0
    """The doctor's clock when it read the transactions."""
    who: str = "User:ANONYMOUS"
    """The identity of the doctor at the brokers."""
    connection_faults: Sequence[ConnectionFault] = ()
    unreachable_advertised: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """If only the bootstrap address answers: each node's advertised address, and why it does not answer."""
    refusals: list[Refusal] = field(default_factory=list)
    throttles: list[Throttle] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def ago_s(self, event: Trace) -> float:
        """Return how long before the end of the examination an event was traced."""
        return max(0.0, self.node_clocks_ms.get(event.node, event.time_ms) - event.time_ms) / 1000

    def refused(self, refusal: Refusal) -> None:
        if refusal not in self.refusals:
            self.refusals.append(refusal)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def lasting_s(samples: Sequence[PartitionSample], holds: Callable[[PartitionSample], bool]) -> float | None:
    """Return how long a condition has held without a break up to the last sample, or None if it does not hold now."""
    holding = list(itertools.takewhile(holds, reversed(samples)))
    return holding[0].at_s - holding[-1].at_s if holding else None
