"""What a partition is at one moment: its log, its role, and what others may know of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol
from uuid import UUID

from chronik.metadata.elections import Loss
from chronik.metadata.image import PartitionImage
from chronik.metadata.names import is_internal, is_traceable
from chronik.node.environment import Environment
from chronik.node.replicas.healing import HowFound
from chronik.node.replicas.partition_waits import PartitionWaits, ReplicaListener, WaitingFetch
from chronik.node.replicas.storage_jobs import StorageJobs
from chronik.node.replicas.syncer import Syncer
from chronik.node.topic_settings import TopicSettings
from chronik.observe.logging import Logger
from chronik.observe.metrics import Metrics
from chronik.observe.traces import PartitionTrace, TraceRing
from chronik.replication.follower import NO_EPOCH, NO_LEADER, PartitionFollower
from chronik.replication.leader import PartitionLeader
from chronik.storage.log import Log, ReadJob
from chronik.storage.refusals import REPEATED, RefusedBatches
from chronik.wire.batch import HEADER_BYTES, read_batch_header
from chronik.wire.errors import ErrorCode, KafkaError

if TYPE_CHECKING:
    from chronik.node.replicas.partition import Partition

LATEST_EPOCH = -1


class Replicating(Protocol):
    """Who replicates: knows the brokers, and hears when a partition's part in it changes."""

    live: Mapping[int, int]
    """The epoch of each broker that may be in an ISR."""
    lag_ms_max: int

    def now_ms(self) -> int: ...

    def lease_is_valid(self) -> bool: ...

    def isr_is_due(self, partition: Partition) -> None:
        """A replica may join the ISR, or has what it takes to lead."""

    def role_changed(self, partition: Partition) -> None: ...

    def counted(self, partition: Partition) -> None:
        """The follower's copy counts as written up to its end."""

    def log_failed(self, partition: Partition) -> None:
        """The log can be read but not written: not now (a full disk), or not before the node starts anew."""

    def sync_failed(self, partition: Partition) -> None:
        """The same, and what the page cache had of the log is not to be trusted either."""

    def leader_lacks(self, partition: Partition, reason: str) -> None:
        """The leader does not have records that were committed, and that this replica has."""

    def cannot_lead(self, partition: Partition) -> None:
        """The metadata has this node lead the partition, with a log that had failed before."""

    def damaged(self, partition: Partition, offset: int, how: HowFound, reason: str) -> None:
        """What was written at or after `offset` is bad or missing: the replica has to be healed."""


