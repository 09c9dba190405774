"""The log's state of idempotent and transactional producers: the epoch, the last batches, the open transaction of each.

A producer that resends a batch (it did not get the response) receives the batch's existing offsets; a gap in its
sequence is refused, and so is a batch with the sequence of one in a transaction that has ended. The state is a function
of the log: snapshots only avoid reading the whole log again.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from chronik.storage.transactions import EndedTransaction, OpenTransactions
from chronik.wire.batch import TRANSACTIONAL, BatchHeader, Marker
from chronik.wire.errors import ErrorCode, KafkaError

BATCHES_KEPT: Final = 5
"""As many as a producer may have in flight."""
PRODUCERS_MAX: Final = 50_000
"""Above this many in one log, the producer that has been idle longest is forgotten."""

SEQUENCE_MASK: Final = 0x7FFFFFFF
"""Sequences wrap after 2^31-1."""
FAR_SEQUENCE: Final = 1 << 29
"""So far from its first sequence, a producer no longer resends what came before that."""


class SentBatch(NamedTuple):
    """One of a producer's batches in the log."""

    base_sequence: int
    last_sequence: int
    base_offset: int
    last_offset: int
    log_append_time_ms: int


class AppendResult(NamedTuple):
    """The offsets of the appended records, and their log append time (-1: they keep their own timestamps)."""

    base_offset: int
    last_offset: int
    log_append_time_ms: int


@dataclass(slots=True)
class ProducerState:
    """One producer: its epoch, and its last batches in that epoch, oldest first."""

    epoch: int
    last_seen_ms: int
    batches: list[SentBatch]
    first_sequence: int = 0
    """Of the first batch of the epoch in this log: the log never had earlier ones. 0: it has had all of them."""
    coordinator_epoch: int = -1
    """Of the last marker; -1 if there was none."""
    first_offset: int | None = None
    """Of the open transaction, if there is one."""
    marker_offset: int = field(default=-1, compare=False)
    """Of the last marker that this process saw in the log; not part of snapshots."""


class LastBatch(NamedTuple):
    """A producer's epoch, and the last offset of its last batch; None if only a marker states its epoch."""

    epoch: int
    last_offset: int | None


