"""Confluent's Avro serializers for Java, unchanged, with nodes as their registry."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.clients.drivers.java import COMPILE_TIMEOUT_S, COMPILER_FLAGS, JVM_FLAGS, TOOLS

from chronik.testing.cluster import TestCluster

SOURCE = Path(__file__).parent / "java" / "AvroSerializers.java"
JARS = TOOLS / "confluent-avro-7.9"
TIMEOUT_S = 120.0


def test_confluents_avro_serializers_for_java_work_unchanged(chronik_cluster: TestCluster, tmp_path: Path) -> None:
    if shutil.which("javac") is None or not any(JARS.glob("*.jar")):
        pytest.skip("there is no javac, or no jar of Confluent's Avro serializers in .tools: make test fetches them")
    class_path = f"{JARS}/*:{tmp_path}"
    compile_ = ["javac", *COMPILER_FLAGS, "-d", str(tmp_path), "-cp", class_path, str(SOURCE)]
    subprocess.run(compile_, check=True, timeout=COMPILE_TIMEOUT_S)
    urls = [f"http://{node.http}" for node in chronik_cluster.nodes]
    run = ["java", *JVM_FLAGS, "-cp", class_path, SOURCE.stem, *urls]
    done = subprocess.run(run, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr[-2_000:]
    assert done.stdout.splitlines() == [
        "incompatible 409 40901",
        "value 00000000010e06416461",
        "same true",
        'read {"id": 7, "who": "Ada"}',
        'read {"id": 7, "who": "Ada", "note": null}',
        "subjects [orders-value]",
        "versions [1, 2]",
        "latest 2",
        "level NONE",
        "compatible true",
        "deleted [1, 2]",
        "missing 404 40401",
    ]
