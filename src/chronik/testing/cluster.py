"""A real cluster for somebody's tests: real processes on free ports in a folder of their own, gone when done."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TypeVar

from chronik.cli.errors import CliError
from chronik.cli.local_cluster import clean_environment
from chronik.cli.local_node import LocalNode
from chronik.cli.options import with_cluster
from chronik.cli.temporary_cluster import TemporaryCluster
from chronik.client.cluster import Cluster
from chronik.client.groups import Groups
from chronik.client.topics import Topics
from chronik.testing.tied_node import TIED_TO
from chronik.wire.errors import ErrorCode, KafkaError

_T = TypeVar("_T")

HEALED_TIMEOUT_S = 60.0
TIDY_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.05


class TestCluster:
    """A running cluster. `bootstrap` names all nodes; nodes are numbered from 1.

    What a test does to the nodes and makes in the cluster is undone by `heal` and `tidy`.
    """

    __test__ = False  # pytest: this is no test

    def __init__(self, nodes: int = 3) -> None:
        self._cluster = TemporaryCluster(
            nodes,
            command=(sys.executable, "-m", "chronik.testing.tied_node", "start"),
            environment={**clean_environment(os.environ), TIED_TO: str(os.getpid())},
        )
        self._topics = 0

    def __enter__(self) -> TestCluster:
        self._cluster.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._cluster.remove()

    # -- what a test asks ----------------------------------------------------------------------------------------------

    @property
    def bootstrap(self) -> str:
        """All nodes' addresses, as clients take them: `HOST:PORT,HOST:PORT,...`."""
        return self._cluster.bootstrap

    @property
    def nodes(self) -> list[LocalNode]:
        """The nodes in order of their number; each has `id`, `bootstrap`, `http` and `log_path`."""
        return self._cluster.nodes

    def topic(self, partitions: int = 3, replication_factor: int | None = None, **configs: str) -> str:
        """Makes a topic of a name that was not used before, and returns it; configs take `_` for each dot."""
        self._topics += 1
        name = f"topic-{self._topics}"
        settings = {key.replace("_", "."): value for key, value in configs.items()}
        self._ask(lambda cluster: Topics(cluster).create(name, partitions, replication_factor, settings))
        return name

    def leader(self, topic: str, partition: int = 0) -> int:
        """The number of the node that leads a partition now; waits until one does."""

        async def ask(cluster: Cluster) -> int:
            return (await cluster.leaders(topic, frozenset({partition})))[partition]

        return self._ask(ask)

    @property
    def controller(self) -> int | None:
        """The number of the controller, as the node with the newest metadata knows it."""
        view = self._cluster.view()
        return None if view is None else view["controller"]

    # -- what a test does to the nodes ---------------------------------------------------------------------------------

    def kill(self, node: int) -> None:
        """SIGKILL."""
        self._cluster.kill(node)

    def stop(self, node: int) -> None:
        """A clean stop."""
        self._cluster.stop(node)

    def start(self, node: int) -> None:
        """Starts a node that was killed or stopped; returns when it serves, if enough nodes run for that."""
        self._cluster.start(node)

    def pause(self, node: int) -> None:
        """SIGSTOP."""
        self._cluster.pause(node)

    def resume(self, node: int) -> None:
        """SIGCONT."""
        self._cluster.resume(node)

    # -- between tests -------------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """Brings back every node, and waits until every partition has all its replicas in sync."""
        for node in self._cluster.nodes:
            if node.process.state == "paused":
                self._cluster.resume(node.id)
        self._cluster.start_all(HEALED_TIMEOUT_S)
        deadline_s = time.monotonic() + HEALED_TIMEOUT_S
        while not self._is_in_sync():
            if time.monotonic() >= deadline_s:
                raise CliError(f"replicas were not in sync within {HEALED_TIMEOUT_S:g} s: see {self._cluster.folder}")
            time.sleep(POLL_INTERVAL_S)

    def tidy(self) -> None:
        """Deletes all topics and groups, so that the next test finds none."""

        async def delete(cluster: Cluster) -> None:
            for name, topic in sorted((await cluster.layout()).topics.items()):
                if not topic.is_internal:
                    await _unless_gone(Topics(cluster).delete(name))
            for group in await Groups(cluster).list():
                await _unless_gone(Groups(cluster).delete(group.group))

        self._ask(delete)

    def _is_in_sync(self) -> bool:
        view = self._cluster.view()
        return view is not None and view["under_replicated"] == 0 and view["leaderless"] == 0

    def _ask(self, work: Callable[[Cluster], Awaitable[_T]]) -> _T:
        return with_cluster(self.bootstrap, work, TIDY_TIMEOUT_S)


async def _unless_gone(deletion: Awaitable[None]) -> None:
    """What a test deleted itself is fine, and so is a group whose members have not left yet."""
    gone = (ErrorCode.unknown_topic_or_partition, ErrorCode.group_id_not_found, ErrorCode.non_empty_group)
    try:
        await deletion
    except KafkaError as error:
        if error.code not in gone:
            raise
