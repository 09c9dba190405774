"""Carries out the decisions of the pure controller, and answers the brokers' calls to it.

Every node has one. It is active while this node leads the Raft group and has applied all entries that earlier leaders
committed. One task asks `metadata.controller.Controller` which commands are due, and proposes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Protocol
from uuid import UUID

from chronik.metadata.calls import (
    AlterIsrCall,
    HandOver,
    HeartbeatCall,
    RegisterBrokerCall,
    ReportedResult,
    ReportReplicasCall,
)
from chronik.metadata.commands import AllocateProducerIds, Command
from chronik.metadata.controller import DUE_INTERVAL_MS, Controller
from chronik.metadata.events import Event, ProducerIdsAllocated, TopicCreated
from chronik.metadata.image import ClusterImage, TopicImage
from chronik.metadata.index import Key
from chronik.metadata.registration import plan_unregistration
from chronik.node.membership.internal_api import (
    AllocateProducerIdsCall,
    Call,
    CallReply,
    Done,
    ProducerIdsResult,
    RegisteredResult,
    Result,
    TopicCreatedResult,
)
from chronik.node.membership.metadata_log import MetadataLog, NotController
from chronik.node.membership.peers import Peers
from chronik.node.membership.raft_service import RaftService
from chronik.node.membership.topic_plans import NewTopic, plan_topic
from chronik.node.runtime import Runtime
from chronik.raft.membership import Promote, Remove
from chronik.raft.ready import Event as RaftEvent
from chronik.raft.ready import LeaderEstablished, Reason, Refused, RoleChanged, RoleKind
from chronik.wire.errors import ErrorCode, KafkaError

VOTERS_SMALL, VOTERS_LARGE = 3, 5
FOLLOWED_TIMEOUT_S = 5.0
"""Longer than a broker session: by then a broker that does not apply the image has been fenced."""


class HostedPartitions(Protocol):
    """The interface to the partitions that this node hosts."""

    async def settled(self) -> None:
        """Wait until the partitions have applied the current image."""

    async def applied(self) -> None:
        """Like `settled`, but raise TimeoutError after a bounded time."""

    def has_opened(self, topic: TopicImage) -> bool:
        """Return whether all of the topic's logs on this node are open, or will be before the node serves."""

    def hand_over(self, hand_overs: Sequence[HandOver]) -> None:
        """Transfer the leadership of these partitions without losing an acknowledged record."""


