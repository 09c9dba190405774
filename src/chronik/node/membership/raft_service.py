"""Drives the Raft core on the node's loop: timers and messages in, messages and writes out, in the core's order.

The core makes all decisions. This module only holds its timer, the single write that may run in the executor, and the
sending of its messages to the peers. Committed entries go to the `StateMachine`, on the loop, in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from chronik.client.endpoint import Endpoint, EndpointError
from chronik.node.disk_watch import NO_ANSWER, DiskWatch
from chronik.node.membership.internal_api import InternalKey
from chronik.node.membership.peers import Peers
from chronik.node.membership.raft_store import is_full
from chronik.node.runtime import Runtime
from chronik.raft.membership import MembershipChange
from chronik.raft.messages import Message, decode_message, encode_message
from chronik.raft.node import RaftNode
from chronik.raft.ready import (
    Event,
    LeaderEstablished,
    MembershipChanged,
    NodeIdTaken,
    ProposalId,
    Ready,
    Refused,
    RoleChanged,
)
from chronik.raft.store import Entry, RaftError, RaftStore, Snapshot, StoreError

WRITE_RETRY_S = 1.0
NO_LEADER = -1
NEVER_MS = -(1 << 60)


class StateMachine(Protocol):
    """The consumer of the committed log."""

    def restore(self, snapshot: Snapshot) -> None: ...

    def apply(self, entries: Sequence[Entry]) -> None: ...

    def dropped(self, proposals: Sequence[ProposalId]) -> None:
        """Handle proposals that can never be applied."""

    def write_failed(self, error: Exception) -> None:
        """Handle a failed store write. The write is retried, so the proposals may still be applied."""


class RaftService:
    """One member of the Raft group. Owned by the loop.

    Invariant: messages that depend on the write of a Ready are sent only after the store holds that write.
    """

    def __init__(
        self,
        runtime: Runtime,
        disk: DiskWatch,
        node: RaftNode,
        store: RaftStore,
        peers: Peers,
        machine: StateMachine,
        on_fatal: Callable[[Exception], None],
    ) -> None:
        self.node = node
        self._loop = runtime.loop
        self._executor = runtime.env.executor
        self._disk = disk
        self._store = store
        self._peers = peers
        self._machine = machine
        self._log = runtime.log.bind(component="raft")
        self._on_fatal = on_fatal
        self._listeners: list[Callable[[Event], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms: int | None = None
        self._is_pump_due = False
        self._writing: asyncio.Task[None] | None = None
        self._job: asyncio.Future[None] | None = None
        self._is_closed = False
        self.is_alone = _is_alone(node)
        """Whether this node is the only member, so that its decisions need no other vote."""
        self.write_error: Exception | None = None
        """Why the store cannot write; None while it can."""
        self.is_storage_failed = False
        """Whether the store cannot write or any other write of this node hangs. Then this node should not lead."""
        self.is_changing_members = False
        """Whether the membership in force is not yet committed, according to the core's events."""
        self._taken_ids: dict[int, None] = {}

    def start(self) -> None:
        self._disk.subscribe(self._storage_changed)
        self._tick()

    async def close(self) -> None:
        """Finish the running write, then close the store. Wait for neither if the disk does not answer."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._writing is not None:
            self._writing.cancel()
        try:
            if self._job is not None:
                # Wait for the job, not the task: the thread keeps writing even if the task was cancelled.
                await self._disk.wait(asyncio.gather(self._job, return_exceptions=True))
            await self._disk.wait(self._loop.run_in_executor(self._executor, self._store.close))
        except TimeoutError as error:
            self._log.error("raft_store_not_closed", reason=str(error))

    def subscribe(self, listener: Callable[[Event], None]) -> None:
        """Call `listener` with each event of the core, after earlier committed entries are applied."""
        self._listeners.append(listener)

    def now(self) -> int:
        return int(self._loop.time() * 1000)

    @property
    def leader_id(self) -> int:
        leader = self.node.leader
        return NO_LEADER if leader is None else leader

    def led_at_ms(self) -> int:
        """Return the latest time at which no other node can have led: now, while this node holds the leader lease."""
        until_ms = self.node.leader_lease_until_ms
        return NEVER_MS if until_ms is None else min(self.now(), until_ms)

    def received(self, peer_id: int, data: bytes) -> None:
        """Pass on a message from a peer whose connection is authenticated as `peer_id`."""
        try:
            message = decode_message(data)
        except ValueError as error:
            self._log.warning("raft_message_refused", peer=peer_id, reason=str(error))
            return
        if message.source != peer_id:
            self._log.error(
                "raft_message_refused", peer=peer_id, reason=f"it claims to come from node {message.source}"
            )
        elif not self._is_closed:
            self._step(lambda: self.node.step(message, self.now()))

    def propose(self, data: bytes) -> ProposalId | Refused:
        outcome = self.node.propose(data, self.now())
        self._pump_soon()
        return outcome

    def propose_membership(self, change: MembershipChange) -> ProposalId | Refused:
        outcome = self.node.propose_membership(change, self.now())
        self._pump_soon()
        return outcome

    def transfer_leadership(self) -> Refused | None:
        outcome = self.node.transfer_leadership(None, self.now())
        self._pump_soon()
        return outcome

    def compact(self, index: int, data: bytes) -> None:
        self.node.compact(index, data)
        self._pump_soon()

    def _tick(self) -> None:
        self._timer = self._timer_ms = None
        if not self._is_closed:
            self._step(lambda: self.node.tick(self.now()))

    def _step(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:
            self._fail(error)
            return
        self._pump()

    def _pump_soon(self) -> None:
        """Run `_pump` at the end of this loop iteration, so that proposals made together are sent together."""
        if not self._is_pump_due:
            self._is_pump_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._is_pump_due = False
        try:
            while not self._is_closed and (ready := self.node.ready()) is not None:
                self._carry_out(ready)
        except Exception as error:
            self._fail(error)
            return
        self._set_timer()

    def _carry_out(self, ready: Ready) -> None:
        self._send(ready.messages)
        if ready.persist is not None:
            self._writing = self._loop.create_task(self._write(ready), name="raft-write")
        if ready.restore is not None:
            self._machine.restore(ready.restore)
        if ready.committed:
            self._machine.apply(ready.committed)
        if ready.proposals_dropped:
            self._machine.dropped(ready.proposals_dropped)
        for event in ready.events:
            self._handle_event(event)
            for listener in self._listeners:
                listener(event)

    def _send(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._peers.send(message.target, InternalKey.RAFT, encode_message(message))

    async def _write(self, ready: Ready) -> None:
        """Make one Ready durable, with as many retries as it needs, then continue from there.

        A write that fails is retried. A write that hangs is not, because it may still take effect at any time.
        """
        assert ready.persist is not None
        persist = ready.persist
        late = StoreError(NO_ANSWER)
        write = self._disk.begin(lambda: self._write_failed(late, then="other nodes lead until it does"))
        while True:
            try:
                self._job = self._loop.run_in_executor(self._executor, self._store.persist, persist)
                await asyncio.shield(self._job)
                break
            except Exception as error:
                if is_full(error):
                    # The disk answers but is full. Meanwhile the node serves requests that need no space.
                    write.end()
                self._write_failed(error, then="the write is retried every second")
            await asyncio.sleep(WRITE_RETRY_S)
        write.end()
        if self.write_error is not None:
            self.write_error = None
            self._log.info("raft_write_recovered")
        self._writing = None
        if not self._is_closed:
            self._step(lambda: self._persisted(ready))
            self._storage_changed()

    def _write_failed(self, error: Exception, then: str) -> None:
        if self.write_error is None:
            self._log.error("raft_write_failed", error=str(error), then=then)
        self.write_error = error
        self._machine.write_failed(error)
        self._storage_changed()

    def _storage_changed(self) -> None:
        """Report to the core whether this node can write, judging by the Raft store and all other writes."""
        is_failed = self.write_error is not None or self._disk.is_stuck
        if is_failed == self.is_storage_failed or self._is_closed:
            return
        self.is_storage_failed = is_failed
        report = self.node.storage_failed if is_failed else self.node.storage_recovered
        self._step(lambda: report(self.now()))

    def _persisted(self, ready: Ready) -> None:
        self.node.persisted(ready, self.now())
        self._send(ready.messages_after)

    def _set_timer(self) -> None:
        """Set the timer to the core's next deadline. It is only ever moved earlier: an early timer is harmless."""
        deadline_ms = self.node.next_deadline_ms()
        if deadline_ms is None or self._is_closed or (self._timer_ms is not None and self._timer_ms <= deadline_ms):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ms = deadline_ms
        # Use the next whole millisecond: `now` rounds down, so a timer that fires early would only be set again.
        self._timer = self._loop.call_at((deadline_ms + 1) / 1000, self._tick)

    def _handle_event(self, event: Event) -> None:
        match event:
            case RoleChanged(role=role, term=term, leader=leader):
                self._log.info("raft_role", role=role.value, term=term, leader=leader)
            case LeaderEstablished(term=term):
                self._log.info("controller_elected", term=term)
            case MembershipChanged(membership=membership, is_committed=is_committed):
                self.is_alone = _is_alone(self.node)
                self.is_changing_members = not is_committed
                self.learn_members()
                if is_committed:
                    voters = [member.node_id for member in membership.voters]
                    learners = [member.node_id for member in membership.members if not member.is_voter]
                    self._log.info("members_changed", voters=voters, learners=learners)
            case NodeIdTaken(node_id=node_id) if node_id not in self._taken_ids:
                self._taken_ids[node_id] = None
                self._log.error(
                    "node_id_taken",
                    peer=node_id,
                    reason=f"a node with an empty data folder requests to join as node {node_id}, which is alive: "
                    "give it a node_id of its own",
                )

    def learn_members(self) -> None:
        """Learn the members' addresses."""
        for member in self.node.membership.members:
            with suppress(EndpointError):
                self._peers.learn(member.node_id, Endpoint.parse(member.address))

    def _fail(self, error: Exception) -> None:
        """Stop the node after an impossible state in the core or the state machine: continuing would spread it."""
        if self._is_closed:
            return
        self._is_closed = True
        if isinstance(error, RaftError):
            self._log.error("raft_failed", error=str(error))
        else:
            self._log.exception("raft_failed", error=repr(error))
        self._on_fatal(error)


def _is_alone(node: RaftNode) -> bool:
    return [member.node_id for member in node.membership.members] == [node.node_id]
