"""Kafka's own ACL tool and Java's admin client against a node that authorizes."""

from __future__ import annotations

from tests.cluster.support_tools import KafkaTools
from tests.conftest import StartNode

ADMIN = {"enabled": True, "super_users": ["User:ANONYMOUS"]}


def test_kafka_acls_adds_lists_and_removes_acls(start_node: StartNode, kafka_tools: KafkaTools) -> None:
    at = ("--bootstrap-server", start_node(authorization=ADMIN).bootstrap)
    kafka_tools.ok("kafka-acls", *at, "--add", "--allow-principal", "User:alice", "--producer", "--topic", "orders")
    kafka_tools.ok(
        "kafka-acls",
        *at,
        "--add",
        *("--allow-principal", "User:bob", "--consumer", "--topic", "orders", "--group", "g-"),
        *("--resource-pattern-type", "prefixed"),
    )
    kafka_tools.ok("kafka-acls", *at, "--add", "--deny-principal", "User:eve", "--operation", "All", "--cluster")
    listed = kafka_tools.ok("kafka-acls", *at, "--list")
    for expected in (
        "ResourcePattern(resourceType=TOPIC, name=orders, patternType=LITERAL)",
        "ResourcePattern(resourceType=TOPIC, name=orders, patternType=PREFIXED)",
        "ResourcePattern(resourceType=GROUP, name=g-, patternType=PREFIXED)",
        "ResourcePattern(resourceType=CLUSTER, name=kafka-cluster, patternType=LITERAL)",
        "(principal=User:alice, host=*, operation=WRITE, permissionType=ALLOW)",
        "(principal=User:bob, host=*, operation=READ, permissionType=ALLOW)",
        "(principal=User:eve, host=*, operation=ALL, permissionType=DENY)",
    ):
        assert expected in listed, listed
    matched = kafka_tools.ok("kafka-acls", *at, "--list", "--topic", "orders-eu", "--resource-pattern-type", "match")
    assert "User:bob" in matched
    assert "User:alice" not in matched
    kafka_tools.ok(
        "kafka-acls",
        *at,
        *("--remove", "--force", "--topic", "orders", "--resource-pattern-type", "any"),
    )
    left = kafka_tools.ok("kafka-acls", *at, "--list")
    assert "name=orders" not in left
    assert "name=g-" in left


def test_kafka_acls_reports_that_a_node_does_not_authorize(start_node: StartNode, kafka_tools: KafkaTools) -> None:
    ran = kafka_tools.run("kafka-acls", "--bootstrap-server", start_node().bootstrap, "--list")
    assert "SecurityDisabledException" in ran.out + ran.err


def test_a_java_client_without_the_right_sees_no_topic(start_node: StartNode, kafka_tools: KafkaTools) -> None:
    node = start_node(authorization={"enabled": True, "allow_everyone_if_no_acl_found": True})
    at = ("--bootstrap-server", node.bootstrap)
    kafka_tools.ok("kafka-topics", *at, "--create", "--topic", "orders")
    kafka_tools.ok("kafka-topics", *at, "--create", "--topic", "payments")
    kafka_tools.ok("kafka-acls", *at, "--add", "--allow-principal", "User:alice", "--topic", "orders")
    assert kafka_tools.ok("kafka-topics", *at, "--list").split() == ["payments"]
    refused = kafka_tools.run("kafka-topics", *at, "--delete", "--topic", "orders")
    assert refused.status != 0
    ran = kafka_tools.run("kafka-configs", *at, "--describe", "--topic", "orders", "--all")
    assert "TopicAuthorizationException" in ran.out + ran.err
    kafka_tools.ok("kafka-acls", *at, "--add", "--allow-principal", "User:ANONYMOUS", "--topic", "orders")
    kafka_tools.ok("kafka-topics", *at, "--delete", "--topic", "orders")
