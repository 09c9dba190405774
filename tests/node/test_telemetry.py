"""Metrics of clients (KIP-714): subscriptions, pushes and their bounds, over real connections."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID, uuid4

import pytest
from tests.conftest import StartNode
from tests.node.support_wire import WireClient, connect
from tests.support.eventually import eventually
from tests.support.node import Node
from tests.wire.test_otlp import GAUGE, SUM, attribute, double, field, int64, metric, metrics_data, number

from chronik.wire.api import ApiKey
from chronik.wire.compression import compress
from chronik.wire.errors import ErrorCode

CLIENT_METRICS = 16
SET, DELETE = 0, 1
RATE = metric("org.apache.kafka.producer.rate", GAUGE, field(7, attribute("topic", field(1, b"t"))) + double(4, 1.5))
TOTAL = metric("org.apache.kafka.producer.total", SUM, int64(6, 40), more=number(2, 2) + number(3, 1))
OTHER = metric("org.apache.kafka.consumer.rate", GAUGE, double(4, 2.5))
PUSHED = metrics_data(RATE, TOTAL, OTHER)


@pytest.fixture
def node(start_node: StartNode) -> Node:
    return start_node(telemetry_max_bytes=20_000)


def alter(client: WireClient, name: str, **configs: str | None) -> ErrorCode:
    changes = [
        {
            "name": key.replace("_", "."),
            "config_operation": DELETE if value is None else SET,
            "value": value,
        }
        for key, value in configs.items()
    ]
    resource = {"resource_type": CLIENT_METRICS, "resource_name": name, "configs": changes}
    answer = client.call(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, {"resources": [resource], "validate_only": False})
    return ErrorCode(answer.responses[0].error_code)


@contextmanager
def library(node: Node, name: str = "librdkafka", client_id: str = "orders") -> Iterator[WireClient]:
    """A connection of a client that names its library."""
    with WireClient(node.kafka_port, client_id=client_id) as client:
        client.call(ApiKey.API_VERSIONS, 3, {"client_software_name": name, "client_software_version": "2.16.1"})
        yield client


def get(client: WireClient, instance: UUID | None = None) -> Any:
    return client.call(ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, 0, {"client_instance_id": instance})


def push(client: WireClient, got: Any, data: bytes = PUSHED, **more: Any) -> ErrorCode:
    values = {
        "client_instance_id": got.client_instance_id,
        "subscription_id": got.subscription_id,
        "terminating": False,
        "compression_type": 0,
        "metrics": data,
        **more,
    }
    return ErrorCode(client.call(ApiKey.PUSH_TELEMETRY, 0, values).error_code)


def clients_of(node: Node) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{node.http}/api/client-metrics") as answer:
        found: list[dict[str, Any]] = json.load(answer)["clients"]
    return found


def exposed(node: Node) -> str:
    with urllib.request.urlopen(f"{node.http}/metrics") as answer:
        text: str = answer.read().decode()
    return text


def test_a_client_pushes_what_its_subscriptions_request_and_metrics_show_it(node: Node) -> None:
    with library(node) as client, library(node, "apache-kafka-java") as java:
        assert get(client).requested_metrics == ()
        assert alter(client, "rates", metrics="org.apache.kafka.producer.", interval_ms="200") == ErrorCode.none
        assert alter(client, "java", metrics="*", match="client_software_name=apache-.*") == ErrorCode.none
        got, of_java = get(client), get(java)
        assert (got.requested_metrics, of_java.requested_metrics) == (("org.apache.kafka.producer.",), ("*",))
        assert got.push_interval.total_seconds() == of_java.push_interval.total_seconds() == 0.2
        assert (got.telemetry_max_bytes, got.delta_temporality) == (20_000, False)
        assert set(got.accepted_compression_types) == {1, 2, 3, 4}
        assert push(client, got) == push(java, of_java) == ErrorCode.none
        shown = {each["software_name"]: each for each in clients_of(node) if each["metrics"]}
        assert [(each["name"], each["value"]) for each in shown["librdkafka"]["metrics"]] == [
            ("org.apache.kafka.producer.rate", 1.5),
            ("org.apache.kafka.producer.total", 40.0),
        ]
        assert shown["librdkafka"]["metrics"][0]["attributes"] == {"topic": "t"}
        assert len(shown["apache-kafka-java"]["metrics"]) == 3
        labels = f'attributes="topic=t",client_id="orders",client_instance_id="{got.client_instance_id}"'
        text = exposed(node)
        line = next(line for line in text.splitlines() if labels in line)
        assert 'metric="org.apache.kafka.producer.rate"' in line and line.endswith(" 1.5")
        assert 'chronik_client_pushes_total{outcome="accepted"} 2.0' in text
        assert "chronik_client_instances 3.0" in text


@pytest.mark.parametrize("codec", range(5))
def test_every_compression_is_accepted(node: Node, codec: int) -> None:
    with library(node) as client:
        alter(client, "all", metrics="*", interval_ms="100")
        assert push(client, get(client), compress(codec, PUSHED), compression_type=codec) == ErrorCode.none
        assert [len(each["metrics"]) for each in clients_of(node)] == [3]


def test_a_push_that_is_invalid_or_too_large_is_refused(node: Node) -> None:
    with library(node) as client:
        alter(client, "all", metrics="*", interval_ms="100")

        def refusal(data: bytes = PUSHED, **more: Any) -> ErrorCode:
            return push(client, get(client), data, **more)

        assert refusal(b"\x0a\x05ab") == ErrorCode.invalid_record
        assert refusal(b"not gzip", compression_type=1) == ErrorCode.invalid_record
        assert refusal(compress(4, bytes(1 << 20)), compression_type=4) == ErrorCode.invalid_record
        assert refusal(compression_type=9) == ErrorCode.unsupported_compression_type
        assert refusal(bytes(20_001)) == ErrorCode.telemetry_too_large
        assert refusal(subscription_id=7) == ErrorCode.unknown_subscription_id
        assert refusal(client_instance_id=None) == ErrorCode.invalid_request
        assert all(not each["metrics"] for each in clients_of(node))


def test_a_client_that_does_not_wait_for_the_interval_is_throttled(node: Node) -> None:
    with library(node) as client:
        alter(client, "all", metrics="*", interval_ms="3600000")
        got = get(client)
        again = get(client, got.client_instance_id)
        assert again.error_code == ErrorCode.throttling_quota_exceeded
        assert push(client, got) == ErrorCode.none
        assert push(client, got) == ErrorCode.throttling_quota_exceeded
        # The last push need not wait; nothing is accepted after it.
        assert push(client, got, metrics_data(TOTAL), terminating=True) == ErrorCode.none
        assert push(client, got, terminating=True) == ErrorCode.invalid_request
        (shown,) = clients_of(node)
        assert shown["metrics"][0]["name"] == "org.apache.kafka.consumer.rate"


def test_a_changed_subscription_reaches_a_client_with_its_next_push(node: Node) -> None:
    with library(node) as client:
        alter(client, "s", metrics="a.", interval_ms="3600000")
        got = get(client)
        alter(client, "s", metrics="org.", interval_ms="100")
        assert push(client, got) == ErrorCode.unknown_subscription_id
        changed = get(client, got.client_instance_id)
        assert (changed.error_code, changed.requested_metrics) == (ErrorCode.none, ("org.",))
        assert changed.subscription_id != got.subscription_id
        assert push(client, changed) == ErrorCode.none
        alter(client, "s", metrics=None, interval_ms=None)
        assert push(client, changed) == ErrorCode.unknown_subscription_id
        assert get(client, got.client_instance_id).requested_metrics == ()


def test_deltas_are_added_and_the_interval_allows_the_next_push(node: Node) -> None:
    with library(node) as client:
        alter(client, "s", metrics="*", interval_ms="100")
        got = get(client)
        delta = metrics_data(metric("sent", SUM, int64(6, 7), more=number(2, 1) + number(3, 1)))
        assert push(client, got, delta) == ErrorCode.none
        eventually(lambda: push(client, got, delta) == ErrorCode.none, 10, "the interval has passed")
        (shown,) = clients_of(node)
        assert shown["metrics"] == [{"name": "sent", "attributes": {}, "value": 14.0, "is_counter": True}]


def test_series_of_a_client_are_bounded_and_the_dropped_ones_counted(node: Node) -> None:
    with library(node) as client:
        alter(client, "s", metrics="*", interval_ms="100")
        points = [field(7, attribute("p", field(1, b"%d" % index))) + double(4, index) for index in range(600)]
        long = metric("m" * 201, GAUGE, double(4, 1))
        assert push(client, get(client), metrics_data(long, metric("m", GAUGE, *points))) == ErrorCode.none
        (shown,) = clients_of(node)
        assert len(shown["metrics"]) == 499
        assert "chronik_client_metrics_dropped_total 102.0" in exposed(node)


def test_subscriptions_are_described_altered_and_deleted_as_configs(node: Node) -> None:
    with connect(node) as client:

        def described(name: str = "s") -> dict[str, tuple[str | None, int]]:
            resource = {"resource_type": CLIENT_METRICS, "resource_name": name, "configuration_keys": None}
            (result,) = client.call(ApiKey.DESCRIBE_CONFIGS, 4, {"resources": [resource]}).results
            assert result.error_code == ErrorCode.none
            return {config.name: (config.value, config.config_source) for config in result.configs}

        assert described() == {}
        assert alter(client, "s", metrics="a.,b.") == ErrorCode.none
        assert described() == {"metrics": ("a.,b.", 7), "interval.ms": ("300000", 5), "match": ("", 5)}
        assert alter(client, "s", interval_ms="7") == ErrorCode.invalid_request
        assert alter(client, "s", match="client_id=(") == ErrorCode.invalid_config
        assert alter(client, "", metrics="*") == ErrorCode.invalid_request
        assert described() == {"metrics": ("a.,b.", 7), "interval.ms": ("300000", 5), "match": ("", 5)}
        assert alter(client, "s", metrics=None) == ErrorCode.none
        assert described() == {}


def test_another_node_accepts_the_pushes_of_a_client_that_it_does_not_know(node: Node) -> None:
    """The id of a subscription depends on the configs and the instance id only; a restart forgets all clients."""
    with library(node) as client:
        alter(client, "s", metrics="*", interval_ms="100")
        got = get(client, uuid4())
    node.terminate()
    node.start()
    with library(node) as client:
        assert push(client, got) == ErrorCode.none
