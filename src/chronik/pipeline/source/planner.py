"""Plan what to read: turn options and the cluster's responses into positions and ranges. Runs on the driver.

A position is an offset for each partition. Spark stores it in the checkpoint:

    {"version": 1, "topics": {TOPIC: {"id": UUID or "", "offsets": {PARTITION: next offset}}},
     "bootstrap": ..., "group": ...}

The topic's id reveals a topic that was deleted and recreated. `bootstrap` and `group` are present if offsets are
committed to a group: the query listener receives nothing but positions.
Equal positions give equal JSON, by which Spark detects that there is nothing new.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from chronik.client.layout import TopicLayout
from chronik.client.topics import EARLIEST, LATEST
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.source.blocking import BlockingCluster, topic_id
from chronik.pipeline.source.options import Edge, SourceOptions
from chronik.pipeline.source.ranges import Partition, RecordRange, split

VERSION = 1


@dataclass(frozen=True, slots=True)
class Position:
    """The next offset of each partition, and the ids of their topics."""

    offsets: Mapping[Partition, int]
    ids: Mapping[str, str] = field(default_factory=dict)

    def to_json(self, bootstrap: str = "", group: str = "", properties: str = "") -> dict[str, Any]:
        topics: dict[str, Any] = {}
        for (topic, partition), offset in sorted(self.offsets.items()):
            entry = topics.setdefault(topic, {"id": self.ids.get(topic, ""), "offsets": {}})
            entry["offsets"][str(partition)] = offset
        written: dict[str, Any] = {"version": VERSION, "topics": topics}
        if group:
            written |= {"bootstrap": bootstrap, "group": group}
            if properties:
                written["properties"] = properties
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
            topics = written["topics"].items()
            named = [(topic, number, offset) for topic, entry in topics for number, offset in entry["offsets"].items()]
            offsets = {(topic, int(number)): int(offset) for topic, number, offset in named}
            return cls(offsets, {topic: str(entry["id"]) for topic, entry in topics})
        except (KeyError, TypeError, ValueError, AttributeError):
            fault = "the checkpoint was not written by this source"
            raise PipelineError(f"{fault}: start with a new checkpoint folder") from None


class Planner:
    """Resolves one source's options against its cluster, anew on each call. Used by one thread."""

    def __init__(self, options: SourceOptions, cluster: BlockingCluster, warn: Callable[[str], None]) -> None:
        self._options = options
        self._cluster = cluster
        self._warn = warn

    # Positions.

    def start(self) -> Position:
        return self._position(self._options.starting, "starting")

    def end(self) -> Position:
        """Return where a batch read ends."""
        return self._position(self._options.ending, "ending")

    def latest(self) -> Position:
        """Return the current end of all partitions."""
        return self._position(Edge(LATEST), "")

    def advance(self, start: Position, latest: Position, rows_max: int | None) -> Position:
        """Return the end of a micro-batch from `start`: `latest`, or less if that is more than `rows_max` offsets.

        This detects what has changed since `start`. New partitions are read from their beginning. Deleted partitions,
        recreated topics and logs that have become shorter are data loss.
        """
        ends = dict(latest.offsets)
        begins = dict(start.offsets)
        for topic in _recreated(start, latest):
            self._report_loss(
                f"topic {topic} was deleted and recreated since this query read it: use a new checkpoint folder",
                "; it is read from its first record",
            )
            begins = {partition: offset for partition, offset in begins.items() if partition[0] != topic}
        for partition in sorted(begins.keys() - ends.keys()):
            self._report_loss(
                f"{_name(partition)} is in the checkpoint but not (or no longer) among what this query reads: "
                "was the topic deleted, or the subscription changed? Start with a new checkpoint folder"
            )
            del begins[partition]
        ends |= self._unstable(begins, ends)
        for partition, end in ends.items():
            if end < begins.get(partition, 0):
                self._report_loss(
                    f"{_name(partition)} ends at offset {end}, and this query has read up to {begins[partition]}: "
                    "records were lost, or the topic was recreated; start with a new checkpoint folder",
                    "; it is read from its first record",
                )
                begins[partition] = 0
        if rows_max is not None:
            # The first offset of a partition that was never read may be far above 0.
            unread = [partition for partition in ends if not begins.get(partition)]
            begins |= self._offsets(unread, EARLIEST) if unread else {}
            ends = limited(begins, ends, rows_max)
        return Position(ends, latest.ids)

    def _unstable(self, begins: Mapping[Partition, int], ends: Mapping[Partition, int]) -> dict[Partition, int]:
        """Return the positions that lie in an open transaction: of a query that did not read committed records only.

        The query waits there until the last stable offset has passed them.
        """
        above = [partition for partition, end in ends.items() if end < begins.get(partition, 0)]
        if not above or not self._options.committed_only:
            return {}
        readable = self._cluster.offsets(above, LATEST)
        return {partition: begins[partition] for partition in above if readable[partition] >= begins[partition]}

    # Ranges.

    def batch_ranges(self) -> list[tuple[RecordRange, str]]:
        """Return the tasks of a batch read. A partition whose start is at or after its end has none."""
        start, end = self.start(), self.end()
        ends = dict(end.offsets)
        if self._options.ending.offsets is not None:
            for partition, latest in self.latest().offsets.items():
                if ends[partition] > latest:
                    self._report_loss(
                        f"option endingOffsets: {_name(partition)} ends at offset {latest}, and {ends[partition]} was "
                        f"requested: request {latest} or less",
                        "; it is read up to its end",
                    )
                    ends[partition] = latest
        starts = {partition: min(offset, ends.get(partition, offset)) for partition, offset in start.offsets.items()}
        return self.ranges(Position(starts, start.ids), Position(ends, end.ids))

    def ranges(self, start: Position, end: Position) -> list[tuple[RecordRange, str]]:
        """Return the tasks that read everything between two positions, each with its topic's id."""
        recreated = _recreated(start, end)
        begins = {partition: offset for partition, offset in start.offsets.items() if partition[0] not in recreated}
        requested = [
            RecordRange(*partition, self._begin(partition, begins, end_offset), end_offset)
            for partition, end_offset in sorted(end.offsets.items())
        ]
        parts = split(requested, self._options.parts_min, self._options.rows_per_part_max)
        return [(part, end.ids.get(part.topic, "")) for part in parts]

    def _begin(self, partition: Partition, begins: Mapping[Partition, int], end: int) -> int:
        begin = begins.get(partition, 0)
        if begin > end:
            return 0
        if partition in begins or end <= 0:
            return begin
        # The partition appeared while the query ran. It should still have its first record.
        first = self._offsets([partition], EARLIEST)[partition]
        if first > 0:
            self._report_loss(
                f"{_name(partition)} is new to this query, and its log starts at {first}: earlier records are gone; "
                "start with a new checkpoint folder"
            )
        return first

    # Cluster state.

    def _topics(self) -> dict[str, TopicLayout]:
        options = self._options
        if options.pattern is not None:
            pattern = re.compile(options.pattern)
            every = self._cluster.topics(None).items()
            topics = {name: topic for name, topic in every if pattern.fullmatch(name) and not topic.is_internal}
            if not topics:
                raise PipelineError(f"no topic at {options.bootstrap} matches the pattern {options.pattern}")
            return topics
        topics = self._cluster.require_topics(options.topics)
        for name, number in sorted(options.assigned or ()):
            if number not in {partition.partition for partition in topics[name].partitions}:
                raise PipelineError(f"topic {name} has no partition {number}, which the option assign names")
        return topics

    def _offsets(self, partitions: list[Partition], timestamp_ms: int) -> dict[Partition, int]:
        return self._cluster.offsets(partitions, timestamp_ms, committed_only=self._options.committed_only)

    def _position(self, edge: Edge, side: str) -> Position:
        topics = self._topics()
        found = [(name, each.partition) for name, topic in sorted(topics.items()) for each in topic.partitions]
        assigned = self._options.assigned
        partitions = [partition for partition in found if assigned is None or partition in assigned]
        ids = {name: topic_id(topic) for name, topic in topics.items()}
        return Position(self._resolve(edge, side, partitions), ids)

    def _resolve(self, edge: Edge, side: str, partitions: list[Partition]) -> dict[Partition, int]:
        if edge.everywhere is not None:
            return self._offsets(partitions, edge.everywhere)
        if edge.offsets is not None:
            _check_names(edge.offsets, f"{side}Offsets", partitions)
            return {
                partition: self._offsets([partition], offset)[partition] if offset in (EARLIEST, LATEST) else offset
                for partition, offset in edge.offsets.items()
            }
        if edge.times_ms is not None:
            _check_names(edge.times_ms, f"{side}OffsetsByTimestamp", partitions)
        times = edge.times_ms or dict.fromkeys(partitions, edge.time_ms or 0)
        offsets: dict[Partition, int] = {}
        for time_ms in sorted(set(times.values())):
            offsets |= self._offsets([partition for partition in partitions if times[partition] == time_ms], time_ms)
        late = sorted(partition for partition, offset in offsets.items() if offset < 0)
        if late and not edge.latest_if_none:
            raise PipelineError(
                f"{_name(late[0])} has no record at or after {times[late[0]]}: use an earlier time, or set "
                "startingOffsetsByTimestampStrategy=latest"
            )
        return offsets | (self._offsets(late, LATEST) if late else {})

    def _report_loss(self, what: str, consequence: str = "") -> None:
        if self._options.fail_on_data_loss:
            if self._options.ranges_only:
                raise PipelineError(what)
            raise PipelineError(f"{what} (or pass failOnDataLoss=false to continue)")
        self._warn(what + consequence)


def _check_names(given: Mapping[Partition, int], option: str, partitions: list[Partition]) -> None:
    missing = sorted(set(partitions) - given.keys())
    extra = sorted(given.keys() - set(partitions))
    if missing or extra:
        fault = f"does not name {_name(missing[0])}" if missing else f"names {_name(extra[0])}, which is not read"
        raise PipelineError(f"option {option} {fault}: name each partition that is read")


def _name(partition: Partition) -> str:
    return f"{partition[0]}-{partition[1]}"


def _recreated(start: Position, latest: Position) -> list[str]:
    known = [(topic, before, latest.ids.get(topic)) for topic, before in sorted(start.ids.items())]
    return [topic for topic, before, after in known if before and after and before != after]


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
