"""The driver of the Raft core: a message waits for the writes it depends on, and a closed store is never written."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from random import Random
from typing import cast
from uuid import UUID

import pytest
from tests.raft.harness import founded, store_id, stored_log
from tests.raft.memory_store import MemoryRaftStore
from tests.support.eventually import until

from chronik.node.config import NodeConfig
from chronik.node.disk_watch import DiskWatch
from chronik.node.environment import Environment
from chronik.node.membership.internal_api import InternalKey
from chronik.node.membership.peers import Peers
from chronik.node.membership.raft_service import RaftService
from chronik.node.runtime import Runtime
from chronik.observe.logging import silent_logger
from chronik.observe.metrics import Metrics
from chronik.raft.messages import (
    AppendReply,
    Heartbeat,
    HeartbeatReply,
    Message,
    TimeoutNow,
    VoteReply,
    VoteRequest,
    decode_message,
    encode_message,
)
from chronik.raft.node import RaftNode
from chronik.raft.ready import ProposalId, RoleKind
from chronik.raft.state import RaftSettings
from chronik.raft.store import Entry, EntryKind, Persist, Snapshot, StoredState, StoreError
from chronik.storage.disk import RealDisk

DISK_TIMEOUT_MS = 500
# Long enough that a leader on a busy machine does not step down between two turns of a test.
SETTINGS = RaftSettings(heartbeat_interval_ms=50, election_timeout_ms=300)
OWN, OTHER = UUID(int=1), UUID(int=2)


class GatedStore(MemoryRaftStore):
    """A store whose writes the test can block or fail."""

    def __init__(self, stored: StoredState | None = None) -> None:
        super().__init__(OWN)
        self.stored = stored or self.stored
        self.gate = threading.Event()
        self.gate.set()
        self.failures = 0
        self.cause: OSError | None = None
        self.begun = 0
        self.writes = 0
        self.is_closed = False

    def persist(self, persist: Persist) -> None:
        self.begun += 1
        assert self.gate.wait(10)
        assert not self.is_closed, "a write after the store was closed"
        if self.failures:
            self.failures -= 1
            raise StoreError("no space") from self.cause
        super().persist(persist)
        self.writes += 1

    def close(self) -> None:
        self.is_closed = True


class FakePeers:
    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send(self, node_id: int, key: InternalKey, body: bytes) -> None:
        self.sent.append(decode_message(body))

    def learn(self, node_id: int, endpoint: object) -> None: ...


class Machine:
    """Records the commands that were applied."""

    def __init__(self) -> None:
        self.applied: list[bytes] = []
        self.failures: list[Exception] = []

    def restore(self, snapshot: Snapshot) -> None: ...

    def apply(self, entries: Sequence[Entry]) -> None:
        self.applied += [entry.data for entry in entries if entry.kind is EntryKind.COMMAND]

    def dropped(self, proposals: Sequence[ProposalId]) -> None: ...

    def write_failed(self, error: Exception) -> None:
        self.failures.append(error)


class Scene:
    def __init__(self, executor: ThreadPoolExecutor, founders: tuple[int, ...], stored: StoredState | None) -> None:
        loop = asyncio.get_running_loop()
        self.store = GatedStore(stored)
        self.peers = FakePeers()
        self.machine = Machine()
        env = Environment(RealDisk(), Random(1), executor, lambda: 0)
        node = RaftNode(
            1, self.store.load(), SETTINGS, env.random, int(loop.time() * 1000), seeds=(1, 2), founders=founders
        )
        self.fatal: list[Exception] = []
        self.disk = DiskWatch(loop, DISK_TIMEOUT_MS, silent_logger())
        runtime = Runtime.make(NodeConfig(), env, Metrics(), silent_logger())
        peers = cast(Peers, self.peers)
        self.raft = RaftService(runtime, self.disk, node, self.store, peers, self.machine, self.fatal.append)
        self.raft.start()

    async def until_established(self) -> None:
        """Wait until this node leads and has committed all its entries."""
        await until(lambda: self.raft.node.is_leader)
        await until(lambda: self.raft.node.commit_index == self.raft.node.last_index)

    def votes(self) -> list[VoteReply]:
        return [message.body for message in self.peers.sent if isinstance(message.body, VoteReply)]


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


@asynccontextmanager
async def new_scene(
    executor: ThreadPoolExecutor,
    founders: tuple[int, ...] = (1,),
    *,
    stored: StoredState | None = None,
    closes: bool = True,
) -> AsyncIterator[Scene]:
    scene = Scene(executor, founders, stored)
    yield scene
    scene.store.gate.set()
    if closes:
        await scene.raft.close()
        assert scene.store.is_closed


async def test_a_single_voter_leads_and_applies_proposals(executor: ThreadPoolExecutor) -> None:
    async with new_scene(executor) as scene:
        await until(lambda: scene.raft.node.is_leader)
        assert scene.raft.is_alone
        for number in range(20):
            assert isinstance(scene.raft.propose(b"%d" % number), ProposalId)
        before = scene.store.writes
        await until(lambda: len(scene.machine.applied) == 20)
        assert scene.machine.applied == [b"%d" % number for number in range(20)]
        assert scene.store.writes - before <= 3, "what is proposed together is written together"


async def test_a_vote_is_sent_only_after_it_is_stored(executor: ThreadPoolExecutor) -> None:
    async with new_scene(executor, founders=()) as scene:
        # After a start, a node grants no vote for an election timeout, because it may have heard a leader before.
        await asyncio.sleep(2 * SETTINGS.election_timeout_ms / 1000)
        scene.store.gate.clear()
        request = Message(2, OTHER, 1, OWN, 7, VoteRequest(5, 6))
        scene.raft.received(2, encode_message(request))
        await asyncio.sleep(0.05)
        assert scene.votes() == []
        assert scene.store.stored.hard_state.vote is None
        scene.store.gate.set()
        await until(scene.votes)
        assert scene.votes() == [VoteReply(True)]
        durable = scene.store.load().hard_state
        assert (durable.term, durable.vote) == (7, 2)


async def test_a_forged_or_malformed_message_has_no_effect(executor: ThreadPoolExecutor) -> None:
    async with new_scene(executor, founders=()) as scene:
        await asyncio.sleep(2 * SETTINGS.election_timeout_ms / 1000)
        forged = Message(2, OTHER, 1, OWN, 7, VoteRequest(5, 6))
        scene.raft.received(3, encode_message(forged))
        scene.raft.received(2, b"")
        scene.raft.received(2, b"\xff" * 50)
        await asyncio.sleep(0.05)
        assert scene.votes() == []
        assert scene.raft.node.term == 0
        assert not scene.fatal


async def test_a_failed_write_is_retried_and_nothing_is_applied_before_it_succeeds(
    executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chronik.node.membership.raft_service.WRITE_RETRY_S", 0.05)

    async with new_scene(executor) as scene:
        await scene.until_established()
        scene.store.failures = 2
        scene.raft.propose(b"x")
        await until(lambda: scene.raft.write_error is not None)
        assert scene.machine.applied == []
        await until(lambda: scene.machine.applied == [b"x"])
        assert len(scene.machine.failures) == 2
        assert scene.raft.write_error is None


async def test_closing_waits_for_the_running_write_and_starts_no_other(executor: ThreadPoolExecutor) -> None:
    async with new_scene(executor) as scene:
        await scene.until_established()
        scene.store.gate.clear()
        scene.raft.propose(b"x")
        await asyncio.sleep(0.02)
        closing = asyncio.create_task(scene.raft.close())
        await asyncio.sleep(0.02)
        assert not scene.store.is_closed
        scene.store.gate.set()
        await closing
        assert scene.store.is_closed
        assert scene.machine.applied == []


async def test_a_failing_state_machine_stops_the_node(executor: ThreadPoolExecutor) -> None:
    async with new_scene(executor) as scene:
        await until(lambda: scene.raft.node.is_leader)

        def refuse(entries: Sequence[Entry]) -> None:
            raise ValueError("a command from the future")

        scene.machine.apply = refuse  # type: ignore[method-assign]
        scene.raft.propose(b"x")
        await until(lambda: scene.fatal)
        assert "future" in str(scene.fatal[0])


# A store that hangs

THREE = founded((1, 2, 3))


def vote_for(scene: Scene, *, is_pre_vote: bool) -> bool:
    """Let node 2 grant the requested vote, if there is a request; return whether there was one."""
    asked = [
        message
        for message in scene.peers.sent
        if isinstance(message.body, VoteRequest) and message.target == 2 and message.body.is_pre_vote == is_pre_vote
    ]
    if asked:
        vote = Message(2, store_id(2), 1, store_id(1), asked[-1].term, VoteReply(True, is_pre_vote))
        scene.raft.received(2, encode_message(vote))
    return bool(asked)


async def lead(scene: Scene) -> None:
    """Make node 1 leader with the vote of node 2."""
    await until(lambda: vote_for(scene, is_pre_vote=True))
    await until(lambda: vote_for(scene, is_pre_vote=False))
    await until(lambda: scene.raft.node.is_leader)


def answer_all(scene: Scene, *peers: int) -> bool:
    """Let the peers acknowledge the leader's whole log and its last heartbeat."""
    node = scene.raft.node
    rounds = [message.body.round for message in scene.peers.sent if isinstance(message.body, Heartbeat)]
    for peer in peers:
        for body in (AppendReply(node.last_index), HeartbeatReply(rounds[-1])):
            scene.raft.received(peer, encode_message(Message(peer, store_id(peer), 1, store_id(1), node.term, body)))
    return True


