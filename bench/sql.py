"""`chronik sql` against its goals: a count of 10 million records, and the time to a first row, from process start."""

from __future__ import annotations

import json
import subprocess
import time

from tests.support.node import CHRONIK, Node

from bench.filling import fill
from bench.one_node import OwnRows, running_node

RECORD_BYTES = 100
ROUNDS = 3
TOPIC = "sql"
FIRST_ROWS = f'SELECT "partition", "offset", decode(value) AS value FROM {TOPIC} LIMIT 10'


def sql(rows: OwnRows, *, quick: bool) -> None:
    with running_node(durability="replicated") as node:
        records = fill(node.bootstrap, TOPIC, RECORD_BYTES, 500_000 if quick else 10_000_000)
        count_s = min(_count_s(node, records) for _ in range(ROUNDS))
        rows.add(f"`chronik sql` counts {records:,} records of 100 B", "from process start", "s", count_s, "<= 5.0")
        first_s = min(_first_row_s(node) for _ in range(ROUNDS))
        rows.add("`chronik sql` with LIMIT 10", "first row, from process start", "s", first_s, "<= 1.0")


def _count_s(node: Node, records: int) -> float:
    began_s = time.monotonic()
    printed = subprocess.run(
        [str(CHRONIK), "sql", f"SELECT count(*) AS n FROM {TOPIC}", "--json", "-b", node.bootstrap],
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    took_s = time.monotonic() - began_s
    if json.loads(printed)["rows"] != [[records]]:
        raise RuntimeError(f"counted {printed.decode()}, not {records}")
    return took_s


def _first_row_s(node: Node) -> float:
    began_s = time.monotonic()
    command = [str(CHRONIK), "sql", FIRST_ROWS, "--jsonl", "-b", node.bootstrap]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        took_s = time.monotonic() - began_s
        others = process.stdout.read().splitlines()
    if process.returncode or not first.startswith(b"{") or len(others) != 9:
        raise RuntimeError(f"chronik sql ended with {process.returncode} after {len(others) + 1} rows")
    return took_s
