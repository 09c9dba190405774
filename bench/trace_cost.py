"""What traces cost: produce and consume on a topic with traces off and on, in turn, on three local nodes.

    .venv/bin/python bench/trace_cost.py                       # off against on
    .venv/bin/python bench/trace_cost.py --against OTHER/src   # also: this tree with traces off against another tree

The promise: on costs below 10 % of throughput, off nothing that can be measured. Runs take turns, so that a busy
machine hits both alike, and the medians are compared; the nodes' CPU for each record is the figure that a busy machine
disturbs least. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1] / "src"
REQUESTS_S = "4"
CHRONIK = Path(sys.executable).with_name("chronik")


def chronik(source: Path, *arguments: str) -> str:
    done = subprocess.run(
        [str(CHRONIK), *arguments],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"chronik {' '.join(arguments)} failed: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def cluster(source: Path, port: int) -> Iterator[str]:
    """Start three nodes of that source tree, and yield their bootstrap addresses."""
    with tempfile.TemporaryDirectory(prefix="trace-cost-") as folder:
        chronik(source, "cluster", "up", "--port", str(port), "--dir", folder)
        try:
            yield ",".join(f"127.0.0.1:{port + index}" for index in range(3))
        finally:
            chronik(source, "cluster", "down", "--dir", folder)


class Side:
    """One of the compared sides: a cluster, and the config of its topics."""

    def __init__(self, bootstrap: str, modes: list[str], *configs: str) -> None:
        self.runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
        self.bootstrap = bootstrap
        self._configs = [part for config in configs for part in ("--config", config)]

    def measure(self, name: str, records: int, size: int) -> None:
        at = ("-b", self.bootstrap)
        chronik(HERE, "topic", "create", name, "--partitions", "3", *self._configs, *at)
        for mode, found in self.runs.items():
            wanted = ["--records", str(records), "--size", str(size)]
            if mode == "requests":
                # One record each is the worst case, because a trace is recorded for each request and not for each
                # record.
                wanted = ["--seconds", REQUESTS_S, "--size", "100"]
            found.append(json.loads(chronik(HERE, "bench", mode, "--topic", name, *wanted, "--json", *at)))
        chronik(HERE, "topic", "delete", name, *at)

    def median(self, mode: str) -> tuple[float, float]:
        """Return records per second, and microseconds of the nodes' CPU for each record."""
        runs = self.runs[mode]
        return (
            statistics.median(run["records_per_s"] for run in runs),
            statistics.median((run["broker_cpu_s"] or 0) / run["records"] * 1e6 for run in runs),
        )


def compared(name: str, before: Side, after: Side) -> list[dict[str, Any]]:
    rows = []
    for mode in before.runs:
        (rate, cpu_us), (new_rate, new_cpu_us) = before.median(mode), after.median(mode)
        rows.append(
            {
                "comparison": name,
                "mode": mode,
                "records_per_s": [round(rate), round(new_rate)],
                "throughput_lost_percent": round((1 - new_rate / rate) * 100, 1),
                "broker_cpu_us_per_record": [round(cpu_us, 2), round(new_cpu_us, 2)],
                "cpu_added_percent": round((new_cpu_us / cpu_us - 1) * 100, 1) if cpu_us else None,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=300_000)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--modes", nargs="+", default=["produce", "consume", "requests"], help="in this order")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=21092)
    parser.add_argument("--against", type=Path, metavar="SRC", help="the src folder of another version")
    wanted = parser.parse_args()
    load_before = os.getloadavg()[0]
    with cluster(HERE, wanted.port) as here:
        off, on = Side(here, wanted.modes), Side(here, wanted.modes, "chronik.trace=true")
        for number in range(wanted.rounds):
            off.measure(f"off-{number}", wanted.records, wanted.size)
            on.measure(f"on-{number}", wanted.records, wanted.size)
        rows = compared("traces off, on", off, on)
    if wanted.against is not None:
        other, same = Side("", wanted.modes), Side("", wanted.modes)
        trees = [(wanted.against.resolve(), other), (HERE, same)]
        for number in range(wanted.rounds):
            # One cluster at a time, in alternating order: two at once disturbed each other.
            for source, side in trees if number % 2 == 0 else reversed(trees):
                with cluster(source, wanted.port) as side.bootstrap:
                    side.measure(f"round-{number}", wanted.records, wanted.size)
        rows += compared("the other tree, this one with traces off", other, same)
    print(json.dumps({"load_before": round(load_before, 2), "records": wanted.records, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
