"""The durable state of one transactional id, and the transitions between its values.

    Empty ──add──> Ongoing ──end──> PrepareCommit ──markers──> CompleteCommit ──add──> Ongoing ...
                      │   └──end──> PrepareAbort  ──markers──> CompleteAbort  ──add──> Ongoing ...
                      └─timeout, new producer──> PrepareAbort with a higher epoch

Each transition returns the next value. It takes effect once its record is committed in `__transaction_state`.
"""

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final, TypeAlias

TopicPartition: TypeAlias = tuple[str, int]

NO_PRODUCER_ID: Final = -1
NO_EPOCH: Final = -1
NO_TIME_MS: Final = -1
EPOCH_MAX: Final = 32_767

EPOCH_BUMP_VERSION: Final = 2
"""From this transaction version on (KIP-890), each EndTxn raises the epoch."""


class TransactionState(IntEnum):
    """The numbers are those of Kafka's log format. Dead and PrepareEpochFence are never written."""

    EMPTY = 0
    ONGOING = 1
    PREPARE_COMMIT = 2
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4
    COMPLETE_ABORT = 5
    DEAD = 6
    PREPARE_EPOCH_FENCE = 7

    @property
    def label(self) -> str:
        """The name that ListTransactions and DescribeTransactions use."""
        return "".join(word.capitalize() for word in self.name.split("_"))

    @property
    def is_prepared(self) -> bool:
        """Whether the outcome is decided, but not every marker is written."""
        return self in (TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT)


@dataclass(frozen=True, slots=True)
class TransactionMetadata:
    """What the log holds for a transactional id.

    While a transaction is prepared, `producer_epoch` is the epoch of its markers. `next_producer_id` replaces the
    producer id when the transaction is complete: the epochs of the current id are used up. `client_version` is the
    transaction version of the client that ended the transaction; 0 if the coordinator ended it.
    """

    producer_id: int
    producer_epoch: int
    timeout_ms: int
    state: TransactionState
    updated_ms: int
    partitions: frozenset[TopicPartition] = frozenset()
    start_ms: int = NO_TIME_MS
    previous_producer_id: int = NO_PRODUCER_ID
    next_producer_id: int = NO_PRODUCER_ID
    client_version: int = 0

    @property
    def epochs_are_used_up(self) -> bool:
        """Whether a producer may not get a higher epoch. The highest one is kept for fencing."""
        return self.producer_epoch >= EPOCH_MAX - 1

    def fences(self, epoch: int) -> bool:
        """Whether a producer with this epoch is fenced. No producer gets the highest epoch, whatever it claims."""
        return epoch != self.producer_epoch or epoch == EPOCH_MAX

    def with_next_epoch(self, timeout_ms: int, wall_ms: int) -> "TransactionMetadata":
        """Start over with the next epoch, which fences earlier producers."""
        return self._empty(self.producer_id, self.producer_epoch + 1, timeout_ms, wall_ms)

    def with_same_epoch(self, timeout_ms: int, wall_ms: int) -> "TransactionMetadata":
        """Start over for a producer that already has the current epoch."""
        return self._empty(self.producer_id, self.producer_epoch, timeout_ms, wall_ms)

    def with_producer_id(self, producer_id: int, timeout_ms: int, wall_ms: int) -> "TransactionMetadata":
        """Start over with a new producer id: the epochs of the old one are used up."""
        return self._empty(producer_id, 0, timeout_ms, wall_ms)

    def _empty(self, producer_id: int, epoch: int, timeout_ms: int, wall_ms: int) -> "TransactionMetadata":
        return TransactionMetadata(
            producer_id,
            epoch,
            timeout_ms,
            TransactionState.EMPTY,
            wall_ms,
            previous_producer_id=self.producer_id if producer_id != self.producer_id else self.previous_producer_id,
        )

    def with_partitions(self, partitions: frozenset[TopicPartition], wall_ms: int) -> "TransactionMetadata":
        """Add partitions to the transaction, or begin one with them."""
        is_open = self.state is TransactionState.ONGOING
        return replace(
            self,
            state=TransactionState.ONGOING,
            partitions=self.partitions | partitions if is_open else partitions,
            start_ms=self.start_ms if is_open else wall_ms,
            updated_ms=wall_ms,
            client_version=0,
        )

    def ended(
        self, *, is_commit: bool, client_version: int, next_producer_id: int, wall_ms: int
    ) -> "TransactionMetadata":
        """Decide the outcome. From version 2 on the epoch rises, and `next_producer_id` is set if that is the last."""
        is_open = self.state is TransactionState.ONGOING
        bumps = client_version >= EPOCH_BUMP_VERSION
        return replace(
            self,
            state=TransactionState.PREPARE_COMMIT if is_commit else TransactionState.PREPARE_ABORT,
            producer_epoch=self.producer_epoch + bumps,
            next_producer_id=next_producer_id,
            start_ms=self.start_ms if is_open else wall_ms,
            updated_ms=wall_ms,
            client_version=client_version,
        )

    def fenced(self, wall_ms: int) -> "TransactionMetadata":
        """Abort the transaction with a higher epoch, which its producer does not get."""
        return replace(
            self,
            state=TransactionState.PREPARE_ABORT,
            producer_epoch=self.producer_epoch + 1,
            next_producer_id=NO_PRODUCER_ID,
            updated_ms=wall_ms,
            client_version=0,
        )

    def completed(self, wall_ms: int) -> "TransactionMetadata":
        """Every marker is written."""
        is_commit = self.state is TransactionState.PREPARE_COMMIT
        changes_id = self.next_producer_id != NO_PRODUCER_ID
        return replace(
            self,
            state=TransactionState.COMPLETE_COMMIT if is_commit else TransactionState.COMPLETE_ABORT,
            producer_id=self.next_producer_id if changes_id else self.producer_id,
            producer_epoch=0 if changes_id else self.producer_epoch,
            previous_producer_id=self.producer_id if changes_id else self.previous_producer_id,
            next_producer_id=NO_PRODUCER_ID,
            partitions=frozenset(),
            updated_ms=wall_ms,
        )
