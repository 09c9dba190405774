"""Kafka's own producer benchmark with default settings: batches of 16 KB, acks=all, idempotent.

It runs in a JVM of its own, with the heap of kafka-producer-perf-test.sh. Its first records are not measured, because
the JVM compiles code meanwhile. The last lines of its output:

    500000 records sent, 81234.5 records/sec (77.47 MB/sec), 310.20 ms avg latency, 512.00 ms max latency, ...
    400000 steady state records sent, 95238.1 records/sec (90.83 MB/sec), 250.11 ms avg latency, ...
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

from tests.support import apache_kafka

from bench.clients import NotMeasured, Topic
from bench.processes import usage_of
from bench.samples import Figure
from bench.workloads import KILOBYTE_RECORD, MEGABYTE, PARTITIONS, Life

TOOL = "org.apache.kafka.tools.ProducerPerformance"
HEAP = "-Xmx512m"
TIMEOUT_S = 300.0
_STEADY = re.compile(r"^(\d+) steady state records sent, ([\d.]+) records/sec", re.MULTILINE)


def produce(life: Life) -> Iterator[Figure]:
    """Measure the rate after a fifth of the records; CPU covers all of them."""
    records = life.scale.records(500_000 if life.setup.nodes == 1 else 250_000)
    with Topic(life.server, PARTITIONS) as topic:
        before = usage_of(life.server.pids)
        rate = _run(topic, records)
        after = usage_of(life.server.pids)
        life.server.check()
        if topic.available() != records:
            raise NotMeasured(f"{topic.available():,} of {records:,} records are in the topic")
    cpu_s, resident_mb = after.cpu_s - before.cpu_s, after.resident_bytes / MEGABYTE
    workload = f"Java producer, default settings, 1 KB, {life.setup}"
    yield Figure(workload, "records", "1/s", rate, ">= 1.0", cpu_s=cpu_s, resident_mb=resident_mb)
    cost = cpu_s * 1000 / (records * KILOBYTE_RECORD / MEGABYTE)
    yield Figure(workload, "server CPU", "ms/MB", cost, "<= 0.5", cpu_s=cpu_s, resident_mb=resident_mb)


def _run(topic: Topic, records: int) -> float:
    """Return the records per second that the tool reports."""
    options = {
        "--topic": topic.name,
        "--num-records": records,
        "--warmup-records": records // 5,
        "--record-size": KILOBYTE_RECORD,
        "--throughput": -1,
        "--bootstrap-server": topic.server.bootstrap,
    }
    arguments = [str(part) for option in options.items() for part in option]
    command = ["java", HEAP, "-cp", f"{apache_kafka.JARS}/*", TOOL, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise NotMeasured(f"the Java producer did not end within {TIMEOUT_S:g} s") from None
    return steady_rate(done.stdout + done.stderr)


def steady_rate(output: str) -> float:
    """Return the rate after the warm-up, as the tool printed it."""
    found = _STEADY.search(output)
    if found is None:
        raise NotMeasured(f"the Java producer printed no rate: {output.strip()[-1000:]}")
    return float(found[2])
