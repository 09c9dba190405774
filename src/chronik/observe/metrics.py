"""A node's metrics: plain counters on the request path, Prometheus families for scrapes.

The hot path adds to ints and lists on slotted objects; it takes no lock and builds no label. The metric names are part
of the public interface, and each exists from the node's start, even at zero. Every node has its own `Metrics`, since
several nodes may share a process. prometheus_client is imported at the first scrape (80 ms), not at startup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from chronik.observe.histogram import Histogram
from chronik.observe.process import process_usage
from chronik.wire.api import ApiKey

if TYPE_CHECKING:
    from prometheus_client.core import Metric


REJECTED_PARTITIONS_MAX = 10_000
"""Rejections are counted by partition for this many partitions; other partitions only add to the total."""


class PartitionGauges(NamedTuple):
    """One hosted partition at the time of a scrape. `replicas` and `in_sync_replicas` are counts."""

    topic: str
    partition: int
    log_start_offset: int
    log_end_offset: int
    high_watermark: int
    replicas: int
    in_sync_replicas: int
    size_bytes: int
    is_leader: bool = True


class GroupLag(NamedTuple):
    """The lag of one group in one partition."""

    group: str
    topic: str
    partition: int
    lag: int


class ApiMetrics:
    """Request metrics of one API. Owned by the loop."""

    __slots__ = ("errors", "name", "seconds")

    def __init__(self, name: str) -> None:
        self.name = name
        self.errors = 0
        self.seconds = Histogram()


class Metrics:
    """All counters of one node. Owned by the node's loop, which also scrapes it.

    The node sets `partitions`, `groups` and `watermark_age_s`: callables that return the current gauges.
    """

    def __init__(self) -> None:
        self._apis: dict[int, ApiMetrics] = {}
        self.produce_forwarded = 0
        self.not_leader = 0
        self.leadership_rejections: dict[tuple[str, int], int] = {}
        self.watermark_updates = 0
        self.traces_dropped = 0
        self.group_rebalances = 0
        self.connections = 0
        self.connections_refused = 0
        self.malformed_requests = 0
        self.bytes_in = 0
        self.bytes_out = 0
        self.records_in = 0
        self.scrubbed_bytes = 0
        self.scrub_passes = 0
        self.damages_found = {"scrub": 0, "recovery": 0, "read": 0}
        """By what found the damage."""
        self.replicas_healed = 0
        self.replicas_healing = 0
        self.fsync = Histogram()
        self.fetch = Histogram()
        self.watermark_propagation = Histogram()
        self.partitions: Callable[[], Iterable[PartitionGauges]] = tuple
        self.groups: Callable[[], Iterable[GroupLag]] = tuple
        self.watermark_age_s: Callable[[str, int], float] = lambda topic, partition: 0.0
        for key in (ApiKey.PRODUCE, ApiKey.FETCH):  # scrapes show these before the node registers its APIs
            self.api(key)

    def api(self, key: int) -> ApiMetrics:
        """Return the counters of one API, created on first use. A starting node calls this for each API it supports."""
        found = self._apis.get(key)
        if found is None:
            found = self._apis[key] = ApiMetrics(api_name(key))
        return found

    def rejected(self, topic: str, partition: int) -> None:
        """Count a request refused because another node leads. Callers pass only partitions that exist."""
        self.not_leader += 1
        rejections = self.leadership_rejections
        key = (topic, partition)
        if key in rejections or len(rejections) < REJECTED_PARTITIONS_MAX:
            rejections[key] = rejections.get(key, 0) + 1

    def exposition(self) -> bytes:
        """Return the current metrics in Prometheus text format, version 0.0.4."""
        return render(list(self.collect()))

    def collect(self) -> Iterator[Metric]:
        """Yield all current families of this node."""
        yield from self._request_families()
        yield from self._partition_families()
        yield from self._node_families()
        yield from _process_families()

    def _request_families(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        requests = CounterMetricFamily("chronik_requests", "Requests answered, by API.", labels=["api"])
        errors = CounterMetricFamily("chronik_request_errors", "Requests answered with an error.", labels=["api"])
        seconds = HistogramMetricFamily(
            "chronik_request_seconds", "From a request's last byte to its response, waits included.", labels=["api"]
        )
        for _, api in sorted(self._apis.items()):
            requests.add_metric([api.name], api.seconds.count)
            errors.add_metric([api.name], api.errors)
            seconds.add_metric([api.name], api.seconds.cumulative(), api.seconds.sum)
        yield requests
        yield errors
        yield seconds

    def _partition_families(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        labels = ["topic", "partition"]
        start = GaugeMetricFamily("chronik_log_start_offset", "First offset that can be read.", labels=labels)
        end = GaugeMetricFamily("chronik_log_end_offset", "Next offset to assign.", labels=labels)
        watermark = GaugeMetricFamily("chronik_high_watermark", "Consumers see what lies below.", labels=labels)
        lag = GaugeMetricFamily("chronik_watermark_lag", "Log end minus high watermark.", labels=labels)
        age = GaugeMetricFamily(
            "chronik_watermark_lag_seconds", "How long the watermark has been behind, at the leader.", labels=labels
        )
        in_sync = GaugeMetricFamily("chronik_in_sync_replicas", "Replicas in the ISR.", labels=labels)
        size = GaugeMetricFamily("chronik_log_size_bytes", "Bytes of the partition's segments.", labels=labels)
        under_replicated = 0
        for gauges in self.partitions():
            names = [gauges.topic, str(gauges.partition)]
            start.add_metric(names, gauges.log_start_offset)
            end.add_metric(names, gauges.log_end_offset)
            watermark.add_metric(names, gauges.high_watermark)
            lag.add_metric(names, gauges.log_end_offset - gauges.high_watermark)
            if gauges.is_leader:
                age.add_metric(names, self.watermark_age_s(gauges.topic, gauges.partition))
            in_sync.add_metric(names, gauges.in_sync_replicas)
            size.add_metric(names, gauges.size_bytes)
            under_replicated += gauges.is_leader and gauges.in_sync_replicas < gauges.replicas
        yield from (start, end, watermark, lag, age, in_sync, size)
        yield GaugeMetricFamily(
            "chronik_under_replicated_partitions",
            "Partitions led here whose ISR is smaller than their replica set.",
            value=under_replicated,
        )
        rejections = CounterMetricFamily(
            "chronik_leadership_rejections", "Requests refused since another node leads, by partition.", labels=labels
        )
        for (topic, partition), count in self.leadership_rejections.items():
            rejections.add_metric([topic, str(partition)], count)
        yield rejections
        group_lag = GaugeMetricFamily(
            "chronik_group_lag", "High watermark minus the group's committed offset.", labels=["group", *labels]
        )
        for group in self.groups():
            group_lag.add_metric([group.group, group.topic, str(group.partition)], group.lag)
        yield group_lag

    def _node_families(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        yield GaugeMetricFamily("chronik_connections", "Open client connections.", value=self.connections)
        for name, text, count in (
            ("chronik_connections_refused", "Connections closed at once: too many.", self.connections_refused),
            (
                "chronik_malformed_requests",
                "Frames that did not parse; their connection was closed.",
                self.malformed_requests,
            ),
            ("chronik_received_bytes", "Bytes of request frames.", self.bytes_in),
            ("chronik_sent_bytes", "Bytes of responses.", self.bytes_out),
            ("chronik_appended_records", "Records appended by producers.", self.records_in),
            ("chronik_produce_forwarded", "Produce requests forwarded to the leader.", self.produce_forwarded),
            ("chronik_not_leader", "Partitions answered with NOT_LEADER_OR_FOLLOWER.", self.not_leader),
            ("chronik_watermark_updates", "Times a high watermark rose.", self.watermark_updates),
            ("chronik_group_rebalances", "Rebalances of groups coordinated here.", self.group_rebalances),
            ("chronik_traces_dropped", "Traces that were lost before they reached their topic.", self.traces_dropped),
            ("chronik_scrubbed_bytes", "Bytes of closed segments that the scrubber re-read.", self.scrubbed_bytes),
            ("chronik_scrub_passes", "Times the scrubber has read all closed segments.", self.scrub_passes),
            ("chronik_replicas_healed", "Damaged replicas that are whole and in sync again.", self.replicas_healed),
        ):
            yield CounterMetricFamily(name, text, value=count)
        damages = CounterMetricFamily(
            "chronik_damages_found", "Damages found in logs of this node, by what found them.", labels=["how"]
        )
        for how, count in self.damages_found.items():
            damages.add_metric([how], count)
        yield damages
        yield GaugeMetricFamily(
            "chronik_replicas_healing", "Damaged replicas that are not healed yet.", value=self.replicas_healing
        )
        for name, text, histogram in (
            ("chronik_fetch_seconds", "Consumer fetches, the long poll included.", self.fetch),
            ("chronik_fsync_seconds", "Time of one fdatasync.", self.fsync),
            (
                "chronik_watermark_propagation_seconds",
                "From a watermark's rise at the leader to the answer that tells a follower.",
                self.watermark_propagation,
            ),
        ):
            yield HistogramMetricFamily(name, text, buckets=histogram.cumulative(), sum_value=histogram.sum)


def render(families: Iterable[Metric]) -> bytes:
    """Render families as Prometheus text. Touches no node state, so it may run in a thread."""
    from prometheus_client.exposition import generate_latest
    from prometheus_client.registry import Collector, CollectorRegistry

    class Collected(Collector):
        def collect(self) -> Iterable[Metric]:
            return families

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collected())
    return generate_latest(registry)


def _process_families() -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    usage = process_usage()
    yield CounterMetricFamily("process_cpu_seconds", "User and system CPU of this process.", value=usage.cpu_s)
    if usage.resident_bytes is not None:
        yield GaugeMetricFamily("process_resident_memory_bytes", "Resident memory.", value=usage.resident_bytes)
    if usage.open_files is not None:
        yield GaugeMetricFamily("process_open_fds", "Open file descriptors.", value=usage.open_files)
    yield GaugeMetricFamily("process_max_fds", "Limit of open file descriptors.", value=usage.open_files_max)


def api_name(key: int) -> str:
    """Return Kafka's spelling: LIST_OFFSETS is ListOffsets; an unknown key is its number."""
    try:
        return "".join(word.capitalize() for word in ApiKey(key).name.split("_"))
    except ValueError:
        return str(key)
