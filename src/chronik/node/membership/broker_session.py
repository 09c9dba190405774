"""This broker's session with the controller: registration, heartbeats, and the lease to lead.

The broker's lease starts when it sends a heartbeat, the controller's timeout when that arrives. So the controller
never declares a broker dead that may still serve. A paused broker finds its lease expired before it answers anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from chronik.metadata.calls import HeartbeatCall, HeartbeatResult, RegisterBrokerCall
from chronik.metadata.events import BrokerUnfenced, Event, LeaderChanged, PartitionsCreated, TopicCreated, TopicDeleted
from chronik.metadata.image import NO_LEADER, ClusterImage
from chronik.node.config import ConfigError
from chronik.node.membership.controller_client import ControllerClient
from chronik.node.membership.controller_service import HostedPartitions
from chronik.node.membership.internal_api import RegisteredResult
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.runtime import Runtime
from chronik.wire.errors import ErrorCode, KafkaError

HEARTBEAT_INTERVAL_S = 0.3
HEARTBEAT_TIMEOUT_S = 1.0
REGISTER_TIMEOUT_S = 2.0
LEAVING_INTERVAL_S = 0.02
"""A leaving broker sends heartbeats often, because clients wait for the new leaders."""

LEAVING_SILENCE_S = 1.0
"""How long a leaving broker waits for an answer: without a controller no other broker can take over."""

UNKNOWN_TO_CONTROLLER = (ErrorCode.stale_broker_epoch, ErrorCode.broker_id_not_registered)


class BrokerSession:
    """Owned by the loop.

    Invariant: while `lease_is_valid`, no other broker is elected for a partition that this one leads in its image.
    """

    def __init__(
        self,
        runtime: Runtime,
        client: ControllerClient,
        metadata: MetadataLog,
        registration: RegisterBrokerCall,
        hosted: HostedPartitions,
        on_replaced: Callable[[Exception], None],
        cannot_write: Callable[[], bool],
    ) -> None:
        """`cannot_write` returns whether the disk is stuck."""
        self.broker_epoch = -1
        self.applied_version = 0
        self._loop = runtime.loop
        self._client = client
        self._metadata = metadata
        self.registration = registration
        self._hosted = hosted
        self._on_replaced = on_replaced
        self._cannot_write = cannot_write
        self._is_removed = False
        self._has_handed_over = False
        self._answered_s = 0.0
        self._log = runtime.log
        self._lease_until_s = 0.0
        self._is_leaving = False
        self._has_news = False
        self._is_fenced: bool | None = None
        self._wake = asyncio.Event()
        self._heartbeats: asyncio.Task[None] | None = None
        self._applying: asyncio.Task[None] | None = None
        self._left = asyncio.Event()

    @property
    def lease_is_valid(self) -> bool:
        """Whether this broker may act as leader of the partitions it leads in its image."""
        return self._loop.time() < self._lease_until_s

    async def register(self) -> None:
        """Register this process with the controller; return once this node's own image has the registration."""
        result = await self._client.call(self.registration, REGISTER_TIMEOUT_S)
        assert isinstance(result, RegisteredResult)
        self.broker_epoch = result.broker_epoch

    def start(self) -> None:
        self._metadata.subscribe(self._metadata_changed)
        self._start_applying()
        self._heartbeats = self._loop.create_task(self._send_heartbeats(), name="heartbeats")

    async def wait_unfenced(self) -> None:
        """Wait until the controller has unfenced this broker, so that it can lead and join ISRs."""
        while True:
            broker = self._metadata.image.brokers.get(self.registration.broker_id)
            if broker is not None and broker.epoch == self.broker_epoch and not broker.is_fenced:
                return
            await self._metadata.applied(self._metadata.version + 1)

    async def leave(self, timeout_s: float) -> bool:
        """Request a controlled shutdown. Return whether other brokers took over all leadership in time."""
        if self._heartbeats is None:
            return False
        self._is_leaving = True
        self._answered_s = self._loop.time()
        self._wake.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._left.wait()
        return self._has_handed_over

    def removed(self) -> None:
        """Handle this broker's removal from the cluster: it leads nothing and does not register again."""
        self._is_removed = self._has_handed_over = True
        self._left.set()

    async def close(self) -> None:
        for task in (self._heartbeats, self._applying):
            if task is not None:
                task.cancel()
        self._lease_until_s = 0.0

    def heartbeat_soon(self) -> None:
        """Send a heartbeat now: it has news that should not wait for the next interval."""
        self._wake.set()

    async def _send_heartbeats(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._heartbeat()
            except Exception:
                # Keep sending heartbeats after any error: without them this broker would be fenced.
                self._log.exception("heartbeat_failed")
            with suppress(TimeoutError):
                async with asyncio.timeout(LEAVING_INTERVAL_S if self._is_leaving else HEARTBEAT_INTERVAL_S):
                    await self._wake.wait()

    async def _heartbeat(self) -> None:
        process = (self.registration.broker_id, self.registration.incarnation, self.broker_epoch)
        call = HeartbeatCall(*process, self.applied_version, self._is_leaving, self._cannot_write())
        sent_s = self._loop.time()
        if self._is_leaving and sent_s - self._answered_s > LEAVING_SILENCE_S:
            self._left.set()
            return
        try:
            result = await self._client.call(call, HEARTBEAT_TIMEOUT_S, waits_for_image=False)
            assert isinstance(result, HeartbeatResult)
        except KafkaError as error:
            if error.code is ErrorCode.duplicate_broker_registration:
                # The controller has registered another process as this broker: this one must not answer anything more.
                self._lease_until_s = 0.0
                self._on_replaced(ConfigError(error.message))
            elif error.code in UNKNOWN_TO_CONTROLLER and not self._is_leaving and not self._is_removed:
                self._log.warning("broker_registers_again", reason=error.message)
                try:
                    await self.register()
                except KafkaError as refused:
                    self._log.warning("broker_not_registered", reason=refused.message)
            return
        self._answered_s = self._loop.time()
        self._lease_until_s = max(self._lease_until_s, sent_s + result.lease_ms / 1000)
        if result.is_fenced != self._is_fenced:
            self._is_fenced = result.is_fenced
            self._log.info("broker_fenced" if result.is_fenced else "broker_active", epoch=self.broker_epoch)
        if result.hand_overs:
            self._hosted.hand_over(result.hand_overs)
        if result.should_shut_down:
            self._has_handed_over = True
            self._left.set()

    def _metadata_changed(self, image: ClusterImage, events: Sequence[Event]) -> None:
        broker_id = self.registration.broker_id
        self._start_applying()
        for event in events:
            match event:
                case TopicCreated() | TopicDeleted() | PartitionsCreated():
                    # A caller may be waiting until all brokers have applied it.
                    self._has_news = True
                case LeaderChanged(partition=partition) if partition.leader == NO_LEADER:
                    # The next leader waits until this broker knows that it no longer leads.
                    self._has_news |= partition.last_known_leader == broker_id
                case BrokerUnfenced(broker=broker) if broker.id == broker_id:
                    # The next heartbeat brings a lease. Send it now, so that clients do not wait.
                    self._wake.set()

    def _start_applying(self) -> None:
        if self._applying is None:
            self._applying = self._loop.create_task(self._apply_images(), name="follow-image")

    async def _apply_images(self) -> None:
        """Record each image version that the partitions have applied; other nodes may be waiting for it."""
        while self.applied_version < self._metadata.version:
            version, has_news = self._metadata.version, self._has_news
            self._has_news = False
            try:
                await self._hosted.settled()
            except Exception:
                self._log.exception("image_not_followed", version=version)
                break
            self.applied_version = version
            if has_news or self._is_fenced is not False:
                self._wake.set()
        self._applying = None
