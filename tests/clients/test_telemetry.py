"""Released clients push their metrics by default, once a subscription matches them (KIP-714)."""

from __future__ import annotations

from typing import Any

from confluent_kafka import Producer
from tests.clients.conftest import NewName
from tests.node.support_wire import connect
from tests.node.test_telemetry import alter, clients_of
from tests.support.eventually import eventually
from tests.support.node import Node

from chronik.wire.errors import ErrorCode


def test_librdkafka_pushes_its_metrics_and_follows_a_changed_subscription(shared_node: Node, new_name: NewName) -> None:
    client_id = new_name("telemetry")

    def pushed() -> dict[str, Any]:
        (found,) = (each for each in clients_of(shared_node) if each["client_id"] == client_id)
        return {each["name"]: each["value"] for each in found["metrics"]}

    with connect(shared_node) as admin:
        names = "org.apache.kafka.producer.connection."
        match = f"client_id={client_id},client_software_name=confluent-kafka-python.*"
        assert alter(admin, client_id, metrics=names, interval_ms="100", match=match) == ErrorCode.none
        producer = Producer({"bootstrap.servers": shared_node.bootstrap, "client.id": client_id})
        producer.produce(new_name("topic"), b"value")
        assert producer.flush(30) == 0
        eventually(lambda: "org.apache.kafka.producer.connection.creation.total" in pushed(), 30, "a push has arrived")
        assert all(name.startswith(names) for name in pushed())
        assert alter(admin, client_id, metrics="*") == ErrorCode.none
        eventually(
            lambda: any(not name.startswith(names) for name in pushed()), 30, "the client has the new subscription"
        )
        assert alter(admin, client_id, metrics=None, interval_ms=None, match=None) == ErrorCode.none
        del producer
