"""`chronik produce` and `chronik consume` against a real node."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path

from tests.cli.run_chronik import chronik, create_topic
from tests.support.node import Node


def test_consume_prints_the_lines_that_produce_sent(shared_node: Node) -> None:
    at = ("-b", shared_node.bootstrap)
    create_topic(shared_node, "cli-lines", 1)
    sent = chronik("produce", "cli-lines", *at, stdin="one\n\nthree: 3\n")
    assert sent.code == 0
    assert "3 of 3 records delivered" in sent.error_line
    read = chronik("consume", "cli-lines", "--from-beginning", "--count", "3", "--timeout", "10", *at)
    assert (read.code, read.out) == (0, "one\n\nthree: 3\n")


def test_produce_splits_lines_into_keys_and_values(shared_node: Node) -> None:
    at = ("-b", shared_node.bootstrap)
    create_topic(shared_node, "cli-keys", 1)
    assert chronik("produce", "cli-keys", "--key-separator", "=", *at, stdin="k=v=w\nplain\n").code == 0
    read = chronik("consume", "cli-keys", "--from-beginning", "--count", "2", "--timeout", "10", "--json", *at).json()
    assert [(record["key"], record["value"]) for record in read["records"]] == [("k", "v=w"), (None, "plain")]
    assert read["consumed"] == 2
    assert read["partitions"] == [{"partition": 0, "records": 2, "first_offset": 0, "last_offset": 1}]


def test_the_ledger_of_a_producer_equals_the_receipts_of_a_consumer(shared_node: Node, tmp_path: Path) -> None:
    at = ("-b", shared_node.bootstrap)
    ledger, receipts = tmp_path / "ledger.jsonl", tmp_path / "receipts.jsonl"
    create_topic(shared_node, "cli-ledger", 3)
    sent = chronik("produce", "cli-ledger", "--count", "3000", "--size", "64", "--ledger", str(ledger), *at)
    assert sent.code == 0
    read = chronik(
        *("consume", "cli-ledger", "--from-beginning", "--count", "3000", "--timeout", "15"),
        *("--receipts", str(receipts), *at),
    )
    assert read.code == 0
    acknowledged = sorted(ledger.read_text().splitlines())
    assert len(acknowledged) == 3000
    assert acknowledged == sorted(receipts.read_text().splitlines())
    line = json.loads(acknowledged[0])
    assert set(line) == {"topic", "partition", "offset", "key", "timestamp_ms", "checksum"}
    assert b64decode(line["key"]).isdigit()


def test_a_group_resumes_at_its_committed_offsets(shared_node: Node) -> None:
    at = ("-b", shared_node.bootstrap)
    create_topic(shared_node, "cli-resume", 2)
    chronik("produce", "cli-resume", "--count", "500", "--size", "10", *at)
    read = [
        chronik("consume", "cli-resume", "--group", "cli-resume", "--from-beginning", *more, "--timeout", "5", *at)
        for more in (("--count", "200"), ())
    ]
    values = [value for part in read for value in part.out.splitlines()]
    assert len(read[0].out.splitlines()) == 200
    assert len(values) == len(set(values)) == 500


def test_members_of_a_share_group_print_each_record_once(shared_node: Node) -> None:
    at = ("-b", shared_node.bootstrap)
    create_topic(shared_node, "cli-share", 1)
    chronik("produce", "cli-share", *at, stdin="".join(f"{number}\n" for number in range(50)))
    share = ("consume", "cli-share", "--share", "cli-shared", "--from-beginning", "--timeout", "10", *at)
    first = chronik(*share, "--count", "20")
    rest = chronik(*share, "--count", "30")
    assert (first.code, rest.code) == (0, 0), (first.err, rest.err)
    assert sorted(map(int, (first.out + rest.out).split())) == list(range(50)), "the others were released"
    described = chronik("group", "describe", "cli-shared", "--json", *at).json()
    assert [(each["start"], each["lag"]) for each in described["partitions"]] == [(50, 0)]
    refused = chronik(*share, "--group", "g")
    assert "exclude each other" in refused.error_line
    chronik(
        "consume", "cli-share", "--group", "cli-classic", "--from-beginning", "--count", "1", "--timeout", "10", *at
    )
    other = chronik("consume", "cli-share", "--share", "cli-classic", "--count", "1", "--timeout", "10", *at)
    assert "is not a share group" in other.error_line


def test_consume_fails_if_too_few_records_arrive(shared_node: Node) -> None:
    at = ("-b", shared_node.bootstrap)
    create_topic(shared_node, "cli-few")
    read = chronik("consume", "cli-few", "--from-beginning", "--count", "5", "--timeout", "0.5", *at)
    assert read.code == 1
    assert "only 0 of 5 records arrived" in read.error_line


def test_produce_fails_if_a_record_is_rejected(shared_node: Node) -> None:
    at = ("-b", shared_node.bootstrap)
    create_topic(shared_node, "cli-small", configs={"max.message.bytes": "100"})
    sent = chronik("produce", "cli-small", "--count", "1", "--size", "1000", *at)
    assert sent.code == 1
    assert "1 of 1 records were not delivered" in sent.err


def test_produce_refuses_an_unwritable_ledger_before_it_sends_records(shared_node: Node, tmp_path: Path) -> None:
    at = ("-b", shared_node.bootstrap)
    create_topic(shared_node, "cli-no-ledger")
    sent = chronik("produce", "cli-no-ledger", "--count", "1", "--ledger", str(tmp_path), *at)
    assert sent.code == 2
    assert "--ledger" in sent.error_line
    described = chronik("topic", "describe", "cli-no-ledger", "--json", *at).json()
    assert {partition["log_end_offset"] for partition in described["partitions"]} == {0}
