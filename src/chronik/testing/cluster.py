"""A real cluster for tests: real processes on free ports in their own folder, removed at the end."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import TypeVar

from chronik.authorization.acl_filter import AclFilter
from chronik.cli.options import with_cluster
from chronik.client.acls import Acls
from chronik.client.cluster import Cluster
from chronik.client.groups import Groups
from chronik.client.quotas import Quotas
from chronik.client.topics import Topics
from chronik.client.users import Users
from chronik.local.errors import LocalClusterError
from chronik.local.security import CLIENT_PROPERTIES
from chronik.local.temporary_cluster import TemporaryCluster
from chronik.testing.tied_node import TIED_NODE, tied_environment
from chronik.wire.errors import ErrorCode, KafkaError

_T = TypeVar("_T")

HEALED_TIMEOUT_S = 60.0
TIDY_TIMEOUT_S = 30.0


class TestCluster(TemporaryCluster):
    """A running cluster. `bootstrap` lists all nodes; `kill`, `stop`, `start`, `pause` and `resume` take a node's id.

    Nodes are numbered from 1; each of `nodes` has `id`, `bootstrap`, `http` and `log_path`. `heal` and `tidy` undo what
    a test does to the nodes and creates in the cluster. A secure cluster has TLS, SCRAM users and ACLs: `properties` is
    the path of the administrator's client settings, and `client_settings` has them parsed.
    """

    __test__ = False  # pytest: this is not a test

    def __init__(self, nodes: int = 3, *, is_secure: bool = False) -> None:
        super().__init__(nodes, command=TIED_NODE, environment=tied_environment(), is_secure=is_secure)
        self._topics = 0

    @property
    def properties(self) -> str:
        """The path of the administrator's client settings, in librdkafka's names."""
        return os.path.join(self.folder, CLIENT_PROPERTIES)

    def topic(self, partitions: int = 3, replication_factor: int | None = None, **configs: str) -> str:
        """Create a topic with an unused name, and return the name; configs use `_` for each dot."""
        self._topics += 1
        name = f"topic-{self._topics}"
        settings = {key.replace("_", "."): value for key, value in configs.items()}
        self._run(lambda cluster: Topics(cluster).create(name, partitions, replication_factor, settings))
        return name

    def leader(self, topic: str, partition: int = 0) -> int:
        """Return the id of the node that leads a partition now; wait until there is a leader."""
        return self._run(lambda cluster: cluster.leaders(topic, frozenset({partition})))[partition]

    @property
    def controller(self) -> int | None:
        """The id of the controller, according to the node with the newest metadata."""
        view = self.view()
        return None if view is None else view["controller"]

    def heal(self) -> None:
        """Bring back every node, and wait until every partition has all its replicas in sync."""
        for node in self.nodes:
            if node.process.state == "paused":
                self.resume(node.id)
        self.start_all(HEALED_TIMEOUT_S)
        if not self.wait_until_in_sync(HEALED_TIMEOUT_S):
            raise LocalClusterError(f"replicas were not in sync within {HEALED_TIMEOUT_S:g} s: see {self.folder}")

    def tidy(self) -> None:
        """Delete all topics, groups, quotas, users and ACLs, so that the next test starts with none.

        The administrator stays: it is not in the metadata.
        """

        async def delete(cluster: Cluster) -> None:
            for name, topic in sorted((await cluster.layout()).topics.items()):
                if not topic.is_internal:
                    await _unless_gone(Topics(cluster).delete(name))
            for group in await Groups(cluster).list():
                await _unless_gone(Groups(cluster).delete(group.group))
            for quotas in await Quotas(cluster).list():
                await Quotas(cluster).alter(quotas.entity, dict.fromkeys(quotas.values))
            for user in await Users(cluster).list():
                await Users(cluster).delete(user.name, list(user.iterations))
            if self.is_secured:
                await Acls(cluster).delete(AclFilter())

        self._run(delete)

    def _run(self, work: Callable[[Cluster], Awaitable[_T]]) -> _T:
        return with_cluster(self.client_settings, work, TIDY_TIMEOUT_S)


async def _unless_gone(deletion: Awaitable[None]) -> None:
    """Tolerate deletions that the test made itself, and groups whose members have not left yet."""
    gone = (ErrorCode.unknown_topic_or_partition, ErrorCode.group_id_not_found, ErrorCode.non_empty_group)
    try:
        await deletion
    except KafkaError as error:
        if error.code not in gone:
            raise
