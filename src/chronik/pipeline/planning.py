"""Plan what to read: turn options and the cluster's responses into positions and ranges. Runs on the driver.

It needs no Spark, so that the audit and the tests can use it alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from chronik.client.layout import TopicLayout
from chronik.pipeline.blocking import BlockingCluster
from chronik.pipeline.columns import RecordRange
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.options import EARLIEST, LATEST, Edge, SourceOptions
from chronik.pipeline.positions import Partition, Position, limited
from chronik.pipeline.ranges import split

__all__ = ["Planner"]

Warn = Callable[[str], None]


class Planner:
    """Resolves one source's options against its cluster, anew on each call. Used by one thread."""

    def __init__(self, options: SourceOptions, cluster: BlockingCluster, warn: Warn) -> None:
        self._options = options
        self._cluster = cluster
        self._warn = warn

    # Positions.

    def start(self) -> Position:
        """Return the position at which the options start reading."""
        topics = self._topics()
        return Position(self._resolve(self._options.starting, "starting", topics), _ids(topics))

    def end(self) -> Position:
        """Return the position at which the options end a batch read."""
        topics = self._topics()
        return Position(self._resolve(self._options.ending, "ending", topics), _ids(topics))

    def latest(self) -> Position:
        """Return the current end of all partitions."""
        topics = self._topics()
        return Position(self._offsets(_partitions(topics, self._options), LATEST), _ids(topics))

    def advance(self, start: Position, latest: Position, rows_max: int | None) -> Position:
        """Return the end of a micro-batch from `start`: `latest`, or less if that is more than `rows_max` offsets.

        This detects what has changed since `start`. New partitions are read from their beginning. Deleted partitions,
        recreated topics and logs that have become shorter are data loss.
        """
        ends = dict(latest.offsets)
        begins = dict(start.offsets)
        for topic in _made_again(start, latest):
            self._lost(
                f"topic {topic} was deleted and made again since this query read it: take a new checkpoint folder",
                "; its records are read from the first on",
            )
            begins = {place: offset for place, offset in begins.items() if place[0] != topic}
        for place in sorted(begins.keys() - ends.keys()):
            self._lost(
                f"{place[0]}-{place[1]} is in the checkpoint but not (or no longer) among what this query reads: "
                "was the topic deleted, or the subscription changed? Start with a new checkpoint folder",
                "",
            )
            del begins[place]
        for place, end in ends.items():
            if end < begins.get(place, 0):
                self._lost(
                    f"{place[0]}-{place[1]} ends at offset {end}, and this query has read up to {begins[place]}: "
                    "records were lost, or the topic was made again",
                    "; it is read from its first record on",
                )
                begins[place] = 0
        if rows_max is not None:
            # The first offset of a partition that was never read may be far above 0.
            unread = [place for place in ends if place not in begins or not begins[place]]
            begins |= self._offsets(unread, EARLIEST) if unread else {}
            ends = limited(begins, ends, rows_max)
        return Position(ends, latest.ids)

    # Ranges.

    def ranges(self, start: Position, end: Position) -> list[tuple[RecordRange, str]]:
        """Return the tasks that read everything between two positions, each with its topic's id."""
        begins = {
            place: offset for place, offset in start.offsets.items() if place[0] not in set(_made_again(start, end))
        }
        wanted = [
            RecordRange(*place, self._begin(place, begins, end_offset), end_offset)
            for place, end_offset in sorted(end.offsets.items())
        ]
        parts = split(wanted, self._options.parts_min, self._options.rows_per_part_max)
        return [(part, end.ids.get(part.topic, "")) for part in parts]

    def _begin(self, place: Partition, begins: Mapping[Partition, int], end: int) -> int:
        begin = begins.get(place, 0)
        if begin > end:
            return 0
        if place not in begins and end > 0:
            return self._first_offset(place)
        return begin

    def _first_offset(self, place: Partition) -> int:
        """Return the start of a partition that appeared while the query ran. It should still have its first record."""
        first = self._offsets([place], EARLIEST)[place]
        if first > 0:
            self._lost(
                f"{place[0]}-{place[1]} is new to this query, and its log starts at {first}: earlier records are gone",
                "",
            )
        return first

    # Cluster state.

    def _topics(self) -> dict[str, TopicLayout]:
        options = self._options
        if options.pattern is not None:
            pattern = re.compile(options.pattern)
            found = {
                name: topic
                for name, topic in self._cluster.topics(None).items()
                if pattern.fullmatch(name) and not topic.is_internal
            }
            if not found:
                raise PipelineError(f"no topic at {options.bootstrap} matches the pattern {options.pattern}")
            return found
        found = self._cluster.topics(options.topics)
        for name in options.topics:
            if name not in found:
                raise PipelineError(f"topic {name} does not exist at {options.bootstrap}: create it, or check its name")
        for topic, partition in sorted(options.assigned or ()):
            if partition not in {place.partition for place in found[topic].partitions}:
                raise PipelineError(f"topic {topic} has no partition {partition}, which the option assign names")
        return found

    def _offsets(self, places: list[Partition], timestamp_ms: int) -> dict[Partition, int]:
        return self._cluster.offsets(places, timestamp_ms, committed_only=self._options.committed_only)

    def _resolve(self, edge: Edge, side: str, topics: Mapping[str, TopicLayout]) -> dict[Partition, int]:
        places = _partitions(topics, self._options)
        if edge.everywhere is not None:
            return self._offsets(places, edge.everywhere)
        if edge.offsets is not None:
            given = self._given(edge.offsets, f"{side}Offsets", places)
            return {place: self._one(place, offset) for place, offset in given.items()}
        times = (
            dict.fromkeys(places, edge.time_ms or 0)
            if edge.times_ms is None
            else self._given(edge.times_ms, f"{side}OffsetsByTimestamp", places)
        )
        found: dict[Partition, int] = {}
        for time_ms in sorted(set(times.values())):
            found |= self._offsets([place for place in places if times[place] == time_ms], time_ms)
        late = sorted(place for place, offset in found.items() if offset < 0)
        if late and not edge.latest_if_none:
            raise PipelineError(
                f"{late[0][0]}-{late[0][1]} has no record at or after {times[late[0]]}: take an earlier time, or set "
                "startingOffsetsByTimestampStrategy=latest"
            )
        return found | (self._offsets(late, LATEST) if late else {})

    def _given(self, given: Mapping[Partition, int], name: str, places: list[Partition]) -> dict[Partition, int]:
        missing = sorted(set(places) - given.keys())
        more = sorted(given.keys() - set(places))
        if missing or more:
            which, place = ("does not name", missing[0]) if missing else ("names", more[0])
            what = "" if missing else ", which is not read"
            raise PipelineError(f"option {name} {which} {place[0]}-{place[1]}{what}: name each partition that is read")
        return dict(given)

    def _one(self, place: Partition, offset: int) -> int:
        return self._offsets([place], offset)[place] if offset in (EARLIEST, LATEST) else offset

    def _lost(self, what: str, then: str) -> None:
        if self._options.fail_on_data_loss:
            raise PipelineError(f"{what} (or pass failOnDataLoss=false to go on)")
        self._warn(what + then)


def _partitions(topics: Mapping[str, TopicLayout], options: SourceOptions) -> list[Partition]:
    return [
        (name, place.partition)
        for name, topic in sorted(topics.items())
        for place in topic.partitions
        if options.wants(name, place.partition)
    ]


def _ids(topics: Mapping[str, TopicLayout]) -> dict[str, str]:
    return {name: "" if topic.id is None or topic.id.int == 0 else str(topic.id) for name, topic in topics.items()}


def _made_again(start: Position, latest: Position) -> list[str]:
    return [
        topic
        for topic, topic_id in sorted(start.ids.items())
        if topic_id and latest.ids.get(topic) and latest.ids[topic] != topic_id
    ]
