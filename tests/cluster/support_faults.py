"""Faults that happen to nodes while records flow. Each fault ends with all nodes up and connected again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.cluster.support_workload import Workload

PROGRESS = 100
"""Minimum number of acknowledged records in each partition before, during and after a fault."""


@dataclass(frozen=True)
class Scene:
    """What a fault needs: the workload, the random choice of its victims, and the duration of a pause."""

    workload: Workload
    chance: random.Random
    pause_s: float

    def random_leader(self) -> int:
        partition = self.chance.choice(self.workload.partitions)
        return self.workload.nodes.leader(self.workload.topic, partition)

    def in_random_order(self) -> list[int]:
        ids = self.workload.nodes.ids
        return self.chance.sample(ids, len(ids))


Fault = Callable[[Scene], None]


def kill_leader(scene: Scene) -> None:
    _kill(scene, scene.random_leader())


def kill_controller(scene: Scene) -> None:
    _kill(scene, scene.workload.nodes.controller())


def kill_follower(scene: Scene) -> None:
    _kill(scene, scene.workload.nodes.follower(scene.workload.topic))


def rolling_kill(scene: Scene) -> None:
    for node_id in scene.in_random_order():
        _kill(scene, node_id)
        scene.workload.nodes.wait_in_sync()


def kill_all(scene: Scene) -> None:
    nodes = scene.workload.nodes
    nodes.kill_all()
    nodes.start_all()


def pause_leader(scene: Scene) -> None:
    nodes, leader = scene.workload.nodes, scene.random_leader()
    nodes.pause(leader)
    until_s = time.monotonic() + scene.pause_s
    scene.workload.proceed(PROGRESS)  # the other nodes continue meanwhile
    time.sleep(max(0.0, until_s - time.monotonic()))  # let the fault last; there is no condition to wait for
    nodes.resume(leader)


def cut_off_leader(scene: Scene) -> None:
    _cut_off(scene, scene.random_leader())


def cut_off_controller(scene: Scene) -> None:
    _cut_off(scene, scene.workload.nodes.controller())


def cut_off_follower(scene: Scene) -> None:
    _cut_off(scene, scene.workload.nodes.follower(scene.workload.topic))


def rolling_restart(scene: Scene) -> None:
    nodes = scene.workload.nodes
    for node_id in scene.in_random_order():
        nodes.stop(node_id)
        scene.workload.proceed(PROGRESS)
        nodes.start(node_id)
        nodes.wait_in_sync()


def _kill(scene: Scene, node_id: int) -> None:
    nodes = scene.workload.nodes
    nodes.kill(node_id)
    scene.workload.proceed(PROGRESS)
    nodes.start(node_id)


def _cut_off(scene: Scene, node_id: int) -> None:
    nodes = scene.workload.nodes
    nodes.cut_off(node_id)
    until_s = time.monotonic() + scene.pause_s
    scene.workload.proceed(PROGRESS)
    time.sleep(max(0.0, until_s - time.monotonic()))
    nodes.heal()


FAULTS: dict[str, Fault] = {
    "kill-leader": kill_leader,
    "kill-controller": kill_controller,
    "kill-follower": kill_follower,
    "rolling-kill": rolling_kill,
    "kill-all": kill_all,
    "pause-leader": pause_leader,
    "cut-off-leader": cut_off_leader,
    "cut-off-controller": cut_off_controller,
    "cut-off-follower": cut_off_follower,
    "rolling-restart": rolling_restart,
}
NEEDS_LINKS = frozenset(name for name in FAULTS if name.startswith("cut-off"))
