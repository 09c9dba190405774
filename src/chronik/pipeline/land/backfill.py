"""Which offsets a backfill lands: a range of offsets or times, fixed before it starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypeAlias

from chronik.client.topics import EARLIEST, LATEST
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.source.blocking import BlockingCluster

Bound: TypeAlias = str | int | Mapping[int, int]
"""`earliest`, `latest`, an offset of all partitions, or the offsets of some. A time is TimeMs."""


class TimeMs(int):
    """A time: the first record of each partition at or after it."""


Range: TypeAlias = dict[int, tuple[int, int]]
"""The first offset of each partition, and the end, which is exclusive."""


def backfill_range(cluster: BlockingCluster, topic: str, first: Bound, end: Bound) -> Range:
    """Return what there is to land: partitions without an offset in the range are left out. The log's end limits it.

    Raises PipelineError if the range begins with records that the log no longer has.
    """
    layout = cluster.require_topics([topic])[topic]
    names = [(topic, each.partition) for each in layout.partitions]
    for bound in (first, end):
        unknown = sorted(set(bound) - {number for _, number in names}) if isinstance(bound, Mapping) else []
        if unknown:
            raise PipelineError(f"{topic} has no partition {unknown[0]}: it has 0 to {len(names) - 1}")
    ends = {number: offset for (_, number), offset in cluster.offsets(names, LATEST, committed_only=True).items()}
    starts = {number: offset for (_, number), offset in cluster.offsets(names, EARLIEST).items()}

    def resolved(bound: Bound) -> dict[int, int]:
        if isinstance(bound, Mapping):
            return dict(bound)
        if isinstance(bound, TimeMs):
            found = cluster.offsets(names, bound)
            return {number: offset if offset >= 0 else ends[number] for (_, number), offset in found.items()}
        if isinstance(bound, int):
            return dict.fromkeys(ends, bound)
        return dict(starts if bound == "earliest" else ends)

    firsts, lasts = resolved(first), resolved(end)
    found: Range = {}
    for number in sorted(set(firsts) & set(lasts)):
        start, stop = firsts[number], min(lasts[number], ends[number])
        if start < stop and start < starts[number]:
            raise PipelineError(
                f"partition {number} of {topic} begins at offset {starts[number]} by now, and the range at {start}: "
                f"those records are gone, so begin at {starts[number]} or at earliest"
            )
        if start < stop:
            found[number] = start, stop
    return found


def range_options(topic: str, chosen: Range) -> dict[str, str]:
    """Return the options of the Spark source that read a range, which is not empty."""
    return {
        "assign": json.dumps({topic: sorted(chosen)}),
        "startingOffsets": json.dumps({topic: {str(number): start for number, (start, _) in chosen.items()}}),
        "endingOffsets": json.dumps({topic: {str(number): stop for number, (_, stop) in chosen.items()}}),
    }
