"""What the scrubber costs producers: produce with the scrubber off and on, in turn, on three local nodes.

    .venv/bin/python -m bench.scrub_cost                        # at its limit: one pass after the other
    .venv/bin/python -m bench.scrub_cost --interval-ms 60000    # 100 MB a minute: as a node with 1 TB and a pass a week

At its limit, the only pauses are those that keep it below 5 % of the disk's time. The promise: below 3 % of throughput.
Each run has a cluster of its own with old segments to scrub, the order turns, and the medians are compared; the nodes'
CPU for each record is the figure that a busy machine disturbs least. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import urllib.request
from typing import Any

from bench.trace_cost import HERE, Side, chronik, cluster, compared

SCRUB_INTERVAL = "CHRONIK_SCRUB_INTERVAL_MS"
OFF, AT_THE_LIMIT = 0, 1
OLD_TOPIC = "old"
HTTP_BELOW_KAFKA = 3000


class ScrubbedSide(Side):
    """A side whose clusters scrub at this interval."""

    def __init__(self, interval_ms: int, modes: list[str]) -> None:
        super().__init__("", modes)
        self.scrubbed_mb_per_run: list[float] = []
        self._interval_ms = interval_ms

    def run(self, port: int, old_mb: int, records: int, size: int) -> None:
        os.environ[SCRUB_INTERVAL] = str(self._interval_ms)
        with cluster(HERE, port) as self.bootstrap:
            at = ("-b", self.bootstrap)
            chronik(HERE, "topic", "create", OLD_TOPIC, "--config", "segment.bytes=16777216", *at)
            chronik(
                HERE, "bench", "produce", "--topic", OLD_TOPIC, "--records", str(old_mb * 1000), "--size", "1000", *at
            )
            before = scrubbed_bytes(port)
            self.measure("new", records, size)
            self.scrubbed_mb_per_run.append((scrubbed_bytes(port) - before) / 1e6)


def scrubbed_bytes(port: int) -> float:
    """Return the bytes scrubbed by all three nodes since their start."""
    total = 0.0
    for index in range(3):
        with urllib.request.urlopen(f"http://127.0.0.1:{port + index - HTTP_BELOW_KAFKA}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        total += sum(float(line.split()[1]) for line in lines if line.startswith("chronik_scrubbed_bytes_total "))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=300_000)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--old-mb", type=int, default=100, help="of closed segments on each node")
    parser.add_argument("--interval-ms", type=int, default=AT_THE_LIMIT, help="of one pass")
    parser.add_argument("--modes", nargs="+", default=["produce", "requests"], help="in this order")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=21192)
    wanted = parser.parse_args()
    load_before = os.getloadavg()[0]
    off, on = ScrubbedSide(OFF, wanted.modes), ScrubbedSide(wanted.interval_ms, wanted.modes)
    for number in range(wanted.rounds):
        for side in (off, on) if number % 2 == 0 else (on, off):
            side.run(wanted.port, wanted.old_mb, wanted.records, wanted.size)
    result: dict[str, Any] = {
        "load_before": round(load_before, 2),
        "records": wanted.records,
        "interval_ms": wanted.interval_ms,
        "scrubbed_mb_per_run": round(statistics.median(on.scrubbed_mb_per_run)),
        "rows": compared("scrubber off, on", off, on),
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
