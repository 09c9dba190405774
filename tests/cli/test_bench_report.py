"""The figures of a benchmark."""

import pytest

from chronik.cli.bench_report import BenchResult, BrokerUsage, percentiles, print_result
from chronik.cli.bench_run import RunningTopic, _appended, http_addresses
from chronik.cli.errors import CliError


def result(errors: int = 0, broker_cpu_s: float | None = 0.5) -> BenchResult:
    after = None if broker_cpu_s is None else BrokerUsage(1.0 + broker_cpu_s, 50_000_000)
    return BenchResult(
        workload="produce",
        records=1000,
        bytes=1_000_000,
        seconds=2.0,
        errors=errors,
        latencies_ms=[1.0, 2.0, 3.0],
        client_cpu_s=[0.4, 0.6],
        broker_before=BrokerUsage(1.0, 40_000_000),
        broker_after=after,
    )


def test_rates_and_costs_are_computed_from_the_measurements() -> None:
    figures = result().figures()
    assert figures["records_per_s"] == 500
    assert figures["mb_per_s"] == 0.5
    assert figures["broker_cpu_s"] == 0.5
    assert figures["broker_cpu_ms_per_mb"] == 500
    assert figures["client_cpu_s"] == 1.0
    assert figures["busiest"] == "client"
    assert figures["latency_ms"] == {"p50": 2.0, "p99": 3.0, "max": 3.0}


def test_broker_figures_are_null_without_broker_metrics() -> None:
    figures = result(broker_cpu_s=None).figures()
    assert figures["broker_cpu_s"] is None
    assert figures["broker_cpu_ms_per_mb"] is None
    assert figures["busiest"] is None


def test_lost_records_fail_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CliError) as failed:
        print_result(result(errors=2), as_json=True)
    assert failed.value.exit_code == 1
    assert capsys.readouterr().out.startswith("{")


def test_percentiles_without_samples_are_null() -> None:
    assert percentiles([]) == {"p50": None, "p99": None, "max": None}
    assert percentiles([float(number) for number in range(100)]) == {"p50": 50.0, "p99": 99.0, "max": 99.0}


def test_the_default_metrics_port_is_the_kafka_port_minus_3000() -> None:
    assert http_addresses([("a", 9092), ("b", 9093)], None) == ["a:6092", "b:6093"]
    assert http_addresses([("a", 9092)], "c:1") == ["c:1"]
    assert http_addresses([("a", 2000)], None) == []


class LateTopic(RunningTopic):
    """A topic whose end offset lags: each query returns the next of `ends`."""

    def __init__(self, *ends: int) -> None:
        super().__init__("127.0.0.1:1", "late", 1)
        self._ends = iter(ends)

    def offsets(self) -> dict[int, tuple[int, int]]:
        return {0: (0, next(self._ends))}


def test_records_that_followers_are_still_fetching_are_not_lost() -> None:
    assert _appended(LateTopic(100, 160, 200, 999), before=100, expected=100) == 100


def test_records_that_never_arrive_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chronik.cli.bench_run.END_TIMEOUT_S", 0.0)
    assert _appended(LateTopic(160), before=100, expected=100) == 60
