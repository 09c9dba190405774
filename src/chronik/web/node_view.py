"""The state of a node that this package needs, and lookups of topics, partitions and leaders."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from chronik.client.connection import Connection
from chronik.client.endpoint import Endpoint
from chronik.client.errors import Unreachable
from chronik.client.node_http import Caller
from chronik.metadata.image import BrokerImage, ClusterImage, PartitionImage, TopicImage
from chronik.node.admin.telemetry import ClientInstance
from chronik.node.broker import Broker, BrokerState
from chronik.node.config import NodeConfig
from chronik.node.replicas.healing import Damage
from chronik.node.replicas.partition import Partition
from chronik.node.runtime import Runtime
from chronik.node.schema_registry import SchemaRegistry
from chronik.node.serving.access import Access, Decisions
from chronik.node.serving.signed import Kind, node_token
from chronik.node.serving.tls import NodeTls
from chronik.web.answers import Refusal
from chronik.web.users import Users

NOT_READY = "starting, stopping or disconnected from the controller"
REASONS: dict[BrokerState, str] = {
    "starting": "the node is starting",
    "stopping": "the node is stopping",
    "disconnected": "the node is disconnected from the controller",
}


class NodeView:
    """The node of this process, as seen from its event loop. `broker` is None until the data directory is open."""

    def __init__(self, runtime: Runtime) -> None:
        self.node_id = runtime.node_id
        self.metrics = runtime.metrics
        self.traces = runtime.traces
        self.run_blocking = runtime.run_blocking
        self.wall_ms = runtime.env.wall_ms
        self.random = runtime.env.random
        config = runtime.config
        self.security = config.security
        self.failure_delay_ms = config.sasl.failure_delay_ms
        self.users: Users | None = None
        """Who may log in. Without it, nobody can."""
        self.decisions: Decisions | None = None
        """The authorizer. With `authorization.enabled`, nothing is shown without it."""
        self.broker: Broker | None = None
        self.tls: NodeTls | None = None
        self.is_authorizing = config.authorization.enabled
        self._is_kafka_open = config.kafka_listeners[0].protocol == "PLAINTEXT" and not self.is_authorizing
        self._hosts = frozenset(_hosts(config))
        self._connection_ids = itertools.count(1)

    @property
    def image(self) -> ClusterImage | None:
        return None if self.broker is None else self.broker.image

    @property
    def controller_id(self) -> int:
        return -1 if self.broker is None else self.broker.controller_id

    @property
    def is_ready(self) -> bool:
        return self.broker is not None and self.broker.is_ready

    @property
    def state(self) -> BrokerState:
        return "starting" if self.broker is None else self.broker.state

    @property
    def disk_error(self) -> str | None:
        return None if self.broker is None else self.broker.disk_error

    @property
    def damages(self) -> Sequence[Damage]:
        return () if self.broker is None else self.broker.damages

    @property
    def pushing_clients(self) -> Sequence[ClientInstance]:
        return () if self.broker is None else self.broker.pushing_clients

    @property
    def schemas(self) -> SchemaRegistry | None:
        return None if self.broker is None else self.broker.schemas

    def partition(self, topic: str, index: int) -> Partition | None:
        return None if self.broker is None else self.broker.partition(topic, index)

    # -- log-ins and rights --------------------------------------------------------------------------------------------

    def derived_keys(self, purpose: bytes) -> tuple[bytes, ...]:
        """Return keys that all nodes of the cluster have; empty until this node has read the cluster secret."""
        return () if self.broker is None else self.broker.secret.derived(purpose)

    def access_of(self, principal: str, host: str) -> Access:
        """Return the rights of a logged-in client. Raise Refusal while they are unknown."""
        if self.is_authorizing and self.decisions is None:
            raise Refusal(503, "this node is starting and does not know your rights yet: retry in a second")
        return Access(principal, host, self.decisions)

    @property
    def http_hosts(self) -> frozenset[str]:
        """The host names by which browsers may address this node, in lower case."""
        image = self.image
        if image is None:
            return self._hosts
        http = (broker.http.rpartition(":")[0].strip("[]").lower() for broker in image.brokers.values() if broker.http)
        return self._hosts.union(http)

    # -- other nodes ---------------------------------------------------------------------------------------------------

    def caller(self, access: Access | None = None) -> Caller:
        """Return how this node identifies itself to another node's HTTP API.

        The other node checks the rights of the client in `access`; without one, it answers this node everything.
        """
        tls = None if self.tls is None else self.tls.contexts.dialed_peers
        keys = self.derived_keys(Kind.NODE.purpose) if self.security.http_login else ()
        if not keys:
            return Caller(tls=tls)
        principal, host = ("", "") if access is None or access.is_open else (access.principal, access.host)
        return Caller(f"Bearer {node_token(keys[0], self.wall_ms(), principal, host)}", tls)

    async def connect(self, host: str, port: int, *, client_id: str, timeout_s: float) -> Connection:
        """Open a connection to the broker with this Kafka address, on which everything is answered.

        If clients have to log in there, it goes to the internal listener, where this node proves the cluster secret.
        The caller checks its own client's rights. Works on any event loop. Raise ClientError if it cannot be opened.
        """
        if self._is_kafka_open:
            return await Connection.open(host, port, client_id=client_id, timeout_s=timeout_s)
        image = self.image
        found = (
            () if image is None else (each for each in image.brokers.values() if (each.host, each.port) == (host, port))
        )
        broker = next(iter(found), None)
        if self.broker is None or broker is None or not broker.internal:
            raise Unreachable(f"{host}:{port} is not the address of a broker with an internal listener")
        # A purpose of its own for each: a node keeps only the newest connection of each purpose.
        purpose = f"{client_id}-{next(self._connection_ids)}"
        return await self.broker.member.peers.open(broker.id, Endpoint.parse(broker.internal), purpose, timeout_s)


def _hosts(config: NodeConfig) -> Iterator[str]:
    """Yield the host names in the settings."""
    listeners = (listener.advertise or listener.listen for listener in config.kafka_listeners)
    for text in (config.listen.http, config.advertise.http, *listeners):
        if text is not None:
            yield Endpoint.parse(text).host.lower()
    yield from (name.lower() for name in config.security.http_hosts)


def require_image(node: NodeView) -> ClusterImage:
    image = node.image
    if image is None:
        raise Refusal(503, "this node is starting and has no metadata yet: retry in a second")
    return image


def require_topic(node: NodeView, name: str) -> TopicImage:
    """Return the topic. The node must be ready to serve."""
    image = node.image
    topic = None if image is None else image.topic(name)
    if topic is None:
        raise Refusal(404, f"topic {name[:260]} does not exist: see /api/topics")
    if not node.is_ready:
        raise Refusal(503, f"this node is not serving: it is {NOT_READY}; use another node")
    return topic


def require_partition(topic: TopicImage, index: int) -> PartitionImage:
    partition = topic.partition(index)
    if partition is None:
        last = len(topic.partitions) - 1
        raise Refusal(404, f"topic {topic.name} has no partition {index}: pass partition=0 to {last}")
    return partition


def require_other_leader(node: NodeView, topic: TopicImage, partition: PartitionImage, is_own: bool) -> BrokerImage:
    """Return the leader, which is another node. Raises Refusal if there is none, or if the request has own=1."""
    leader = require_image(node).brokers.get(partition.leader)
    name = f"{topic.name}-{partition.partition}"
    if leader is None:
        replicas = ", ".join(map(str, partition.replicas))
        raise Refusal(503, f"{name} has no leader: start its nodes {replicas}, then retry")
    if leader.id == node.node_id:
        raise Refusal(503, f"node {leader.id} is becoming the leader of {name}: retry")
    if is_own:
        raise Refusal(503, f"node {leader.id} leads {name}: send the request there, or omit own=1")
    return leader


def led_here(node: NodeView, topic: str, index: int) -> Partition | None:
    """Return the partition if this node currently leads it."""
    hosted = node.partition(topic, index)
    return hosted if hosted is not None and hosted.leads else None
