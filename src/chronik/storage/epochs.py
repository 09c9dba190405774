"""The start offset of each leader epoch.

The file `leader-epoch-checkpoint` is text like Kafka's, but with a checksum (see `small_files`), since truncation after
a failover depends on it:

    1                    version
    2                    number of the following lines, without the last one
    0 0                  epoch, start offset
    3 1745
    crc32c=5f1b8a0e
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from chronik.storage.small_files import decode_lines, encode_lines

UNDEFINED = -1
VERSION = "1"


class LeaderEpochs:
    """Invariant: epochs and start offsets both increase from entry to entry. Owned by the event loop."""

    __slots__ = ("_epochs", "_starts")

    def __init__(self, entries: Sequence[tuple[int, int]] = ()) -> None:
        self._epochs = [epoch for epoch, _ in entries]
        self._starts = [start for _, start in entries]

    @property
    def latest(self) -> int:
        return self._epochs[-1] if self._epochs else UNDEFINED

    def entries(self) -> list[tuple[int, int]]:
        return list(zip(self._epochs, self._starts, strict=True))

    def assign(self, epoch: int, start_offset: int) -> None:
        """Start `epoch` at `start_offset`; do nothing if it is not newer than the latest."""
        if epoch <= self.latest:
            return
        # An epoch without records leaves no entry.
        while self._starts and self._starts[-1] >= start_offset:
            self._starts.pop()
            self._epochs.pop()
        self._epochs.append(epoch)
        self._starts.append(start_offset)

    def epoch_of(self, offset: int) -> int:
        at = bisect_right(self._starts, offset)
        return self._epochs[at - 1] if at else UNDEFINED

    def end_offset(self, epoch: int, log_end_offset: int) -> tuple[int, int]:
        """Return the largest known epoch that is not newer than `epoch`, and its end offset.

        (-1, -1) if `epoch` is newer than all. For an epoch older than all: that epoch and the start of the oldest one.
        """
        if not self._epochs or epoch > self._epochs[-1] or epoch < 0:
            return UNDEFINED, UNDEFINED
        if epoch == self._epochs[-1]:
            return epoch, log_end_offset
        at = bisect_right(self._epochs, epoch)
        if at == 0:
            return epoch, self._starts[0]
        return self._epochs[at - 1], self._starts[at]

    def truncate_to(self, end_offset: int) -> None:
        """Note that the log now ends at `end_offset`."""
        while self._starts and self._starts[-1] >= end_offset:
            self._starts.pop()
            self._epochs.pop()

    def start_at(self, start_offset: int) -> None:
        """Note that the log now starts at `start_offset`; the epoch that covers it starts there."""
        at = bisect_right(self._starts, start_offset)
        if at > 1:
            del self._epochs[: at - 1], self._starts[: at - 1]
        if at and self._starts[0] < start_offset:
            self._starts[0] = start_offset

    def encode(self) -> bytes:
        return encode_lines(VERSION, (f"{epoch} {start}" for epoch, start in self.entries()))

    @staticmethod
    def decode(data: bytes) -> "LeaderEpochs | None":
        """Return None if the file is damaged or not in the expected format."""
        try:
            lines = decode_lines(VERSION, data)
            entries = [(int(epoch), int(start)) for epoch, start in (line.split(" ") for line in lines)]
        except ValueError:
            return None
        grows = all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(entries))
        return LeaderEpochs(entries) if grows else None
