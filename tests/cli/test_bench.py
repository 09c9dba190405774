"""`chronik bench` against a real node, with a small load."""

from __future__ import annotations

from typing import Any

import pytest
from tests.cli.run_chronik import chronik
from tests.support.node import Node

PROMISED = {"records", "seconds", "records_per_s", "mb_per_s", "latency_ms", "errors", "broker_cpu_s"}


def bench(node: Node, *arguments: str) -> dict[str, Any]:
    http = node.http.removeprefix("http://")
    return chronik("bench", *arguments, "--json", "-b", node.bootstrap, "--http", http).json()


@pytest.mark.parametrize(
    "arguments",
    [
        ("produce", "--records", "5000", "--size", "100", "--clients", "2"),
        ("produce", "--records", "300", "--rate", "1000", "--acks", "1"),
        ("consume", "--records", "5000", "--size", "100", "--clients", "2"),
        ("roundtrip", "--records", "200", "--rate", "500", "--size", "100"),
        ("roundtrip", "--records", "200", "--rate", "500", "--size", "100", "--keyed", "--partitions", "5"),
    ],
)
def test_bench_accounts_for_every_record(shared_node: Node, arguments: tuple[str, ...]) -> None:
    figures = bench(shared_node, *arguments)
    assert set(figures) >= PROMISED
    assert figures["records"] == int(arguments[2])
    assert figures["errors"] == 0
    assert figures["broker_cpu_s"] >= 0
    assert 0 < figures["latency_ms"]["p50"] <= figures["latency_ms"]["p99"] <= figures["latency_ms"]["max"]


def test_bench_requests_counts_and_times_requests(shared_node: Node) -> None:
    figures = bench(shared_node, "requests", "--clients", "4", "--seconds", "0.5", "--depth", "2")
    assert figures["records"] > 0
    assert figures["errors"] == 0
    assert figures["latency_ms"]["p50"] > 0


def test_bench_deletes_its_topic(shared_node: Node) -> None:
    bench(shared_node, "produce", "--records", "100")
    topics = chronik("topic", "list", "--json", "-b", shared_node.bootstrap).json()["topics"]
    assert not [topic for topic in topics if topic["name"].startswith("chronik-bench")]


def test_broker_cpu_is_null_if_the_broker_metrics_are_unreachable(shared_node: Node) -> None:
    figures = chronik(
        "bench", "produce", "--records", "10", "--json", "-b", shared_node.bootstrap, "--http", "127.0.0.1:1"
    ).json()
    assert figures["broker_cpu_s"] is None
