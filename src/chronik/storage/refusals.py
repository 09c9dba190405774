"""Batches of idempotent producers that a log did not take, though it may take them when they come again.

A producer pipelines. When its first batches are refused and a later one comes when the log takes batches again, that
one would be the first that the log sees of this producer, and any sequence may be a producer's first: it would be
written before the others, which then never fit. So what was refused first is remembered until it comes again. Clients
repeat a batch that is out of order as long as one before it is open.
"""

from typing import Final, NamedTuple

from chronik.storage.producers import SEQUENCE_MASK, ProducerStates
from chronik.wire.batch import BatchHeader
from chronik.wire.errors import ErrorCode, KafkaError

__all__ = ["KEPT_MS", "PRODUCERS_MAX", "RefusedBatches"]

PRODUCERS_MAX: Final = 1_000
"""Beyond that many in one log, who was refused longest ago is forgotten."""
KEPT_MS: Final = 120_000
"""A producer that has not repeated a batch for so long has given it up (delivery.timeout.ms)."""


class Refused(NamedTuple):
    epoch: int
    sequence: int
    at_ms: int


class RefusedBatches:
    """The first refused batch of each producer that the log does not know, who was refused last standing last.

    Bounded in number and time. Owned by the loop.
    """

    __slots__ = ("_first",)

    def __init__(self) -> None:
        self._first: dict[int, Refused] = {}

    def __len__(self) -> int:
        return len(self._first)

    def note(self, header: BatchHeader, producers: ProducerStates, now_ms: int) -> None:
        """The batch was refused before anything of it was appended."""
        producer_id, epoch, sequence = header.producer_id, header.producer_epoch, header.base_sequence
        if producer_id < 0 or sequence < 0 or producers.get(producer_id) is not None:
            return
        known = self._first.get(producer_id)
        if known is not None and now_ms - known.at_ms <= KEPT_MS:
            if epoch < known.epoch or (epoch == known.epoch and _is_after(sequence, known.sequence)):
                return
            del self._first[producer_id]
        elif known is None and len(self._first) >= PRODUCERS_MAX:
            del self._first[next(iter(self._first))]
        self._first[producer_id] = Refused(epoch, sequence, now_ms)

    def check(self, header: BatchHeader, producers: ProducerStates, now_ms: int) -> None:
        """Raises where a batch before this one was refused and has not come again."""
        refused = self._first.get(header.producer_id)
        if refused is None:
            return
        if now_ms - refused.at_ms > KEPT_MS or producers.get(header.producer_id) is not None:
            del self._first[header.producer_id]
        elif header.producer_epoch == refused.epoch and _is_after(header.base_sequence, refused.sequence):
            raise KafkaError(
                ErrorCode.out_of_order_sequence_number,
                f"producer {header.producer_id} sends sequence {header.base_sequence}, and {refused.sequence} was "
                "refused before",
            )

    def forget(self, producer_id: int) -> None:
        """A batch of it is in the log: from here on that says what comes next."""
        self._first.pop(producer_id, None)


def _is_after(sequence: int, other: int) -> bool:
    """On the circle of sequences."""
    return 0 < (sequence - other & SEQUENCE_MASK) <= SEQUENCE_MASK >> 1
