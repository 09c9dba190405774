"""The ordered, durable log of metadata commands, and the image that results from it.

Callers propose commands to `MetadataLog`, and receive the events once a command is committed and applied on this node.
Raft orders the commands; a single-node cluster is a Raft group of one. Only the controller, the leader of that group,
accepts proposals. It validates each one against the image that includes all earlier proposals.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

from chronik.metadata.apply import apply
from chronik.metadata.commands import Command, decode_command, encode_command
from chronik.metadata.events import Event, events_between
from chronik.metadata.image import ClusterImage, decode_image, encode_image
from chronik.node.environment import Environment
from chronik.node.membership.raft_service import RaftService
from chronik.observe.logging import Logger
from chronik.raft.ready import Event as RaftEvent
from chronik.raft.ready import LeaderEstablished, ProposalId, Reason, Refused, RoleChanged, RoleKind
from chronik.raft.store import Entry, EntryKind, RaftError, Snapshot
from chronik.wire.errors import ErrorCode, KafkaError

SNAPSHOT_COMMANDS = 1000
"""A snapshot is taken after this many commands, so that replay at start takes tens of milliseconds."""

WAITING_COMMANDS_MAX = 10_000
"""A proposal is refused instead of queued if this many commands are pending."""

PROPOSAL_TIMEOUT_S = 30.0
CLOSE_WAIT_S = 1.0

Proposal: TypeAlias = Command | Callable[[ClusterImage], Command]
Listener: TypeAlias = Callable[[ClusterImage, Sequence[Event]], None]


class Planned(Protocol):
    """The changes that were decided for a request; None if nothing is to change."""

    @property
    def command(self) -> Command | None: ...


P = TypeVar("P", bound=Planned)


class NotController(KafkaError):
    """Another node is the controller: `controller_id`, or -1 if none is known. The proposal had no effect."""

    def __init__(self, controller_id: int) -> None:
        where = f"node {controller_id} is" if controller_id >= 0 else "no controller is known"
        super().__init__(ErrorCode.not_controller, f"this node is not the controller: {where}")
        self.controller_id = controller_id


@dataclass(slots=True)
class _Waiting:
    """A pending proposal and its speculative result."""

    before: ClusterImage
    image: ClusterImage
    events: list[Event]
    done: asyncio.Future[list[Event]]


class MetadataLog:
    """The metadata as this node has applied it. Owned by the node's loop.

    Invariant: `image` holds exactly the commands that Raft delivered as committed. While this node is the controller,
    `_projected` also holds all pending commands, so each proposal is validated against everything before it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, log: Logger) -> None:
        self._loop = loop
        self._log = log.bind(component="metadata")
        self._raft: RaftService
        self.image = ClusterImage()
        """The image after every command that is committed and applied on this node."""
        self._projected = self.image
        self.is_controller = False
        """Whether this node is the controller, so that it may propose."""
        self.applied_index = 0
        """The last Raft entry that was applied on this node. It is durable on this node."""
        self._snapshot_index = 0
        self._waiting: dict[ProposalId, _Waiting] = {}
        self._listeners: list[Listener] = []
        self._version_waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._is_closed = False

    def attach(self, raft: RaftService) -> None:
        """Set the Raft group that orders the commands. Called once, before `raft` starts."""
        self._raft = raft
        raft.subscribe(self._raft_event)

    @property
    def version(self) -> int:
        return self.image.version

    @property
    def controller_id(self) -> int:
        """The controller that this node knows of; -1 for none."""
        return self._raft.leader_id

    def subscribe(self, listener: Listener) -> None:
        """Call `listener(image, events)` on the loop after each applied command, before its proposer resumes."""
        self._listeners.append(listener)

    async def applied(self, version: int) -> None:
        """Wait until this node's image is at least as new as `version`."""
        if self.image.version >= version:
            return
        reached: asyncio.Future[None] = self._loop.create_future()
        self._version_waiters.append((version, reached))
        await reached

    async def propose(self, proposal: Proposal) -> list[Event]:
        """Propose one command; return its events once it is committed and applied on this node.

        A function receives the image with all earlier proposals applied, and returns the command. Validation belongs in
        it, because no other command can come in between. If it raises, or NotController is raised, nothing is written.
        After KAFKA_STORAGE_ERROR or REQUEST_TIMED_OUT the command may still take effect.
        """
        done = self.submit(proposal)
        try:
            async with asyncio.timeout(PROPOSAL_TIMEOUT_S):
                # Shielded: later proposals were validated against this one, so a timeout must not cancel it.
                return await asyncio.shield(done)
        except TimeoutError:
            raise KafkaError(
                ErrorCode.request_timed_out, "no majority has committed the change yet; it may still take effect"
            ) from None

    def submit(self, proposal: Proposal) -> asyncio.Future[list[Event]]:
        """Propose without waiting. Raise if the proposal is invalid; the future receives its outcome."""
        self._check_may_propose()
        command = proposal(self._projected) if callable(proposal) else proposal
        image, events = apply(self._projected, command)
        outcome = self._raft.propose(encode_command(command))
        if isinstance(outcome, Refused):
            raise self._refusal(outcome)
        done: asyncio.Future[list[Event]] = self._loop.create_future()
        # Retrieve the exception, because the proposer may be gone: an unretrieved one is logged as an error.
        done.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._waiting[outcome] = _Waiting(self._projected, image, events, done)
        self._projected = image
        return done

    async def propose_plan(self, make_plan: Callable[[ClusterImage], P]) -> P:
        """Propose the command that `make_plan` makes for the newest image, if it makes one. Return the plan."""
        self._check_may_propose()
        plan = make_plan(self._projected)
        command = plan.command
        if command is not None:
            await self.propose(command)
        return plan

    def _check_may_propose(self) -> None:
        if not self.is_controller or self._is_closed:
            raise NotController(self.controller_id if not self.is_controller else -1)
        if len(self._waiting) >= WAITING_COMMANDS_MAX:
            raise KafkaError(ErrorCode.request_timed_out, "too many metadata changes are pending")
        if self._raft.write_error is not None and self._raft.is_alone:
            # In a group of several nodes the others may still commit it, which shows that they can write.
            raise KafkaError(ErrorCode.kafka_storage_error, f"metadata cannot be written: {self._raft.write_error}")

    def _refusal(self, refused: Refused) -> KafkaError:
        if refused.reason is Reason.TOO_LARGE:
            return KafkaError(ErrorCode.policy_violation, "the change is too large for one command: split it")
        if refused.reason is Reason.BUSY:
            return KafkaError(ErrorCode.request_timed_out, "too many metadata changes are pending")
        return NotController(-1 if refused.leader is None else refused.leader)

    async def close(self) -> None:
        """Refuse new proposals, wait up to CLOSE_WAIT_S for pending ones, then stop applying entries."""
        self._is_closed = True
        waiting = [each.done for each in self._waiting.values() if not each.done.done()]
        if waiting:
            await asyncio.wait(waiting, timeout=CLOSE_WAIT_S)
        self.is_controller = False
        await self._raft.close()
        self._fail_waiting(
            KafkaError(ErrorCode.request_timed_out, "the node stopped; the change may still take effect")
        )
        for _, waiter in self._version_waiters:
            if not waiter.done():
                waiter.set_exception(KafkaError(ErrorCode.request_timed_out, "the node stopped"))
                waiter.exception()  # retrieved: the waiter may be gone

    def _raft_event(self, event: RaftEvent) -> None:
        match event:
            case LeaderEstablished():
                self._projected = self.image
                self.is_controller = True
            case RoleChanged(role=role) if role is not RoleKind.LEADER:
                # The next leader may commit or drop the pending proposals; Raft reports which.
                self.is_controller = False
                if self._raft.is_storage_failed:
                    # This node cannot apply them before it can write them.
                    self._fail_waiting(_taken_over())

    def restore(self, snapshot: Snapshot) -> None:
        try:
            image = decode_image(snapshot.data)
        except ValueError as error:
            raise RaftError(f"this version cannot read the snapshot ({error}): use the one that wrote it") from None
        events = events_between(self.image, image)
        self.applied_index = self._snapshot_index = snapshot.index
        self._set_image(image, events)
        for proposal in [each for each in self._waiting if each.index <= snapshot.index]:
            _settle(self._waiting.pop(proposal), _taken_over())

    def apply(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self.applied_index = entry.index
            if entry.kind is EntryKind.COMMAND:
                self._apply(entry)
        if self.applied_index - self._snapshot_index >= SNAPSHOT_COMMANDS:
            self._snapshot_index = self.applied_index
            self._raft.compact(self.applied_index, encode_image(self.image))

    def _apply(self, entry: Entry) -> None:
        waiting = self._waiting.pop(ProposalId(entry.index, entry.term), None)
        if waiting is not None and waiting.before is self.image:
            self._set_image(waiting.image, waiting.events)
            _settle(waiting, waiting.events)
            return
        try:
            command = decode_command(entry.data)
        except ValueError as error:
            raise RaftError(
                f"metadata command {entry.index} cannot be read ({error}): was it written by a newer version?"
            ) from None
        try:
            image, events = apply(self.image, command)
        except KafkaError as error:
            # The command is invalid after the ones before it. Every node refuses it alike.
            _settle(waiting, error)
            return
        self._set_image(image, events)
        _settle(waiting, events)

    def _set_image(self, image: ClusterImage, events: Sequence[Event]) -> None:
        self.image = image
        for listener in self._listeners:
            try:
                listener(image, events)
            except Exception:
                # The command is applied; a failing listener must not stop other listeners or later commands.
                self._log.exception("metadata_listener_failed", version=image.version)
        for version, waiter in self._version_waiters:
            if version <= image.version and not waiter.done():
                waiter.set_result(None)
        self._version_waiters = [each for each in self._version_waiters if not each[1].done()]

    def dropped(self, proposals: Sequence[ProposalId]) -> None:
        for proposal in proposals:
            _settle(self._waiting.pop(proposal, None), NotController(self.controller_id))

    def write_failed(self, error: Exception) -> None:
        if self._raft.is_alone or not self.is_controller:
            # With several nodes the controller waits: they may still commit, and its next decision depends on it.
            self._fail_waiting(KafkaError(ErrorCode.kafka_storage_error, f"metadata cannot be written: {error}"))

    def _fail_waiting(self, error: KafkaError) -> None:
        """Fail the waiting proposers. Their commands stay in the log and may be committed later."""
        for waiting in self._waiting.values():
            _settle(waiting, error)


def _taken_over() -> KafkaError:
    return KafkaError(ErrorCode.request_timed_out, "another controller took over; the change may have taken effect")


def _settle(waiting: _Waiting | None, outcome: list[Event] | KafkaError) -> None:
    """Answer the proposer, unless it was answered before, or was another node."""
    if waiting is None or waiting.done.done():
        return
    if isinstance(outcome, KafkaError):
        waiting.done.set_exception(outcome)
    else:
        waiting.done.set_result(outcome)


def new_cluster_id(env: Environment) -> str:
    """Return a random id in Kafka's format: 16 bytes in URL-safe base64, unpadded, not starting with a dash."""
    while True:
        cluster_id = base64.urlsafe_b64encode(env.new_uuid().bytes).decode().rstrip("=")
        if not cluster_id.startswith("-"):
            return cluster_id
