"""The log's state of idempotent producers: the epoch and the last batches of each.

A producer that resends a batch (it did not get the response) receives the batch's existing offsets; a gap in its
sequence is refused. The state is a function of the log: snapshots only avoid reading the whole log again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from chronik.wire.batch import BatchHeader
from chronik.wire.errors import ErrorCode, KafkaError

BATCHES_KEPT: Final = 5
"""As many as a producer may have in flight."""
PRODUCERS_MAX: Final = 50_000
"""Above this many in one log, the producer that has been idle longest is forgotten."""

SEQUENCE_MASK: Final = 0x7FFFFFFF
"""Sequences wrap after 2^31-1."""


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
    """One producer: its epoch, and its last batches, oldest first."""

    epoch: int
    last_seen_ms: int
    batches: list[SentBatch]


@dataclass(slots=True, eq=False)
class ProducerStates:
    """All producers of one log, ordered by their last write, newest last. Owned by the event loop."""

    expiration_ms: int
    _states: dict[int, ProducerState] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._states)

    def items(self) -> Iterator[tuple[int, ProducerState]]:
        return iter(self._states.items())

    def get(self, producer_id: int) -> ProducerState | None:
        return self._states.get(producer_id)

    def check(self, header: BatchHeader) -> AppendResult | None:
        """Return None if the batch may be appended, its earlier result if it already was. Raises KafkaError otherwise.

        An unknown producer may start with any sequence: its older batches may have expired.
        """
        if header.producer_id < 0:
            return None
        state = self._states.get(header.producer_id)
        if state is None:
            return None
        if header.producer_epoch < state.epoch:
            raise KafkaError(
                ErrorCode.invalid_producer_epoch,
                f"producer {header.producer_id} has epoch {state.epoch}, the batch {header.producer_epoch}",
            )
        sequence = header.base_sequence
        if header.producer_epoch > state.epoch:
            if sequence != 0:
                raise _out_of_order(header, 0)
            return None
        last_sequence = header.last_sequence
        for batch in state.batches:
            if batch.base_sequence == sequence and batch.last_sequence == last_sequence:
                return AppendResult(batch.base_offset, batch.last_offset, batch.log_append_time_ms)
        if not state.batches:
            return None
        expected = state.batches[-1].last_sequence + 1 & SEQUENCE_MASK
        if sequence == expected:
            return None
        if is_after(state.batches[0].base_sequence, last_sequence) and len(state.batches) == BATCHES_KEPT:
            raise KafkaError(
                ErrorCode.duplicate_sequence_number,
                f"producer {header.producer_id} repeats sequence {sequence}, which is too old to know its offset",
            )
        raise _out_of_order(header, expected)

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
        state = self._states.pop(header.producer_id, None)
        if state is None or state.epoch != header.producer_epoch:
            state = ProducerState(header.producer_epoch, now_ms, [sent])
            if len(self._states) >= PRODUCERS_MAX:
                del self._states[next(iter(self._states))]
        else:
            state.last_seen_ms = now_ms
            state.batches.append(sent)
            if len(state.batches) > BATCHES_KEPT:
                del state.batches[0]
        self._states[header.producer_id] = state

    def restore(self, producer_id: int, state: ProducerState) -> None:
        self._states[producer_id] = state

    def expire(self, now_ms: int) -> int:
        """Forget producers that have been idle too long; return how many."""
        oldest_ms = now_ms - self.expiration_ms
        expired = [producer_id for producer_id, state in self._states.items() if state.last_seen_ms < oldest_ms]
        for producer_id in expired:
            del self._states[producer_id]
        return len(expired)

    def last_offsets(self) -> dict[int, int]:
        """Return each producer's last offset: compaction must keep that batch, even if it becomes empty."""
        return {producer_id: state.batches[-1].last_offset for producer_id, state in self._states.items()}


def is_after(sequence: int, other: int) -> bool:
    """Return whether `sequence` comes after `other`; sequences wrap around."""
    return 0 < (sequence - other & SEQUENCE_MASK) <= SEQUENCE_MASK >> 1


def _out_of_order(header: BatchHeader, expected: int) -> KafkaError:
    return KafkaError(
        ErrorCode.out_of_order_sequence_number,
        f"producer {header.producer_id} sends sequence {header.base_sequence}, {expected} is next",
    )
