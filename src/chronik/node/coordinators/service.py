"""Runs a coordinator's state machine on the node's loop: requests, replies, timers and the lease.

The state machine (`chronik.groups`, `chronik.transactions`) owns all rules, and `CoordinatorTopic` stores its state.
This module only has the futures of the waiting requests and the timers.

A coordinator needs a lease. This node answers for a key (a group, a transactional id) only while it leads the key's
partition with a valid lease. The lease is checked when the response is sent (`_authority`); otherwise clients get
NOT_COORDINATOR and look for the coordinator elsewhere. The coordinator's clock stops without a lease: members that
could not reach their coordinator keep their membership, and transactions stay open, if it is still their coordinator
when the lease is renewed.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from chronik.groups.step import Append, Moment, Reply
from chronik.metadata.events import Event
from chronik.metadata.image import BrokerImage, ClusterImage
from chronik.node.admin.topics import Topics
from chronik.node.age_clock import AgeClock
from chronik.node.coordinators.coordinator_topic import CoordinatorTopic, LoadedRecords
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Values
from chronik.wire.errors import ErrorCode, KafkaError

LEASE_CHECK_S = 0.25
"""How soon after the lease ends the waiting requests are answered."""

EXPIRY_INTERVAL_S = 600.0


class StateMachine(Protocol):
    """A pure coordinator. Its actions are `Reply`, `Append`, and others that only its own service knows."""

    partition_count: int

    @property
    def is_loading(self) -> bool: ...

    def start_loading(self, partition: int) -> None: ...

    def replay(self, partition: int, records: Iterable[tuple[bytes | None, bytes | None]]) -> None: ...

    def is_loaded(self, partition: int) -> bool: ...

    def unload(self, partition: int, at: Moment) -> list[Any]: ...

    def partition_of(self, key: str, /) -> int | None:
        """Return the partition that owns a key; None if there are no partitions yet or the key is too long."""

    def appended(self, token: int, error: ErrorCode, at: Moment) -> list[Any]: ...

    def next_deadline_ms(self) -> int | None: ...

    def tick(self, at: Moment) -> list[Any]: ...


M = TypeVar("M", bound=StateMachine)


class CoordinatorService(ABC, Generic[M]):
    """What the services of groups, transactions and share state have in common. Owned by the loop.

    Invariant: `_replies` has the future of each request that the coordinator has not answered yet, by token.
    """

    invalid_key: ErrorCode
    """The error for a key that is too long."""

    skips_damage: bool
    """See `Coordinator`."""

    def __init__(
        self,
        topic: str,
        partition_count: int,
        what: str,
        coordinator: M,
        runtime: Runtime,
        metadata: MetadataLog,
        host: PartitionHost,
        topics: Topics,
        lease_is_valid: Callable[[], bool],
        age_clock: AgeClock,
    ) -> None:
        """`what` names the keys in logs; `partition_count` is used if this node creates the topic."""
        self._runtime = runtime
        self._metadata = metadata
        self._host = host
        self._lease_is_valid = lease_is_valid
        self._age_clock = age_clock
        self._loop = runtime.loop
        self._log = runtime.log.bind(component=what)
        self._coordinator = coordinator
        self.topic = CoordinatorTopic(topic, partition_count, what, runtime, metadata, host, topics, self)
        self._token = 0
        self._replies: dict[int, asyncio.Future[Values]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms: int | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._lease_check: asyncio.TimerHandle | None = None
        self._leased_s = self._loop.time()
        """When the lease was last seen to be valid."""
        self._without_lease_s = 0.0
        """The total time without a lease, which the coordinator's clock excludes."""
        self._is_suspended = False
        """Whether the lease has ended and its renewal has not been seen yet."""
        self._is_stopped = False

    # -- lifecycle -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load what this node coordinates, if the topic exists."""
        await self.topic.take_over()
        self._expire_after(EXPIRY_INTERVAL_S)
        self._check_lease()

    async def stop(self) -> None:
        """Wait for running appends, then fail the waiting requests so that clients look elsewhere. Idempotent."""
        if self._is_stopped:
            return
        self._is_stopped = True
        for timer in (self._timer, self._expiry, self._lease_check):
            if timer is not None:
                timer.cancel()
        await self.topic.stop()

    def metadata_changed(self, image: ClusterImage, events: Sequence[Event]) -> None:
        self.topic.metadata_changed(image, events)

    # -- the topic's partitions ----------------------------------------------------------------------------------------

    @property
    def partition_count(self) -> int:
        return self._coordinator.partition_count

    @partition_count.setter
    def partition_count(self, count: int) -> None:
        self._coordinator.partition_count = count

    def partition_of(self, key: str) -> int | None:
        """Return the partition that owns a key; None if there are no partitions yet or the key is too long."""
        return self._coordinator.partition_of(key)

    def is_loaded(self, partition: int) -> bool:
        return self._coordinator.is_loaded(partition)

    def start_loading(self, partition: int) -> None:
        self._coordinator.start_loading(partition)

    def replay(self, partition: int, loaded: LoadedRecords) -> None:
        self._coordinator.replay(partition, loaded.records)

    @abstractmethod
    def finish_loading(self, partition: int, leader_epoch: int) -> int:
        """Serve the partition from now on; return the number of unreadable records."""

    def unload(self, partition: int) -> None:
        self._run(self._coordinator.unload(partition, self._now()))

    def appended(self, token: int, error: ErrorCode) -> None:
        self._run(self._coordinator.appended(token, error, self._now()))

    # -- the lease -----------------------------------------------------------------------------------------------------

    def _authority(self, key: str) -> M:
        """Return the coordinator if it may answer for the key now; raise NOT_COORDINATOR otherwise."""
        index = self._coordinator.partition_of(key)
        if index is not None:
            topic = self.topic.name
            partition = self._host.partitions.get((topic, index))
            if partition is None or not partition.leads:
                raise KafkaError(ErrorCode.not_coordinator, f"{topic}-{index} is not led here under a lease")
            if self._is_suspended:
                self._resume()
        return self._coordinator

    def _check_lease(self) -> None:
        self._lease_check = self._loop.call_later(LEASE_CHECK_S, self._check_lease)
        if not self._lease_is_valid():
            self._suspend()
        elif self._is_suspended:
            self._resume()
        self._now()

    def _resume(self) -> None:
        self._is_suspended = False
        self._without_lease_s += self._loop.time() - self._leased_s
        self._set_timer()

    def _suspend(self) -> None:
        """The lease has ended: make waiting requests look for another coordinator, and let no timeout pass."""
        if not self._is_suspended:
            self._is_suspended = True
            self._refuse_waiting()

    def _refuse_waiting(self) -> None:
        """Answer the waiting requests with NOT_COORDINATOR. Later answers of the state machine find none of them."""
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(KafkaError(ErrorCode.not_coordinator, "this node has lost its lease"))

    async def coordinator_of(self, key: str) -> BrokerImage:
        """Return the broker that coordinates a key: the leader of its partition. This node needs a valid lease."""
        await self.topic.ensure_exists()
        if not self._lease_is_valid():
            raise KafkaError(ErrorCode.coordinator_not_available, "this node has lost contact with the controller")
        index = self._coordinator.partition_of(key)
        if index is None and self._coordinator.partition_count:
            raise KafkaError(self.invalid_key, f"a name of {len(key)} characters is too long")
        image = self._metadata.image
        partition = None if index is None else image.partition(self.topic.name, index)
        leader = None if partition is None else image.brokers.get(partition.leader)
        if leader is None:
            raise KafkaError(ErrorCode.coordinator_not_available, f"a partition of {self.topic.name} has no leader")
        return leader

    # -- actions -------------------------------------------------------------------------------------------------------

    async def _submit(self, key: str, start: Callable[[int, Moment], Sequence[Any]]) -> Values:
        self._authority(key)
        self._token += 1
        reply: asyncio.Future[Values] = self._loop.create_future()
        self._replies[self._token] = reply
        self._run(start(self._token, self._now()))
        values = await reply
        # The lease may have ended while the request waited.
        self._authority(key)
        return values

    def _now(self) -> Moment:
        """Return the time of the coordinator's clock, which stops without a lease."""
        if not self._is_suspended and self._lease_is_valid():
            self._leased_s = self._loop.time()
        return Moment(int((self._leased_s - self._without_lease_s) * 1000), self._runtime.env.wall_ms())

    def _run(self, actions: Sequence[Any]) -> None:
        for action in actions:
            match action:
                case Reply(token=token, values=values):
                    reply = self._replies.pop(token)
                    # It is already done if its connection was closed, which cancels the wait.
                    if not reply.done():
                        reply.set_result(values)
                case Append():
                    self.topic.append(action)
                case _:
                    self._carry_out(action)
        self._set_timer()

    @abstractmethod
    def _carry_out(self, action: Any) -> None:
        """Carry out an action that is neither a reply nor an append."""

    def _set_timer(self) -> None:
        """Set the single timer for all keys. It is only ever moved earlier, since an early tick is harmless."""
        deadline_ms = self._coordinator.next_deadline_ms()
        if deadline_ms is None or self._is_stopped or (self._timer_ms is not None and self._timer_ms <= deadline_ms):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ms = deadline_ms
        # The next whole millisecond: `_now` rounds down, so an earlier timer would only be set again.
        self._timer = self._loop.call_at((deadline_ms + 1) / 1000 + self._without_lease_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = self._timer_ms = None
        if self._lease_is_valid() and not self._is_suspended:
            self._run(self._coordinator.tick(self._now()))
        else:
            self._suspend()

    def _expire(self) -> None:
        self._expire_after(EXPIRY_INTERVAL_S)
        self._run(self._expired(self._now()._replace(wall_ms=self._age_clock.now_ms())))

    def _expire_after(self, wait_s: float) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = self._loop.call_later(wait_s, self._expire)

    @abstractmethod
    def _expired(self, at: Moment) -> Sequence[Any]:
        """Return the actions that remove what was not used for long."""
