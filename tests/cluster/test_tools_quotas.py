"""Quotas, as Apache Kafka's own tools set and show them, and as a released client notices them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from confluent_kafka import Message, Producer
from tests.cluster.support_cluster import Nodes
from tests.cluster.support_tools import KafkaTools
from tests.node.support_wire import unique

RATE = 1_000_000
RECORD_BYTES = 100_000
SENT_RECORDS = 140
"""14 MB: 10 of them are the burst, so that the last ones must wait."""


@contextmanager
def quota(nodes: Nodes, tools: KafkaTools, client_id: str, config: str) -> Iterator[None]:
    """Set a quota of a client id, and remove it at the end."""
    entity = ("--bootstrap-server", nodes.bootstrap, "--entity-type", "clients", "--entity-name", client_id, "--alter")
    tools.ok("kafka-configs", *entity, "--add-config", config)
    yield
    tools.ok("kafka-configs", *entity, "--delete-config", config.partition("=")[0])


def test_kafka_configs_sets_describes_and_removes_quotas(shared_nodes: Nodes, kafka_tools: KafkaTools) -> None:
    at, user = ("--bootstrap-server", shared_nodes.bootstrap), unique("user")
    of_user = (*at, "--entity-type", "users", "--entity-name", user)
    of_both = (*of_user, "--entity-type", "clients", "--entity-default")
    values = "producer_byte_rate=1024,consumer_byte_rate=2048,request_percentage=50,controller_mutation_rate=3.5"
    kafka_tools.ok("kafka-configs", *of_user, "--alter", "--add-config", values)
    kafka_tools.ok("kafka-configs", *of_both, "--alter", "--add-config", "producer_byte_rate=4096")
    # The tool shows the quotas of a user together with its SCRAM credentials.
    expected = ("producer_byte_rate=1024.0", "consumer_byte_rate=2048.0", "controller_mutation_rate=3.5")
    kafka_tools.until(lambda out: all(value in out for value in expected), "kafka-configs", *of_user, "--describe")
    kafka_tools.until(lambda out: "producer_byte_rate=4096.0" in out, "kafka-configs", *of_both, "--describe")
    names = ",".join(value.partition("=")[0] for value in values.split(","))
    kafka_tools.ok("kafka-configs", *of_user, "--alter", "--delete-config", names)
    kafka_tools.ok("kafka-configs", *of_both, "--alter", "--delete-config", "producer_byte_rate")
    for entity in (of_user, of_both):
        kafka_tools.until(lambda out: "byte_rate" not in out, "kafka-configs", *entity, "--describe")


def test_kafka_configs_sets_and_removes_the_connection_rate_of_an_address(
    shared_nodes: Nodes, kafka_tools: KafkaTools
) -> None:
    entity = ("--bootstrap-server", shared_nodes.bootstrap, "--entity-type", "ips", "--entity-name", "10.9.8.7")
    kafka_tools.ok("kafka-configs", *entity, "--alter", "--add-config", "connection_creation_rate=9")
    kafka_tools.until(lambda out: "connection_creation_rate=9.0" in out, "kafka-configs", *entity, "--describe")
    kafka_tools.ok("kafka-configs", *entity, "--alter", "--delete-config", "connection_creation_rate")
    kafka_tools.until(lambda out: "connection_creation_rate" not in out, "kafka-configs", *entity, "--describe")


def test_a_confluent_producer_is_throttled_and_loses_no_record(shared_nodes: Nodes, kafka_tools: KafkaTools) -> None:
    slow, topic = unique("slow"), unique("quota")
    at = ("--bootstrap-server", shared_nodes.bootstrap)
    kafka_tools.ok("kafka-topics", *at, "--create", "--topic", topic, "--partitions", "1", "--replication-factor", "1")
    with quota(shared_nodes, kafka_tools, slow, f"producer_byte_rate={RATE}"):
        throttled, untouched = (
            produce(shared_nodes.bootstrap, topic, client_id) for client_id in (slow, unique("free"))
        )
    assert throttled, "librdkafka reports a throttle time"
    assert not untouched


def produce(bootstrap: str, topic: str, client_id: str) -> list[float]:
    """Produce all records; return the throttle times that the client reports."""
    throttles: list[float] = []
    delivered: list[int] = []

    def done(error: object, message: Message) -> None:
        assert error is None, error
        delivered.append(message.offset() or 0)

    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "client.id": client_id,
            "batch.size": 2 * RECORD_BYTES,
            "linger.ms": 0,
            "throttle_cb": lambda event: throttles.append(event.throttle_time),
        }
    )
    for _ in range(SENT_RECORDS):
        producer.produce(topic, b"x" * RECORD_BYTES, on_delivery=done)
        producer.poll(0)
    assert producer.flush(60) == 0
    assert len(delivered) == SENT_RECORDS
    return [seconds for seconds in throttles if seconds > 0]
