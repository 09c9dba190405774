"""Transactions, as Apache Kafka's `kafka-transactions` lists, describes and ends them."""

from __future__ import annotations

import confluent_kafka
import pytest
from tests.cluster.support_cluster import Nodes
from tests.cluster.support_tools import KafkaTools
from tests.node.support_wire import unique
from tests.support.eventually import eventually


def rows(out: str) -> list[dict[str, str]]:
    """Parse the tool's table, whose cells are separated by tabs."""
    lines = [[cell.strip() for cell in line.rstrip("\t").split("\t")] for line in out.splitlines() if "\t" in line]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]


def test_kafka_transactions_lists_describes_and_ends_transactions(shared_nodes: Nodes, kafka_tools: KafkaTools) -> None:
    topic, name = shared_nodes.new_topic(2), unique("transactional")

    def ask(*arguments: str) -> list[dict[str, str]]:
        return rows(kafka_tools.ok("kafka-transactions", "--bootstrap-server", shared_nodes.bootstrap, *arguments))

    def open_in(partition: int) -> list[str]:
        found = ask("describe-producers", "--topic", topic, "--partition", str(partition))
        return [each["CurrentTransactionStartOffset"] for each in found]

    def state() -> str:
        return next(each["TransactionState"] for each in ask("list") if each["TransactionalId"] == name)

    producer = confluent_kafka.Producer({"bootstrap.servers": shared_nodes.bootstrap, "transactional.id": name})
    producer.init_transactions(30.0)
    producer.begin_transaction()
    for partition in range(2):
        producer.produce(topic, b"x", partition=partition)
    producer.flush(30.0)
    assert state() == "Ongoing"
    (described,) = ask("describe", "--transactional-id", name)
    assert (described["TransactionState"], described["TransactionTimeoutMs"]) == ("Ongoing", "60000")
    assert set(described["TopicPartitions"].split(",")) == {f"{topic}-0", f"{topic}-1"}
    assert open_in(0) == open_in(1) == ["0"]
    assert ask("find-hanging", "--topic", topic, "--max-transaction-timeout", "0") == []
    ask("abort", "--topic", topic, "--partition", "0", "--start-offset", "0")
    assert (open_in(0), open_in(1)) == (["None"], ["0"]), "the marker is for one partition"
    ask("forceTerminateTransaction", "--transactionalId", name)
    assert eventually(lambda: open_in(1) == ["None"])
    assert state() == "Empty"
    with pytest.raises(confluent_kafka.KafkaException) as fenced:
        producer.commit_transaction(30.0)
    assert fenced.value.args[0].fatal()
