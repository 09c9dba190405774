"""Detect fetches that hang: records are available and the leader answers other requests, but a fetch does not return.

The doctor measures its own fetches, and those of real consumers if the topic is traced. To exclude a machine that is
slow overall, a fetch must take at least a second and several times as long as a ListOffsets request to the same leader.
"""

from __future__ import annotations

from collections.abc import Iterator

from chronik.doctor.diagnosis import Evidence, Finding, listed, nodes_of
from chronik.doctor.observations import DOCTOR_CLIENT_ID, Fetch, Observations
from chronik.observe.traces import FetchServed, FetchStarted, WatermarkSeen

HANG_MS = 1_000.0
TIMES_SLOWER = 4
SLOW_MIN = 2
"""A single slow fetch may be chance."""
SMOOTH_MS = 100.0
UNNAMED_CLIENT = "a client without a name"


def fetch_hang(seen: Observations) -> Finding:
    by_partition: dict[int, list[Fetch]] = {}
    for fetch in (*seen.fetches, *_traced_fetches(seen)):
        if fetch.elapsed_ms >= _hang_ms(seen, fetch.partition):
            by_partition.setdefault(fetch.partition, []).append(fetch)
    evidence: list[Evidence] = []
    for partition, fetches in sorted(by_partition.items()):
        if len(fetches) < SLOW_MIN:
            continue
        worst = max(fetches, key=lambda fetch: fetch.elapsed_ms)
        clients = sorted({fetch.client for fetch in fetches})
        open_now = sum(not fetch.is_over for fetch in fetches)
        still = f", {open_now} of them still unanswered" if open_now else ""
        evidence.append(
            Evidence(
                f"partition {partition} on node {worst.node}: {len(fetches)} fetches of available records took more "
                f"than {HANG_MS / 1000:g} s, the longest {worst.elapsed_ms / 1000:.1f} s at offset {worst.offset}"
                f"{still} (by {listed(clients)})",
                partition,
                worst.node,
                client=clients[0],
                numbers={"fetches": len(fetches), "longest_ms": round(worst.elapsed_ms, 1)},
            )
        )
    return Finding(
        "fetch-hang",
        f"fetches of partition {listed(e.partition for e in evidence)} of {seen.topic} hang although records are "
        f"available: a healthy fetch takes less than {SMOOTH_MS:g} ms",
        f"Check the disk of node {listed(nodes_of(evidence))} (iostat, smartctl, chronik_fsync_seconds). A restart of "
        "the node transfers its leadership to other nodes meanwhile.",
        evidence,
    )


def _traced_fetches(seen: Observations) -> Iterator[Fetch]:
    """Yield consumers' own fetches that found records at once."""
    started: dict[tuple[int, int, int], FetchStarted] = {}
    had_records: set[tuple[int, int, int]] = set()
    for event in seen.traces:
        if isinstance(event, FetchStarted) and event.client_id != DOCTOR_CLIENT_ID:
            started[(event.node, event.fetch, event.partition)] = event
        elif isinstance(event, WatermarkSeen):
            key = (event.node, event.fetch, event.partition)
            begun = started.get(key)
            # Consider only the first check: a fetch that had to wait found no records then.
            is_first = begun is not None and event.time_ms - begun.time_ms < SMOOTH_MS
            if begun is not None and is_first and event.high_watermark > begun.offset:
                had_records.add(key)
        elif isinstance(event, FetchServed):
            key = (event.node, event.fetch, event.partition)
            begun = started.pop(key, None)
            if begun is not None and key in had_records:
                yield _traced(seen, begun, event.elapsed_ms, is_over=True)
    for key, begun in started.items():
        if key in had_records:
            yield _traced(seen, begun, seen.ago_s(begun) * 1000, is_over=False)


def _traced(seen: Observations, begun: FetchStarted, elapsed_ms: float, *, is_over: bool) -> Fetch:
    at_s = seen.seconds - seen.ago_s(begun)
    client = begun.client_id or UNNAMED_CLIENT
    return Fetch(at_s, begun.partition, begun.node, begun.offset, elapsed_ms, is_over, client)


def _hang_ms(seen: Observations, partition: int) -> float:
    """Compare with the leader's slowest ListOffsets response, which involves no disk access."""
    answer_ms = max((sample.answer_ms for sample in seen.partitions.get(partition, ())), default=0.0)
    return max(HANG_MS, TIMES_SLOWER * answer_ms)
