"""`chronik topic` against a real node."""

from __future__ import annotations

from pathlib import Path

from tests.cli.run_chronik import chronik
from tests.support.node import Node


def test_commands_create_describe_alter_and_delete_a_topic(shared_node: Node) -> None:
    at = ("-b", shared_node.bootstrap)
    assert chronik("topic", "create", "cli-topic", "--partitions", "2", "--config", "retention.ms=5000", *at).code == 0
    described = chronik("topic", "describe", "cli-topic", "--json", *at).json()
    assert described["name"] == "cli-topic"
    assert described["configs"]["retention.ms"] == "5000"
    assert [partition["partition"] for partition in described["partitions"]] == [0, 1]
    first = described["partitions"][0]
    assert first["leader"] == first["replicas"][0] == first["isr"][0] == shared_node.node_id
    assert (first["log_start_offset"], first["log_end_offset"], first["high_watermark"]) == (0, 0, 0)
    assert first["last_stable_offset"] == 0

    assert chronik("topic", "alter", "cli-topic", "--config", "retention.ms=9000", "--partitions", "4", *at).code == 0
    described = chronik("topic", "describe", "cli-topic", "--json", *at).json()
    assert described["configs"]["retention.ms"] == "9000"
    assert len(described["partitions"]) == 4

    listed = chronik("topic", "list", "--json", *at).json()
    assert "cli-topic" in [topic["name"] for topic in listed["topics"]]
    assert "cli-topic" in chronik("topic", "list", *at).out
    assert "retention.ms=9000" in chronik("topic", "describe", "cli-topic", *at).out

    assert chronik("topic", "delete", "cli-topic", *at).code == 0
    listed = chronik("topic", "list", "--json", *at).json()
    assert "cli-topic" not in [topic["name"] for topic in listed["topics"]]


def test_a_rejected_request_is_a_one_line_error_with_exit_code_2(shared_node: Node) -> None:
    at = ("-b", shared_node.bootstrap)
    assert chronik("topic", "create", "cli-twice", *at).code == 0
    for arguments, said in (
        (("create", "cli-twice"), "topic_already_exists"),
        (("create", "not/a/name"), "invalid_topic"),
        (("create", "cli-x", "--config", "retention.ms=soon"), "invalid_config"),
        (("create", "cli-x", "--replication-factor", "9"), "invalid_replication_factor"),
        (("describe", "cli-absent"), "does not exist"),
        (("delete", "cli-absent"), "unknown_topic_or_partition"),
        (("alter", "cli-twice"), "nothing to alter"),
        (("alter", "cli-twice", "--partitions", "1"), "invalid_partitions"),
        (("create", "cli-x", "--partitions", "0"), "--partitions"),
    ):
        refused = chronik("topic", *arguments, *at)
        assert refused.code == 2, arguments
        assert said in refused.error_line


def test_an_unreachable_broker_is_a_one_line_error_with_exit_code_2(tmp_path: Path) -> None:
    refused = chronik("topic", "list", "-b", "127.0.0.1:1")
    assert refused.code == 2
    assert "cannot connect to 127.0.0.1:1" in refused.error_line
