"""The partitions that this node hosts: open, configure and remove their logs, and apply their roles."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar
from uuid import UUID

from chronik.metadata.calls import HandOver, ReplicaReport
from chronik.metadata.elections import Loss, min_insync_replicas
from chronik.metadata.events import (
    BrokerFenced,
    BrokerRegistered,
    BrokerShuttingDown,
    BrokerUnfenced,
    BrokerUnregistered,
    ConfigChanged,
    Event,
    IsrChanged,
    LeaderChanged,
    PartitionsCreated,
    ReplicasChanged,
    TopicCreated,
    TopicDeleted,
)
from chronik.metadata.image import BrokerImage, ClusterImage, PartitionImage, TopicImage
from chronik.node.disk_watch import NO_ANSWER
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.replicas.checkpoints import Checkpoints, recovery_points_of, watermarks_of
from chronik.node.replicas.partition import Appended, Partition, TransactionMarker, resolve
from chronik.node.replicas.replica_reports import ReplicaReports, report_of
from chronik.node.replicas.replica_sessions import ReplicaSessions
from chronik.node.replicas.replication import ClusterLinks, Replication
from chronik.node.replicas.syncer import Syncer
from chronik.node.runtime import Runtime
from chronik.node.topic_settings import (
    TopicDefaults,
    TopicSettings,
    is_traced,
    partition_settings,
    topic_defaults,
    topic_settings,
    traced_topics,
)
from chronik.observe.metrics import PartitionGauges
from chronik.storage.commit_log import LogFrames, LogId
from chronik.storage.config import LogConfig
from chronik.storage.disk import StorageError
from chronik.storage.folder import NO_EPOCH, POINTS_NAME, TOPIC_ID_NAME, Claim, DataFolder, RecoveryPoint
from chronik.storage.log import Log
from chronik.storage.recovery import RecoveryReport
from chronik.storage.refusals import NO_PRODUCERS, RefusedBatches
from chronik.wire.batch import HEADER_BYTES, read_batch_header
from chronik.wire.errors import ErrorCode, KafkaError

OPEN_AT_ONCE = 512
"""More would delay the first partitions; fewer write the recovery points of all logs more often."""
OPEN_IN_TURN = 128
"""A thread opens this many logs, while others open further ones."""
HOST_IN_TURN = 64
MOVED_AWAY_MAX = 1_000
REFUSED_MAX = 1_000
"""Partitions that are not open yet whose refused batches are remembered."""
SYNCED_AT_ONCE = 4
"""How many logs are synced together while no request waits for them: as many as a thread syncs one after another."""
SYNC_ROUNDS_MAX = 50
APPLIED_TIMEOUT_S = 30.0


class Open(NamedTuple):
    """Open the logs of these partitions of a topic, unless they are already open."""

    topic: TopicImage
    indexes: tuple[int, ...]


class Remove(NamedTuple):
    """Close the logs of these partitions of a topic, and remove those that were not assigned to this node again."""

    topic: str
    topic_id: UUID
    indexes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """One log to open. `recovery_point` is None if the recovery points do not list the log."""

    topic: TopicImage
    index: int
    config: LogConfig
    recovery_point: int | None


Work: TypeAlias = Open | Remove | asyncio.Future[None]
OpenOutcome: TypeAlias = tuple[Log | Exception | None, Claim]
"""The log, an error, or None if the log is missing; and how its folder was claimed."""
T = TypeVar("T")


class PartitionHost:
    """Invariant: `partitions` holds exactly the partitions whose log is open here, as leader or as follower.

    One task opens and removes logs one after the other, so that a topic that is deleted and recreated never has two
    logs in one folder. A role change takes effect at once with the metadata event: a replaced leader stops immediately.
    Owned by the loop; files are opened and removed in the executor.
    """

    def __init__(
        self,
        runtime: Runtime,
        folder: DataFolder,
        metadata: MetadataLog,
        syncer: Syncer,
        links: ClusterLinks,
        incarnation: UUID | None = None,
    ) -> None:
        """`incarnation` is the id that this process registered with; an image with another id replaces this process."""
        self.partitions: dict[tuple[str, int], Partition] = {}
        self.folder = folder
        self._runtime = runtime
        self._loop = runtime.loop
        self._node_id = runtime.node_id
        self._metadata = metadata
        self._syncer = syncer
        self._log = runtime.log.bind(component="storage")
        self._defaults = topic_defaults(runtime.config, metadata.image)
        self._known_settings: tuple[TopicImage, TopicDefaults, TopicSettings] | None = None
        self._checkpoints = Checkpoints(runtime, folder, self.partitions)
        self.reports = ReplicaReports(runtime, self.partitions, links.report_replicas, self._loss_reported)
        self.replication = Replication(runtime, links, self._checkpoints, self.reports, folder.path)
        self.replica_sessions = ReplicaSessions(runtime, metadata, self.replication, self.partition_by_id)
        self._work: asyncio.Queue[Work] = asyncio.Queue()
        self._moved_away: dict[tuple[UUID, int], RefusedBatches] = {}
        """What the leader may lack, by partition that this node led and no longer has."""
        self._refused: dict[tuple[UUID, int], RefusedBatches] = {}
        """Batches that were refused because the log was not open yet, by partition."""
        self._unopened: dict[tuple[str, int], UUID] = {}
        self._missing: dict[tuple[UUID, int], TopicImage] = {}
        self._refetched: dict[tuple[UUID, int], str] = {}
        """Missing logs that restart empty, with the reason to record as damage."""
        self._unremoved: list[Remove] = []
        self._to_replay: set[LogId] = set()
        """Logs that could not be synced when they were closed: what they lack is in the commit log."""
        self._worker: asyncio.Task[None] | None = None
        self._is_following = False
        self.is_open = False
        """Whether all logs that the image assigned to this node at startup have been opened."""
        self._incarnation = incarnation

    # -- lifecycle -----------------------------------------------------------------------------------------------------

    async def open_all(self) -> None:
        """Open every partition that the image assigns to this node, and set aside logs without a partition.

        `reports.flush` reports the losses found here. The image must contain the registration of this incarnation: an
        older image would set aside logs of partitions that were assigned to this node since.
        """
        image = self.image
        if self._is_replaced(image):
            self._resign(image)
        else:
            self._is_following = True
            self._configure()
            self.replication.brokers_changed(image)
            await self._set_strays_aside(image)
            await self._open(
                [
                    (topic, partition.partition)
                    for _, topic in sorted(image.topics.items())
                    for partition in topic.partitions
                    if self._is_assigned(partition)
                ]
            )
        self._worker = self._loop.create_task(self._run_work(), name="partition-host")
        if self._syncer.committer is not None:
            self._syncer.committer.start()
        self.is_open = True

    async def close_all(self, broker_epoch: int = NO_EPOCH) -> None:
        if self._worker is not None:
            self._worker.cancel()
        self._is_following = self.is_open = False
        self.reports.close()
        self.replication.close()
        self.replica_sessions.close()
        with contextlib.suppress(TimeoutError):
            await self._syncer.settled()
        # The pending records may have been replicated, so the error must not say that they were not appended.
        closing = KafkaError(ErrorCode.request_timed_out, "the node is stopping")
        partitions = list(self.partitions.values())
        watermarks = watermarks_of(partitions)
        self.partitions.clear()
        for partition in partitions:
            partition.close(closing)
        committer = self._syncer.committer
        if committer is not None:
            await committer.close()
        try:
            is_clean = await self._close_logs(partitions)
            if is_clean and (committer is None or not committer.is_stuck):
                points = recovery_points_of(self.folder, partitions)
                record = partial(self.folder.record_clean_shutdown, points, watermarks, broker_epoch)
                await self._syncer.disk.wait(self._loop.run_in_executor(self._runtime.env.executor, record))
        except OSError as error:
            reason = str(error) or NO_ANSWER
            self._log.warning("shutdown_not_recorded", error=reason, then="the next start recovers the logs")

    async def _close_logs(self, partitions: Iterable[Partition]) -> bool:
        """Close the logs one after the other, each within the disk's time limit; return whether all closed cleanly.

        On TimeoutError (a hanging disk) the remaining logs stay open.
        """
        disk = self._syncer.disk
        is_clean = True
        for partition in partitions:
            async with asyncio.timeout(disk.patience_s):
                await partition.jobs.ended()
            closing = self._loop.run_in_executor(self._runtime.env.executor, close_log, partition.log)
            error = await disk.wait(closing)
            if error is not None:
                self._log.error("log_close_failed", **partition.log_fields, error=error)
                is_clean = False
        return is_clean

    async def _set_strays_aside(self, image: ClusterImage) -> None:
        """Set aside logs left by a crash between the deletion of a topic or replica and the removal of its files.

        A log that the metadata does not know is never deleted: the metadata may be wrong.
        """
        now_ms = self._runtime.env.wall_ms()
        for topic, index in await self._runtime.run_blocking(self.folder.partitions):
            if not self._is_assigned(image.partition(topic, index)):
                move = partial(self.folder.set_aside_log, topic, index, now_ms)
                moved_to = await self._runtime.run_blocking(move)
                self._report_set_aside(topic, index, moved_to)
        for topic, index in list(self.folder.recovery_points):
            if not self._is_assigned(image.partition(topic, index)):
                del self.folder.recovery_points[(topic, index)]

    def _report_set_aside(self, topic: str, index: int, moved_to: str) -> None:
        self._log.warning("log_set_aside", topic=topic, partition=index, to=moved_to, reason="no topic has this log")

    # -- metadata ------------------------------------------------------------------------------------------------------

    @property
    def image(self) -> ClusterImage:
        return self._metadata.image

    def metadata_changed(self, image: ClusterImage, events: Sequence[Event]) -> None:
        if not self._is_following:
            # `open_all` uses the image that is current when it runs.
            return
        if self._is_replaced(image):
            self._resign(image)
            return
        for event in events:
            match event:
                case (
                    BrokerRegistered() | BrokerFenced() | BrokerUnfenced() | BrokerShuttingDown() | BrokerUnregistered()
                ):
                    self.replication.brokers_changed(image)
                case TopicCreated(topic=topic):
                    self._add_replicas(topic, topic.partitions)
                    if is_traced(topic, self._defaults):
                        self._runtime.traces.topics |= {topic.name}
                case PartitionsCreated(topic=topic, partitions=added):
                    self._add_replicas(topic, added)
                case TopicDeleted(topic=topic):
                    gone = KafkaError(ErrorCode.unknown_topic_or_partition, f"{topic.name} was deleted")
                    self._remove_replicas(topic.name, topic.id, [p.partition for p in topic.partitions], gone)
                    self._runtime.traces.topics -= {topic.name}
                case ConfigChanged(resource="broker"):
                    self._configure()
                case ConfigChanged(resource="topic", name=name):
                    configured = image.topics.get(name)
                    if configured is not None:
                        self._configure_topic(configured)
                case ReplicasChanged() | LeaderChanged() | IsrChanged():
                    self._partition_changed(image, event)

    def _is_replaced(self, image: ClusterImage) -> bool:
        own = image.brokers.get(self._node_id)
        return self._incarnation is not None and own is not None and own.incarnation != self._incarnation

    def _resign(self, image: ClusterImage) -> None:
        """Stop serving: another process has this node's id, and from now on the image describes that process."""
        own = image.brokers[self._node_id]
        self._is_following = False
        self._log.error("replaced", by=f"{own.host}:{own.port}", then="this node no longer serves any partition")
        self.replication.close()
        self.replica_sessions.close()
        replaced = KafkaError(ErrorCode.not_leader_or_follower, f"another process is node {own.id} now")
        for partition in self.partitions.values():
            partition.close(replaced)

    def _settings_of(self, topic: TopicImage) -> TopicSettings:
        """Return the topic's settings. They depend on all of its partitions, so they are kept for the next one."""
        known = self._known_settings
        if known is None or known[0] is not topic or known[1] is not self._defaults:
            known = self._known_settings = (topic, self._defaults, topic_settings(topic, self._defaults))
        return known[2]

    def _image_of(self, topic_id: UUID, index: int) -> PartitionImage | None:
        topic = self.image.topic_by_id(topic_id)
        return None if topic is None else topic.partition(index)

    def _is_assigned(self, image: PartitionImage | None) -> bool:
        return image is not None and self._node_id in image.replicas

    async def applied(self) -> None:
        """Like `settled`, but raise TimeoutError after APPLIED_TIMEOUT_S."""
        async with asyncio.timeout(APPLIED_TIMEOUT_S):
            await self.settled()

    async def settled(self) -> None:
        """Wait until the partitions match the current image."""
        if not self.is_open:
            return
        reached: asyncio.Future[None] = self._loop.create_future()
        self._work.put_nowait(reached)
        await reached

    def _partition_changed(self, image: ClusterImage, event: ReplicasChanged | LeaderChanged | IsrChanged) -> None:
        changed = event.partition
        topic = image.topic_by_id(event.topic_id)
        hosted = self.partitions.get((event.topic, changed.partition))
        if hosted is not None and hosted.topic_id == event.topic_id and self._is_assigned(changed):
            if topic is not None and isinstance(event, ReplicasChanged):
                # Before applying the ISR of the same image: a new ISR with the old minimum could commit too early.
                hosted.require_in_sync(min_insync_replicas(image, topic, changed))
            hosted.apply(changed)
        if self._unopened.get((event.topic, changed.partition)) == event.topic_id:
            self._transfer_leadership(event.topic, event.topic_id, changed.partition)
        if not isinstance(event, ReplicasChanged):
            return
        if self._node_id in event.added:
            if topic is not None:
                self._add_replicas(topic, (changed,))
        elif self._node_id in event.removed:
            name = f"{event.topic}-{changed.partition}"
            moved = KafkaError(ErrorCode.request_timed_out, f"node {self._node_id} no longer hosts {name}")
            self._remove_replicas(event.topic, event.topic_id, [changed.partition], moved)

    def _add_replicas(self, topic: TopicImage, partitions: Iterable[PartitionImage]) -> None:
        indexes = tuple(p.partition for p in partitions if self._is_assigned(p))
        if indexes:
            self._work.put_nowait(Open(topic, indexes))

    def _remove_replicas(self, topic: str, topic_id: UUID, indexes: Iterable[int], reason: KafkaError) -> None:
        """Stop serving these partitions now, and queue the removal of their logs."""
        for index in indexes:
            hosted = self.partitions.get((topic, index))
            self.reports.forget(topic_id, index)
            if hosted is not None and hosted.topic_id == topic_id:
                unresolved = hosted.unresolved_batches()
                self._moved_away.pop((topic_id, index), None)
                if unresolved:
                    self._moved_away[(topic_id, index)] = unresolved
                    if len(self._moved_away) > MOVED_AWAY_MAX:
                        del self._moved_away[next(iter(self._moved_away))]
                hosted.close(reason)
                self.replication.partition_closed(hosted)
        self._work.put_nowait(Remove(topic, topic_id, tuple(indexes)))

    def _configure(self) -> None:
        """Apply the settings of all topics."""
        image = self.image
        self._defaults = topic_defaults(self._runtime.config, image)
        self._runtime.traces.topics = traced_topics(image, self._defaults)
        self.replication.limit_rates(image)
        for partition in self.partitions.values():
            topic = image.topics.get(partition.topic)
            if topic is not None:
                partition.configure(partition_settings(self._settings_of(topic), image, topic, partition.index))

    def _configure_topic(self, topic: TopicImage) -> None:
        """Apply the settings of one topic, without a look at others: there may be thousands."""
        traces = self._runtime.traces
        traces.topics -= {topic.name}
        if is_traced(topic, self._defaults):
            traces.topics |= {topic.name}
        for index in range(len(topic.partitions)):
            hosted = self.partitions.get((topic.name, index))
            if hosted is not None:
                hosted.configure(partition_settings(self._settings_of(topic), self.image, topic, index))

    async def _run_work(self) -> None:
        while True:
            work = await self._work.get()
            try:
                match work:
                    case Open(topic=topic, indexes=indexes):
                        await self._open([(topic, index) for index in indexes])
                    case Remove():
                        await self._remove(work)
                    case _:
                        if not work.done():
                            work.set_result(None)
            except Exception:
                self._log.exception("metadata_event_failed", work=type(work).__name__)

    # -- opening and removing logs -------------------------------------------------------------------------------------

    async def _open(self, assigned: Sequence[tuple[TopicImage, int]]) -> None:
        missing = [each for each in assigned if not self._is_open(*each)]
        for at in range(0, len(missing), OPEN_AT_ONCE):
            await self._open_some(missing[at : at + OPEN_AT_ONCE])

    def _is_open(self, topic: TopicImage, index: int) -> bool:
        hosted = self.partitions.get((topic.name, index))
        return hosted is not None and hosted.topic_id == topic.id and not hosted.is_closed

    async def _open_some(self, assigned: Sequence[tuple[TopicImage, int]]) -> None:
        now_ms = self._runtime.env.wall_ms()
        requests = [
            OpenRequest(
                topic,
                index,
                self._settings_of(topic).log_config,
                self.folder.recovery_point(topic.name, index, topic.id),
            )
            for topic, index in assigned
        ]
        # Each new log costs a sync, and the file system joins syncs that wait at the same time.
        parts = [requests[at : at + OPEN_IN_TURN] for at in range(0, len(requests), OPEN_IN_TURN)]
        jobs = [partial(self._open_logs, part, now_ms) for part in parts]
        results = [result for part in await self._run_all(jobs) for result in part]
        opened: list[tuple[OpenRequest, Log]] = []
        for request, (log, claim) in zip(requests, results, strict=True):
            if claim.moved_to is not None:
                self._report_set_aside(request.topic.name, request.index, claim.moved_to)
            if claim.restored:
                self._report_restored(request, claim.restored)
            if log is None:
                self._report_missing(request.topic, request.index)
            elif isinstance(log, Exception):
                self._report_unopened(request.topic, request.index, log)
            else:
                opened.append((request, log))
        for number, (request, log) in enumerate(await self._list_new(opened), 1):
            if number % HOST_IN_TURN == 0:
                await asyncio.sleep(0)
            self._unopened.pop((request.topic.name, request.index), None)
            if log.recovery is not None:
                self._report_recovery(request.topic.name, request.index, log.recovery)
            self._opened(request.topic, request.index, log, request.recovery_point)

    async def _run_all(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        return list(await asyncio.gather(*map(self._runtime.run_blocking, jobs)))

    def _open_logs(self, requests: Sequence[OpenRequest], now_ms: int) -> list[OpenOutcome]:
        return [self._open_log(request, now_ms) for request in requests]

    def _open_log(self, request: OpenRequest, now_ms: int) -> OpenOutcome:
        """Open one log. Blocks."""
        topic, index = request.topic, request.index
        claim = Claim()
        try:
            if LogId(topic.id, index) in self._to_replay:
                raise StorageError("a sync failed: check the disk, then restart the node, which replays its commit log")
            if self.folder.is_lost(topic.name, index, topic.id):
                return None, claim
            claim = self.folder.claim_log(topic.name, index, topic.id, now_ms)
            path = self.folder.log_path(topic.name, index)
            log = Log.open(
                self._runtime.env.disk,
                path,
                request.config,
                now_ms,
                recovery_point=request.recovery_point,
                clean=self.folder.was_clean,
            )
            committer = self._syncer.committer
            if committer is not None:
                log.frames = LogFrames(committer.commit_log, LogId(topic.id, index))
        except Exception as error:
            return error, claim
        return log, claim

    async def _list_new(self, opened: list[tuple[OpenRequest, Log]]) -> list[tuple[OpenRequest, Log]]:
        """List new logs in the recovery points before anything is appended; return the logs that can be used."""
        listed: list[tuple[OpenRequest, Log]] = []
        new: list[tuple[OpenRequest, Log]] = []
        for request, log in opened:
            is_new = request.recovery_point is None and not log.log_end_offset
            (new if is_new else listed).append((request, log))
        if not new:
            return listed
        try:
            # Before they are listed here: a shutdown or a checkpoint at this moment writes what is listed.
            await self._runtime.run_blocking(self.folder.sync_names)
            for request, _ in new:
                self.folder.recovery_points[(request.topic.name, request.index)] = RecoveryPoint(request.topic.id, 0)
                self.folder.high_watermarks.pop((request.topic.id, request.index), None)
            await self._checkpoints.write()
        except OSError as error:
            for request, log in new:
                self.folder.recovery_points.pop((request.topic.name, request.index), None)
                await self._runtime.run_blocking(partial(close_log, log))
                self._report_unopened(request.topic, request.index, error)
            return listed
        return listed + new

    def _report_restored(self, request: OpenRequest, reason: str) -> None:
        topic, index = request.topic, request.index
        proven = f"{POINTS_NAME} lists this log for this topic"
        unproven = f"{POINTS_NAME} does not list it, so make sure that these are the records of this topic"
        self._log.warning(
            "topic_id_restored",
            topic=topic.name,
            partition=index,
            file=f"{self.folder.log_path(topic.name, index)}/{TOPIC_ID_NAME}",
            reason=reason,
            then=f"the log is used as it is: {unproven if request.recovery_point is None else proven}",
        )

    def _report_missing(self, topic: TopicImage, index: int) -> None:
        """Report a log that existed and is missing. It restarts empty once the controller knows."""
        self._log.error("log_missing", topic=topic.name, partition=index)
        self._missing[(topic.id, index)] = topic
        self.reports.add(ReplicaReport(topic.id, index, 0, -1, Loss.CERTAIN.value, "its log is missing"))

    def _report_unopened(self, topic: TopicImage, index: int, error: Exception) -> None:
        reason = error.message if isinstance(error, StorageError) else repr(error)
        then = f"the node retries every {self._runtime.config.recovery_point_interval_ms / 1000:g} s"
        self._log.error("log_open_failed", topic=topic.name, partition=index, error=reason, then=then)
        self._unopened[(topic.name, index)] = topic.id
        self.reports.add(
            ReplicaReport(topic.id, index, 0, -1, Loss.SPOILED.value, f"its log cannot be opened: {reason}")
        )
        self._transfer_leadership(topic.name, topic.id, index)

    def _loss_reported(self, report: ReplicaReport, refusal: str) -> None:
        """The controller knows of the loss: a missing log restarts empty, an open log continues with what it has."""
        name = self.image.names_by_id.get(report.topic_id)
        self._log.error(
            "replica_lost_records",
            topic=name,
            partition=report.partition,
            reason=report.reason,
            then=refusal or "it leaves the ISR until it has caught up with its leader",
        )
        topic = self._missing.pop((report.topic_id, report.partition), None)
        if topic is not None:
            self.folder.recovery_points.pop((topic.name, report.partition), None)
            self._refetched[(report.topic_id, report.partition)] = report.reason
            self._work.put_nowait(Open(topic, (report.partition,)))
        hosted = self.partition_by_id(report.topic_id, report.partition)
        if hosted is not None and hosted.loss is not None:
            hosted.loss = None
            self._apply_image(hosted)

    def _opened(self, topic: TopicImage, index: int, log: Log, recovery_point: int | None) -> None:
        """Host the partition, in the role that the current image assigns."""
        current = self.image.topic_by_id(topic.id)
        image = None if current is None else current.partition(index)
        loss, reason = (None, "") if image is None else self._loss_of(log, recovery_point, len(image.replicas))
        # An old copy of a log may hold uncommitted records below a watermark that was stored later.
        watermark = 0 if loss is not None else self.folder.high_watermarks.get((topic.id, index), 0)
        topic_now = current or topic
        settings = partition_settings(self._settings_of(topic_now), self.image, topic_now, index)
        partition = Partition(topic, index, log, settings, watermark, self._runtime, self._syncer, self.replication)
        partition.take_refused(self._refused.pop((topic.id, index), None))
        self.partitions[(topic.name, index)] = partition
        if loss is not None:
            partition.loss = loss
            self.reports.add(report_of(partition, loss, reason))
        self._apply_image(partition)
        missing = self._refetched.pop((topic.id, index), "")
        if missing and len(partition.replicas) > 1:
            partition.found_damaged(0, "recovery", missing)

    def _loss_of(self, log: Log, recovery_point: int | None, replicas: int) -> tuple[Loss | None, str]:
        """Return the loss found when the log was opened, and the reason. A damaged sole replica serves what is left."""
        report = log.recovery
        if report is not None and report.ends_below_recovery_point:
            return Loss.CERTAIN, f"its log ends at {log.log_end_offset}, and had reached {report.recovery_point}"
        if report is not None and report.damages and replicas > 1:
            first = report.damages[0]
            loss = Loss.CERTAIN if log.read_only_forever else Loss.SPOILED
            return loss, f"its log is damaged at offset {first.offset}"
        if recovery_point is None and log.log_end_offset > 0:
            return Loss.POSSIBLE, "the file recovery-points does not list it"
        return None, ""

    def _apply_image(self, partition: Partition) -> None:
        image = self._image_of(partition.topic_id, partition.index)
        if image is not None and self._is_assigned(image) and not self._is_replaced(self.image):
            partition.apply(image)
        else:
            # The partition was removed while its log was being opened; the removal is already queued.
            partition.close(KafkaError(ErrorCode.unknown_topic_or_partition, f"{partition.topic} was deleted"))

    def _report_recovery(self, topic: str, partition: int, report: RecoveryReport) -> None:
        """Log what opening a log found, as an error if durable data is damaged."""
        say = self._log.error if report.is_damaged else self._log.warning
        if not (report.is_damaged or report.truncated_bytes or report.removed_segments):
            say = self._log.info
        fields = asdict(report)
        del fields["folder"]
        say("log_damaged" if report.is_damaged else "log_recovered", topic=topic, partition=partition, **fields)

    async def _remove(self, work: Remove) -> None:
        topic, topic_id, indexes = work
        closed: list[Partition] = []
        for index in indexes:
            hosted = self.partitions.get((topic, index))
            # An open partition was assigned to this node again after this removal was queued.
            if hosted is not None and hosted.topic_id == topic_id and hosted.is_closed:
                del self.partitions[(topic, index)]
                closed.append(hosted)
        try:
            await self._syncer.settled()
            for hosted in closed:
                await hosted.jobs.ended()
                self.folder.recovery_points.pop((topic, hosted.index), None)
            # Before the files are removed: a new log of the same name must not be checked against this recovery point.
            await self._checkpoints.write()
            await self._cancel_frames(work, closed)
        except OSError as error:
            self._log.error("log_not_removed", topic=topic, error=repr(error), then="the node retries")
            for hosted in closed:
                self.partitions.setdefault((topic, hosted.index), hosted)
            self._unremoved.append(work)
            return
        removed = [hosted for hosted in closed if not self._is_assigned(self._image_of(topic_id, hosted.index))]

        def remove() -> None:
            for hosted in closed:
                frames = hosted.log.frames
                if not hosted.log.close() and frames is not None and frames.exist:
                    self._to_replay.add(frames.log)
            for hosted in removed:
                self.folder.remove_log(hosted.topic, hosted.index)()

        for hosted in closed:
            # From now on no flush begins, which could write to the folder of the partition's next log.
            await hosted.jobs.begin_exclusive()
        try:
            await self._runtime.run_blocking(remove)
        finally:
            for hosted in closed:
                hosted.jobs.end_exclusive()
        for hosted in removed:
            self.folder.high_watermarks.pop((topic_id, hosted.index), None)

    async def _cancel_frames(self, work: Remove, closed: Sequence[Partition]) -> None:
        """Void the commit log's entries of logs that are removed: a later log of the partition must not get them."""
        for hosted in closed:
            frames = hosted.log.frames
            is_removed = not self._is_assigned(self._image_of(work.topic_id, hosted.index))
            if is_removed and frames is not None and frames.exist:
                await self._runtime.run_blocking(frames.void)

    def _transfer_leadership(self, topic: str, topic_id: UUID, index: int) -> None:
        """Transfer leadership while this node's log is unavailable."""

        def image_led() -> PartitionImage | None:
            is_unopened = self._unopened.get((topic, index)) == topic_id
            return self._image_of(topic_id, index) if is_unopened else None

        image = image_led()
        if image is not None and image.leader == self._node_id and len(image.replicas) > 1:
            self.replication.transfer_leadership(topic, topic_id, index, image_led)

    def _retry_failed(self) -> None:
        """Retry failed removals, and failed opens of partitions that the image still assigns to this node."""
        unremoved, self._unremoved = self._unremoved, []
        for work in unremoved:
            self._work.put_nowait(work)
        unopened, self._unopened = self._unopened, {}
        for (_, index), topic_id in unopened.items():
            topic = self.image.topic_by_id(topic_id)
            partition = None if topic is None else topic.partition(index)
            if topic is not None and partition is not None:
                self._add_replicas(topic, (partition,))

    async def sync_all(self) -> None:
        """Sync each log with unsynced records, under `replicated` a few at a time.

        There, appends go on without syncs, and the syncs of hundreds of logs at once would hold them up.
        """
        config = self._runtime.config
        unsynced = [each for each in self.partitions.values() if each.log.synced_end_offset < each.log_end_offset]
        at_once = len(unsynced)
        if config.durability == "replicated":
            at_once = max(SYNCED_AT_ONCE, -(-len(unsynced) // SYNC_ROUNDS_MAX))
        for first in range(0, len(unsynced) or 1, at_once or 1):
            if first:
                # All rounds together take a quarter of the interval, and the time of the disk.
                await asyncio.sleep(config.recovery_point_interval_ms / 4000 * at_once / len(unsynced))
            for partition in unsynced[first : first + at_once]:
                if not partition.is_closed:
                    self._syncer.request(partition)
            await self._syncer.settled()

    async def record_recovery_points(self) -> None:
        """Record how far each log is synced, so that recovery after a crash reads only what was written since."""
        # The disk may work again.
        self._retry_failed()
        await self.sync_all()
        await self._checkpoints.write()

    # -- requests ------------------------------------------------------------------------------------------------------

    def require_leader(self, topic: str, index: int, *, is_answer: bool = True) -> Partition:
        """Return the partition if this node leads it; otherwise raise the error for the client.

        Pass `is_answer=False` if the caller may forward the request instead of returning the error.
        """
        partition = self.partitions.get((topic, index))
        if partition is not None and partition.leads:
            return partition
        if self.image.partition(topic, index) is None:
            raise KafkaError(ErrorCode.unknown_topic_or_partition, f"{topic}-{index} does not exist")
        if is_answer:
            self._runtime.metrics.rejected(topic, index)
        raise KafkaError(ErrorCode.not_leader_or_follower, f"{topic}-{index} is not led by node {self._node_id}")

    async def append_internal(self, topic: str, index: int, batch: bytes, timeout_s: float) -> int:
        """Append to an internal topic, wait until the batch is committed, and return its base offset.

        REQUEST_TIMED_OUT after `timeout_s`: the batch is in the log, and may be committed later or never.
        """
        return await self._append_and_commit(
            topic, index, lambda partition: partition.append_internal(batch, self._runtime.env.wall_ms()), timeout_s
        )

    async def append_marker(self, topic: str, index: int, marker: TransactionMarker, timeout_s: float) -> int:
        """Append the marker of a transaction, wait until it is committed, and return its offset.

        INVALID_PRODUCER_EPOCH and TRANSACTION_COORDINATOR_FENCED mean that the marker is obsolete. After a change of
        the leader epoch, another leader may have committed it and begun the next transaction: NOT_LEADER_OR_FOLLOWER.
        """
        leader_epoch = self.require_leader(topic, index).leader_epoch
        offset = await self._append_and_commit(
            topic, index, lambda partition: partition.append_marker(marker, self._runtime.env.wall_ms()), timeout_s
        )
        if self.require_leader(topic, index).leader_epoch != leader_epoch:
            raise KafkaError(ErrorCode.not_leader_or_follower, f"{topic}-{index} has a new leader epoch")
        return offset

    async def _append_and_commit(
        self, topic: str, index: int, append: Callable[[Partition], Appended], timeout_s: float
    ) -> int:
        """Append with acks=all; return the base offset once it is committed."""
        partition = self.require_leader(topic, index)
        partition.check_enough_replicas()
        appended = append(partition)
        committed: asyncio.Future[None] = self._loop.create_future()
        partition.when_committed(appended.last_offset + 1, partial(resolve, committed))
        try:
            async with asyncio.timeout(timeout_s):
                await committed
        except TimeoutError:
            raise KafkaError(
                ErrorCode.request_timed_out, f"{topic}-{index} was not committed within {timeout_s} s"
            ) from None
        return appended.base_offset

    def check_forwardable(self, topic: TopicImage, index: int, records: memoryview, now_ms: int) -> None:
        """Raise if the leader may lack earlier batches that this batch's producer sent here while this node led."""
        hosted = self.partitions.get((topic.name, index))
        if hosted is not None and not hosted.is_closed:
            hosted.check_forwardable(records, now_ms)
        elif (unresolved := self._moved_away.get((topic.id, index))) and len(records) >= HEADER_BYTES:
            unresolved.check(read_batch_header(records), NO_PRODUCERS, now_ms)

    def refused(self, topic: TopicImage, index: int, records: memoryview, error: KafkaError, now_ms: int) -> None:
        """Remember a batch that failed with `error`, so that its producer's later batches do not overtake it."""
        hosted = self.partition_by_id(topic.id, index)
        if hosted is not None:
            hosted.refused(records, error, now_ms)
        elif self._is_assigned(topic.partition(index)) and len(records) >= HEADER_BYTES:
            if (topic.id, index) not in self._refused and len(self._refused) >= REFUSED_MAX:
                del self._refused[next(iter(self._refused))]
            refused = self._refused.setdefault((topic.id, index), RefusedBatches())
            refused.note(read_batch_header(records), error.code, NO_PRODUCERS, now_ms)

    def other_leader(self, topic: str, index: int) -> tuple[tuple[int, int], BrokerImage] | None:
        """Return the leader if it is another node, as (id, leader epoch) and broker, to redirect a client."""
        partition = self.image.partition(topic, index)
        leader = None if partition is None else self.image.brokers.get(partition.leader)
        if partition is None or leader is None or leader.id == self._node_id:
            return None
        return (leader.id, partition.leader_epoch), leader

    def has_opened(self, topic: TopicImage) -> bool:
        """Whether every log of the topic that is assigned to this node is open, or will be before the node serves."""
        return not self.is_open or all(
            (topic.name, partition.partition) in self.partitions
            for partition in topic.partitions
            if self._is_assigned(partition)
        )

    def partition_by_id(self, topic_id: UUID, index: int) -> Partition | None:
        name = self.image.names_by_id.get(topic_id)
        partition = None if name is None else self.partitions.get((name, index))
        return partition if partition is not None and partition.topic_id == topic_id else None

    def hand_over(self, hand_overs: Iterable[HandOver]) -> None:
        for each in hand_overs if self.is_open else ():
            partition = self.partition_by_id(each.topic_id, each.partition)
            if partition is not None:
                self.replication.hand_over(partition, each.leader_epoch, each.to)

    def gauges(self) -> Iterator[PartitionGauges]:
        for partition in self.partitions.values():
            yield PartitionGauges(
                topic=partition.topic,
                partition=partition.index,
                log_start_offset=partition.log_start_offset,
                log_end_offset=partition.log_end_offset,
                high_watermark=partition.high_watermark,
                last_stable_offset=partition.last_stable_offset,
                replicas=len(partition.replicas),
                in_sync_replicas=len(partition.in_sync_replicas),
                size_bytes=partition.log.size_bytes,
                is_leader=partition.leader is not None,
            )


def close_log(log: Log) -> str | None:
    """Close the log; return the error if it did not close cleanly. Runs in a thread."""
    try:
        return None if log.close() else log.read_only_reason
    except Exception as error:
        return repr(error)
