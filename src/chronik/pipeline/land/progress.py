"""A query's lag, from the progress that Spark reports after each micro-batch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from chronik.pipeline.errors import PipelineError
from chronik.pipeline.source.planner import Position
from chronik.pipeline.source.ranges import Partition


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures at the end of a micro-batch."""

    rows_per_s: float
    lag: Mapping[int, int]
    """Each partition's unread offsets when the micro-batch was planned, minus those that it read."""
    catch_up_s: float | None
    """Time to catch up at this rate, net of new records. None if it never will, 0 if it has caught up."""
    batch_s: float | None = None
    """How long the last micro-batch with rows took."""


class ProgressAccount:
    """Takes one query's progress reports, in order."""

    def __init__(self) -> None:
        self.figures: Figures | None = None
        self._latest: tuple[float, int] | None = None

    def take(self, progress: Mapping[str, Any]) -> Figures | None:
        """Return the current figures. A report without rows, which Spark sends while idle, changes only the lag."""
        source = progress["sources"][0] if progress.get("sources") else {}
        ends, latest = offsets_of(source.get("endOffset")), offsets_of(source.get("latestOffset"))
        if not ends:
            return self.figures
        lag = {
            partition: max(0, latest.get((topic, partition), end) - end)
            for (topic, partition), end in sorted(ends.items())
        }
        arriving = self._arriving(_seconds(progress.get("timestamp")), sum((latest or ends).values()))
        pace = _pace(progress) or (self.figures.rows_per_s if self.figures else 0.0)
        waiting = sum(lag.values())
        ahead = pace - arriving
        catch_up_s = 0.0 if not waiting else waiting / ahead if ahead > 0 else None
        batch_s = _took_s(progress) or (self.figures.batch_s if self.figures else None)
        self.figures = Figures(pace, lag, catch_up_s, batch_s)
        return self.figures

    def _arriving(self, at_s: float | None, end: int) -> float:
        before, self._latest = self._latest, None if at_s is None else (at_s, end)
        if before is None or at_s is None or at_s <= before[0]:
            return 0.0
        return max(0, end - before[1]) / (at_s - before[0])


def offsets_of(written: object) -> dict[Partition, int]:
    """Parse a source's offset in a report: ours, or `{TOPIC: {PARTITION: OFFSET}}` of Spark's own source."""
    try:
        offset = json.loads(written) if isinstance(written, str) else written
    except ValueError:
        return {}
    if not isinstance(offset, dict):
        return {}
    if "version" in offset:
        try:
            return dict(Position.from_json(offset).offsets)
        except PipelineError:
            return {}
    return {
        (topic, int(partition)): int(number)
        for topic, entries in offset.items()
        if isinstance(entries, dict)
        for partition, number in entries.items()
    }


def _pace(progress: Mapping[str, Any]) -> float | None:
    took_s = _took_s(progress)
    return progress["numInputRows"] / took_s if took_s else None


def _took_s(progress: Mapping[str, Any]) -> float | None:
    took_ms = (progress.get("durationMs") or {}).get("triggerExecution") or 0
    return took_ms / 1000 if progress.get("numInputRows") and took_ms else None


def _seconds(written: object) -> float | None:
    try:
        return datetime.fromisoformat(str(written)).timestamp()
    except ValueError:
        return None
