"""Landings beside others: typed Avro against Spark's own connector, and JSON against the source of an earlier version.

Each landing is a process of its own, with a table and a checkpoint of its own; the sides take turns. A rate is that of
all micro-batches but the first, which pays for starting processes, imports and compilers: the rows of the later commits
by the time between the first commit and the last, from the table's own log. So session starts are excluded, and all
sides are measured by one clock.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from itertools import count
from pathlib import Path

import fastavro
from deltalake import DeltaTable
from tests.support.node import Node

from bench.earlier import EARLIER, earlier_source
from bench.filling import BATCH_BYTES, fill_with
from bench.one_node import OwnRows, running_node
from bench.rows import compared_row
from chronik.client.schema_registry import RegistryClient
from chronik.pipeline.session import ALWAYS, LOCAL
from chronik.wire.records import NewRecord

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / ".tools"
PEER_SPARK = TOOLS / "spark-4.2"
"""The newest Spark that a Delta was published for; our session runs the pinned one."""
PEER_JARS = TOOLS / "spark-kafka-4.2", TOOLS / "spark-typed-4.2"
PEER_SETTINGS = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}
RECORDS, QUICK_RECORDS, MICRO_BATCHES = 2_000_000, 100_000, 5
ROUNDS = 3
TIMEOUT_S = 600.0
DISTINCT_BATCHES = 200
AVRO = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "customer", "type": "string"},
        {"name": "price", "type": "double"},
        {"name": "quantity", "type": "int"},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "note", "type": ["null", "string"], "default": None},
    ],
}
JSON_COLUMNS = "id BIGINT NOT NULL, customer STRING, price DOUBLE, quantity INT, note STRING"
NOW_MS = 1_760_000_000_000

Land = Callable[[str, int], list[str]]
"""Returns the command that lands in a folder, with so many rows in each micro-batch."""


class Landings:
    """The landings of one topic, which has exactly `records` records."""

    def __init__(self, node: Node, topic: str, records: int) -> None:
        self.node, self.topic, self.records = node, topic, records
        self._numbers = count()

    def rows_per_s(self, command: Land, environment: Mapping[str, str] | None = None) -> float:
        folder = self.node.folder / f"tables-{next(self._numbers)}"
        log = self.node.folder / "landing.log"
        with log.open("wb") as output:
            done = subprocess.run(
                command(str(folder), -(-self.records // MICRO_BATCHES)),
                env={**os.environ, **(environment or {})},
                stdout=output,
                stderr=output,
                timeout=TIMEOUT_S,
                check=False,
            )
        if done.returncode:
            raise RuntimeError(f"the landing ended with {done.returncode}: {log.read_text(errors='replace')[-2000:]}")
        rate = rate_of(folder / self.topic, self.records)
        shutil.rmtree(folder)
        return rate

    def own(self, *options: str) -> Land:
        def command(folder: str, rows_per_batch: int) -> list[str]:
            limit = f"spark.chronik.maxOffsetsPerTrigger={rows_per_batch}"
            land = [sys.executable, "-m", "chronik.cli", "pipeline", "land", self.topic, "--to", folder, "--once"]
            return [*land, "--master", "local[2]", "--conf", limit, *options, "-b", self.node.bootstrap]

        return command

    def peer(self, schema: Path) -> Land:
        jars = ",".join(str(jar) for folder in PEER_JARS for jar in sorted(folder.glob("*.jar")))
        conf = json.dumps({**ALWAYS, **LOCAL, **PEER_SETTINGS, "spark.jars": jars})

        def command(folder: str, rows_per_batch: int) -> list[str]:
            script = [sys.executable, str(ROOT / "bench" / "peer_avro.py"), self.node.bootstrap, self.topic]
            return [*script, str(schema), f"{folder}/{self.topic}", f"{folder}/checkpoint", str(rows_per_batch), conf]

        return command


def rate_of(table: Path, records: int) -> float:
    """Return the rows per second after the first commit with rows; raise unless each record landed once."""
    times, rows = list[int](), list[int]()
    for entry in sorted((table / "_delta_log").glob("*.json")):
        actions = [json.loads(line) for line in entry.read_text().splitlines()]
        added = [json.loads(action["add"]["stats"])["numRecords"] for action in actions if "add" in action]
        if added and not any("remove" in action for action in actions):  # others only merge files
            times.append(next(action["commitInfo"]["timestamp"] for action in actions if "commitInfo" in action))
            rows.append(sum(added))
    landed = DeltaTable(str(table)).to_pyarrow_dataset().count_rows()
    # A source may divide the offsets among the partitions with a remainder, which is a micro-batch of its own.
    if (sum(rows), landed) != (records, records) or len(rows) - MICRO_BATCHES not in (0, 1):
        raise RuntimeError(f"{sum(rows):,} rows in {len(rows)} commits, {landed:,} in the table, not {records:,}")
    return sum(rows[1:]) / (times[-1] - times[0]) * 1000


def typed(rows: OwnRows, *, quick: bool) -> None:
    with avro_topic(quick) as (landings, schema):
        sides: dict[str, Callable[[], float]] = {
            "chronik": lambda: landings.rows_per_s(landings.own("--format", "avro"))
        }
        missing = [folder.name for folder in (PEER_SPARK, *PEER_JARS) if not folder.is_dir()]
        if missing:
            rows.say(f"no peer, because .tools lacks {', '.join(missing)}: scripts/test-tools gets them")
        else:
            peer = landings.peer(schema)
            sides["peer"] = lambda: landings.rows_per_s(peer, {"PYTHONPATH": str(PEER_SPARK)})
        _compare(rows, "typed Avro landing", sides, "from_avro, Spark's connector, Delta", ">= 3.0", quick=quick)


def json_landing(rows: OwnRows, *, quick: bool) -> None:
    with json_topic(quick) as (landings, schema), earlier_source() as source:
        command = landings.own("--schema", str(schema))
        sides = {
            "chronik": lambda: landings.rows_per_s(command),
            "peer": lambda: landings.rows_per_s(command, {"PYTHONPATH": str(source)}),
        }
        _compare(rows, "JSON landing", sides, f"commit {EARLIER}", ">= 1.0", quick=quick)


def _compare(
    rows: OwnRows, workload: str, sides: Mapping[str, Callable[[], float]], peer: str, goal: str, *, quick: bool
) -> None:
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(1 if quick else ROUNDS):
        for side in sides if number % 2 == 0 else reversed(list(sides)):
            rates[side].append(sides[side]())
            rows.say(f"    round {number}, {side}: {rates[side][-1]:,.0f} rows/s")
    if "peer" in rates:
        rows.put(compared_row(workload, "rows", "1/s", rates["chronik"], rates["peer"], peer, goal))


@contextmanager
def avro_topic(quick: bool) -> Iterator[tuple[Landings, Path]]:
    with running_node(durability="replicated") as node:
        topic, text = "avro", json.dumps(AVRO)
        registered = RegistryClient(node.http).request("POST", f"/subjects/{topic}-value/versions", {"schema": text})
        header = b"\0" + int(registered["id"]).to_bytes(4, "big")
        parsed = fastavro.parse_schema(AVRO)

        def value(number: int) -> bytes:
            content = BytesIO()
            fastavro.schemaless_writer(content, parsed, order(number))
            return header + content.getvalue()

        yield _filled(node, topic, value, quick), _written(node, "order.avsc", text)


@contextmanager
def json_topic(quick: bool) -> Iterator[tuple[Landings, Path]]:
    with running_node(durability="replicated") as node:
        landings = _filled(node, "json", lambda number: json.dumps(order(number)).encode(), quick)
        yield landings, _written(node, "order.sql", JSON_COLUMNS)


def order(number: int) -> dict[str, object]:
    made: dict[str, object] = {"id": number, "customer": f"customer-{number * 7919 % 100_003:06d}"}
    made |= {"price": number % 9973 / 100, "quantity": number % 12, "at": NOW_MS + number}
    return made | {"note": None if number % 3 else f"leave at door {number % 89}"}


def _filled(node: Node, topic: str, value: Callable[[int], bytes], quick: bool) -> Landings:
    per_batch = BATCH_BYTES // len(value(0))
    numbers = [range(first * per_batch, (first + 1) * per_batch) for first in range(DISTINCT_BATCHES)]
    batches: list[list[NewRecord]] = [
        [(b"key-%06d" % number, value(number), (), NOW_MS + number) for number in some] for some in numbers
    ]
    return Landings(node, topic, fill_with(node.bootstrap, topic, batches, QUICK_RECORDS if quick else RECORDS))


def _written(node: Node, name: str, text: str) -> Path:
    path = node.folder / name
    path.write_text(text)
    return path
