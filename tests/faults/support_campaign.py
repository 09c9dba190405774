"""A campaign: records flow through real nodes while single faults and mixes of faults are injected into them.

Time is divided into rounds. Each round creates a topic that clients write and read (`Workload`), and topics for
transactions (`TransactionWorkload`). It injects a few faults or mixes with quiet periods between them. Then the checker
verifies the clients' histories, every transaction has ended, and the replicas' files are compared. So nothing grows
with the length of a campaign. In every second round the clients use TLS, SASL and ACLs; an `Intruder` is refused in all
rounds. The seed determines the victims, the faults, their durations and their order; how the machine reacts is not
reproducible.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from tests.clients.drivers.java import Jvm
from tests.cluster.support_logs import replicas_agree, wait_until_replicas_agree
from tests.cluster.support_offsets import OffsetWatch
from tests.cluster.support_soak import SoakResults
from tests.cluster.support_transaction_workload import PARTITIONS as TRANSACTION_PARTITIONS
from tests.cluster.support_transaction_workload import TRANSFORMERS, TransactionWorkload, transaction_topics
from tests.cluster.support_workload import Workload
from tests.faults.support_faults import ALONE, CAMPAIGN, FILE_DAMAGE, HARD, SOFT, possible
from tests.faults.support_injector import FaultInjector
from tests.faults.support_intruder import Intruder, Target

from chronik.cli.options import with_cluster
from chronik.client.topics import Topics
from chronik.testing.history import Report

PARTITIONS = 4
RATE_PER_S = 300.0
STEPS_PER_ROUND = 4
QUIET_S = (0.5, 3.0)
SEGMENT_BYTES = 128 * 1024
MIX = "mix"
OPERATION_SHARE = 0.25
"""The share of mixes that run an operation or damage on a slow cluster, instead of several faults."""
SLOW_DISK = "slow-disk"
"""Not mixed with operations and damage, which wait until all replicas are in sync: a replica on a slow disk may lag for
as long as its disk is slow.
"""


class Campaign:
    """Injects faults into a cluster and checks the outcome. Raises an AssertionError if a check fails."""

    def __init__(
        self,
        injector: FaultInjector,
        seed: int,
        results: SoakResults,
        folder: Path,
        say: Callable[[str], None],
        only: Collection[str] = (),
        jvm: Jvm | None = None,
        transformers: int = TRANSFORMERS,
    ) -> None:
        self._injector = injector
        self._transformers = transformers
        self._seed = seed
        self._jvm = jvm
        self._results = results
        self._folder = folder
        self._say = say
        self._began_s = time.monotonic()
        self._faults = possible(injector)
        hard, soft, alone = ([name for name in kind if name in self._faults] for kind in (HARD, SOFT, ALONE))
        self._schedule = schedule(random.Random(seed), hard, soft, alone, only)
        self._rounds = 0
        self._injected: set[str] = set()
        """The faults of the current round."""
        left_out = sorted(CAMPAIGN.keys() - self._faults.keys())
        if left_out:
            say(f"links are proxies, and left out are {', '.join(left_out)}")

    def run(self, until_s: float, steps_max: int = sys.maxsize) -> None:
        """Run rounds until `until_s` on the monotonic clock or until `steps_max` steps were taken; at least one."""
        taken = 0
        while taken == 0 or (time.monotonic() < until_s and taken < steps_max):
            taken += self._round(min(STEPS_PER_ROUND, steps_max - taken), until_s)

    # -- a round -------------------------------------------------------------------------------------------------------

    def _round(self, steps: int, until_s: float) -> int:
        nodes = self._injector.nodes
        self._rounds += 1
        self._injected.clear()
        topic = nodes.new_topic(PARTITIONS, segment_bytes=str(SEGMENT_BYTES))
        history, transactional = (self._folder / f"{name}-{self._rounds}.jsonl" for name in ("history", "transactions"))
        taken = 0
        name = f"{self._seed} {self._rounds}"
        topics = transaction_topics(nodes)
        security = self._injector.security
        logins = security.admit(nodes, topic, topics) if self._is_secured else None
        with (
            OffsetWatch(nodes, topic, range(PARTITIONS)),
            Workload(nodes, topic, PARTITIONS, rate_per_s=RATE_PER_S, rereads=True, logins=logins) as workload,
            TransactionWorkload(nodes, name, self._jvm, self._transformers, logins, topics) as transactions,
            OffsetWatch(nodes, transactions.input, range(TRANSACTION_PARTITIONS)),
            Intruder(security, nodes, Target(topic, f"{transactions.input}-w0"), name) as intruder,
        ):
            workload.proceed(1)
            transactions.proceed()
            while taken == 0 or (taken < steps and time.monotonic() < until_s):
                self._quiet(workload)
                self._inject(next(self._schedule), workload)
                transactions.proceed()
                taken += 1
            report = workload.conclude(history)
            transaction_report = transactions.conclude(transactional)
        self._judge(report, history, f"; refused an intruder {intruder.refused.total()} times")
        assert report.acknowledged == report.sent, f"{report}\nthe history is in {history}"
        self._judge(transaction_report, transactional, f"; commits/aborts/unknown: {transactions.summary()}")
        nodes.wait_in_sync()
        self._compare_replicas(topic, workload.recorder.acknowledged())
        ends = transactions.ends()
        for each in transactions.topics:
            self._compare_replicas(each, ends)
        nodes.no_surprises()
        history.unlink()
        transactional.unlink()
        if self._is_secured:
            security.dismiss(nodes)
        for each in (topic, *transactions.topics):
            self._delete(each)
        return taken

    @property
    def _is_secured(self) -> bool:
        """Whether the clients of this round use TLS, SASL and ACLs: in every second round. The seed decides which."""
        return (self._seed + self._rounds) % 2 == 0

    def _delete(self, topic: str) -> None:
        with_cluster(self._injector.nodes.bootstrap, lambda online: Topics(online).delete(topic))

    def _quiet(self, workload: Workload) -> None:
        """Leave the nodes alone; sometimes one member leaves the group and another joins."""
        chance = self._injector.chance
        if chance.random() < 0.5:
            chance.choice(workload.members).stop()
            workload.new_member(f"member{len(workload.members)}")
        time.sleep(chance.uniform(*QUIET_S))

    def _inject(self, names: tuple[str, ...], workload: Workload) -> None:
        injector = self._injector
        injector.notes.clear()
        injector.is_mixed = len(names) > 1
        began_s, recorded_s = time.monotonic(), workload.recorder.now_s()
        self._injected.update(names)
        for name in names:
            self._results.fault(name)
        with contextlib.ExitStack() as held:
            for name in names:
                held.enter_context(self._faults[name](injector, workload))
                injector.hold()
        injector.recover(workload)
        kind = MIX if injector.is_mixed else names[0]
        if injector.is_mixed:
            self._results.fault(MIX)
        for name, seconds, goal_s in injector.measured:
            self._results.measure(name, seconds, "s", at_most=goal_s)
            injector.note(f"{name}: {seconds:.1f} s")
        injector.measured.clear()
        gap_ms = workload.longest_gap_ms(recorded_s)
        self._results.unavailable(kind, gap_ms)
        minutes, seconds = divmod(int(began_s - self._began_s), 60)
        took_s = time.monotonic() - began_s
        self._say(
            f"{minutes:3}:{seconds:02}  {'+'.join(names)}: {'; '.join(injector.notes)}; all well after {took_s:.1f} s, "
            f"a partition without acknowledgement for at most {gap_ms:.0f} ms"
        )

    # -- verdict -------------------------------------------------------------------------------------------------------

    def _judge(self, report: Report, history: Path, more: str = "") -> None:
        self._results.history(report)
        lag = report.worst_lag
        if lag is not None:
            self._results.measure("campaign: worst real-time lag of a consumer", lag.seconds, "s")
        behind = "" if lag is None else f", a consumer behind for at most {lag.seconds:.1f} s"
        protocol = "SASL_SSL" if self._is_secured else "PLAINTEXT"
        self._say(f"       round {self._rounds} ({protocol}): {str(report).splitlines()[0]}{behind}{more}")
        assert report.is_clean, f"{report}\nthe history is in {history}"

    def _compare_replicas(self, topic: str, ends: Mapping[str, int]) -> None:
        """Compare the replicas while the nodes run: acknowledged records do not change and are on all replicas."""
        nodes = self._injector.nodes
        for index, state in nodes.partitions(topic).items():
            partition = f"{topic}-{index}"
            end = ends.get(partition, 0)
            if self._injected & FILE_DAMAGE.keys():
                # A damaged replica may be in sync before its damage is found and healed.
                wait_until_replicas_agree(nodes, state.replicas, partition, end)
            else:
                replicas_agree({node_id: nodes.data_folder(node_id) for node_id in state.replicas}, partition, end)


def schedule(
    chance: random.Random, hard: Sequence[str], soft: Sequence[str], alone: Sequence[str], only: Collection[str] = ()
) -> Iterator[tuple[str, ...]]:
    """Yield steps forever: each fault alone, in a new random order each time, and a mix after every second one.

    With `only`, yield these faults and no mixes.
    """
    faults = sorted(name for name in (*hard, *soft, *alone) if not only or name in only)
    while True:
        for number, name in enumerate(chance.sample(faults, len(faults))):
            yield (name,)
            if number % 2 and not only:
                yield mix(chance, hard, soft, alone)


def mix(chance: random.Random, hard: Sequence[str], soft: Sequence[str], alone: Sequence[str]) -> tuple[str, ...]:
    if chance.random() < OPERATION_SHARE:
        return chance.choice([name for name in soft if name != SLOW_DISK]), chance.choice(alone)
    return tuple(chance.sample([*hard, *soft], chance.randint(2, 3)))


def fresh_seed() -> int:
    return int.from_bytes(os.urandom(4), "big")
