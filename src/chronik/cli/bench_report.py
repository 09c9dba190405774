"""A benchmark's figures: as one JSON object for scripts, as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chronik.cli.errors import CHECK_FAILED, CliError
from chronik.cli.output import print_json, print_table

MEGABYTE = 1_000_000


@dataclass(frozen=True, slots=True)
class BrokerUsage:
    """CPU time and memory, summed over the brokers that report them."""

    cpu_s: float
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class BenchResult:
    """One run. `client_cpu_s` is per client process, `broker_*` the sum over the brokers or None."""

    workload: str
    records: int
    bytes: int
    seconds: float
    errors: int
    latencies_ms: Sequence[float]
    client_cpu_s: Sequence[float]
    broker_before: BrokerUsage | None
    broker_after: BrokerUsage | None

    def figures(self) -> dict[str, Any]:
        """Return what `--json` prints. `busiest` is the process that limited the run."""
        megabytes = self.bytes / MEGABYTE
        seconds = max(self.seconds, 1e-9)
        broker_cpu_s = None
        if self.broker_before is not None and self.broker_after is not None:
            broker_cpu_s = round(self.broker_after.cpu_s - self.broker_before.cpu_s, 4)
        busiest_client_s = max(self.client_cpu_s, default=0.0)
        return {
            "workload": self.workload,
            "records": self.records,
            "seconds": round(self.seconds, 4),
            "records_per_s": round(self.records / seconds, 1),
            "mb_per_s": round(megabytes / seconds, 3),
            "latency_ms": percentiles(self.latencies_ms),
            "errors": self.errors,
            "broker_cpu_s": broker_cpu_s,
            "broker_cpu_ms_per_mb": _ratio(broker_cpu_s, megabytes, 1000),
            "broker_cpu_us_per_record": _ratio(broker_cpu_s, self.records, 1_000_000),
            "broker_rss_bytes": None if self.broker_after is None else self.broker_after.resident_bytes,
            "client_cpu_s": round(sum(self.client_cpu_s), 4),
            "busiest": None if broker_cpu_s is None else "client" if busiest_client_s >= broker_cpu_s else "broker",
        }


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """Return nearest-rank p50 and p99, and the maximum; None if nothing was measured."""
    ranked = sorted(values)
    if not ranked:
        return {"p50": None, "p99": None, "max": None}

    def rank(share: float) -> float:
        return round(ranked[min(len(ranked) - 1, int(share * len(ranked)))], 4)

    return {"p50": rank(0.5), "p99": rank(0.99), "max": rank(1.0)}


def print_result(result: BenchResult, as_json: bool) -> None:
    """Print the figures; raise if the run lost records."""
    figures = result.figures()
    if as_json:
        print_json(figures)
    else:
        latency = figures.pop("latency_ms")
        rows = [(name, _plain(value)) for name, value in figures.items() if name != "workload"]
        rows += [(f"latency {name} (ms)", _plain(value)) for name, value in latency.items()]
        print_table(f"bench {result.workload}", ("figure", "value"), rows, ("value",))
    if result.errors:
        raise CliError(f"{result.errors} records failed or are missing: see the node's log", CHECK_FAILED)


def _plain(value: object) -> object:
    return f"{value:,.3f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value


def _ratio(amount: float | None, of: float, scale: float) -> float | None:
    return None if amount is None or not of else round(amount * scale / of, 4)
