"""`chronik group` against a real node."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.cli.run_chronik import CHRONIK, Outcome, chronik, create_topic
from tests.clients.drivers.confluent import ConfluentMember
from tests.support.eventually import eventually
from tests.support.node import Node


def prepare(node: Node, name: str, consumed: int = 60) -> None:
    """Create a topic of 100 records in 2 partitions, and a group of the same name that has read `consumed` of them."""
    at = ("-b", node.bootstrap)
    create_topic(node, name, 2)
    chronik("produce", name, "--count", "100", "--size", "10", *at)
    read = chronik(
        "consume", name, "--group", name, "--from-beginning", "--count", str(consumed), "--timeout", "10", *at
    )
    assert read.code == 0, read.err


def committed(outcome: Outcome) -> int:
    return sum(partition["committed"] for partition in outcome.json()["partitions"])


@contextmanager
def running_consumer(node: Node, name: str) -> Iterator[None]:
    command = [str(CHRONIK), "consume", name, "--group", name, "-b", node.bootstrap]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def test_lag_is_the_end_offset_minus_the_committed_offset(shared_node: Node) -> None:
    prepare(shared_node, "cli-lag")
    at = ("-b", shared_node.bootstrap)
    described = chronik("group", "describe", "cli-lag", "--json", *at).json()
    assert described["group"] == "cli-lag"
    assert described["state"] == "Empty"
    assert described["members"] == []
    partitions = described["partitions"]
    assert sum(partition["end"] for partition in partitions) == 100
    assert sum(partition["lag"] for partition in partitions) == 40
    assert all(partition["lag"] == partition["end"] - partition["committed"] for partition in partitions)
    assert "cli-lag" in [group["group"] for group in chronik("group", "list", "--json", *at).json()["groups"]]
    assert "cli-lag" in chronik("group", "describe", "cli-lag", *at).out


def test_a_consumer_group_shows_epochs_and_targets(shared_node: Node) -> None:
    prepare(shared_node, "cli-epochs")
    at = ("-b", shared_node.bootstrap)
    member = ConfluentMember(shared_node.bootstrap, "cli-epochs", "cli-epochs", "server-uniform")
    member.start()
    try:
        eventually(lambda: len(member.partitions) == 2, 20, "the member has both partitions")
        described = chronik("group", "describe", "cli-epochs", "--json", *at).json()
        (shown,) = described["members"]
        assert (described["group_type"], described["assignor"], described["state"]) == ("consumer", "uniform", "Stable")
        assert described["epoch"] == described["assignment_epoch"] == shown["epoch"] > 0
        assert shown["target"] == shown["partitions"]
        assert shown["protocol"] == "consumer"
        assert f"epoch {described['epoch']}" in chronik("group", "describe", "cli-epochs", *at).out
        listed = chronik("group", "list", "--json", *at).json()["groups"]
        assert ("cli-epochs", "consumer") in [(group["group"], group["group_type"]) for group in listed]
    finally:
        member.leave()


def test_reset_commits_the_requested_offsets(shared_node: Node) -> None:
    prepare(shared_node, "cli-reset")
    at = ("--json", "-b", shared_node.bootstrap)
    reset = ("group", "reset", "cli-reset", "--topic", "cli-reset", "--to")
    assert committed(chronik(*reset, "earliest", *at)) == 0
    assert committed(chronik(*reset, "latest", *at)) == 100
    assert committed(chronik(*reset, "10", *at)) == 20
    assert committed(chronik(*reset, "2000-01-01T00:00:00Z", *at)) == 0
    assert committed(chronik(*reset, "2100-01-01T00:00:00Z", *at)) == 100
    assert committed(chronik(*reset, "1000000000000", *at)) == 0
    described = chronik("group", "describe", "cli-reset", *at).json()
    assert sum(partition["committed"] for partition in described["partitions"]) == 0
    refused = chronik(*reset, "someday", "-b", shared_node.bootstrap)
    assert refused.code == 2
    assert "earliest, latest" in refused.error_line


def test_a_group_with_active_members_cannot_be_reset_or_deleted(shared_node: Node) -> None:
    prepare(shared_node, "cli-busy")
    at = ("-b", shared_node.bootstrap)
    with running_consumer(shared_node, "cli-busy"):

        def is_stable() -> bool:
            described = json.loads(chronik("group", "describe", "cli-busy", "--json", *at).out)
            return described["state"] == "Stable" and len(described["members"]) == 1

        eventually(is_stable, 30, "the consumer has joined")
        described = chronik("group", "describe", "cli-busy", "--json", *at).json()
        assert {partition["member"] for partition in described["partitions"]} == {described["members"][0]["member"]}
        reset = chronik("group", "reset", "cli-busy", "--topic", "cli-busy", "--to", "earliest", *at)
        assert reset.code == 2
        assert "in use by 1 consumer" in reset.error_line
        deleted = chronik("group", "delete", "cli-busy", *at)
        assert deleted.code == 2
        assert "stop its consumers first" in deleted.error_line
    assert chronik("group", "delete", "cli-busy", *at).code == 0


def test_an_unknown_group_is_a_one_line_error(shared_node: Node) -> None:
    for command in ("describe", "delete"):
        refused = chronik("group", command, "cli-no-group", "-b", shared_node.bootstrap)
        assert refused.code == 2
        assert "group_id_not_found" in refused.error_line
