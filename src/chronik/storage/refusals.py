"""Batches of idempotent producers that a log refused, but may accept when the producer resends them.

A producer pipelines batches. If its first batches are refused and a later one arrives when the log accepts batches
again, the later one is out of order. If the log does not know the producer, any sequence may be the first, and the
batch would be written before the refused ones. If it does, the response would be OUT_OF_ORDER_SEQUENCE_NUMBER.
librdkafka then takes a new epoch and resends everything outstanding under it, in every partition. So a batch that
another log has, but has not acknowledged yet, is written there twice. To avoid this, the log remembers the first
refused batch until it is resent, and refuses later ones with the same error: their producer resends them, in order.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from chronik.storage.producers import ProducerState, ProducerStates, is_after
from chronik.wire.batch import BatchHeader
from chronik.wire.errors import ErrorCode, KafkaError

TEMPORARY_ERRORS: Final = frozenset(
    {
        ErrorCode.not_leader_or_follower,
        ErrorCode.not_enough_replicas,
        ErrorCode.kafka_storage_error,
        ErrorCode.concurrent_transactions,
    }
)
"""Errors that keep a batch out of the log for now; producers resend it."""

PRODUCERS_MAX: Final = 1_000
"""Above this many in one log, the producer refused longest ago is forgotten."""
KEPT_MS: Final = 120_000
"""A producer that has not resent a batch for this long has given it up (delivery.timeout.ms)."""


class Refused(NamedTuple):
    epoch: int
    sequence: int
    code: ErrorCode
    at_ms: int


NO_PRODUCERS: Final = ProducerStates(0)
"""For a node that has no log to compare with."""


class RefusedBatches:
    """The first refused batch of each producer that the log does not have, ordered by refusal, newest last.

    Bounded in number and time. Owned by the event loop.
    """

    __slots__ = ("_first",)

    def __init__(self) -> None:
        self._first: dict[int, Refused] = {}

    def __len__(self) -> int:
        return len(self._first)

    def note(self, header: BatchHeader, code: ErrorCode, producers: ProducerStates, now_ms: int) -> None:
        """Note that the batch was refused before any part of it was appended."""
        refused = Refused(header.producer_epoch, header.base_sequence, code, now_ms)
        self._note(header.producer_id, refused, producers)

    def note_lost(self, first: Iterable[tuple[int, int, int]], producers: ProducerStates, now_ms: int) -> None:
        """Note batches, by producer, epoch and sequence, that were in this log but are not in the new leader's log."""
        for producer_id, epoch, sequence in first:
            refused = Refused(epoch, sequence, ErrorCode.not_leader_or_follower, now_ms)
            self._note(producer_id, refused, producers)

    def _note(self, producer_id: int, refused: Refused, producers: ProducerStates) -> None:
        if producer_id < 0 or refused.sequence < 0 or _is_obsolete(refused, producers.get(producer_id)):
            return
        known = self._current(producer_id, producers, refused.at_ms)
        if known is not None:
            if refused.epoch < known.epoch or _comes_after(refused.epoch, refused.sequence, known):
                return
            del self._first[producer_id]
        elif len(self._first) >= PRODUCERS_MAX:
            del self._first[next(iter(self._first))]
        self._first[producer_id] = refused

    def check(self, header: BatchHeader, producers: ProducerStates, now_ms: int) -> None:
        """Raise the same error again if an earlier batch of the producer was refused and has not been resent."""
        refused = self._current(header.producer_id, producers, now_ms)
        if refused is None:
            return
        if _comes_after(header.producer_epoch, header.base_sequence, refused):
            raise KafkaError(
                refused.code,
                f"sequence {refused.sequence} of producer {header.producer_id} was refused and has not been resent; "
                f"this is {header.base_sequence}",
            )
        if (header.producer_epoch, header.base_sequence) == (refused.epoch, refused.sequence):
            del self._first[header.producer_id]

    def forget_received(self, producers: ProducerStates, now_ms: int) -> None:
        """Forget the batches that the log has received since."""
        for producer_id in list(self._first):
            self._current(producer_id, producers, now_ms)

    def _current(self, producer_id: int, producers: ProducerStates, now_ms: int) -> Refused | None:
        """Return the producer's first refused batch, unless it is obsolete."""
        refused = self._first.get(producer_id)
        if refused is None:
            return None
        if now_ms - refused.at_ms > KEPT_MS or _is_obsolete(refused, producers.get(producer_id)):
            del self._first[producer_id]
            return None
        return refused


def _is_obsolete(refused: Refused, state: ProducerState | None) -> bool:
    """Return whether the log has the batch, even from another leader, or the producer has moved to another epoch."""
    if state is None or state.epoch < refused.epoch:
        return False
    if state.epoch > refused.epoch:
        return True
    if not state.batches:
        return False
    last = state.batches[-1].last_sequence
    return last == refused.sequence or is_after(last, refused.sequence)


def _comes_after(epoch: int, sequence: int, refused: Refused) -> bool:
    return epoch == refused.epoch and is_after(sequence, refused.sequence)
