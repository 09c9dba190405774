"""Random walks: no election loses a committed record, whatever fails, restarts, is delayed or is lost."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.metadata.replicated_partition import TOPIC, World

from chronik.metadata.commands import AlterConfigs
from chronik.metadata.elections import MIN_INSYNC_REPLICAS, BrokerStates
from chronik.metadata.image import NO_LEADER
from chronik.metadata.reassignment import Move, plan_moves

BROKERS = 4
broker_ids = st.integers(1, BROKERS)
replica_lists = st.lists(broker_ids, min_size=1, max_size=3, unique=True).map(tuple)


class Walk(RuleBasedStateMachine):
    """Steps of brokers, messages and administrators in any order."""

    durability: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.world = World(BROKERS, (1, 2, 3), self.durability)

    # -- brokers and records -------------------------------------------------------------------------------------------

    @rule(broker_id=broker_ids, count=st.integers(1, 3))
    def append(self, broker_id: int, count: int) -> None:
        for _ in range(count):
            self.world.append(broker_id)

    @rule()
    def append_at_the_leader(self) -> None:
        if self.world.partition.leader != NO_LEADER:
            self.world.append(self.world.partition.leader)

    @rule(broker_id=broker_ids, records=st.integers(0, 3), times=st.integers(1, 2))
    def fetch(self, broker_id: int, records: int, times: int) -> None:
        for _ in range(times):
            self.world.fetch(broker_id, records)

    @rule(broker_id=broker_ids, versions=st.sampled_from([1, 1, 2, 100]))
    def follow(self, broker_id: int, versions: int) -> None:
        self.world.follow(broker_id, versions)

    @rule(broker_id=broker_ids, leaving=st.sets(broker_ids, max_size=2))
    def propose_isr(self, broker_id: int, leaving: set[int]) -> None:
        self.world.propose_isr(broker_id, leaving)

    @rule(broker_id=broker_ids, to=broker_ids)
    def hand_over(self, broker_id: int, to: int) -> None:
        self.world.propose_isr(broker_id, set(), to)

    @precondition(lambda self: self.world.proposals)
    @rule(data=st.data(), is_again=st.booleans())
    def deliver(self, data: st.DataObject, is_again: bool) -> None:
        self.world.deliver(data.draw(st.integers(0, len(self.world.proposals) - 1)), is_again=is_again)

    @precondition(lambda self: self.world.proposals)
    @rule()
    def lose_a_proposal(self) -> None:
        self.world.proposals.pop(0)

    # -- failures and restarts -----------------------------------------------------------------------------------------

    @rule(broker_id=broker_ids)
    def heartbeat(self, broker_id: int) -> None:
        self.world.heartbeat(broker_id)

    @rule(broker_id=broker_ids)
    def ask_to_stop(self, broker_id: int) -> None:
        self.world.processes[broker_id].wants_shutdown = True
        self.world.heartbeat(broker_id)

    @rule(broker_id=broker_ids, cannot_write=st.booleans())
    def disk_hangs_or_is_well(self, broker_id: int, cannot_write: bool) -> None:
        self.world.processes[broker_id].cannot_write = cannot_write
        self.world.heartbeat(broker_id)

    @rule(broker_id=broker_ids, is_refused=st.booleans())
    def kill(self, broker_id: int, is_refused: bool) -> None:
        self.world.kill(broker_id)
        if is_refused:
            self.world.controller.broker_gone(broker_id, self.world.now_ms)

    @rule(broker_id=broker_ids, lost=st.integers(0, 3))
    def restart(self, broker_id: int, lost: int) -> None:
        if self.world.processes[broker_id].is_up:
            return
        partition = self.world.partition
        if set(partition.isr) | set(partition.eligible) <= {broker_id}:
            lost = 0
        self.world.restart(broker_id, lost)

    @rule(broker_id=broker_ids)
    def copy_folder(self, broker_id: int) -> None:
        self.world.copy_folder(broker_id)

    @rule(broker_id=broker_ids, is_removed=st.booleans())
    def lose_files(self, broker_id: int, is_removed: bool) -> None:
        """Lose the files of one replica that is down, while another replica that could lead is intact."""
        world, partition = self.world, self.world.partition
        whole = [
            member
            for member in (*partition.isr, *partition.eligible)
            if member != broker_id
            and not world.processes[member].has_lost
            and (self.durability == "synced" or world.processes[member].was_clean)
        ]
        if world.processes[broker_id].is_up or not whole or world.processes[broker_id].has_lost:
            return
        if is_removed:
            world.remove_log(broker_id)
        else:
            world.restore_folder(broker_id)

    @rule(broker_id=broker_ids, is_removed=st.booleans())
    def crash_and_return_without_files(self, broker_id: int, is_removed: bool) -> None:
        self.world.kill(broker_id)
        self.lose_files(broker_id, is_removed)
        self.restart(broker_id, 0)
        self.world.register(broker_id)

    @rule(broker_id=broker_ids, lost=st.integers(0, 3))
    def crash_and_return_at_once(self, broker_id: int, lost: int) -> None:
        self.world.kill(broker_id)
        self.restart(broker_id, lost)
        self.world.register(broker_id)

    @precondition(lambda self: self.world.proposals)
    @rule(lost=st.integers(1, 3))
    def a_proposed_member_crashes_and_returns_before_the_proposal_arrives(self, lost: int) -> None:
        self.crash_and_return_at_once(self.world.proposals[-1].new_isr[-1].broker_id, lost)
        self.world.deliver(len(self.world.proposals) - 1)

    @rule(broker_id=broker_ids)
    def register(self, broker_id: int) -> None:
        process = self.world.processes[broker_id]
        if process.is_up and not process.is_registered:
            self.world.register(broker_id)

    # -- the controller ------------------------------------------------------------------------------------------------

    @rule(ms=st.sampled_from([0, 50, 100, 300, 700]), everybody=st.booleans())
    def time_passes(self, ms: int, everybody: bool) -> None:
        self.world.now_ms += ms
        if everybody:
            for broker_id in self.world.processes:
                self.world.heartbeat(broker_id)
        self.world.run_controller()

    @rule()
    def sessions_end(self) -> None:
        for _ in range(7):
            self.world.now_ms += 300
            self.world.run_controller()

    @rule(commands_done=st.integers(0, 1))
    def controller_changes(self, commands_done: int) -> None:
        self.world.run_controller(commands_done)
        self.world.change_controller()

    @rule()
    def all_is_well_for_a_while(self) -> None:
        self.world.settle(500)

    # -- administrators ------------------------------------------------------------------------------------------------

    @rule(value=st.sampled_from(["1", "2", "3", None]))
    def set_min_insync(self, value: str | None) -> None:
        self.world.propose(AlterConfigs("topic", TOPIC, {MIN_INSYNC_REPLICAS: value}))

    @rule(replicas=st.none() | replica_lists)
    def move(self, replicas: tuple[int, ...] | None) -> None:
        image = self.world.image
        plan = plan_moves(image, BrokerStates.of(image), [Move(TOPIC, 0, replicas)])
        if plan.command is not None:
            self.world.propose(plan.command)

    @rule()
    def elect_preferred(self) -> None:
        self.world.controller.elect_preferred([(TOPIC, 0)], self.world.now_ms)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        """When all brokers are back, the partition has its leader, its full ISR and its target replicas."""
        world = self.world
        for broker_id, process in world.processes.items():
            process.cannot_write = False
            if process.wants_shutdown:
                world.kill(broker_id)
            if not process.is_up:
                world.restart(broker_id)
        world.settle(6_000)
        world.check()
        partition = world.partition
        if world.is_offline or world.is_refused:
            return
        assert not partition.is_being_reassigned, partition
        assert sorted(partition.isr) == sorted(partition.replicas), partition
        assert partition.leader == partition.replicas[0], partition
        assert not any(broker.is_fenced for broker in world.image.brokers.values())
        before = len(world.committed)
        world.append(partition.leader)
        world.settle(300)
        assert world.is_tainted or len(world.committed) > before


class SyncedWalk(Walk):
    durability = "synced"


class ReplicatedWalk(Walk):
    durability = "replicated"


SyncedWalk.TestCase.settings = settings(max_examples=60, stateful_step_count=50)
ReplicatedWalk.TestCase.settings = settings(max_examples=60, stateful_step_count=50)


class TestUnderSynced(SyncedWalk.TestCase):  # type: ignore[misc, valid-type]
    """Under durability=synced."""


class TestUnderReplicated(ReplicatedWalk.TestCase):  # type: ignore[misc, valid-type]
    """Under durability=replicated."""
