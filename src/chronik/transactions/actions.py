"""The outputs of the transaction state machine that it does not share with groups."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from chronik.groups.step import Append, Reply
from chronik.transactions.transaction import TopicPartition

Cause: TypeAlias = Literal["client", "timeout", "fenced"]


@dataclass(frozen=True, slots=True)
class WriteMarkers:
    """Have the leader of each partition write this marker, and repeat that until each one has.

    Report each partition to `TransactionCoordinator.marker_written`. The action is void once the coordinator's
    partition was unloaded.
    """

    transactional_id: str
    partition: int
    """The partition of the transaction topic; the leaders fence markers by its leader epoch."""
    coordinator_epoch: int
    producer_id: int
    producer_epoch: int
    is_commit: bool
    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """The outcome of a transaction is decided and durable; for logs and metrics."""

    transactional_id: str
    producer_id: int
    is_commit: bool
    cause: Cause
    open_ms: int


@dataclass(frozen=True, slots=True)
class Settled:
    """No transition of this id is pending: a request that got CONCURRENT_TRANSACTIONS may be repeated now."""

    transactional_id: str


Action: TypeAlias = Reply | Append | WriteMarkers | Ended | Settled