class ControllerService:
    """Owned by the loop. Invariant: `_controller` is set exactly while this node is the controller."""

    def __init__(
        self, runtime: Runtime, raft: RaftService, metadata: MetadataLog, peers: Peers, hosted: HostedPartitions
    ) -> None:
        self._runtime = runtime
        self._raft = raft
        self._metadata = metadata
        self._peers = peers
        self._hosted = hosted
        self._loop = runtime.loop
        self._now = raft.now
        self._log = runtime.log.bind(component="controller")
        self._controller: Controller | None = None
        self._running: asyncio.Task[None] | None = None
        self.charge_creation: Callable[[str, str, Callable[[], int]], None] | None = None
        """Charges partitions to the quota of a principal and client id, if it has one; raises KafkaError if it is used
        up."""
        self._wake = asyncio.Event()
        self._waiters: list[tuple[ClusterImage, asyncio.Future[None]]] = []

    def start(self) -> None:
        self._raft.subscribe(self._raft_event)
        self._metadata.subscribe(self._metadata_changed)

    def _raft_event(self, event: RaftEvent) -> None:
        match event:
            case LeaderEstablished():
                self.stop()
                self._controller = Controller(self._metadata.image, self._now())
                self._running = self._loop.create_task(self._run(self._controller), name="controller")
                for node_id in self._peers.known():
                    # Above all the former controller: it may have failed before this node took over.
                    if not self._peers.is_connected(node_id):
                        self._peers.probe(node_id)
            case RoleChanged(role=role) if role is not RoleKind.LEADER:
                self.stop()

    def stop(self) -> None:
        self._controller = None
        if self._running is not None:
            self._running.cancel()
            self._running = None
        waiters, self._waiters = self._waiters, []
        for _, waiter in waiters:
            if not waiter.done():
                waiter.set_exception(NotController(self._metadata.controller_id))

    def _metadata_changed(self, image: ClusterImage, events: Sequence[Event]) -> None:
        if self._controller is not None:
            self._controller.image_applied(image)
            self._wake.set()

    def broker_gone(self, broker_id: int) -> None:
        """Notify the controller that the broker's process is gone: its address refuses connections."""
        if self._controller is not None:
            self._controller.broker_gone(broker_id, self._now())
            self._wake.set()

    async def _run(self, controller: Controller) -> None:
        while True:
            self._wake.clear()
            try:
                await self._propose_all(controller.due(self._now()))
                self._change_membership()
            except Exception as error:
                # If another node leads, this task is about to be cancelled.
                if not isinstance(error, NotController):
                    self._log.exception("controller_failed")
                await asyncio.sleep(DUE_INTERVAL_MS / 1000)
            self._answer_waiters(controller)
            if controller.is_behind:
                await asyncio.sleep(0)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(DUE_INTERVAL_MS / 1000):
                    await self._wake.wait()

    async def _propose_all(self, commands: Iterable[Command]) -> None:
        """Propose the commands in order and wait for all. A command that is no longer valid is planned again."""
        submitted: list[tuple[Command, asyncio.Future[list[Event]]]] = []
        for command in commands:
            try:
                submitted.append((command, self._metadata.submit(command)))
            except NotController:
                raise
            except KafkaError as error:
                self._log.debug("command_refused", command=type(command).__name__, reason=error.message)
        for command, done in submitted:
            try:
                await asyncio.shield(done)
            except KafkaError as error:
                self._log.debug("command_refused", command=type(command).__name__, reason=error.message)
            else:
                self._log.debug("command_applied", command=type(command).__name__)

    def _change_membership(self) -> None:
        """Add nodes that request to join as learners, and promote learners while there are too few voters."""
        raft = self._raft
        members = len(raft.node.membership.members)
        voters_max = 1 if members < VOTERS_SMALL else VOTERS_LARGE if members >= VOTERS_LARGE else VOTERS_SMALL
        change = raft.node.suggested_change(voters_max)
        if change is None:
            return
        outcome = raft.propose_membership(change)
        if isinstance(outcome, Refused):
            self._log.debug("membership_refused", change=str(change), reason=outcome.reason.value)

    async def answer(self, call: Call, caller_id: int) -> CallReply:
        """Answer a broker's call; if this node is not the controller, name the node that may be.

        `caller_id` is the authenticated sender: a node may make calls only in its own name.
        """
        node_id, metadata = self._runtime.node_id, self._metadata
        claimed_id = caller_id if isinstance(call, NewTopic) else call.broker_id
        if claimed_id != caller_id:
            self._log.error("call_refused", call=type(call).__name__, peer=caller_id, claimed=claimed_id)
            message = f"node {caller_id} may not make calls for node {claimed_id}"
            return CallReply(True, node_id, metadata.version, ErrorCode.cluster_authorization_failed, message)
        controller = self._controller
        if controller is None:
            return CallReply(False, metadata.controller_id)
        try:
            result = await self._execute(controller, call)
        except KafkaError as error:
            if error.code is ErrorCode.not_controller:
                return CallReply(False, error.controller_id if isinstance(error, NotController) else node_id)
            return CallReply(True, node_id, metadata.version, error.code, error.message)
        except Exception:
            self._log.exception("controller_call_failed", call=type(call).__name__)
            message = "unexpected error; see the controller's log"
            return CallReply(True, node_id, metadata.version, ErrorCode.unknown_server_error, message)
        return CallReply(True, node_id, metadata.version, result=result)

    async def _execute(self, controller: Controller, call: Call) -> Result:
        metadata = self._metadata
        match call:
            case HeartbeatCall():
                result = controller.heartbeat(call, self._now(), self._raft.led_at_ms())
                self._wake.set()
                return result
            case AlterIsrCall():
                await metadata.propose(lambda image: controller.alter_isr(image, call, self._now()))
                return Done()
            case RegisterBrokerCall():
                self._check_member(call)
                await metadata.propose(lambda image: controller.register(image, call, self._now()))
                return RegisteredResult(metadata.image.brokers[call.broker_id].epoch)
            case ReportReplicasCall():
                plan = await metadata.propose_plan(lambda image: controller.report(image, call, self._now()))
                self._wake.set()
                return ReportedResult(tuple("" if error is None else error.message for error in plan.outcomes))
            case AllocateProducerIdsCall(broker_id=broker_id, count=count):
                events = await metadata.propose(AllocateProducerIds(broker_id, count))
                allocated = next(event for event in events if isinstance(event, ProducerIdsAllocated))
                return ProducerIdsResult(allocated.first, allocated.count)
            case NewTopic():
                return await self._create_topic(call)

    async def _create_topic(self, new: NewTopic) -> TopicCreatedResult:
        """Create a topic; return when the live brokers serve it."""
        config, env = self._runtime.config, self._runtime.env
        if new.charged_to is not None and self.charge_creation is not None:
            image = self._metadata.image
            self.charge_creation(*new.charged_to, lambda: len(plan_topic(image, config, env, new).partitions))
        events = await self._metadata.propose(lambda image: plan_topic(image, config, env, new))
        await self.applied_everywhere()
        created = next(event.topic for event in events if isinstance(event, TopicCreated))
        if not self._hosted.has_opened(created):
            raise KafkaError(
                ErrorCode.kafka_storage_error, f"{created.name} was created, but not all of its logs are open yet"
            )
        return TopicCreatedResult(created.id)

    def _check_member(self, call: RegisterBrokerCall) -> None:
        """Reject a node that was removed: it can rejoin only with an empty data folder."""
        known = self._raft.node.membership.member(call.broker_id)
        if known is None or (call.folder_id is not None and known.store != call.folder_id):
            raise KafkaError(
                ErrorCode.invalid_registration,
                f"node {call.broker_id} is not a member of this cluster: start it with an empty data folder to join",
            )

    async def elect_preferred(self, requested: Sequence[Key], wait_s: float) -> list[KafkaError | None]:
        """Elect the preferred leaders and wait until they lead. Return an error or None for each partition."""
        controller, metadata = self._controller, self._metadata
        if controller is None:
            raise NotController(metadata.controller_id)
        outcomes = controller.elect_preferred(requested, self._now())
        accepted = [key for key, error in zip(requested, outcomes, strict=True) if error is None]
        try:
            async with asyncio.timeout(wait_s):
                while not all(_is_led_by_preferred(metadata.image, key) for key in accepted):
                    await metadata.applied(metadata.version + 1)
        except TimeoutError:
            late = KafkaError(ErrorCode.request_timed_out, "the leader has not handed over in time; it may still do so")
            return [
                late if error is None and not _is_led_by_preferred(metadata.image, key) else error
                for key, error in zip(requested, outcomes, strict=True)
            ]
        return outcomes

    async def remove_node(self, node_id: int) -> None:
        """Remove a node from the cluster: its registration, then its membership. A learner replaces a voter first.

        Raise INVALID_REQUEST while it has replicas. If the node is this one, another node becomes the controller, and
        the caller must retry there.
        """
        metadata, raft = self._metadata, self._raft
        membership, registered = raft.node.membership, metadata.image.brokers.get(node_id)
        member = membership.member(node_id)
        if member is None and registered is None:
            raise KafkaError(ErrorCode.broker_id_not_registered, f"node {node_id} is not in this cluster")
        if node_id == self._runtime.node_id:
            refused = raft.transfer_leadership()
            if refused is not None:
                raise KafkaError(ErrorCode.invalid_request, f"node {node_id} cannot leave: {refused.detail}")
            raise NotController(-1)
        if registered is not None:
            await metadata.propose(lambda image: plan_unregistration(image, node_id))
        if member is None:
            return
        if member.is_voter:
            learners = [other for other in membership.members if not other.is_voter]
            if learners:
                await self._change_member(Promote(learners[0].node_id))
        await self._change_member(Remove(node_id))

    async def add_voter(self, node_id: int, store: UUID | None) -> None:
        """Give a learner a vote; return when that is committed. DUPLICATE_VOTER or VOTER_NOT_FOUND if it is none."""
        member = self._raft.node.membership.member(node_id)
        if member is None or member.store != store:
            raise KafkaError(
                ErrorCode.voter_not_found,
                f"node {node_id} has not joined with this directory id: start it, and see DescribeQuorum",
            )
        if member.is_voter:
            raise KafkaError(ErrorCode.duplicate_voter, f"node {node_id} is already a voter")
        await self._change_member(Promote(node_id))

    async def remove_voter(self, node_id: int, store: UUID | None) -> None:
        """Remove a voter that is not a broker any more; return when that is committed."""
        member = self._raft.node.membership.member(node_id)
        if member is None or not member.is_voter or member.store != store:
            raise KafkaError(ErrorCode.voter_not_found, f"node {node_id} is not a voter with this directory id")
        if node_id in self._metadata.image.brokers:
            raise KafkaError(
                ErrorCode.invalid_request,
                f"node {node_id} is a broker, and every broker takes part in the Raft group: move its replicas away, "
                "then unregister it (chronik cluster remove)",
            )
        await self._change_member(Remove(node_id))

    async def _change_member(self, change: Promote | Remove) -> None:
        """Propose a membership change until it is in force and committed."""
        raft = self._raft
        while self._controller is not None:
            member = raft.node.membership.member(change.node_id)
            is_in_force = member is None if isinstance(change, Remove) else member is not None and member.is_voter
            if is_in_force and not raft.is_changing_members:
                return
            if not is_in_force:
                outcome = raft.propose_membership(change)
                if isinstance(outcome, Refused) and outcome.reason is Reason.INVALID:
                    raise KafkaError(ErrorCode.invalid_request, outcome.detail)
            await asyncio.sleep(DUE_INTERVAL_MS / 1000)
        raise NotController(self._metadata.controller_id)

    async def applied_everywhere(self) -> None:
        """Wait until all live brokers have applied the current image, for a bounded time."""
        image = self._metadata.image
        await self._hosted.applied()
        if self._controller is None or self._controller.has_applied(image.version, image.brokers):
            return
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append((image, waiter))
        try:
            async with asyncio.timeout(FOLLOWED_TIMEOUT_S):
                await waiter
        except TimeoutError:
            self._log.warning("image_not_followed", version=image.version, then="the caller is answered anyway")
        except NotController:
            # Another controller has taken over. The change itself is committed.
            return

    def _answer_waiters(self, controller: Controller) -> None:
        for image, waiter in self._waiters:
            if not waiter.done() and controller.has_applied(image.version, image.brokers):
                waiter.set_result(None)
        self._waiters = [each for each in self._waiters if not each[1].done()]


def _is_led_by_preferred(image: ClusterImage, key: Key) -> bool:
    """Return whether the preferred leader leads the partition, or the partition no longer exists."""
    partition = image.partition(*key)
    return partition is None or partition.leader == partition.replicas[0]
