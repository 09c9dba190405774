"""A campaign: records flow through real nodes while single faults and mixes of faults are injected into them.

Time is divided into rounds. Each round creates a topic that clients write and read (`Workload`), and plays a few acts
with quiet periods between them. Then the checker verifies the clients' history, and the replicas' files are compared.
So nothing grows with the length of a campaign. The seed determines the victims, the faults, their durations and their
order; how the machine reacts is not reproducible.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.cluster.support_replicas import replicas_agree
from tests.cluster.support_soak import SoakResults
from tests.cluster.support_watch import OffsetWatch
from tests.cluster.support_workload import Workload
from tests.faults.support_acts import ACTS, ALONE, HARD, SOFT, possible
from tests.faults.support_programme import programme
from tests.faults.support_stage import Stage
from tests.support.eventually import eventually

from chronik.cli.options import with_cluster
from chronik.client.topics import Topics
from chronik.testing.history import Report

PARTITIONS = 4
RATE_PER_S = 300.0
ACTS_PER_ROUND = 4
QUIET_S = (0.5, 3.0)
SEGMENT_BYTES = 128 * 1024
MIX = "mix"
HEALED_TIMEOUT_S = 60.0
"""A replica that found damage may be in sync with all later records before it is healed."""

Say = Callable[[str], None]


class Campaign:
    """Injects faults into the nodes of a stage and checks the outcome. Raises an AssertionError if a check fails."""

    def __init__(
        self, stage: Stage, results: SoakResults, folder: Path, say: Say, only: list[str] | None = None
    ) -> None:
        self.stage = stage
        self._results = results
        self._folder = folder
        self._say = say
        self._began_s = time.monotonic()
        self._acts = possible(stage)
        hard, soft, alone = ([name for name in kind if name in self._acts] for kind in (HARD, SOFT, ALONE))
        self._programme = programme(random.Random(stage.seed), hard, soft, alone, only or ())
        self._rounds = 0
        left_out = sorted(ACTS.keys() - self._acts.keys())
        if left_out:
            say(f"no network namespaces ({stage.without}): links are proxies, and left out are {', '.join(left_out)}")

    def run(self, until_s: float, acts_max: int | None = None) -> None:
        """Play rounds until `until_s` on the monotonic clock or until `acts_max` acts were played; at least one act."""
        played = 0
        while played == 0 or (time.monotonic() < until_s and (acts_max is None or played < acts_max)):
            acts = ACTS_PER_ROUND if acts_max is None else min(ACTS_PER_ROUND, acts_max - played)
            played += self._round(acts, until_s)

    # -- a round -------------------------------------------------------------------------------------------------------

    def _round(self, acts: int, until_s: float) -> int:
        nodes = self.stage.nodes
        self._rounds += 1
        topic = nodes.new_topic(PARTITIONS, segment_bytes=str(SEGMENT_BYTES))
        history = self._folder / f"history-{self._rounds}.jsonl"
        played = 0
        with (
            OffsetWatch(nodes, topic, range(PARTITIONS)),
            Workload(nodes, topic, PARTITIONS, rate_per_s=RATE_PER_S, rereads=True) as workload,
        ):
            workload.proceed(1)
            while played == 0 or (played < acts and time.monotonic() < until_s):
                self._quiet(workload)
                self._play(next(self._programme), workload)
                played += 1
            report = workload.conclude(history)
        self._judge(report, history)
        self._compare_replicas(workload)
        nodes.no_surprises()
        history.unlink()
        with_cluster(nodes.bootstrap, lambda online: Topics(online).delete(topic))
        return played

    def _quiet(self, workload: Workload) -> None:
        """Leave the nodes alone; sometimes one member leaves the group and another joins."""
        chance = self.stage.chance
        if chance.random() < 0.5:
            chance.choice(workload.members).stop()
            workload.new_member(f"member{len(workload.members)}")
        time.sleep(chance.uniform(*QUIET_S))

    def _play(self, names: tuple[str, ...], workload: Workload) -> None:
        stage = self.stage
        stage.notes.clear()
        stage.is_mixed = len(names) > 1
        began_s, at_s = time.monotonic(), workload.recorder.now_s()
        for name in names:
            self._results.fault(name)
        with contextlib.ExitStack() as held:
            for name in names:
                held.enter_context(self._acts[name](stage, workload))
                stage.hold()
        stage.recover(workload)
        kind = MIX if stage.is_mixed else names[0]
        if stage.is_mixed:
            self._results.fault(MIX)
        for name, seconds, goal_s in stage.measured:
            self._results.measure(name, seconds, "s", at_most=goal_s)
            stage.note(f"{name}: {seconds:.1f} s")
        stage.measured.clear()
        gap_ms = workload.longest_gap_ms(at_s)
        self._results.unavailable(kind, gap_ms)
        minutes, seconds = divmod(int(began_s - self._began_s), 60)
        took_s = time.monotonic() - began_s
        self._say(
            f"{minutes:3}:{seconds:02}  {'+'.join(names)}: {'; '.join(stage.notes)}; all well after {took_s:.1f} s, "
            f"a partition without acknowledgement for at most {gap_ms:.0f} ms"
        )

    # -- verdict -------------------------------------------------------------------------------------------------------

    def _judge(self, report: Report, history: Path) -> None:
        self._results.history(report)
        lag = report.worst_lag
        if lag is not None:
            self._results.measure("campaign: worst real-time lag of a consumer", lag.seconds, "s")
        behind = "" if lag is None else f", a consumer behind for at most {lag.seconds:.1f} s"
        self._say(f"       round {self._rounds}: {str(report).splitlines()[0]}{behind}")
        assert report.is_clean, f"{report}\nthe history is in {history}"
        assert report.acknowledged == report.sent, f"{report}\nthe history is in {history}"

    def _compare_replicas(self, workload: Workload) -> None:
        """Compare the replicas while the nodes run: acknowledged records do not change and are on all replicas."""
        nodes = self.stage.nodes
        nodes.wait_in_sync()
        ends = workload.recorder.acknowledged()
        for index, state in nodes.partitions(workload.topic).items():
            folders = {node_id: Path(nodes.node(node_id).folder) for node_id in state.replicas}
            self._wait_until_equal(folders, f"{workload.topic}-{index}", ends)

    def _wait_until_equal(self, folders: dict[int, Path], partition: str, ends: Mapping[str, int]) -> None:
        def are_equal() -> bool:
            replicas_agree(folders, partition, ends.get(partition, 0))
            return True

        eventually(are_equal, HEALED_TIMEOUT_S, f"the replicas of {partition} are equal")


def fresh_seed() -> int:
    return int.from_bytes(os.urandom(4), "big")