async def test_a_leader_with_a_hung_write_steps_down_and_starts_no_other_write(
    executor: ThreadPoolExecutor,
) -> None:
    async with new_scene(executor, stored=stored_log(1, [1], THREE)) as scene:
        await lead(scene)
        await until(lambda: answer_all(scene, 2) and scene.raft.node.applied_index == scene.raft.node.last_index)
        scene.store.gate.clear()
        proposal = scene.raft.propose(b"x")
        assert isinstance(proposal, ProposalId)
        writes = scene.store.begun
        # Both peers have the entry: it is committed, but not applied here.
        await until(lambda: answer_all(scene, 2, 3) and scene.raft.node.commit_index == proposal.index)
        assert scene.raft.write_error is None
        while scene.raft.write_error is None:
            assert scene.raft.node.is_leader
            answer_all(scene, 2, 3)
            await asyncio.sleep(0.01)
        assert scene.disk.is_stuck
        assert not scene.raft.node.is_leader
        assert [message.target for message in scene.peers.sent if isinstance(message.body, TimeoutNow)] == [2]
        await asyncio.sleep(10 * SETTINGS.election_timeout_ms / 1000)
        assert scene.raft.node.role is RoleKind.FOLLOWER, "it does not campaign while its store hangs"
        assert scene.store.begun == writes + 1
        assert scene.machine.applied == []
        scene.store.gate.set()
        await until(lambda: scene.machine.applied == [b"x"])
        assert scene.raft.write_error is None
        assert not scene.disk.is_stuck
        await until(lambda: scene.raft.node.role is not RoleKind.FOLLOWER)


