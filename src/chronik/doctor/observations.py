"""What was seen of a topic: values only, in the order of time. Made by `examination`, judged by `rules`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from chronik.observe.traces import Trace

DOCTOR_CLIENT_ID = "chronik-doctor"


@dataclass(frozen=True, slots=True)
class PartitionSample:
    """One partition at one moment. `error` is why its leader told no offsets: Kafka's name, or what the network said.

    `high_watermark` is what consumers see; it may be missing while `log_end_offset` is there, when a new leader does
    not tell it yet. `answer_ms` is how long the leader took to say so.
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

    @property
    def has_leader(self) -> bool:
        """Whether a leader answers for the partition, whatever the metadata says.

        Only a leader tells consumers where the log starts; where it ends, any replica tells a debugging consumer.
        """
        return self.leader >= 0 and (self.error is None or self.log_start_offset is not None)


@dataclass(frozen=True, slots=True)
class FetchProbe:
    """A fetch by the doctor itself, from an offset at which there are records. Still running where `is_over` is not."""

    at_s: float
    partition: int
    node: int
    offset: int
    elapsed_ms: float
    is_over: bool = True


@dataclass(frozen=True, slots=True)
class Member:
    member_id: str
    client_id: str
    host: str
    partitions: tuple[int, ...]
    """Of the topic."""


@dataclass(frozen=True, slots=True)
class GroupSample:
    """One group at one moment: where it stands in the topic's partitions, and who holds them."""

    at_s: float
    state: str
    members: tuple[Member, ...]
    committed: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class RejectionSample:
    """How often each node has refused each partition of the topic, since its start, because it does not lead it."""

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


@dataclass(slots=True)
class Observations:
    """All that was seen, until now. `asked_group`: the one that was named, if any."""

    topic: str
    asked_group: str | None = None
    seconds: float = 0.0
    min_insync_replicas: int | None = None
    silent_nodes: Mapping[int, str] = field(default_factory=dict)
    """Nodes of the cluster that did not answer at last, with the reason."""
    partitions: dict[int, list[PartitionSample]] = field(default_factory=dict)
    fetches: list[FetchProbe] = field(default_factory=list)
    groups: dict[str, list[GroupSample]] = field(default_factory=dict)
    rejections: list[RejectionSample] = field(default_factory=list)
    replica_ends: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    """By partition and node: the log end of each replica that could be asked."""
    damages: Sequence[DamageSeen] = ()
    """Of all nodes that answered; of each the newest first."""
    watermark_age_s: Mapping[int, float] = field(default_factory=dict)
    traces: Sequence[Trace] = ()
    """Of all nodes that answered, by node and number."""
    node_clocks_ms: Mapping[int, float] = field(default_factory=dict)
    """What each node's own clock said when its traces were read: clocks differ."""
    notes: list[str] = field(default_factory=list)

    def ago_s(self, event: Trace) -> float:
        """How long before the end of the examination something was traced."""
        return max(0.0, self.node_clocks_ms.get(event.node, event.time_ms) - event.time_ms) / 1000

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
