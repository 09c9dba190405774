"""Verification of transactions by the leader of a partition (KIP-890): the state of one partition.

A transaction hangs if a batch is appended after its marker, or if its coordinator does not know the partition: no
marker ever follows. So before the leader appends the first batch of a producer's transaction, the coordinator confirms
that the transaction is open and contains the partition. Between its answer and the append, a marker may be written: the
transaction has ended, and the answer is void. `Verification` is the guard against that, as Kafka's VerificationGuard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from chronik.storage.producers import ProducerStates, is_after
from chronik.wire.batch import BatchHeader
from chronik.wire.errors import ErrorCode, KafkaError

Resume: TypeAlias = "Callable[[Verification, ErrorCode], None]"


class ProducedTransaction(NamedTuple):
    """The transaction of a produce request.

    `adds` is set if the batch itself adds the partition to the transaction (transaction version 2). Otherwise the
    producer has added the partition before, and the coordinator only confirms it.
    """

    transactional_id: str
    adds: bool


class UnverifiedBatch(KafkaError):
    """The batch may be appended after the coordinator has confirmed its transaction, or after the batches that wait."""

    def __init__(self, header: BatchHeader) -> None:
        super().__init__(
            ErrorCode.invalid_txn_state, f"the transaction of producer {header.producer_id} is not verified here"
        )
        self.header = header


class Verification:
    """One verification of a producer's transaction, and the batches that wait for its outcome, in order of arrival.

    Once `void` is set, no batch may be appended under it: `void` is the outcome of each of them.
    """

    __slots__ = ("adds", "epoch", "is_outdated", "is_requested", "lowest_sequence", "void", "waiting")

    def __init__(self, header: BatchHeader, adds: bool) -> None:
        self.epoch = header.producer_epoch
        self.adds = adds
        self.lowest_sequence = header.base_sequence
        """An unknown producer may begin with any sequence, but a later batch must not overtake an earlier one."""
        self.void: KafkaError | None = None
        self.waiting: deque[Resume] = deque()
        self.is_requested = False
        """Whether the coordinator's answer is on its way."""
        self.is_outdated = False
        """Whether that answer may be older than a marker, so that the coordinator must be asked again."""


class Verifications:
    """The pending verifications of one partition, one for each producer. Owned by the loop.

    Invariant: an entry is not void. It exists from the first batch that waits until the first append, the producer's
    marker, or the end of the leader epoch, and at the latest until its outcome is known.
    """

    __slots__ = ("_pending",)

    def __init__(self) -> None:
        self._pending: dict[int, Verification] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def join(self, header: BatchHeader, adds: bool) -> Verification:
        """Return the verification that the batch has to wait for, a new one if none is pending."""
        producer_id = header.producer_id
        pending = self._pending.get(producer_id)
        while pending is not None and header.producer_epoch > pending.epoch:
            self._void(producer_id, _fenced(producer_id, pending.epoch, header.producer_epoch))
            pending = self._pending.get(producer_id)
        if pending is None:
            pending = self._pending[producer_id] = Verification(header, adds)
        elif header.producer_epoch < pending.epoch:
            raise _fenced(producer_id, header.producer_epoch, pending.epoch)
        elif is_after(pending.lowest_sequence, header.base_sequence):
            pending.lowest_sequence = header.base_sequence
        return pending

    def check_order(self, header: BatchHeader, verified: Verification | None) -> None:
        """Raise UnverifiedBatch if earlier batches of the producer wait for a verification."""
        pending = self._pending.get(header.producer_id)
        if verified is None and pending is not None and pending.epoch == header.producer_epoch:
            raise UnverifiedBatch(header)

    def check(
        self,
        header: BatchHeader,
        transaction: ProducedTransaction,
        verified: Verification | None,
        producers: ProducerStates,
    ) -> None:
        """Raise unless the producer's transaction is open in this partition, or `verified` allows to begin it."""
        if verified is not None and verified.void is not None:
            raise verified.void
        if producers.has_transaction(header.producer_id, header.producer_epoch):
            return
        if verified is None:
            raise UnverifiedBatch(header)
        sequence = header.base_sequence
        if is_after(sequence, verified.lowest_sequence):
            raise _out_of_order(header, verified.lowest_sequence)
        if transaction.adds and sequence != 0 and producers.get(header.producer_id) is None:
            # Each transaction of version 2 has its own epoch, so its first batch in a partition has sequence 0.
            raise _out_of_order(header, 0)

    def appended(self, header: BatchHeader) -> None:
        """The batch is in the log, and its transaction open: batches that still wait may follow."""
        pending = self._pending.get(header.producer_id)
        if pending is not None and pending.epoch == header.producer_epoch:
            del self._pending[header.producer_id]

    def ended(self, producer_id: int, epoch: int) -> None:
        """A marker was appended: an answer of the coordinator from before it proves nothing any more.

        With version 2, a marker has the epoch of the producer's next transaction, whose first batch often arrives
        before it: that batch waits for a new answer.
        """
        pending = self._pending.get(producer_id)
        if pending is None:
            return
        if epoch > pending.epoch or (epoch == pending.epoch and not pending.adds):
            self._void(
                producer_id,
                KafkaError(ErrorCode.invalid_txn_state, f"the transaction of producer {producer_id} has ended"),
            )
        else:
            pending.is_outdated = True

    def end_all(self, error: KafkaError) -> None:
        """This node no longer leads, or leads in a new epoch: other leaders may have written markers."""
        while self._pending:
            self._void(next(iter(self._pending)), error)

    def finish(self, producer_id: int, verification: Verification, outcome: ErrorCode) -> None:
        """Resume the batches that wait, in order, with the coordinator's answer. None wait if it is void."""
        try:
            # An answer that is sent may run the next request of its connection, whose batch then waits here too.
            while verification.waiting:
                verification.waiting.popleft()(verification, outcome)
        finally:
            if self._pending.get(producer_id) is verification:
                del self._pending[producer_id]

    def _void(self, producer_id: int, error: KafkaError) -> None:
        """End a verification early: its batches need not wait for the answer."""
        verification = self._pending.pop(producer_id)
        verification.void = error
        self.finish(producer_id, verification, ErrorCode.none)


def _fenced(producer_id: int, epoch: int, newer_epoch: int) -> KafkaError:
    return KafkaError(
        ErrorCode.invalid_producer_epoch, f"producer {producer_id} has epoch {newer_epoch}, the batch {epoch}"
    )


def _out_of_order(header: BatchHeader, expected: int) -> KafkaError:
    return KafkaError(
        ErrorCode.out_of_order_sequence_number,
        f"the transaction of producer {header.producer_id} begins with sequence {header.base_sequence}, not {expected}",
    )
