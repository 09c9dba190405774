"""A stream's position: an offset for each partition, as Spark stores it in the checkpoint.

    {"version": 1, "topics": {TOPIC: {"id": UUID or "", "offsets": {PARTITION: next offset}}},
     "bootstrap": ..., "group": ...}

The topic's id reveals a topic that was deleted and recreated. `bootstrap` and `group` are present if offsets are
committed to a group: the query listener receives nothing but positions.
Equal positions give equal JSON, by which Spark detects that there is nothing new.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chronik.pipeline.errors import PipelineError

__all__ = ["Partition", "Position", "limited"]

VERSION = 1

Partition = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Position:
    """The next offset of each partition, and the ids of their topics."""

    offsets: Mapping[Partition, int]
    ids: Mapping[str, str] = field(default_factory=dict)

    def to_json(self, bootstrap: str = "", group: str = "") -> dict[str, Any]:
        topics: dict[str, Any] = {}
        for (topic, partition), offset in sorted(self.offsets.items()):
            entry = topics.setdefault(topic, {"id": self.ids.get(topic, ""), "offsets": {}})
            entry["offsets"][str(partition)] = offset
        written: dict[str, Any] = {"version": VERSION, "topics": topics}
        if group:
            written |= {"bootstrap": bootstrap, "group": group}
        return written

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> Position:
        """Raises PipelineError if the checkpoint contains something other than a position of this source."""
        try:
            if written["version"] != VERSION:
                raise PipelineError(
                    f"the checkpoint was written by another version of chronik (format {written['version']}): "
                    "start with a new checkpoint folder"
                )
            topics = written["topics"]
            return cls(
                {
                    (topic, int(partition)): int(offset)
                    for topic, entry in topics.items()
                    for partition, offset in entry["offsets"].items()
                },
                {topic: str(entry["id"]) for topic, entry in topics.items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            raise PipelineError(
                "the checkpoint was not written by this source: start with a new checkpoint folder"
            ) from None


def limited(start: Mapping[Partition, int], end: Mapping[Partition, int], rows_max: int) -> dict[Partition, int]:
    """Return ends with at most `rows_max` offsets in total after `start`, shared in proportion to each partition's lag.

    The remainder of the division goes to the partitions that lost most by rounding, so that small ones are not starved.
    """
    waiting = {partition: max(0, stop - start.get(partition, 0)) for partition, stop in end.items()}
    total = sum(waiting.values())
    if total <= rows_max:
        return dict(end)
    shares = {partition: divmod(rows_max * count, total) for partition, count in waiting.items()}
    left_over = rows_max - sum(whole for whole, _ in shares.values())
    first_served = sorted(shares, key=lambda partition: (-shares[partition][1], partition))[:left_over]
    return {
        partition: start.get(partition, 0) + whole + (partition in first_served)
        for partition, (whole, _) in shares.items()
    }