class PartitionState:
    """The part of a `Partition` that writes nothing: its state, and questions about it. Owned by the loop."""

    def __init__(
        self,
        topic: str,
        topic_id: UUID,
        index: int,
        log: Log,
        settings: TopicSettings,
        *,
        node_id: int,
        high_watermark: int,
        counts_unsynced: bool,
        replicating: Replicating,
        env: Environment,
        syncer: Syncer,
        metrics: Metrics,
        traces: TraceRing,
        logger: Logger,
    ) -> None:
        self.topic = topic
        self.topic_id = topic_id
        self.index = index
        self.log = log
        self.settings = settings
        self.node_id = node_id
        self.is_internal = is_internal(topic)
        self.is_closed = False
        self.image: PartitionImage | None = None
        self.loss: Loss | None = None
        """What the log lost before it was opened, until the controller knows; the replica plays no part until then."""
        watermark = max(log.log_start_offset, min(high_watermark, log.log_end_offset))
        self.role: PartitionLeader | PartitionFollower = PartitionFollower(NO_LEADER, NO_EPOCH, watermark)
        self.leader: PartitionLeader | None = None
        self.refusal = ""
        """Why this replica does not follow its leader; empty while it does."""
        self.hands_over_to = NO_LEADER
        """Who shall lead instead: until that is decided, this node takes no records and answers no readers."""
        self.durable_log_start = log.log_start_offset
        """Records below do not come back, whatever happens to this node. At most the log's start."""
        self.generation = 0
        """Rises when what was read before may no longer be true: with each role, and with each truncation."""
        self.jobs = StorageJobs()
        self.is_damaged = False
        """While it is healed: it does not lead, and names no position that others could rely on."""
        self._appender: PartitionLeader | None = None
        self._next_image: PartitionImage | None = None
        self.counts_unsynced = counts_unsynced
        self._replicating = replicating
        self._env = env
        self._syncer = syncer
        self._metrics = metrics
        self._traces = traces
        self.trace: PartitionTrace | None = None
        """Set while the topic is traced: asked where requests run, so nothing else is done where it is not."""
        self._set_trace()
        self._logger = logger
        self._waits = PartitionWaits()
        self._refused = RefusedBatches()
        self._is_in_doubt = False
        """Whether the log may end with what this node took as the leader, and a new leader does not have."""
        self._deleting = asyncio.Lock()

    def _set_trace(self) -> None:
        is_traced = self.settings.is_traced and is_traceable(self.topic)
        if is_traced != (self.trace is not None):
            self.trace = PartitionTrace(self._traces, self.topic, self.index) if is_traced else None

    # -- what others may know ------------------------------------------------------------------------------------------

    @property
    def log_start_offset(self) -> int:
        return self.log.log_start_offset

    @property
    def log_end_offset(self) -> int:
        return self.log.log_end_offset

    @property
    def counted_end_offset(self) -> int:
        """Below this, this node's copy counts as written."""
        return self.log.log_end_offset if self.counts_unsynced else self.log.synced_end_offset

    def fetch_position(self) -> tuple[int, int] | None:
        """Where this node's copy goes on, and the epoch of the record before; None while it must not ask.

        A follower asks from what counts as written, since its leader takes the question for that.
        """
        log = self.log
        end = log.log_end_offset
        if self.is_closed or self.is_damaged or self.jobs.is_exclusive or log.read_only_forever:
            return None
        if self.counted_end_offset < end:
            return None
        return end, log.epoch_of(end - 1) if end > log.log_start_offset else NO_EPOCH

    def read_job(self, offset: int, max_bytes: int, upto_offset: int, *, min_one_batch: bool) -> ReadJob:
        """A read for a thread. It is a job of the log: `jobs.end` follows it."""
        if not self.jobs.begin():
            raise self._not_leader()
        try:
            return self.log.read_job(offset, max_bytes, upto_offset, min_one_batch=min_one_batch)
        except BaseException:
            self.jobs.end()
            raise

    @property
    def high_watermark(self) -> int:
        return self.role.high_watermark

    @property
    def leader_epoch(self) -> int:
        return self.role.leader_epoch

    @property
    def replicas(self) -> tuple[int, ...]:
        return () if self.image is None else self.image.replicas

    @property
    def in_sync_replicas(self) -> tuple[int, ...]:
        return () if self.image is None else self.image.isr

    def is_fit_to_lead(self, image: PartitionImage) -> bool:
        """Whether others may be measured by this node's log.

        A leader outside of the ISR may lack committed records: the controller names none, and none is accepted. One
        whose log is damaged may lack them too. The only replica leads all the same: its log is all that there is.
        """
        is_whole = not self.log.read_only_forever and not self.is_damaged
        return self.node_id in image.isr and (is_whole or len(image.replicas) == 1)

    @property
    def leads(self) -> bool:
        """Whether this node may answer for the partition now: the metadata says so, and its lease runs."""
        return self._appender is not None and self._replicating.lease_is_valid()

    @property
    def follows(self) -> bool:
        """Whether this node may answer readers of its copy: it follows a leader, and its lease runs."""
        if self.leader is not None or self.is_closed or self.jobs.is_exclusive or self.loss is not None:
            return False
        return self._replicating.lease_is_valid()

    @property
    def visible_end_offset(self) -> int:
        """The first offset that consumers do not see."""
        if self.settings.visible_when_appended and self.leader is not None:
            return self.log.log_end_offset
        return self.role.high_watermark

    @property
    def is_settling(self) -> bool:
        """Whether this node leads so freshly that its watermark may lie below what clients have seen.

        However long that takes: without enough replicas in sync the watermark cannot rise, and no end may go back.
        """
        leader = self.leader
        return leader is not None and not leader.has_reached_its_epoch and not self.settings.visible_when_appended

    def check_end_is_known(self) -> None:
        """The end that consumers see may not go back at a failover (KIP-207)."""
        leader = self.leader
        if leader is not None and self.is_settling:
            raise KafkaError(
                ErrorCode.offset_not_available,
                f"epoch {leader.leader_epoch} began at {leader.epoch_start_offset}, "
                f"the watermark is {leader.high_watermark}",
            )

    # -- waiting for records -------------------------------------------------------------------------------------------

    def wait_for_data(self, fetch: WaitingFetch) -> None:
        self._waits.fetches[fetch] = None

    def stop_waiting(self, fetch: WaitingFetch) -> None:
        self._waits.fetches.pop(fetch, None)

    def listen(self, listener: ReplicaListener) -> None:
        self._waits.listeners[listener] = None

    def stop_listening(self, listener: ReplicaListener) -> None:
        self._waits.listeners.pop(listener, None)

    # -- what requests are checked against -----------------------------------------------------------------------------

    def check_leader_epoch(self, epoch: int) -> None:
        """A client that knows another epoch than ours has old metadata, or we have."""
        current = self.role.leader_epoch
        if epoch in (LATEST_EPOCH, current):
            return
        if epoch < current:
            raise KafkaError(ErrorCode.fenced_leader_epoch, f"epoch {epoch} is over, now {current}")
        raise KafkaError(ErrorCode.unknown_leader_epoch, f"epoch {epoch} is not known here yet")

    def check_enough_replicas(self) -> None:
        """acks=all needs min.insync.replicas in sync before the append."""
        leader = self.leader
        if leader is not None and not leader.has_enough_replicas:
            raise KafkaError(ErrorCode.not_enough_replicas, too_few(leader))

    def refused(self, records: memoryview, error: KafkaError, now_ms: int) -> None:
        """A batch was not appended, with `error`: what its producer sent behind it must not get ahead of it."""
        if error.code in REPEATED and len(records) >= HEADER_BYTES:
            self._refused.note(read_batch_header(records), error.code, self.log.producers, now_ms)

    def check_passing_on(self, records: memoryview, now_ms: int) -> None:
        """Raises where the leader may not have what this batch's producer sent here before it, when this node led."""
        if len(records) < HEADER_BYTES or not (self._refused or self._is_in_doubt):
            return
        header = read_batch_header(records)
        if header.producer_id < 0:
            return
        if self._is_in_doubt and (
            self.jobs.is_exclusive or self.log.producers.is_behind_what_lies_from(self.role.high_watermark, header)
        ):
            raise self._not_leader()
        self._refused.check(header, self.log.producers, now_ms)

    def _not_leader(self) -> KafkaError:
        return KafkaError(
            ErrorCode.not_leader_or_follower, f"{self.topic}-{self.index} is not led by node {self.node_id}"
        )


def too_few(leader: PartitionLeader) -> str:
    """Why acks=all cannot be now."""
    return f"{len(leader.in_sync_replicas)} replicas are in sync, {leader.replicas_needed} are needed"