async def test_a_leader_whose_writes_fail_steps_down(executor: ThreadPoolExecutor) -> None:
    async with new_scene(executor, stored=stored_log(1, [1], THREE)) as scene:
        await lead(scene)
        await until(lambda: answer_all(scene, 2) and scene.raft.node.applied_index == scene.raft.node.last_index)
        scene.store.failures = 1_000
        scene.raft.propose(b"x")
        await until(lambda: scene.raft.write_error is not None)
        await until(lambda: answer_all(scene, 2, 3) and not scene.raft.node.is_leader)
        scene.store.failures = 0
        await until(lambda: scene.machine.applied == [b"x"])


async def test_persistent_write_failures_mark_the_disk_stuck_unless_it_is_full(
    executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chronik.node.membership.raft_service.WRITE_RETRY_S", 0.05)

    async with new_scene(executor) as scene:
        await scene.until_established()
        scene.store.cause = OSError(errno.ENOSPC, "no space left on device")
        scene.store.failures = 1_000
        scene.raft.propose(b"x")
        await asyncio.sleep(2 * DISK_TIMEOUT_MS / 1000)
        assert scene.raft.write_error is not None
        assert not scene.disk.is_stuck
        scene.store.failures = 0
        await until(lambda: scene.raft.write_error is None)
        scene.store.cause = OSError(errno.EIO, "device")
        scene.store.failures = 1_000
        scene.raft.propose(b"y")
        await until(lambda: scene.disk.is_stuck)
        scene.store.failures = 0
        await until(lambda: not scene.disk.is_stuck)


async def test_closing_does_not_wait_for_a_hung_write(executor: ThreadPoolExecutor) -> None:
    async with new_scene(executor, closes=False) as scene:
        await scene.until_established()
        scene.store.gate.clear()
        begun = scene.store.begun
        scene.raft.propose(b"x")
        await until(lambda: scene.store.begun > begun)
        async with asyncio.timeout(5 * DISK_TIMEOUT_MS / 1000):
            await scene.raft.close()
        assert not scene.store.is_closed, "a thread still writes to it"
