"""A node's metrics: plain counters on the request path, Prometheus families for scrapes.

The hot path adds to ints and lists on slotted objects; it takes no lock and builds no label. The metric names are part
of the public interface, and each exists from the node's start, even at zero. Every node has its own `Metrics`, since
several nodes may share a process. prometheus_client is imported at the first scrape (80 ms), not at startup.
"""

from __future__ import annotations

import os
import resource
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from chronik.authentication.sasl import OAUTHBEARER, PLAIN, SCRAM_SHA_256, SCRAM_SHA_512
from chronik.authorization.acls import Operation
from chronik.wire.api import ApiKey

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

    _Family = TypeVar("_Family", CounterMetricFamily, GaugeMetricFamily)

_LATENCY_BUCKETS_MS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 30_000)
LATENCY_BUCKETS_S = tuple(bound_ms / 1000 for bound_ms in _LATENCY_BUCKETS_MS)
REJECTED_PARTITIONS_MAX = 10_000
"""Rejections are counted by partition for this many partitions; other partitions only add to the total."""


MECHANISMS = (PLAIN, SCRAM_SHA_256, SCRAM_SHA_512, OAUTHBEARER)
DENIED_OPERATIONS = tuple(operation.name for operation in Operation if operation >= Operation.READ)


class Histogram:
    """Observation counts by bucket, as plain ints in a list. Owned by the loop; a scrape on the same loop reads it."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float] = LATENCY_BUCKETS_S) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """Return Prometheus buckets: the upper bound as text, and the number of observations at or below it."""
        return list(zip((*map(str, self.bounds), "+Inf"), map(float, accumulate(self.counts)), strict=True))


class PartitionGauges(NamedTuple):
    """One hosted partition at the time of a scrape. `replicas` and `in_sync_replicas` are counts."""

    topic: str
    partition: int
    log_start_offset: int
    log_end_offset: int
    high_watermark: int
    last_stable_offset: int
    replicas: int
    in_sync_replicas: int
    size_bytes: int
    is_leader: bool = True


class GroupLag(NamedTuple):
    group: str
    topic: str
    partition: int
    lag: int


class ShareFigures(NamedTuple):
    """The records of one partition in one share group, since their leader loaded the group's state."""

    group: str
    topic: str
    partition: int
    start_offset: int
    in_flight: int
    """Delivered, and locked for their consumers."""
    oldest_lock_s: float
    delivered: int
    accepted: int
    released: int
    rejected: int
    exhausted: int
    """Archived because they were not accepted in their last delivery."""
    exhausted_offset: int
    """The last one of those; -1 if there is none."""
    suspect_offset: int
    """The record that was delivered most often without being done; -1 if there is none."""
    suspect_deliveries: int
    delivery_limit: int


class TransactionGauges(NamedTuple):
    """The transactions that a node coordinates."""

    open_count: int = 0
    longest_open_s: float = 0.0
    unwritten_markers: int = 0


class ClientMetric(NamedTuple):
    """The last value of a metric that a client pushed."""

    client_id: str
    instance: str
    software: str
    metric: str
    attributes: str
    value: float


class ApiMetrics:
    """Request metrics of one API. Owned by the loop."""

    __slots__ = ("errors", "name", "seconds")

    def __init__(self, name: str) -> None:
        self.name = name
        self.errors = 0
        self.seconds = Histogram()


