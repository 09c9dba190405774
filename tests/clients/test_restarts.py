"""What clients see of a node that stops, cleanly or not, and comes back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import confluent_kafka
import pytest
from tests.clients.conftest import OUTSIDE_BOOTSTRAP, GetClient
from tests.clients.drivers.base import Client, Sent
from tests.conftest import StartNode
from tests.support.eventually import eventually
from tests.support.node import Node

pytestmark = pytest.mark.skipif(OUTSIDE_BOOTSTRAP is not None, reason="needs a node of its own, to stop it")

PARTITIONS = 2


class SteadyProducer:
    """An idempotent producer that sends numbered records until it is stopped, and knows which were acknowledged."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.acknowledged: list[tuple[int, int, bytes]] = []
        self.failures: list[str] = []
        self._topic = topic
        self._stopping = threading.Event()
        self._producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "linger.ms": 1,
                "reconnect.backoff.max.ms": 200,
                "retry.backoff.ms": 50,
            }
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        number = 0
        while not self._stopping.is_set():
            if len(self._producer) < 1_000:
                value = b"%d" % number
                self._producer.produce(self._topic, value, partition=number % PARTITIONS, on_delivery=self._delivered)
                number += 1
            self._producer.poll(0.0005)
        self._producer.flush(30)

    def _delivered(self, error: confluent_kafka.KafkaError | None, message: confluent_kafka.Message) -> None:
        value = message.value()
        if error is not None:
            self.failures.append(error.str())
        else:
            assert isinstance(value, bytes)
            self.acknowledged.append((message.partition() or 0, message.offset() or 0, value))


@contextmanager
def producing(node: Node, topic: str) -> Iterator[SteadyProducer]:
    producer = SteadyProducer(node.bootstrap, topic)
    try:
        yield producer
    finally:
        producer.stop()


@pytest.mark.parametrize("durability", ["synced", "replicated"])
def test_every_acknowledged_record_survives_kill_9_exactly_once_and_in_order(
    durability: str, start_node: StartNode, topic: str, get_client: GetClient
) -> None:
    node = start_node(durability=durability, num_partitions=PARTITIONS)
    with producing(node, topic) as producer:
        for _ in range(3):
            seen = len(producer.acknowledged)
            eventually(lambda: len(producer.acknowledged) > seen + 500, 20, "records are acknowledged")  # noqa: B023
            node.kill()
            node.start()
    assert producer.failures == []
    count = len(producer.acknowledged)
    read = get_client("kafka-python").read(node.bootstrap, topic, count, partitions=range(PARTITIONS))
    for partition in range(PARTITIONS):
        of_partition = [record for record in read if record.partition == partition]
        assert [record.offset for record in of_partition] == list(range(len(of_partition)))
        expected = [value for at, _, value in producer.acknowledged if at == partition]
        assert [record.value for record in of_partition] == expected
        offsets = {value: offset for at, offset, value in producer.acknowledged if at == partition}
        assert {record.value: record.offset for record in of_partition} == offsets


def test_topics_records_and_committed_offsets_survive_a_clean_restart(
    start_node: StartNode, topic: str, get_client: GetClient
) -> None:
    node = start_node()
    client = get_client("confluent-kafka")
    client.produce(node.bootstrap, topic, [Sent(b"%d" % number) for number in range(10)])
    member = client.join(node.bootstrap, topic, "readers")
    eventually(lambda: len(member.done) == 10, 20, "the first ten are read")
    member.leave()
    node.restart()
    client.produce(node.bootstrap, topic, [Sent(b"%d" % number) for number in range(10, 15)])
    member = client.join(node.bootstrap, topic, "readers")
    eventually(lambda: len(member.done) == 5, 20, "the group goes on after them")
    member.leave()
    assert [record.value for record in member.done] == [b"%d" % number for number in range(10, 15)]


# Not kafka-python: it leaves the sockets of refused connections to the garbage collector, and the resulting warnings
# fail whichever test runs then.
@pytest.mark.parametrize("client", ["confluent-kafka", "java-4.3"], indirect=True)
def test_group_member_resumes_when_its_node_restarts(client: Client, start_node: StartNode, topic: str) -> None:
    node = start_node()
    client.produce(node.bootstrap, topic, [Sent(b"before")])
    member = client.join(node.bootstrap, topic, "readers")
    try:
        eventually(lambda: len(member.done) == 1, 20, "the record before the crash is read")
        node.kill()
        node.start()
        client.produce(node.bootstrap, topic, [Sent(b"after")])
        eventually(lambda: len(member.done) == 2, 30, "the record after the crash is read")
    finally:
        member.leave()
    assert [record.value for record in member.done] == [b"before", b"after"]