@dataclass(slots=True, eq=False)
class ProducerStates:
    """All producers of one log, ordered by their last batch, newest last. Owned by the event loop.

    Invariant: `transactions` has an open transaction for each state with a `first_offset`, and no other.
    """

    expiration_ms: int
    transactions: OpenTransactions = field(default_factory=OpenTransactions)
    _states: dict[int, ProducerState] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._states)

    def items(self) -> Iterator[tuple[int, ProducerState]]:
        return iter(self._states.items())

    def get(self, producer_id: int) -> ProducerState | None:
        return self._states.get(producer_id)

    def check(self, header: BatchHeader, may_be_early: bool = False) -> AppendResult | None:
        """Return None if the batch may be appended, its earlier result if it already was. Raises KafkaError otherwise.

        An unknown producer may start with any sequence: its older batches may have expired. With `may_be_early`,
        older batches may still be on their way, so a batch that skips sequences is refused, and its producer resends
        it. A batch without a sequence comes from the group coordinator.
        """
        if header.producer_id < 0:
            return None
        state = self._states.get(header.producer_id)
        if state is None:
            if may_be_early and header.base_sequence > 0:
                raise _early(header)
            return None
        if header.producer_epoch < state.epoch:
            raise _fenced(header, state)
        earlier = self._check_sequence(header, state, may_be_early) if header.base_sequence >= 0 else None
        if earlier is None and state.first_offset is not None and not header.is_transactional:
            raise KafkaError(
                ErrorCode.invalid_txn_state,
                f"producer {header.producer_id} has a transaction from offset {state.first_offset} on, the batch none",
            )
        return earlier

    def _check_sequence(self, header: BatchHeader, state: ProducerState, may_be_early: bool) -> AppendResult | None:
        sequence = header.base_sequence
        if header.producer_epoch > state.epoch:
            if sequence != 0:
                raise _early(header) if may_be_early else _out_of_order(header, 0)
            return None
        last_sequence = header.last_sequence
        for batch in state.batches:
            if batch.base_sequence == sequence and batch.last_sequence == last_sequence:
                _check_repeated(header, state, batch)
                return AppendResult(batch.base_offset, batch.last_offset, batch.log_append_time_ms)
        # A marker may have begun the epoch.
        expected = state.batches[-1].last_sequence + 1 & SEQUENCE_MASK if state.batches else 0
        if sequence == expected:
            return None
        if may_be_early and is_after(sequence, expected):
            raise _early(header)
        if not state.batches or (state.first_sequence and is_after(state.first_sequence, last_sequence)):
            # To call a batch a duplicate that the log never had would lose its records.
            raise _out_of_order(header, expected)
        if is_after(state.batches[0].base_sequence, last_sequence) and len(state.batches) == BATCHES_KEPT:
            _check_repeated(header, state, state.batches[0])
            raise KafkaError(
                ErrorCode.duplicate_sequence_number,
                f"producer {header.producer_id} repeats sequence {sequence}, which is too old to know its offset",
            )
        raise _out_of_order(header, expected)

    def check_marker(self, header: BatchHeader, marker: Marker) -> None:
        """Raise KafkaError if the marker comes from an earlier producer epoch, or an earlier coordinator."""
        state = self._states.get(header.producer_id)
        if state is None:
            return
        if header.producer_epoch < state.epoch:
            raise _fenced(header, state)
        if marker.coordinator_epoch < state.coordinator_epoch:
            raise KafkaError(
                ErrorCode.transaction_coordinator_fenced,
                f"the coordinator of producer {header.producer_id} has epoch {state.coordinator_epoch}, "
                f"the marker {marker.coordinator_epoch}",
            )

    def has_transaction(self, producer_id: int, epoch: int) -> bool:
        """Return whether the producer has an open transaction with this epoch in the log."""
        state = self._states.get(producer_id)
        return state is not None and state.first_offset is not None and state.epoch == epoch

    def has_marker(self, producer_id: int, epoch: int, from_offset: int) -> bool:
        """Return whether a marker of this epoch is at `from_offset` or after it."""
        state = self._states.get(producer_id)
        return state is not None and state.epoch == epoch and state.marker_offset >= from_offset

    def check_verified(self, producer_id: int, epoch: int, verified_from: int) -> None:
        """Raise KafkaError if the producer's transaction has ended since it was verified.

        `verified_from` is the log end offset when the verification began, in the current leader epoch: a marker from
        there on may be newer than the coordinator's answer.
        """
        state = self._states.get(producer_id)
        if state is None:
            return
        if epoch < state.epoch:
            raise _epoch_fenced(producer_id, epoch, state)
        if state.marker_offset >= verified_from:
            raise KafkaError(
                ErrorCode.invalid_txn_state,
                f"the transaction of producer {producer_id} ended at offset {state.marker_offset}",
            )

    def follows_batch_from(self, offset: int, header: BatchHeader) -> bool:
        """Return whether the producer's last batch here is at or after `offset` and precedes this one in sequence."""
        state = self._states.get(header.producer_id)
        if state is None or state.epoch != header.producer_epoch or not state.batches:
            return False
        last = state.batches[-1]
        return last.last_offset >= offset and is_after(header.base_sequence, last.base_sequence)

    def first_from(self, offset: int) -> list[tuple[int, int, int]]:
        """Return id, epoch and first kept sequence from `offset` on, of each producer that wrote there."""
        batches: list[tuple[int, int, int]] = []
        for producer_id, state in reversed(self._states.items()):
            if not state.batches:
                continue
            sequences = [batch.base_sequence for batch in state.batches if batch.base_offset >= offset]
            if not sequences:
                break
            batches.append((producer_id, state.epoch, sequences[0]))
        return batches

    def record(self, header: BatchHeader, base_offset: int, now_ms: int, log_append_time_ms: int = -1) -> None:
        sent = SentBatch(
            header.base_sequence,
            header.last_sequence,
            base_offset,
            base_offset + header.last_offset_delta,
            log_append_time_ms,
        )
        producer_id = header.producer_id
        state = self._states.pop(producer_id, None)
        if state is None:
            self._make_room()
            state = ProducerState(header.producer_epoch, now_ms, [sent], max(header.base_sequence, 0))
        else:
            state.last_seen_ms = now_ms
            if state.epoch != header.producer_epoch:
                state.epoch = header.producer_epoch
                state.batches = [sent]
                state.first_sequence = max(header.base_sequence, 0)
            else:
                state.batches.append(sent)
                if len(state.batches) > BATCHES_KEPT:
                    del state.batches[0]
                if state.first_sequence and header.base_sequence - state.first_sequence & FAR_SEQUENCE:
                    state.first_sequence = 0
        self._states[producer_id] = state
        if header[5] & TRANSACTIONAL and state.first_offset is None:
            state.first_offset = base_offset
            self.transactions.begin(producer_id, base_offset)

    def end_transaction(self, header: BatchHeader, marker: Marker, offset: int, now_ms: int) -> EndedTransaction | None:
        """Record a marker at `offset`; return the transaction that it ends, None if the producer has none here.

        A marker keeps the producer's place in the order: it is no batch of the producer.
        """
        state = self._states.get(header.producer_id)
        if state is None:
            self._make_room()
            state = self._states[header.producer_id] = ProducerState(header.producer_epoch, now_ms, [])
        elif state.epoch != header.producer_epoch:
            state.epoch = header.producer_epoch
            state.batches = []
            state.first_sequence = 0
        state.last_seen_ms = now_ms
        state.coordinator_epoch = marker.coordinator_epoch
        state.first_offset = None
        state.marker_offset = offset
        return self.transactions.end(header.producer_id, offset)

    def open_transactions(self) -> Iterator[tuple[int, ProducerState]]:
        """Yield the producers that have an open transaction."""
        for producer_id in self.transactions:
            yield producer_id, self._states[producer_id]

    def _make_room(self) -> None:
        """Forget the producer that has been idle longest, if there are too many; never one with a transaction."""
        if len(self._states) >= PRODUCERS_MAX:
            for producer_id, state in self.items():
                if state.first_offset is None:
                    del self._states[producer_id]
                    return

    def restore(self, states: Iterable[tuple[int, ProducerState]], ended: Iterable[tuple[int, int]]) -> None:
        """Set the state from a snapshot: all producers in order, and the transactions that had just ended."""
        self._states = dict(states)
        open_ = [(each, state.first_offset) for each, state in self.items() if state.first_offset is not None]
        self.transactions.restore(open_, ended)

    def forget_transactions(self) -> None:
        """Forget which transactions are open, but no producer."""
        for _, state in self.open_transactions():
            state.first_offset = None
        self.transactions = OpenTransactions()

    def expire(self, now_ms: int) -> int:
        """Forget producers that have been idle too long and have no open transaction; return how many."""
        oldest_ms = now_ms - self.expiration_ms
        expired = [
            producer_id
            for producer_id, state in self._states.items()
            if state.last_seen_ms < oldest_ms and state.first_offset is None
        ]
        for producer_id in expired:
            del self._states[producer_id]
        return len(expired)

    def last_batches(self) -> dict[int, LastBatch]:
        """Return each producer's last batch: compaction must keep it, even if it becomes empty."""
        return {
            producer_id: LastBatch(state.epoch, state.batches[-1].last_offset if state.batches else None)
            for producer_id, state in self._states.items()
        }


