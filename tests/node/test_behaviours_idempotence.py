"""Idempotent producers: a repeated batch is stored once and a gap is refused, also after a crash."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.node.support_wire import WireClient, batch, connect
from tests.support.node import Node

from chronik.wire.errors import ErrorCode

SEQUENCE_MAX = 0x7FFFFFFF
BATCHES_KEPT = 5


class Producer:
    """An idempotent producer whose sequences the test chooses."""

    def __init__(self, client: WireClient, topic: str, producer_id: int | None = None, epoch: int = 0) -> None:
        self.client = client
        self.topic = topic
        self.producer_id = client.init_producer_id()[0] if producer_id is None else producer_id
        self.epoch = epoch

    def send(self, sequence: int, *values: bytes) -> tuple[int, int]:
        """Send a batch and return the error code and the base offset."""
        response = self.client.produce(
            self.topic,
            batch(
                *(values or (b"%d" % sequence,)),
                producer_id=self.producer_id,
                producer_epoch=self.epoch,
                base_sequence=sequence,
            ),
        )
        return response.error_code, response.base_offset


@pytest.fixture
def client(shared_node: Node) -> Iterator[WireClient]:
    with connect(shared_node) as client:
        yield client


@pytest.fixture
def producer(client: WireClient) -> Producer:
    return Producer(client, client.new_topic())


def test_each_producer_id_is_allocated_once(client: WireClient) -> None:
    given = [client.init_producer_id() for _ in range(20)]
    assert len({producer_id for producer_id, _ in given}) == 20
    assert {epoch for _, epoch in given} == {0}


def test_a_duplicate_batch_returns_its_original_offset_and_is_stored_once(producer: Producer) -> None:
    assert producer.send(0, b"a", b"b") == (0, 0)
    assert producer.send(2, b"c") == (0, 2)
    assert producer.send(0, b"a", b"b") == (0, 0)
    assert producer.send(2, b"c") == (0, 2)
    assert [record.value for record in producer.client.records(producer.topic)] == [b"a", b"b", b"c"]


def test_the_last_five_batches_are_deduplicated_and_older_ones_refused(producer: Producer) -> None:
    for sequence in range(8):
        assert producer.send(sequence) == (0, sequence)
    for sequence in range(8 - BATCHES_KEPT, 8):
        assert producer.send(sequence) == (0, sequence)
    assert producer.send(0)[0] in (ErrorCode.duplicate_sequence_number, ErrorCode.out_of_order_sequence_number)
    assert len(producer.client.records(producer.topic)) == 8


def test_a_sequence_gap_is_out_of_order(producer: Producer) -> None:
    assert producer.send(0) == (0, 0)
    assert producer.send(2)[0] == ErrorCode.out_of_order_sequence_number
    assert producer.send(1) == (0, 1)
    assert producer.send(2) == (0, 2)


def test_sequence_numbers_wrap_after_the_largest_int(client: WireClient) -> None:
    producer = Producer(client, client.new_topic())
    # A producer that is new to this log may start at any sequence.
    assert producer.send(SEQUENCE_MAX - 1, b"a", b"b") == (0, 0)
    assert producer.send(0, b"c") == (0, 2)
    other = Producer(client, client.new_topic())
    # The sequence wraps inside one batch: MAX, 0, 1.
    assert other.send(SEQUENCE_MAX, b"a", b"b", b"c") == (0, 0)
    assert other.send(SEQUENCE_MAX, b"a", b"b", b"c") == (0, 0)
    assert other.send(3, b"x")[0] == ErrorCode.out_of_order_sequence_number
    assert other.send(2, b"d") == (0, 3)


def test_a_new_epoch_starts_at_sequence_0_and_fences_the_old_one(producer: Producer) -> None:
    assert producer.send(0) == (0, 0)
    assert producer.send(1) == (0, 1)
    producer_id, epoch = producer.client.init_producer_id(producer.producer_id, 0)
    assert (producer_id, epoch) == (producer.producer_id, 1)
    newer = Producer(producer.client, producer.topic, producer_id, epoch)
    assert newer.send(2)[0] == ErrorCode.out_of_order_sequence_number
    assert newer.send(0) == (0, 2)
    assert producer.send(2)[0] == ErrorCode.invalid_producer_epoch


def test_sequence_numbers_are_not_checked_without_a_producer_id(client: WireClient) -> None:
    topic = client.new_topic()
    assert [client.append(topic, b"same") for _ in range(3)] == [0, 1, 2]


def test_a_duplicate_batch_in_one_pipeline_gets_the_same_offset_twice(producer: Producer) -> None:
    client = producer.client
    repeated = batch(b"once", producer_id=producer.producer_id, producer_epoch=0, base_sequence=0)
    with client.one_write():
        sent = [client.send_produce(producer.topic, repeated) for _ in range(5)]
    assert {client.produced(correlation_id).base_offset for correlation_id in sent} == {0}
    assert len(client.records(producer.topic)) == 1


@pytest.mark.parametrize("stop", [Node.terminate, Node.kill], ids=["SIGTERM", "kill -9"])
def test_producer_state_survives_a_restart(node: Node, stop: Callable[[Node], None]) -> None:
    with connect(node) as client:
        first = Producer(client, client.new_topic())
        for sequence in range(3):
            assert first.send(sequence) == (0, sequence)
    stop(node)
    node.start()
    with connect(node) as client:
        again = Producer(client, first.topic, first.producer_id)
        assert again.send(2) == (0, 2)
        assert again.send(4)[0] == ErrorCode.out_of_order_sequence_number
        assert again.send(3) == (0, 3)
        assert client.init_producer_id()[0] > first.producer_id
        assert [record.value for record in client.records(first.topic)] == [b"0", b"1", b"2", b"3"]
