"""A sample of a topic's values, from which `land --infer` proposes a schema: some of the oldest and of the newest."""

from __future__ import annotations

from collections.abc import Iterator

from chronik.client.properties import Target
from chronik.client.topics import EARLIEST, LATEST
from chronik.pipeline.source.blocking import BlockingCluster, topic_id
from chronik.pipeline.source.ranges import RecordRange
from chronik.pipeline.source.reading import ReadSettings, read_range

RECORDS_MAX = 10_000


def sample_values(target: Target, topic: str, records_max: int = RECORDS_MAX) -> Iterator[bytes | None]:
    """Yield committed values of all partitions. Raises PipelineError."""
    with BlockingCluster(target) as cluster:
        layout = cluster.require_topics([topic])[topic]
        names = [(topic, each.partition) for each in layout.partitions]
        starts = cluster.offsets(names, EARLIEST)
        ends = cluster.offsets(names, LATEST, committed_only=True)
    half = max(1, records_max // (2 * len(names)))
    settings = ReadSettings(target, committed_only=True, fail_on_data_loss=False)
    for name in names:
        start, end = starts[name], ends[name]
        middle = min(end, start + half)
        for first, stop in ((start, middle), (max(middle, end - half), end)):
            if first < stop:
                for batch in read_range(RecordRange(topic, name[1], first, stop), topic_id(layout), settings):
                    yield from batch.column("value").to_pylist()
