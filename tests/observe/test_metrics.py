"""The content of a metrics scrape."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from chronik.observe.metrics import GroupLag, Histogram, Metrics, PartitionGauges, TransactionGauges, api_name

PROMISED = (
    "chronik_log_end_offset",
    "chronik_high_watermark",
    "chronik_watermark_lag",
    "chronik_last_stable_offset",
    "chronik_last_stable_offset_lag",
    "chronik_in_sync_replicas",
    "chronik_under_replicated_partitions",
    "chronik_group_lag",
    "chronik_group_rebalances",
    "chronik_open_transactions",
    "chronik_longest_transaction_seconds",
    "chronik_transactions_committed",
    "chronik_transactions_aborted",
    "chronik_unwritten_markers",
    "chronik_requests",
    "chronik_request_seconds",
    "chronik_produce_forwarded",
    "chronik_not_leader",
    "chronik_fetch_seconds",
    "chronik_watermark_updates",
    "chronik_watermark_propagation_seconds",
    "chronik_fsync_seconds",
    "chronik_traces_dropped",
    "chronik_scrubbed_bytes",
    "chronik_scrub_passes",
    "chronik_damages_found",
    "chronik_replicas_healed",
    "chronik_replicas_healing",
)


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = metrics.exposition().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_documented_metric_exists_from_the_start() -> None:
    families = {family.name for family in text_string_to_metric_families(Metrics().exposition().decode())}
    assert set(PROMISED) <= families


def test_counters_start_at_zero() -> None:
    found = samples(Metrics())
    assert found["chronik_produce_forwarded_total", ()] == 0
    assert found["chronik_requests_total", (("api", "Produce"),)] == 0
    assert found["chronik_under_replicated_partitions", ()] == 0
    assert found["chronik_scrubbed_bytes_total", ()] == found["chronik_replicas_healing", ()] == 0
    assert [found["chronik_damages_found_total", (("how", how),)] for how in ("scrub", "recovery", "read")] == [0, 0, 0]


def test_requests_are_counted_and_timed_by_api() -> None:
    metrics = Metrics()
    metrics.api(2).seconds.observe(0.002)
    metrics.api(2).seconds.observe(0.2)
    metrics.api(2).errors += 1
    found = samples(metrics)
    assert found["chronik_requests_total", (("api", "ListOffsets"),)] == 2
    assert found["chronik_request_errors_total", (("api", "ListOffsets"),)] == 1
    assert found["chronik_request_seconds_count", (("api", "ListOffsets"),)] == 2
    assert found["chronik_request_seconds_bucket", (("api", "ListOffsets"), ("le", "0.0025"))] == 1


def test_partitions_and_groups_are_read_at_scrape_time() -> None:
    metrics = Metrics()
    end = 10
    metrics.partitions = lambda: [PartitionGauges("t", 0, 2, end, 7, 6, replicas=3, in_sync_replicas=2, size_bytes=99)]
    metrics.groups = lambda: [GroupLag("g", "t", 0, 4)]
    partition = (("partition", "0"), ("topic", "t"))
    assert samples(metrics)["chronik_watermark_lag", partition] == 3
    assert samples(metrics)["chronik_last_stable_offset", partition] == 6
    assert samples(metrics)["chronik_last_stable_offset_lag", partition] == 1
    end = 20
    found = samples(metrics)
    assert found["chronik_log_end_offset", partition] == 20
    assert found["chronik_under_replicated_partitions", ()] == 1
    assert found["chronik_group_lag", (("group", "g"), *partition)] == 4


def test_transactions_are_read_at_scrape_time_and_aborts_counted_by_cause() -> None:
    metrics = Metrics()
    metrics.transactions = lambda: TransactionGauges(2, 1.5, 3)
    metrics.transactions_committed += 4
    metrics.transactions_aborted["timeout"] += 1
    found = samples(metrics)
    assert (found["chronik_open_transactions", ()], found["chronik_longest_transaction_seconds", ()]) == (2, 1.5)
    assert (found["chronik_unwritten_markers", ()], found["chronik_transactions_committed_total", ()]) == (3, 4)
    aborted = [found["chronik_transactions_aborted_total", (("cause", c),)] for c in ("client", "timeout", "fenced")]
    assert aborted == [0, 1, 0]


def test_a_follower_reports_no_under_replicated_partition() -> None:
    metrics = Metrics()
    metrics.partitions = lambda: [PartitionGauges("t", 0, 0, 0, 0, 0, 3, 2, 0, is_leader=False)]
    assert samples(metrics)["chronik_under_replicated_partitions", ()] == 0


def test_two_nodes_in_one_process_do_not_share_counters() -> None:
    one, other = Metrics(), Metrics()
    one.not_leader += 1
    assert samples(one)["chronik_not_leader_total", ()] == 1
    assert samples(other)["chronik_not_leader_total", ()] == 0


def test_the_metrics_include_cpu_and_memory_of_the_process() -> None:
    found = samples(Metrics())
    assert found["process_cpu_seconds_total", ()] > 0
    assert found["process_resident_memory_bytes", ()] > 1_000_000
    assert found["process_open_fds", ()] > 0


def test_apis_have_their_kafka_names() -> None:
    assert api_name(2) == "ListOffsets"
    assert api_name(4711) == "4711"


def test_a_value_equal_to_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(1.0)
    assert histogram.cumulative() == [("1.0", 1.0), ("2.0", 1.0), ("+Inf", 1.0)]


@given(st.lists(st.floats(min_value=0, max_value=100)))
def test_the_last_bucket_contains_every_value(values: list[float]) -> None:
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    buckets = histogram.cumulative()
    assert buckets[-1] == ("+Inf", float(len(values)))
    assert [count for _, count in buckets] == sorted(count for _, count in buckets)
    assert histogram.count == len(values)
    for bound, count in buckets[:-1]:
        assert count == sum(value <= float(bound) for value in values)
