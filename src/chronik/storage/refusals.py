"""Batches of idempotent producers that a log did not take, though it may take them when they come again.

A producer pipelines. When its first batches are refused and a later one comes when the log takes batches again, that
one does not fit: where the log knows nothing of the producer, any sequence may be the first, and it would be written
before the others; where it does, the answer would be OUT_OF_ORDER_SEQUENCE_NUMBER. librdkafka then takes a new epoch
and sends all that is open again under it, in every partition, so that a batch which is in some other log, and was not
acknowledged yet, gets there twice. So what was refused first is remembered until it comes again, and those behind it
are refused as it was: their producer sends them again, in order.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from chronik.storage.producers import ProducerState, ProducerStates, is_after
from chronik.wire.batch import BatchHeader
from chronik.wire.errors import ErrorCode, KafkaError

__all__ = ["KEPT_MS", "PRODUCERS_MAX", "REPEATED", "RefusedBatches"]

REPEATED: Final = frozenset(
    {
        ErrorCode.not_leader_or_follower,
        ErrorCode.not_enough_replicas,
        ErrorCode.kafka_storage_error,
    }
)
"""Errors that keep a batch out of the log now; producers send it again."""

PRODUCERS_MAX: Final = 1_000
"""Beyond that many in one log, who was refused longest ago is forgotten."""
KEPT_MS: Final = 120_000
"""A producer that has not repeated a batch for so long has given it up (delivery.timeout.ms)."""


class Refused(NamedTuple):
    epoch: int
    sequence: int
    code: ErrorCode
    at_ms: int


class RefusedBatches:
    """The first refused batch of each producer that the log does not have, who was refused last standing last.

    Bounded in number and time. Owned by the loop.
    """

    __slots__ = ("_first",)

    def __init__(self) -> None:
        self._first: dict[int, Refused] = {}

    def __len__(self) -> int:
        return len(self._first)

    def note(self, header: BatchHeader, code: ErrorCode, producers: ProducerStates, now_ms: int) -> None:
        """The batch was refused before anything of it was appended."""
        refused = Refused(header.producer_epoch, header.base_sequence, code, now_ms)
        self._note(header.producer_id, refused, producers)

    def lost(self, first: Iterable[tuple[int, int, int]], producers: ProducerStates, now_ms: int) -> None:
        """These were in the log, by producer, epoch and sequence, and another leader's log does not have them."""
        for producer_id, epoch, sequence in first:
            refused = Refused(epoch, sequence, ErrorCode.not_leader_or_follower, now_ms)
            self._note(producer_id, refused, producers)

    def _note(self, producer_id: int, refused: Refused, producers: ProducerStates) -> None:
        if producer_id < 0 or refused.sequence < 0 or _is_past(refused, producers.get(producer_id)):
            return
        known = self._current(producer_id, producers, refused.at_ms)
        if known is not None:
            if refused.epoch < known.epoch or _is_behind(refused.epoch, refused.sequence, known):
                return
            del self._first[producer_id]
        elif len(self._first) >= PRODUCERS_MAX:
            del self._first[next(iter(self._first))]
        self._first[producer_id] = refused

    def check(self, header: BatchHeader, producers: ProducerStates, now_ms: int) -> None:
        """Raises, as then, where a batch before this one was refused and has not come again."""
        refused = self._current(header.producer_id, producers, now_ms)
        if refused is None:
            return
        if _is_behind(header.producer_epoch, header.base_sequence, refused):
            raise KafkaError(
                refused.code,
                f"sequence {refused.sequence} of producer {header.producer_id} was refused and has not come again; "
                f"this is {header.base_sequence}",
            )
        if (header.producer_epoch, header.base_sequence) == (refused.epoch, refused.sequence):
            del self._first[header.producer_id]

    def _current(self, producer_id: int, producers: ProducerStates, now_ms: int) -> Refused | None:
        """What was refused first of this producer, unless that is no matter any more."""
        refused = self._first.get(producer_id)
        if refused is None:
            return None
        if now_ms - refused.at_ms > KEPT_MS or _is_past(refused, producers.get(producer_id)):
            del self._first[producer_id]
            return None
        return refused


def _is_past(refused: Refused, state: ProducerState | None) -> bool:
    """Whether the log has the batch, be it from another leader, or the producer has gone on to another epoch."""
    if state is None or state.epoch < refused.epoch or not state.batches:
        return False
    last = state.batches[-1].last_sequence
    return state.epoch > refused.epoch or last == refused.sequence or is_after(last, refused.sequence)


def _is_behind(epoch: int, sequence: int, refused: Refused) -> bool:
    return epoch == refused.epoch and is_after(sequence, refused.sequence)
