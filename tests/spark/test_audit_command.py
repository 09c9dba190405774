"""`chronik pipeline audit` as a user runs it: exit status, JSON, table, report, and one line for each error."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.cli.run_chronik import Outcome, chronik, create_topic
from tests.support import topics
from tests.support.node import Node
from tests.support.topics import NOW_MS

from chronik.client.ledger import Ledger
from chronik.pipeline.session import java_fault

pytest.importorskip("pyspark", reason="Spark is not installed: pip install 'chronik[spark]'")

pytestmark = [
    pytest.mark.timeout(600),  # separate sessions, on a machine that may be busy
    pytest.mark.skipif(java_fault() is not None, reason=str(java_fault())),
]
SPARK_S_MAX = 240

Command = Callable[..., Outcome]


@pytest.fixture(scope="module")
def ledger(shared_node: Node, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ledger of the topic `audit-command`: 90 records, the last of which is not in the log."""
    create_topic(shared_node, "audit-command", 2)
    path = tmp_path_factory.mktemp("audit") / "acked.jsonl"
    with Ledger(path) as written:
        for partition, count in ((0, 60), (1, 29)):
            records = [(b"k", b"v%d" % n, (), NOW_MS + n * 1000) for n in range(count)]
            topics.append(shared_node.bootstrap, "audit-command", partition, records)
            for offset, (key, value, _, time_ms) in enumerate(records):
                written.record("audit-command", partition, offset, time_ms, key, value)
        written.record("audit-command", 1, 29, NOW_MS, b"k", b"lost")
    return path


class Links(HTMLParser):
    """Collects everything that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [value or "" for name, value in attributes if name in ("src", "href", "data", "action")]


def test_a_lost_record_exits_with_1_and_writes_json_and_an_offline_report(
    shared_node: Node, ledger: Path, tmp_path: Path
) -> None:
    """In a separate process, as a user runs it."""
    report = tmp_path / "audit.html"
    where = ("-b", shared_node.bootstrap, "--master", "local[2]", "--ledger", str(ledger))
    done = chronik(
        "pipeline", "audit", "audit-command", *where, "--report", str(report), "--json", timeout_s=SPARK_S_MAX
    )
    assert (done.code, done.err) == (1, "")
    told = done._replace(code=0).json()
    assert (told["verdict"], told["acked"], told["readable"], told["gaps"]) == ("incomplete", 90, 89, 1)
    assert (told["delivered"], told["landed"]) == (None, None)
    assert told["partitions"][1]["gap_ranges"] == [{"side": "readable", "first": 29, "last": 29, "count": 1}]
    page = report.read_text()
    links = Links()
    links.feed(page)
    assert links.found == []
    assert "script" not in links.tags
    assert links.tags.count("svg") == 4
    assert not re.search(r"url\(|@import|https?://", page)
    assert "partition 1" in page
    assert "incomplete" in page


def test_the_table_without_json_ends_with_the_verdict(shared_node: Node, ledger: Path, command: Command) -> None:
    done = command("pipeline", "audit", "audit-command", "-b", shared_node.bootstrap)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == "Per-Partition Breakdown"
    assert lines[2:7] == [
        "Partition 0:",
        "  Messages:   60/89 (67.4%)",
        "  Deviation:  +16 messages from expected 44",
        "  Offsets:    0-59",
        "  Gaps:       0 (offsets missing in range)",
    ]
    assert "Partition Imbalance: 31 messages (max=60, min=29)" in lines
    assert lines[-1].startswith("complete: readable 89")


def test_a_torn_line_inside_the_ledger_is_a_one_line_error_with_exit_code_2(
    shared_node: Node, ledger: Path, tmp_path: Path, command: Command
) -> None:
    torn = tmp_path / "torn.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    torn.write_bytes(b"".join([*lines[:4], lines[4][:20] + b"\n", *lines[5:]]))
    done = command("pipeline", "audit", "audit-command", "-b", shared_node.bootstrap, "--ledger", str(torn))
    assert (done.code, done.out) == (2, "")
    assert f"{torn}, line 5, is not a ledger entry" in done.error_line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("audit-no-such-topic",), "topic audit-no-such-topic does not exist"),
        (("audit-command", "-b", "127.0.0.1:1"), "no answer from 127.0.0.1:1"),
        (("audit-command", "--ledger", "/no/such/ledger"), "cannot read the ledger /no/such/ledger: No such file"),
        (("audit-command", "--table", "/no/such/table"), "there is no table at /no/such/table"),
        (("audit-command", "--group", "audit-nobody"), "group audit-nobody has committed nothing of audit-command"),
        (("audit-command", "--from", "yesterday"), "--from yesterday is not a time"),
        (("audit-command", "--log", "somehow"), "--log somehow is unknown"),
    ],
    ids=["unknown topic", "unreachable", "no ledger", "no table", "no group", "no time", "unknown way"],
)
def test_missing_inputs_are_a_one_line_error_before_spark_starts(
    shared_node: Node, ledger: Path, command_without_spark: Command, arguments: tuple[str, ...], said: str
) -> None:
    where = () if "-b" in arguments else ("-b", shared_node.bootstrap)
    done = command_without_spark("pipeline", "audit", *arguments, *where)
    assert (done.code, done.out) == (2, "")
    assert said in done.error_line


def test_the_audit_names_what_to_install_if_java_is_missing(
    shared_node: Node,
    ledger: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command_without_spark: Command,
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    done = command_without_spark("pipeline", "audit", "audit-command", "-b", shared_node.bootstrap)
    assert done.code == 2
    assert "Spark needs Java, and there is none: install Java 17" in done.error_line