class Metrics:
    """All counters of one node. Owned by the node's loop, which also scrapes it.

    The node sets `partitions`, `groups`, `transactions`, `clients` and `watermark_age_s`: callables that return current
    gauges.
    """

    def __init__(self) -> None:
        self._apis: dict[int, ApiMetrics] = {}
        self.produce_forwarded = 0
        self.not_leader = 0
        self.leadership_rejections: dict[tuple[str, int], int] = {}
        self.watermark_updates = 0
        self.traces_dropped = 0
        self.group_rebalances = 0
        self.transactions_committed = 0
        self.transactions_aborted = {"client": 0, "timeout": 0, "fenced": 0}
        """By cause."""
        self.authentications = dict.fromkeys(MECHANISMS, 0)
        self.authentication_failures = dict.fromkeys(MECHANISMS, 0)
        self.reauthentications = dict.fromkeys(MECHANISMS, 0)
        """These three by SASL mechanism."""
        self.sessions_expired = 0
        self.authorization_denials = dict.fromkeys(DENIED_OPERATIONS, 0)
        """By operation."""
        self.http_logins = {"accepted": 0, "refused": 0, "delayed": 0}
        """Passwords that the page and the HTTP API received, by outcome."""
        self.client_pushes = {"accepted": 0, "throttled": 0, "refused": 0}
        """Telemetry of clients, by outcome; requests for a subscription are included if they are throttled."""
        self.client_metrics_dropped = 0
        self.client_instances = 0
        self.clients: Callable[[], Iterable[ClientMetric]] = tuple
        self.connections = 0
        self.connections_refused = 0
        self.malformed_requests = 0
        self.tls_failures = 0
        self.certificate_left_s: float | None = None
        """Until the node's certificate expires; None without TLS."""
        self.bytes_in = 0
        self.bytes_out = 0
        self.records_in = 0
        self.scrubbed_bytes = 0
        self.scrub_passes = 0
        self.throttled_requests = {"produce": 0, "fetch": 0, "request": 0, "controller_mutation": 0}
        self.throttled_requests |= {"connection": 0, "ip": 0}
        self.throttle_ms = dict.fromkeys(self.throttled_requests, 0)
        self.damages_found = {"scrub": 0, "recovery": 0, "read": 0}
        """By how the damage was found."""
        self.replicas_healed = 0
        self.replicas_healing = 0
        self.fsync = Histogram()
        self.fetch = Histogram()
        self.watermark_propagation = Histogram()
        self.partitions: Callable[[], Iterable[PartitionGauges]] = tuple
        self.groups: Callable[[], Iterable[GroupLag]] = tuple
        self.shares: Callable[[], Iterable[ShareFigures]] = tuple
        self.transactions: Callable[[], TransactionGauges] = TransactionGauges
        self.watermark_age_s: Callable[[str, int], float] = lambda topic, partition: 0.0
        for key in (ApiKey.PRODUCE, ApiKey.FETCH):  # scrapes show these before the node registers its APIs
            self.api(key)

    def api(self, key: int) -> ApiMetrics:
        """Return the counters of one API, created on first use. A starting node calls this for each API it supports."""
        if key not in self._apis:
            self._apis[key] = ApiMetrics(api_name(key))
        return self._apis[key]

    def denied(self, operation: str) -> None:
        """Count an operation that a client requested without having the right."""
        self.authorization_denials[operation] += 1

    def throttled(self, quota: str, throttle_ms: int) -> None:
        """Count a request, or a new connection, that exceeded a quota of this kind."""
        self.throttled_requests[quota] += 1
        self.throttle_ms[quota] += throttle_ms

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
        yield from self._request_families()
        yield from self._partition_families()
        yield from self._node_families()
        yield from _process_families()

    def _request_families(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        apis = [api for _, api in sorted(self._apis.items())]
        for name, text, counts in (
            ("chronik_requests", "Requests answered, by API.", [api.seconds.count for api in apis]),
            ("chronik_request_errors", "Requests answered with an error.", [api.errors for api in apis]),
        ):
            rows = zip(([api.name] for api in apis), counts, strict=True)
            yield _filled(CounterMetricFamily(name, text, labels=["api"]), rows)
        seconds = HistogramMetricFamily(
            "chronik_request_seconds", "From a request's last byte to its response, waits included.", labels=["api"]
        )
        for api in apis:
            seconds.add_metric([api.name], api.seconds.cumulative(), api.seconds.sum)
        yield seconds

    def _partition_families(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        labels = ["topic", "partition"]
        partitions = list(self.partitions())
        value: Callable[[PartitionGauges], float]
        for name, text, value in (
            ("chronik_log_start_offset", "First offset that can be read.", lambda p: p.log_start_offset),
            ("chronik_log_end_offset", "Next offset to assign.", lambda p: p.log_end_offset),
            ("chronik_high_watermark", "Consumers read records below this offset.", lambda p: p.high_watermark),
            ("chronik_watermark_lag", "Log end minus high watermark.", lambda p: p.log_end_offset - p.high_watermark),
            (
                "chronik_last_stable_offset",
                "read_committed consumers read records below this offset.",
                lambda p: p.last_stable_offset,
            ),
            (
                "chronik_last_stable_offset_lag",
                "High watermark minus last stable offset: what open transactions hold back.",
                lambda p: max(0, p.high_watermark - p.last_stable_offset),
            ),
            ("chronik_in_sync_replicas", "Replicas in the ISR.", lambda p: p.in_sync_replicas),
            ("chronik_log_size_bytes", "Bytes of the partition's segments.", lambda p: p.size_bytes),
        ):
            rows = [([each.topic, str(each.partition)], value(each)) for each in partitions]
            yield _filled(GaugeMetricFamily(name, text, labels=labels), rows)
        led = [partition for partition in partitions if partition.is_leader]
        yield _filled(
            GaugeMetricFamily(
                "chronik_watermark_lag_seconds", "How long the watermark has lagged, at the leader.", labels=labels
            ),
            (([p.topic, str(p.partition)], self.watermark_age_s(p.topic, p.partition)) for p in led),
        )
        yield GaugeMetricFamily(
            "chronik_under_replicated_partitions",
            "Partitions led here whose ISR is smaller than their replica set.",
            value=sum(partition.in_sync_replicas < partition.replicas for partition in led),
        )
        rejections = CounterMetricFamily(
            "chronik_leadership_rejections", "Requests refused because another node leads, by partition.", labels=labels
        )
        counts = self.leadership_rejections.items()
        yield _filled(rejections, (([topic, str(index)], count) for (topic, index), count in counts))
        group_lag = GaugeMetricFamily(
            "chronik_group_lag", "High watermark minus the group's committed offset.", labels=["group", *labels]
        )
        yield _filled(group_lag, (([each.group, each.topic, str(each.partition)], each.lag) for each in self.groups()))
        yield from self._share_families(["group", *labels])

    def _share_families(self, labels: list[str]) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        shares = [([each.group, each.topic, str(each.partition)], each) for each in self.shares()]
        in_flight = GaugeMetricFamily(
            "chronik_share_records_in_flight", "Records that consumers of a share group have locked.", labels=labels
        )
        yield _filled(in_flight, ((key, each.in_flight) for key, each in shares))
        oldest = GaugeMetricFamily(
            "chronik_share_oldest_lock_seconds", "The age of the oldest lock of a share group.", labels=labels
        )
        yield _filled(oldest, ((key, each.oldest_lock_s) for key, each in shares))
        records = CounterMetricFamily(
            "chronik_share_records", "Records of share groups by outcome.", labels=[*labels, "outcome"]
        )
        outcomes = ("delivered", "accepted", "released", "rejected", "exhausted")
        yield _filled(
            records, (([*key, outcome], getattr(each, outcome)) for key, each in shares for outcome in outcomes)
        )

    def _client_families(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        labels = ["client_id", "client_instance_id", "client_software", "metric", "attributes"]
        pushed = GaugeMetricFamily(
            "chronik_client_metric", "The last value of a metric that a client pushed to this node.", labels=labels
        )
        yield _filled(pushed, ((list(each[:-1]), each.value) for each in self.clients()))
        yield GaugeMetricFamily(
            "chronik_client_instances", "Clients that this node knows by their telemetry.", value=self.client_instances
        )
        pushes = CounterMetricFamily(
            "chronik_client_pushes", "Telemetry requests of clients, by outcome.", labels=["outcome"]
        )
        yield _filled(pushes, (([outcome], count) for outcome, count in self.client_pushes.items()))
        yield CounterMetricFamily(
            "chronik_client_metrics_dropped",
            "Metrics of clients above the limits of series.",
            value=self.client_metrics_dropped,
        )

    def _node_families(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        yield from self._client_families()
        yield GaugeMetricFamily("chronik_connections", "Open client connections.", value=self.connections)
        for name, text, count in (
            ("chronik_connections_refused", "Connections closed at the connection limit.", self.connections_refused),
            (
                "chronik_malformed_requests",
                "Connections closed for a malformed or stalled frame, or because there were too many.",
                self.malformed_requests,
            ),
            (
                "chronik_sessions_expired",
                "Connections closed because the client did not authenticate again in time.",
                self.sessions_expired,
            ),
            ("chronik_tls_failures", "TLS handshakes that failed, and broken TLS streams.", self.tls_failures),
            ("chronik_received_bytes", "Bytes of request frames.", self.bytes_in),
            ("chronik_sent_bytes", "Bytes of responses.", self.bytes_out),
            ("chronik_appended_records", "Records appended by producers.", self.records_in),
            ("chronik_produce_forwarded", "Produce requests forwarded to the leader.", self.produce_forwarded),
            ("chronik_not_leader", "Partitions answered with NOT_LEADER_OR_FOLLOWER.", self.not_leader),
            ("chronik_watermark_updates", "Times a high watermark rose.", self.watermark_updates),
            ("chronik_group_rebalances", "Rebalances of groups coordinated here.", self.group_rebalances),
            (
                "chronik_transactions_committed",
                "Transactions coordinated here that were committed.",
                self.transactions_committed,
            ),
            ("chronik_traces_dropped", "Traces that were lost before they reached their topic.", self.traces_dropped),
            ("chronik_scrubbed_bytes", "Bytes of closed segments that the scrubber re-read.", self.scrubbed_bytes),
            ("chronik_scrub_passes", "Times the scrubber has read all closed segments.", self.scrub_passes),
            ("chronik_replicas_healed", "Damaged replicas that are whole and in sync again.", self.replicas_healed),
        ):
            yield CounterMetricFamily(name, text, value=count)
        for name, text, by_mechanism in (
            ("chronik_authentications", "Clients that authenticated.", self.authentications),
            ("chronik_authentication_failures", "Authentications that failed.", self.authentication_failures),
            ("chronik_reauthentications", "Clients that authenticated again in time.", self.reauthentications),
        ):
            counts = CounterMetricFamily(name, text, labels=["mechanism"])
            yield _filled(counts, (([mechanism], count) for mechanism, count in sorted(by_mechanism.items())))
        aborted = CounterMetricFamily(
            "chronik_transactions_aborted", "Transactions coordinated here that were aborted.", labels=["cause"]
        )
        yield _filled(aborted, (([cause], count) for cause, count in self.transactions_aborted.items()))
        denials = CounterMetricFamily(
            "chronik_authorization_denials", "Operations refused to clients without the right.", labels=["operation"]
        )
        yield _filled(denials, (([operation], count) for operation, count in self.authorization_denials.items()))
        logins = CounterMetricFamily(
            "chronik_http_logins", "Passwords sent to the page and the HTTP API, by outcome.", labels=["outcome"]
        )
        yield _filled(logins, (([outcome], count) for outcome, count in self.http_logins.items()))
        transactions = self.transactions()
        for name, text, value in (
            ("chronik_open_transactions", "Open transactions coordinated here.", transactions.open_count),
            ("chronik_longest_transaction_seconds", "Age of the oldest of them.", transactions.longest_open_s),
            ("chronik_unwritten_markers", "Markers that a leader has not written yet.", transactions.unwritten_markers),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        if self.certificate_left_s is not None:
            yield GaugeMetricFamily(
                "chronik_certificate_expiry_seconds",
                "Until the node's TLS certificate expires; negative after that.",
                value=self.certificate_left_s,
            )
        for name, text, by_quota in (
            (
                "chronik_throttled_requests",
                "Requests and new connections that exceeded a quota, by its kind.",
                self.throttled_requests,
            ),
            ("chronik_throttle_milliseconds", "How long their clients were throttled.", self.throttle_ms),
        ):
            rows = (([quota], value) for quota, value in by_quota.items())
            yield _filled(CounterMetricFamily(name, text, labels=["quota"]), rows)
        damages = CounterMetricFamily(
            "chronik_damages_found", "Damaged places found in this node's logs, by how they were found.", labels=["how"]
        )
        yield _filled(damages, (([how], count) for how, count in self.damages_found.items()))
        yield GaugeMetricFamily(
            "chronik_replicas_healing", "Damaged replicas that are not healed yet.", value=self.replicas_healing
        )
        for name, text, histogram in (
            ("chronik_fetch_seconds", "Consumer fetches, the long poll included.", self.fetch),
            ("chronik_fsync_seconds", "Time of one fdatasync.", self.fsync),
            (
                "chronik_watermark_propagation_seconds",
                "From a rise of the watermark at the leader to the response that carries it to a follower.",
                self.watermark_propagation,
            ),
        ):
            yield HistogramMetricFamily(name, text, buckets=histogram.cumulative(), sum_value=histogram.sum)


def _filled(family: _Family, rows: Iterable[tuple[Sequence[str], float]]) -> _Family:
    """Add a sample for each row: the values of the family's labels, and the number."""
    for labels, value in rows:
        family.add_metric(labels, value)
    return family


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

    # getrusage, since /proc/self/stat has steps of 10 ms.
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = usage.ru_utime + usage.ru_stime
    yield CounterMetricFamily("process_cpu_seconds", "User and system CPU of this process.", value=cpu_s)
    if (resident_bytes := _resident_bytes()) is not None:
        yield GaugeMetricFamily("process_resident_memory_bytes", "Resident memory.", value=resident_bytes)
    if (open_files := _open_files()) is not None:
        yield GaugeMetricFamily("process_open_fds", "Open file descriptors.", value=open_files)
    open_files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    yield GaugeMetricFamily("process_max_fds", "Limit of open file descriptors.", value=open_files_max)


def _resident_bytes() -> int | None:
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def _open_files() -> int | None:
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return len(os.listdir(folder)) - 1  # listing the folder opens it
        except OSError:
            continue
    return None


def api_name(key: int) -> str:
    """Return Kafka's spelling: LIST_OFFSETS is ListOffsets; an unknown key is its number."""
    try:
        return "".join(word.capitalize() for word in ApiKey(key).name.split("_"))
    except ValueError:
        return str(key)