def is_after(sequence: int, other: int) -> bool:
    """Return whether `sequence` comes after `other`; sequences wrap around."""
    return 0 < (sequence - other & SEQUENCE_MASK) <= SEQUENCE_MASK >> 1


def _check_repeated(header: BatchHeader, state: ProducerState, batch: SentBatch) -> None:
    """Raise KafkaError if `batch`, which the new one repeats or precedes, is in a transaction that has ended.

    A producer resends only batches of its open transaction. But librdkafka uses the sequence of a batch again that it
    resent, and then purged because the transaction is aborted. To acknowledge that as a duplicate would lose a record.
    """
    if header.is_transactional and (state.first_offset is None or batch.base_offset < state.first_offset):
        raise KafkaError(
            ErrorCode.invalid_txn_state,
            f"producer {header.producer_id} sends sequence {header.base_sequence} of a transaction that has ended",
        )


def _fenced(header: BatchHeader, state: ProducerState) -> KafkaError:
    return _epoch_fenced(header.producer_id, header.producer_epoch, state)


def _epoch_fenced(producer_id: int, epoch: int, state: ProducerState) -> KafkaError:
    return KafkaError(
        ErrorCode.invalid_producer_epoch, f"producer {producer_id} has epoch {state.epoch}, the batch {epoch}"
    )


def _early(header: BatchHeader) -> KafkaError:
    """NOT_ENOUGH_REPLICAS makes every client resend the batch, after the earlier ones have an outcome."""
    return KafkaError(
        ErrorCode.not_enough_replicas,
        f"sequence {header.base_sequence} of producer {header.producer_id} comes before earlier ones, which may still "
        "be on their way through the former leader",
    )


def _out_of_order(header: BatchHeader, expected: int) -> KafkaError:
    return KafkaError(
        ErrorCode.out_of_order_sequence_number,
        f"producer {header.producer_id} sends sequence {header.base_sequence}, {expected} is next",
    )
