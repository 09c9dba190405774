"""`chronik quota` against a real node."""

from __future__ import annotations

from tests.cli.run_chronik import chronik
from tests.support.node import Node

USER = ("--user", "cli-alice", "--client-id", "app")


def test_quotas_are_set_listed_and_removed(shared_node: Node) -> None:
    at = ("-b", shared_node.bootstrap)
    limits = ("--produce-bytes", "1000000", "--fetch-bytes", "2000000", "--request-percent", "12.5", "--mutations", "3")
    assert chronik("quota", "set", *USER, *limits, *at).code == 0
    assert chronik("quota", "set", *USER, "--fetch-bytes", "5", *at).code == 0
    listed = chronik("quota", "list", "--user", "cli-alice", "--json", *at).json()["quotas"]
    assert listed == [
        {
            "entity": {"user": "cli-alice", "client-id": "app"},
            "values": {
                "consumer_byte_rate": 5.0,
                "controller_mutation_rate": 3.0,
                "producer_byte_rate": 1000000.0,
                "request_percentage": 12.5,
            },
        }
    ]
    table = chronik("quota", "list", *at).out
    (row,) = [line for line in table.splitlines() if "cli-alice" in line]
    assert row.split() == ["cli-alice", "app", "-", "1,000,000", "5", "12.5", "3", "-"]
    removed = chronik("quota", "remove", *USER, "--json", *at).json()
    assert len(removed["removed"]) == 4
    assert chronik("quota", "list", "--user", "cli-alice", "--json", *at).json() == {"quotas": []}
    assert "has no quotas" in chronik("quota", "remove", *USER, *at).error_line


def test_defaults_and_addresses_are_entities_of_their_own(shared_node: Node) -> None:
    at = ("--json", "-b", shared_node.bootstrap)
    default = ("--client-id-default",)
    chronik("quota", "set", *default, "--produce-bytes", "900000000000", *at).json()
    chronik("quota", "set", "--ip", "10.1.2.3", "--connections", "7", *at).json()
    assert chronik("quota", "list", *default, *at).json()["quotas"][0]["entity"] == {"client-id": None}
    assert chronik("quota", "list", "--ip", "10.1.2.3", *at).json()["quotas"][0]["values"] == {
        "connection_creation_rate": 7.0
    }
    chronik("quota", "remove", *default, *at).json()
    chronik("quota", "remove", "--ip", "10.1.2.3", *at).json()


def test_wrong_use_is_explained_in_one_line(shared_node: Node) -> None:
    at = ("-b", shared_node.bootstrap)
    for arguments, reason in (
        (("set", "--produce-bytes", "5"), "no entity was given"),
        (("set", "--user", "a"), "no quota was given"),
        (("set", "--user", "a", "--user-default", "--produce-bytes", "5"), "exclude each other"),
        (("set", "--ip", "a.example", "--connections", "5"), "not a valid IP address"),
        (("set", "--ip", "10.0.0.1", "--user", "a", "--connections", "5"), "cannot name a user"),
        (("set", "--user", "a", "--produce-bytes", "0"), "greater than 0"),
        (("set", "--user", "a", "--connections", "5"), "Invalid configuration key connection_creation_rate"),
    ):
        outcome = chronik("quota", *arguments, *at)
        assert outcome.code == 2
        assert reason in outcome.error_line
