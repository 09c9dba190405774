"""Damaged files when a node starts: it serves the intact data, or exits with one line that gives the reason."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from tests.faults.support_load import no_surprises
from tests.node.support_wire import connect
from tests.support.node import Node, NodeFailed

from chronik.testing.fuzz import BrokenPromise
from chronik.testing.fuzz.file_damage import damage_file
from chronik.testing.fuzz.log_files import fuzz_logs
from chronik.testing.fuzz.node_files import fuzz_folders, fuzz_raft_stores
from chronik.wire.batch import check_batches
from chronik.wire.errors import KafkaError

SHORT_RUN, FULL_RUN = 80, 20_000
NODES_SHORT, NODES_FULL = 4, 150
SEED = 1
TOPIC = "kept"
RECORDS = 40


def fuzz(count: int) -> Counter[str]:
    try:
        outcomes = fuzz_logs(count, SEED)
        return outcomes + fuzz_folders(count, SEED) + fuzz_raft_stores(count, SEED)
    except BrokenPromise as broken:
        pytest.fail(str(broken))


def test_damaged_files_are_repaired_refused_or_reported() -> None:
    outcomes = fuzz(SHORT_RUN)
    for outcome in ("whole", "damaged, and says so", "damage met by readers", "refused", "as it once was"):
        assert outcomes[outcome] > 0, outcomes


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_damaged_files_are_repaired_refused_or_reported() -> None:
    fuzz(FULL_RUN)


def filled(folder: Path) -> Node:
    """Return a running node with acknowledged records in several segments."""
    node = Node(folder).start()
    with connect(node) as client:
        client.create_topic(TOPIC, configs={"segment.bytes": "2000", "index.interval.bytes": "200"})
        for number in range(RECORDS):
            assert client.append(TOPIC, b"record-%d" % number * 10) == number
    return node


def start_spoilt(folder: Path, seed: int) -> str:
    """Start a node on damaged files and return the outcome. It must serve only records that were written."""
    chance = random.Random(seed)
    node = filled(folder)
    try:
        if chance.random() < 0.5:
            node.kill()
        else:
            node.terminate()
        files = sorted(path for path in node.data_dir.rglob("*") if path.is_file() and path.name != "lock")
        damages = "; ".join(
            damage_file(chance, [path for path in files if path.exists()]) for _ in range(chance.choice((1, 2)))
        )
        try:
            node.start()
        except NodeFailed as failed:
            log = node.log_text()
            assert "exited 2 before" in str(failed) and "Traceback" not in log, f"{damages}\n{failed}"
            lines = [line for line in log.splitlines() if line.startswith("chronik: ") and "is ready" not in line]
            assert len(lines) == 1, f"{damages}\n{log}"
            return "refused"
        return _check_served(node, damages)
    finally:
        if node.is_running:
            node.kill()


def _check_served(node: Node, damages: str) -> str:
    served: dict[int, bytes] = {}
    is_given_away = False
    with connect(node) as client:
        for offset in range(RECORDS):
            fetched = client.fetch_one(TOPIC, offset, partition_max_bytes=1)
            if fetched.error_code or not len(fetched.records):
                is_given_away = True
                continue
            try:
                data = memoryview(fetched.records)
                check_batches(data, len(data), from_producer=False)
            except KafkaError:
                is_given_away = True
                continue
            served[offset] = bytes(fetched.records)
    for offset, records in served.items():
        assert b"record-%d" % offset * 10 in records, f"{damages}: offset {offset} holds {records!r}"
    no_surprises(node)
    log = node.log_text()
    is_logged = any(f'"{event}"' in log for event in ("log_damaged", "log_open_failed", "read_failed"))
    assert len(served) == RECORDS or is_given_away or is_logged, damages
    return "whole" if len(served) == RECORDS else "damaged"


def run_nodes(folder: Path, count: int) -> None:
    outcomes = Counter(start_spoilt(folder / str(seed), seed) for seed in range(SEED, SEED + count))
    assert outcomes["whole"] > 0, outcomes


def test_a_node_on_damaged_files_serves_intact_records_or_exits_with_one_line(tmp_path: Path) -> None:
    run_nodes(tmp_path, NODES_SHORT)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_nodes_on_damaged_files_serve_intact_records_or_exit_with_one_line(tmp_path: Path) -> None:
    run_nodes(tmp_path, NODES_FULL)
