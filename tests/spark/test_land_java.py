"""Orders of a Java producer with Confluent's Avro serializer, as typed tables that other engines read."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.run_chronik import Outcome
from tests.clients.drivers.java import COMPILE_TIMEOUT_S, COMPILER_FLAGS, JVM_FLAGS, TOOLS
from tests.support import topics
from tests.support.node import Node
from tests.support.readers import delta_readers, iceberg_readers, values

SOURCE = Path(__file__).parents[1] / "clients" / "java" / "AvroProducer.java"
JARS = TOOLS / "confluent-avro-7.9"
TIMEOUT_S = 120.0
AT_US = 1_767_323_045_000_001
ORDERS = [
    (1, AT_US, ["a", "b"], {"name": "Ada"}, None),
    (2, AT_US + 1, [], None, None),
    (2**40, AT_US, [], None, "größer"),
]

pytestmark = pytest.mark.timeout(600)  # the first test starts Spark and compiles the decoder


def test_orders_of_a_java_producer_have_the_right_values_in_every_engine(
    command: Callable[..., Outcome], shared_node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("javac") is None or not any(JARS.glob("*.jar")):
        pytest.skip("there is no javac, or no jar of Confluent's Avro serializers in .tools: make test fetches them")
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    at, name, class_path = shared_node.bootstrap, "land-java", f"{JARS}/*:{tmp_path}"
    topics.create(at, name)
    compile_ = ["javac", *COMPILER_FLAGS, "-d", str(tmp_path), "-cp", class_path, str(SOURCE)]
    subprocess.run(compile_, check=True, timeout=COMPILE_TIMEOUT_S)
    produce = ["java", *JVM_FLAGS, "-cp", class_path, SOURCE.stem, at, shared_node.http, name]
    done = subprocess.run(produce, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr[-2_000:]
    for table_format in ("delta", "iceberg"):
        to = tmp_path / table_format
        land = ("--to", str(to), "--once", "--format", "avro", "--table-format", table_format, "-b", at)
        outcome = command("pipeline", "land", name, *land)
        assert outcome.code == 0 and "3 rows of land-java landed" in outcome.err, outcome
        for engine, table in delta_readers(str(to / name)) if table_format == "delta" else iceberg_readers(to, name):
            assert values(table, "id", "at", "tags", "who", "note") == ORDERS, (engine, table_format)
            assert values(table, "key") == [(b"k",)] * 3, (engine, table_format)
