"""`chronik topic recover`, used wrongly: one line each, and nothing is changed."""

from __future__ import annotations

import json

import pytest
from tests.cli.run_chronik import chronik, create_topic
from tests.support.node import Node

TOPIC = "cli-recovered"


@pytest.fixture(scope="module")
def topic(shared_node: Node) -> str:
    create_topic(shared_node, TOPIC, 2)
    return TOPIC


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("cli-absent", "--partition", "0", "--from", "1"), "does not exist"),
        ((TOPIC, "--partition", "2", "--from", "1"), f"topic {TOPIC} has no partition 2: it has 0 to 1"),
        ((TOPIC, "--partition", "-1", "--from", "1"), "--partition"),
        ((TOPIC, "--partition", "0"), "--from"),
        ((TOPIC, "--from", "1"), "--partition"),
        ((TOPIC, "--partition", "0", "--from", "9"), f"node 9 has no replica of {TOPIC}-0: choose one of 1"),
        ((TOPIC, "--partition", "1", "--from", "1"), f"node 1 already leads {TOPIC}-1, so there is nothing to recover"),
    ],
)
def test_wrong_usage_is_a_one_line_error_with_exit_code_2(
    shared_node: Node, topic: str, arguments: tuple[str, ...], line: str
) -> None:
    refused = chronik("topic", "recover", *arguments, "--accept-loss", "-b", shared_node.bootstrap)
    assert refused.code == 2
    assert line in refused.error_line


def test_recover_prints_one_json_object_even_if_nothing_is_recovered(shared_node: Node, topic: str) -> None:
    at = ("--partition", "0", "--from", "1", "--accept-loss", "--json", "-b", shared_node.bootstrap)
    refused = chronik("topic", "recover", topic, *at)
    assert refused.code == 2 and "node 1 already leads" in refused.error_line
    view = json.loads(refused.out)
    assert (view["topic"], view["partition"], view["from"], view["leader"]) == (topic, 0, 1, 1)
    assert view["recovered"] is False
    (replica,) = view["replicas"]
    assert (replica["node"], replica["state"], replica["log_end_offset"], replica["lost"]) == (1, "answers", 0, 0)
