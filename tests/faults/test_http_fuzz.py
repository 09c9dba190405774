"""The HTTP API under schemathesis: every response is one that /api/openapi.json describes.

No undocumented status, no 5xx at all while the node serves, every body matches its schema, bad parameters are rejected,
other methods are rejected with an Allow header. The schema registry, whose paths are not in that description, gets
requests of its own.
"""

from __future__ import annotations

import http.client
import json
import random
import subprocess
import sys
from contextlib import closing
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
    run(served, tmp_path, EXCLUSIVE, "--seed=1", "--max-examples=5", f"--exclude-path={DOCTOR}")


def test_http_responses_for_an_existing_name_match_the_openapi_schema(served: Node, tmp_path: Path) -> None:
    run(served, tmp_path, KNOWN_NAME + EXCLUSIVE, "--seed=1", "--max-examples=5", f"--exclude-path={DOCTOR}")


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("config", [EXCLUSIVE, KNOWN_NAME + EXCLUSIVE], ids=["any name", "names that are there"])
def test_thousands_of_http_responses_match_the_openapi_schema(served: Node, tmp_path: Path, config: str) -> None:
    run(served, tmp_path, config, "--seed=2", "--max-examples=2000", f"--exclude-path={DOCTOR}")
    run(served, tmp_path, config, "--seed=3", "--max-examples=10", f"--include-path={DOCTOR}")


SUBJECTS = (
    "fuzzed",
    "fuzzed-value",
    "a%20b",
    "%2e%2e%2f%2e%2e",
    "%00",
    "%ff",
    "%0d%0aX:y",
    ":.ctx:a",
    ":*:",
    "%C3%A9",
    "s" * 300,
)
NUMBERS = ("1", "0", "-1", "latest", "2147483648", "9" * 25, "9" * 5_000, "%D9%A1", "1e3", "0x1", "", "+1")
PATHS = (
    "/subjects",
    "/subjects/{subject}",
    "/subjects/{subject}/versions",
    "/subjects/{subject}/versions/{number}",
    "/subjects/{subject}/versions/{number}/schema",
    "/subjects/{subject}/versions/{number}/referencedby",
    "/schemas",
    "/schemas/types",
    "/schemas/ids/{number}",
    "/schemas/ids/{number}/versions",
    "/subjects/{subject}/metadata",
    "/v1/metadata/id",
    "/v1/metadata/version",
    "/compatibility/subjects/{subject}/versions",
    "/compatibility/subjects/{subject}/versions/{number}",
    "/config",
    "/config/{subject}",
    "/mode",
    "/mode/{subject}",
    "/contexts",
    "/contexts/{subject}/{number}",
    "*",
    "//subjects",
    "subjects.example:80",
)
QUERY = (
    "deleted",
    "permanent",
    "force",
    "normalize",
    "verbose",
    "limit",
    "offset",
    "subject",
    "subjectPrefix",
    "format",
    "key",
    "value",
    "x",
)
FIELDS = ("schema", "schemaType", "references", "id", "version", "metadata", "ruleSet", "compatibility", "mode", "x")
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    1e308,
    2**70,
    "",
    "\ud800",
    "AVRO",
    "JSON",
    "PROTOBUF",
    "FULL",
    "READWRITE",
    "9" * 5_000,
    [],
    [{}],
    {},
    [[]],
)
SCHEMAS = (
    '"string"',
    '{"type":"record","name":"A","fields":[{"name":"a","type":"A"}]}',
    '{"type":"record","name":"A","fields":[{"name":"a","type":"int","default":"x"}]}',
    '{"type":"enum","name":"E","symbols":["A","A"]}',
    '{"type":"object","properties":{"a":{"$ref":"#"}}}',
    '{"$ref":"#/definitions/none"}',
    'syntax = "proto3"; message A { int32 a = 1; A b = 2; }',
    'syntax = "proto3"; import "none.proto"; message A { B b = 99999999999; }',
    "message A {" * 300,
    "[" * 2_000,
    "{" + '"a":{' * 500,
    "\ud800",
)


def registry_request(random_: random.Random) -> tuple[str, str, bytes]:
    """Return method, path and body of a request that is malformed in some way, or nearly valid."""
    path = random_.choice(PATHS).format(subject=random_.choice(SUBJECTS), number=random_.choice(NUMBERS))
    query = [f"{random_.choice(QUERY)}={random_.choice(('true', '1', *NUMBERS))}" for _ in range(random_.randrange(3))]
    fields = {random_.choice(FIELDS): random_.choice(ODD) for _ in range(random_.randrange(4))}
    if random_.random() < 0.7:
        fields["schema"] = random_.choice(SCHEMAS)
    body = random_.choice(
        (json.dumps(fields).encode(), json.dumps(fields).encode()[:-1], b"", b"[]", b"\xff", b"9" * 5_000)
    )
    method = random_.choice(("GET", "GET", "POST", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "CONNECT"))
    return method, "?".join((path, "&".join(query))), body


@pytest.mark.parametrize(
    "count", [1_000, pytest.param(50_000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])], ids=["few", "many"]
)
def test_no_registry_request_is_an_internal_error(served: Node, count: int) -> None:
    random_ = random.Random(count)
    statuses: dict[int, int] = {}
    with closing(http.client.HTTPConnection(served.http.removeprefix("http://"), timeout=20)) as connection:
        for _ in range(count):
            method, path, body = registry_request(random_)
            connection.request(method, path, body)
            answer = connection.getresponse()
            received = answer.read()
            statuses[answer.status] = statuses.get(answer.status, 0) + 1
            assert answer.status < 500, (method, path[:200], body[:200], received)
            assert answer.getheader("content-security-policy")
            if answer.status >= 400 and method != "HEAD":
                error = json.loads(received)
                assert "error" in error or error["error_code"] // 100 in (answer.status, answer.status // 100), received
    assert statuses.keys() >= {200, 400, 404, 405, 422}
    no_surprises(served)
