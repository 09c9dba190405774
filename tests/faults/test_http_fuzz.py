"""The HTTP API under schemathesis: every response is one that /api/openapi.json describes.

No undocumented status, no 5xx at all while the node serves, every body matches its schema, bad parameters are rejected,
other methods are rejected with an Allow header.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import StartNode
from tests.faults.support_load import no_surprises
from tests.node.support_wire import batch, connect
from tests.support.node import Node

from chronik.testing.fuzz.damage import signed_mutant
from chronik.wire.api import ApiKey

SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")
NAME = "fuzzed"
"""The name of both a topic and a group: the paths of both end in a name."""
STREAM = "/api/events"
"""An endless stream; tests/web/test_events.py covers it."""
DOCTOR = "/api/doctor/{name}"
"""Takes a second for each response."""

# OpenAPI cannot express that two parameters exclude each other: 400 is the right answer to them.
EXCLUSIVE = """
[[operations]]
include-name = "GET /api/topics/{name}/messages"
checks.positive_data_acceptance.enabled = false

[[operations]]
include-name = "GET /api/traces"
checks.positive_data_acceptance.enabled = false
"""
KNOWN_NAME = f"""[parameters]
"path.name" = "{NAME}"
"query.partition" = 0
"""


@pytest.fixture(scope="module")
def served(start_shared_node: StartNode) -> Node:
    """A node with a group, and a topic whose records are text, bytes, and batches that cannot be decoded."""
    node = start_shared_node(auto_create_topics=False)
    random_ = random.Random(1)
    with connect(node) as client:
        client.create_topic(NAME, partitions=2, configs={"chronik.trace": "true"})
        for codec in range(5):
            client.produce(NAME, batch(b"text", b"\xff\x00" * 40, "ünïcode".encode(), b"", codec=codec))
            client.produce(NAME, signed_mutant(random_, batch(b"value" * 30, b"more", codec=codec)))
        commit = {"name": NAME, "partitions": [{"partition_index": 0, "committed_offset": 3, "committed_metadata": ""}]}
        client.call(
            ApiKey.OFFSET_COMMIT,
            7,
            {"group_id": NAME, "generation_id_or_member_epoch": -1, "member_id": "", "topics": [commit]},
        )
    return node


def run(node: Node, folder: Path, config: str, *options: str) -> dict[str, Any]:
    """Return schemathesis' report of a run that found nothing."""
    config_file, report_file = folder / "schemathesis.toml", folder / "report.json"
    config_file.write_text(config)
    done = subprocess.run(
        [
            str(SCHEMATHESIS),
            f"--config-file={config_file}",
            "run",
            f"{node.http}/api/openapi.json",
            f"--exclude-path={STREAM}",
            f"--report-json-path={report_file}",
            "--request-timeout=10",
            *options,
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    no_surprises(node)
    report: dict[str, Any] = json.loads(report_file.read_text())
    return report


def test_every_http_response_matches_the_openapi_schema(served: Node, tmp_path: Path) -> None:
    run(served, tmp_path, EXCLUSIVE, "--seed=1", "--max-examples=8", f"--exclude-path={DOCTOR}")


def test_http_responses_for_an_existing_name_match_the_openapi_schema(served: Node, tmp_path: Path) -> None:
    run(served, tmp_path, KNOWN_NAME + EXCLUSIVE, "--seed=1", "--max-examples=8", f"--exclude-path={DOCTOR}")


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("config", [EXCLUSIVE, KNOWN_NAME + EXCLUSIVE], ids=["any name", "names that are there"])
def test_thousands_of_http_responses_match_the_openapi_schema(served: Node, tmp_path: Path, config: str) -> None:
    run(served, tmp_path, config, "--seed=2", "--max-examples=2000", f"--exclude-path={DOCTOR}")
    run(served, tmp_path, config, "--seed=3", "--max-examples=10", f"--include-path={DOCTOR}")
