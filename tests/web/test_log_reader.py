"""If a leader's HTTP is unreachable, it is queried over the Kafka protocol, with the same result."""

from __future__ import annotations

import dataclasses
from typing import Any
from uuid import UUID

from tests.web.support_http import batch_of, get, put
from tests.web.test_app import Node, get_json, served

from chronik.metadata.image import BrokerImage, ClusterImage, PartitionImage, TopicImage
from chronik.testing.cluster import TestCluster


@dataclasses.dataclass
class Elsewhere:
    """A node's view of a partition that another node leads."""

    topic: str
    leader: int
    kafka: tuple[str, int]
    http: str = ""

    def image(self) -> ClusterImage:
        broker = BrokerImage(self.leader, 1, *self.kafka, UUID(int=1), http=self.http)
        partition = PartitionImage(0, self.leader, 1, (self.leader,), (self.leader,))
        topic = TopicImage(self.topic, UUID(int=7), (partition,), {})
        return ClusterImage(cluster_id="c", version=1, topics={self.topic: topic}, brokers={self.leader: broker})


def test_a_leader_with_unreachable_http_returns_the_same_over_kafka(chronik_cluster: TestCluster) -> None:
    topic = chronik_cluster.topic(partitions=1)
    put(chronik_cluster.bootstrap, topic, 0, *(batch_of([b"x"] * size) for size in (1, 3, 2, 5)))
    leader = chronik_cluster.nodes[chronik_cluster.leader(topic) - 1]
    other = next(node for node in chronik_cluster.nodes if node is not leader)
    questions = [
        f"/api/topics/{topic}/{what}"
        for what in (
            "batches?partition=0",
            "batches?partition=0&limit=2",
            "batches?partition=0&from=2&to=5",
            "batches?partition=0&from=11",
            "messages?partition=0",
            "messages?partition=0&offset=2&limit=3",
            "messages?partition=0&time=1",
            "messages?partition=0&time=9999999999999",
        )
    ]
    expected = [get(leader.http, question) for question in questions]
    kafka = (leader.kafka.host, leader.kafka.port)

    async def work(node: Node, port: int) -> None:
        node.node_id = 9
        node.broker.is_ready = True
        # No address, nothing listening there, and the address of a node that is not the leader.
        for http in ("", "127.0.0.1:1", str(other.http)):
            node.broker.image = Elsewhere(topic, leader.id, kafka, http).image()
            answers: list[tuple[int, Any]] = [await get_json(port, question) for question in questions]
            assert answers == expected

    served(work)()


@served
async def test_the_error_names_a_leader_that_does_not_answer(node: Node, port: int) -> None:
    node.node_id = 9
    node.broker.is_ready = True
    node.broker.image = Elsewhere("orders", 4, ("127.0.0.1", 1)).image()
    for what in ("batches", "messages"):
        status, answer = await get_json(port, f"/api/topics/orders/{what}?partition=0")
        assert status == 503
        assert "node 4, which leads orders-0, did not answer" in answer["error"]
    status, answer = await get_json(port, "/api/topics/orders/batches?partition=0&own=1")
    assert (status, answer["error"]) == (503, "node 4 leads orders-0: send the request there, or omit own=1")
