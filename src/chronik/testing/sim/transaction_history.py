"""What clients of transactions did and saw: recorded for `chronik.testing.history`, which checks it at the end.

Checked at once: the last stable offset that clients receive is never above the high watermark and never goes backwards,
and the aborted transactions of a response are listed by their first offsets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from chronik.testing.anomalies import AnomalyKind
from chronik.testing.history import check
from chronik.testing.operations import Assigned, OffsetsFetched, Operation
from chronik.testing.sim.world import World


class TransactionHistory:
    """The operations of one run, in order."""

    def __init__(self, world: World) -> None:
        self.operations: list[Operation] = []
        self._world = world
        self._stable: dict[str, int] = {}

    def record(self, operation: Operation) -> None:
        self.operations.append(operation)

    def offsets_fetched(self, group: str, topic: str, offsets: Mapping[int, int], sent_s: float) -> None:
        """Record the answer to an OffsetFetch with `require_stable`; -1 is no offset."""
        found = {f"{topic}-{each}": offset if offset >= 0 else None for each, offset in offsets.items()}
        self.record(OffsetsFetched(self._world.now, sent_s, group, found))

    def stable_known(self, partition: str) -> int:
        """Return the largest last stable offset that a client received."""
        return self._stable.get(partition, 0)

    def stable_received(
        self,
        partition: str,
        last_stable_offset: int,
        high_watermark: int,
        aborted: Sequence[tuple[int, int]],
        known_at_request: int,
        reader: str,
    ) -> None:
        """Check a response to a read_committed fetch."""
        if last_stable_offset > high_watermark:
            self._world.violated(
                f"{partition}: {reader} received last stable offset {last_stable_offset} above {high_watermark}"
            )
        if last_stable_offset < known_at_request:
            self._world.violated(
                f"{partition}: {reader} received last stable offset {last_stable_offset} after {known_at_request}"
            )
        first_offsets = [first for _, first in aborted]
        if first_offsets != sorted(first_offsets):
            self._world.violated(f"{partition}: {reader} received aborted transactions out of order: {list(aborted)}")
        self._stable[partition] = max(last_stable_offset, self.stable_known(partition))

    def check(self, final: str) -> None:
        """Report the first anomaly of the whole history, if there is one; `final` has read everything at the end.

        Only `final` has: readers and groups stop when the run ends, wherever they are.
        """
        readers = {operation.consumer for operation in self.operations if isinstance(operation, Assigned)}
        report = check(self.operations, rereaders=readers, final=final)
        for kind, anomalies in report.anomalies.items():
            if kind == AnomalyKind.LAG_AT_END:
                continue
            self._world.violated(f"{kind}: {anomalies[0].evidence} ({len(anomalies)} of this kind)")
