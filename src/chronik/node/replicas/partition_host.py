"""The partitions that this node hosts: opens, configures and removes their logs, and gives them their roles."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple, TypeAlias
from uuid import UUID

from chronik.metadata.calls import HandOver, ReplicaReport
from chronik.metadata.elections import Loss
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
from chronik.metadata.min_insync import min_insync_replicas
from chronik.node.config import NodeConfig
from chronik.node.disk_watch import NO_ANSWER
from chronik.node.environment import Environment
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.replicas.checkpoints import Checkpoints, recovery_points_of, watermarks_of
from chronik.node.replicas.cluster_links import ALONE, ClusterLinks
from chronik.node.replicas.log_closing import close_log, close_logs
from chronik.node.replicas.partition import Partition
from chronik.node.replicas.replica_reports import ReplicaReports, report_of
from chronik.node.replicas.replica_sessions import ReplicaSessions
from chronik.node.replicas.replication import Replication
from chronik.node.replicas.syncer import Syncer
from chronik.node.topic_settings import is_traced, partition_settings, topic_defaults, topic_settings, traced_topics
from chronik.observe.logging import Logger
from chronik.observe.metrics import Metrics, PartitionGauges
from chronik.observe.traces import TraceRing
from chronik.storage.config import LogConfig
from chronik.storage.folder import NO_EPOCH, DataFolder, RecoveryPoint
from chronik.storage.log import Log, RecoveryReport
from chronik.wire.errors import ErrorCode, KafkaError

OPEN_AT_ONCE = 64
APPLIED_TIMEOUT_S = 30.0


class Open(NamedTuple):
    """Open the logs of these partitions of a topic, unless they are open."""

    topic: TopicImage
    indexes: tuple[int, ...]


class Remove(NamedTuple):
    """Close the logs of these partitions of a topic, and remove them unless they were given back meanwhile."""

    topic: str
    topic_id: UUID
    indexes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """One log to open; `recovery_point` is None where the log is not listed."""

    topic: TopicImage
    index: int
    config: LogConfig
    recovery_point: int | None


Work: TypeAlias = Open | Remove | asyncio.Future[None]


class PartitionHost:
    """Invariant: `partitions` holds exactly the partitions whose log is open here, as leader or as follower.

    Logs are opened and removed one after the other by one task, so that a topic that is deleted and made again never
    has two logs in one folder. A change of role is carried out at once, when the metadata brings it: a leader that was
    replaced stops there and then. Owned by the loop; files are opened and removed in the executor.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        env: Environment,
        config: NodeConfig,
        folder: DataFolder,
        metadata: MetadataLog,
        syncer: Syncer,
        metrics: Metrics,
        traces: TraceRing,
        log: Logger,
        links: ClusterLinks = ALONE,
        incarnation: UUID | None = None,
    ) -> None:
        """`incarnation` is this process as it registered: an image of a later process of this node is not for it."""
        self.partitions: dict[tuple[str, int], Partition] = {}
        self.folder = folder
        self._loop = loop
        self._env = env
        self._config = config
        self._metadata = metadata
        self._syncer = syncer
        self._metrics = metrics
        self._traces = traces
        self._log = log.bind(component="storage")
        self._defaults = topic_defaults(config, metadata.image)
        self._checkpoints = Checkpoints(loop, env, folder, self.partitions)
        self.replication = Replication(
            loop,
            env,
            config.node_id,
            config.replica_lag_ms_max,
            links,
            self._checkpoints.lower,
            self._distrust_page_cache,
            log,
        )
        self.replica_sessions = ReplicaSessions(loop, env, self, metrics, log.bind(component="replication"))
        self.reports = ReplicaReports(
            loop, config.node_id, self.partitions.values, links.report_replicas, self._loss_reported, self._log
        )
        self.replication.leader_lacks = self.reports.leader_lacks
        self.replication.may_have_lost = self.reports.may_have_lost
        self._work: asyncio.Queue[Work] = asyncio.Queue()
        self._unopened: dict[tuple[str, int], UUID] = {}
        self._missing: dict[tuple[UUID, int], TopicImage] = {}
        self._refetched: dict[tuple[UUID, int], str] = {}
        """Missing logs that begin anew, with the reason for the record of damages."""
        self._unremoved: list[Remove] = []
        self._worker: asyncio.Task[None] | None = None
        self._is_following = False
        self.is_open = False
        """Whether every log was opened that the image gave this node at its start."""
        self._incarnation = incarnation

    # -- start and stop ------------------------------------------------------------------------------------------------

    async def open_all(self) -> None:
        """Open every partition that the image gives this node, and set logs aside that belong to none.

        Losses that this finds are for `reports.flush`. The image must be no older than this process: it holds the
        registration of this incarnation. From an older one, logs would be set aside that were given to this node since.
        """
        image = self._metadata.image
        if self._is_replaced(image):
            self._resign(image)
        else:
            self._is_following = True
            self._defaults = topic_defaults(self._config, image)
            self._traces.topics = traced_topics(image, self._defaults)
            self.replication.brokers_changed(image)
            await self._set_strays_aside(image)
            await self._open(
                [
                    (topic, partition.partition)
                    for _, topic in sorted(image.topics.items())
                    for partition in topic.partitions
                    if self._config.node_id in partition.replicas
                ]
            )
        self._worker = self._loop.create_task(self._carry_out(), name="partition-host")
        self.is_open = True

    async def close_all(self, broker_epoch: int = NO_EPOCH) -> None:
        """Close every log cleanly and record that they are, by the broker of this epoch."""
        if self._worker is not None:
            self._worker.cancel()
        self._is_following = self.is_open = False
        self.reports.close()
        self.replication.close()
        self.replica_sessions.close()
        with contextlib.suppress(TimeoutError):
            await self._syncer.settled()
        # Whether what waits was replicated is not known here: it must not be taken for not appended.
        closing = KafkaError(ErrorCode.request_timed_out, "the node is stopping")
        partitions = list(self.partitions.values())
        watermarks = watermarks_of(partitions)
        self.partitions.clear()
        for partition in partitions:
            partition.close(closing)
        try:
            if await close_logs(self._loop, self._env, self._syncer.disk, partitions, self._log):
                points = recovery_points_of(self.folder, partitions)
                record = partial(self.folder.record_clean_shutdown, points, watermarks, broker_epoch)
                await self._syncer.disk.wait(self._loop.run_in_executor(self._env.executor, record))
        except OSError as error:
            reason = str(error) or NO_ANSWER
            self._log.warning("shutdown_not_recorded", error=reason, then="the next start recovers the logs")

    async def _set_strays_aside(self, image: ClusterImage) -> None:
        """A crash may come between a topic's deletion, or a replica's removal, and that of its files.

        Nothing is deleted because the metadata does not know it: the metadata may be what is wrong.
        """
        now_ms = self._env.wall_ms()
        for topic, index in await self._loop.run_in_executor(self._env.executor, self.folder.partitions):
            partition = image.partition(topic, index)
            if partition is None or self._config.node_id not in partition.replicas:
                moved_to = await self._loop.run_in_executor(
                    self._env.executor, self.folder.set_aside_log, topic, index, now_ms
                )
                self._report_set_aside(topic, index, moved_to)
        for topic, index in list(self.folder.recovery_points):
            partition = image.partition(topic, index)
            if partition is None or self._config.node_id not in partition.replicas:
                del self.folder.recovery_points[(topic, index)]

    def _report_set_aside(self, topic: str, index: int, moved_to: str) -> None:
        self._log.warning("log_set_aside", topic=topic, partition=index, to=moved_to, reason="no topic has this log")

    # -- following the metadata ----------------------------------------------------------------------------------------

    @property
    def image(self) -> ClusterImage:
        return self._metadata.image

    def metadata_changed(self, image: ClusterImage, events: Sequence[Event]) -> None:
        if not self._is_following:
            # What is opened at the start follows the image as it is then.
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
                    self._take_on(topic, topic.partitions)
                    if is_traced(topic, self._defaults):
                        self._traces.topics |= {topic.name}
                case PartitionsCreated(topic=topic, partitions=added):
                    self._take_on(topic, added)
                case TopicDeleted(topic=topic):
                    gone = KafkaError(ErrorCode.unknown_topic_or_partition, f"{topic.name} was deleted")
                    self._give_up(topic.name, topic.id, [p.partition for p in topic.partitions], gone)
                    self._traces.topics -= {topic.name}
                case ConfigChanged(resource=resource, name=name):
                    self._configure(name if resource == "topic" else None)
                case ReplicasChanged() | LeaderChanged() | IsrChanged():
                    self._partition_changed(image, event)

    def _is_replaced(self, image: ClusterImage) -> bool:
        own = image.brokers.get(self._config.node_id)
        return self._incarnation is not None and own is not None and own.incarnation != self._incarnation

    def _resign(self, image: ClusterImage) -> None:
        """Another process has this node's id: what the image says of the node is said of that one, from here on."""
        own = image.brokers[self._config.node_id]
        self._is_following = False
        self._log.error("replaced", by=f"{own.host}:{own.port}", then="this node serves no partition any more")
        self.replication.close()
        self.replica_sessions.close()
        replaced = KafkaError(ErrorCode.not_leader_or_follower, f"another process is node {own.id} now")
        for partition in self.partitions.values():
            partition.close(replaced)

    async def applied(self) -> None:
        """As `settled`, within a bound: TimeoutError after it."""
        async with asyncio.timeout(APPLIED_TIMEOUT_S):
            await self.settled()

    async def settled(self) -> None:
        """Wait until the partitions follow the image as it is now."""
        if not self.is_open:
            return
        reached: asyncio.Future[None] = self._loop.create_future()
        self._work.put_nowait(reached)
        await reached

    def _partition_changed(self, image: ClusterImage, event: ReplicasChanged | LeaderChanged | IsrChanged) -> None:
        changed = event.partition
        is_mine = self._config.node_id in changed.replicas
        hosted = self.partitions.get((event.topic, changed.partition))
        if hosted is not None and hosted.topic_id == event.topic_id and is_mine:
            topic = image.topic_by_id(event.topic_id)
            if topic is not None and isinstance(event, ReplicasChanged):
                # Before the ISR of the same image: a newer ISR under an older minimum could commit too early.
                hosted.require_in_sync(min_insync_replicas(image, topic, changed))
            hosted.apply(changed)
        if self._unopened.get((event.topic, changed.partition)) == event.topic_id:
            self._give_away(event.topic, event.topic_id, changed.partition)
        if not isinstance(event, ReplicasChanged):
            return
        if self._config.node_id in event.added:
            topic = image.topic_by_id(event.topic_id)
            if topic is not None:
                self._take_on(topic, (changed,))
        elif self._config.node_id in event.removed:
            moved = KafkaError(ErrorCode.request_timed_out, f"{event.topic}-{changed.partition} has moved away")
            self._give_up(event.topic, event.topic_id, [changed.partition], moved)

    def _take_on(self, topic: TopicImage, partitions: Iterable[PartitionImage]) -> None:
        indexes = tuple(p.partition for p in partitions if self._config.node_id in p.replicas)
        if indexes:
            self._work.put_nowait(Open(topic, indexes))

    def _give_up(self, topic: str, topic_id: UUID, indexes: Iterable[int], reason: KafkaError) -> None:
        """Serve these no more, from here on; the logs go when it is their turn."""
        for index in indexes:
            hosted = self.partitions.get((topic, index))
            self.reports.forget(topic_id, index)
            if hosted is not None and hosted.topic_id == topic_id:
                hosted.close(reason)
                self.replication.gone(hosted)
        self._work.put_nowait(Remove(topic, topic_id, tuple(indexes)))

    def _configure(self, only_topic: str | None) -> None:
        image = self._metadata.image
        self._defaults = topic_defaults(self._config, image)
        self._traces.topics = traced_topics(image, self._defaults)
        for partition in self.partitions.values():
            topic = image.topics.get(partition.topic)
            if topic is not None and (only_topic is None or topic.name == only_topic):
                partition.configure(partition_settings(image, topic, partition.index, self._defaults))

    async def _carry_out(self) -> None:
        while True:
            work = await self._work.get()
            try:
                match work:
                    case Open(topic=topic, indexes=indexes):
                        await self._open([(topic, index) for index in indexes])
                    case Remove(topic=name, topic_id=topic_id, indexes=indexes):
                        await self._remove(name, topic_id, indexes)
                    case _:
                        if not work.done():
                            work.set_result(None)
            except Exception:
                self._log.exception("metadata_event_failed", work=type(work).__name__)

    # -- opening and removing ------------------------------------------------------------------------------------------

    async def _open(self, wanted: Sequence[tuple[TopicImage, int]]) -> None:
        missing = [each for each in wanted if not self._is_open(*each)]
        for at in range(0, len(missing), OPEN_AT_ONCE):
            await self._open_some(missing[at : at + OPEN_AT_ONCE])

    def _is_open(self, topic: TopicImage, index: int) -> bool:
        hosted = self.partitions.get((topic.name, index))
        return hosted is not None and hosted.topic_id == topic.id and not hosted.is_closed

    async def _open_some(self, wanted: Sequence[tuple[TopicImage, int]]) -> None:
        now_ms = self._env.wall_ms()
        requests = [
            OpenRequest(
                topic,
                index,
                topic_settings(topic, self._defaults).log_config,
                self.folder.recovery_point(topic.name, index, topic.id),
            )
            for topic, index in wanted
        ]
        found = await self._loop.run_in_executor(
            self._env.executor, lambda: [self._open_log(request, now_ms) for request in requests]
        )
        opened: list[tuple[OpenRequest, Log]] = []
        for request, (log, moved_to) in zip(requests, found, strict=True):
            if moved_to is not None:
                self._report_set_aside(request.topic.name, request.index, moved_to)
            if log is None:
                self._is_missing(request.topic, request.index)
            elif isinstance(log, Exception):
                self._not_opened(request.topic, request.index, log)
            else:
                opened.append((request, log))
        for request, log in await self._list_new(opened):
            self._unopened.pop((request.topic.name, request.index), None)
            if log.recovery is not None:
                self._report_recovery(request.topic.name, request.index, log.recovery)
            self._opened(request.topic, request.index, log, request.recovery_point)

    def _open_log(self, request: OpenRequest, now_ms: int) -> tuple[Log | Exception | None, str | None]:
        """The log, why it cannot be opened, or None where it is gone; and where another topic's log went. Blocks."""
        topic, index = request.topic, request.index
        moved_to: str | None = None
        try:
            if self.folder.is_lost(topic.name, index, topic.id):
                return None, None
            moved_to = self.folder.claim_log(topic.name, index, topic.id, now_ms)
            path = self.folder.log_path(topic.name, index)
            log = Log.open(
                self._env.disk,
                path,
                request.config,
                now_ms,
                recovery_point=request.recovery_point,
                clean=self.folder.was_clean,
            )
        except Exception as error:
            return error, moved_to
        return log, moved_to

    async def _list_new(self, opened: list[tuple[OpenRequest, Log]]) -> list[tuple[OpenRequest, Log]]:
        """Lists new logs in the recovery points, before anything is appended; returns those that can be used."""
        listed: list[tuple[OpenRequest, Log]] = []
        new: list[tuple[OpenRequest, Log]] = []
        for request, log in opened:
            is_new = request.recovery_point is None and not log.log_end_offset
            (new if is_new else listed).append((request, log))
        if not new:
            return listed
        for request, _ in new:
            self.folder.recovery_points[(request.topic.name, request.index)] = RecoveryPoint(request.topic.id, 0)
            self.folder.high_watermarks.pop((request.topic.id, request.index), None)
        try:
            await self._loop.run_in_executor(self._env.executor, self.folder.sync_names)
            await self._checkpoints.write()
        except OSError as error:
            for request, log in new:
                self.folder.recovery_points.pop((request.topic.name, request.index), None)
                await self._loop.run_in_executor(self._env.executor, close_log, log)
                self._not_opened(request.topic, request.index, error)
            return listed
        return listed + new

    def _is_missing(self, topic: TopicImage, index: int) -> None:
        """The log was here, and is gone: it begins anew once the controller knows."""
        self._log.error("log_missing", topic=topic.name, partition=index)
        self._missing[(topic.id, index)] = topic
        self.reports.add(ReplicaReport(topic.id, index, 0, -1, Loss.CERTAIN.value, "its log is missing"))

    def _not_opened(self, topic: TopicImage, index: int, error: Exception) -> None:
        self._log.error("log_open_failed", topic=topic.name, partition=index, error=repr(error))
        self._unopened[(topic.name, index)] = topic.id
        self.reports.add(
            ReplicaReport(topic.id, index, 0, -1, Loss.SPOILED.value, f"its log cannot be opened: {error}")
        )
        self._give_away(topic.name, topic.id, index)

    def _loss_reported(self, report: ReplicaReport, refusal: str) -> None:
        """The controller knows what was lost: the replica begins anew, or continues with what it has."""
        name = self.image.names_by_id.get(report.topic_id)
        self._log.error(
            "replica_lost_records",
            topic=name,
            partition=report.partition,
            reason=report.reason,
            then=refusal or "out of sync until it has caught up with a whole replica",
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
        """The partition is here, in the role that the image gives it by now."""
        current = self._metadata.image.topic_by_id(topic.id)
        image = None if current is None else current.partition(index)
        loss, reason = (None, "") if image is None else self._loss_of(log, recovery_point, len(image.replicas))
        # A log that may be an old copy may hold records that were never committed below a watermark of later.
        watermark = 0 if loss is not None else self.folder.high_watermarks.get((topic.id, index), 0)
        partition = Partition(
            topic.name,
            topic.id,
            index,
            log,
            partition_settings(self.image, current or topic, index, self._defaults),
            node_id=self._config.node_id,
            high_watermark=watermark,
            counts_unsynced=self._config.durability == "replicated",
            replicating=self.replication,
            env=self._env,
            syncer=self._syncer,
            metrics=self._metrics,
            traces=self._traces,
            logger=self._log,
        )
        self.partitions[(topic.name, index)] = partition
        if loss is not None:
            partition.loss = loss
            self.reports.add(report_of(partition, loss, reason))
        self._apply_image(partition)
        missing = self._refetched.pop((topic.id, index), "")
        if missing and len(partition.replicas) > 1:
            partition.found_damaged(0, "recovery", missing)

    def _loss_of(self, log: Log, recovery_point: int | None, replicas: int) -> tuple[Loss | None, str]:
        """What opening a log showed to be lost, and how. A single replica with damage serves what can be read of it."""
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
        image = self.image
        topic = image.topic_by_id(partition.topic_id)
        current = None if topic is None else topic.partition(partition.index)
        if current is not None and self._config.node_id in current.replicas and not self._is_replaced(image):
            partition.apply(current)
        else:
            # It was taken away while its log was being opened; that it has to be removed stands in the queue.
            partition.close(KafkaError(ErrorCode.unknown_topic_or_partition, f"{partition.topic} was deleted"))

    def _report_recovery(self, topic: str, partition: int, report: RecoveryReport) -> None:
        """One line that says what opening a log found; loud where durable data is bad."""
        say = self._log.error if report.is_damaged else self._log.warning
        if not (report.is_damaged or report.truncated_bytes or report.removed_segments):
            say = self._log.info
        fields = asdict(report)
        del fields["folder"]
        say("log_damaged" if report.is_damaged else "log_recovered", topic=topic, partition=partition, **fields)

    async def _remove(self, topic: str, topic_id: UUID, indexes: Sequence[int]) -> None:
        closed: list[Partition] = []
        for index in indexes:
            hosted = self.partitions.get((topic, index))
            # One that is not closed was opened since, because it was given back.
            if hosted is not None and hosted.topic_id == topic_id and hosted.is_closed:
                del self.partitions[(topic, index)]
                closed.append(hosted)
        try:
            await self._syncer.settled()
            for hosted in closed:
                await hosted.jobs.ended()
                self.folder.recovery_points.pop((topic, hosted.index), None)
            # Before the files: a log of the same name must not be measured by what this one had.
            await self._checkpoints.write()
        except OSError as error:
            self._log.error("log_not_removed", topic=topic, error=repr(error), then="it is tried again")
            for hosted in closed:
                self.partitions.setdefault((topic, hosted.index), hosted)
            self._unremoved.append(Remove(topic, topic_id, tuple(indexes)))
            return
        removed = [hosted for hosted in closed if not self._is_wanted(hosted)]

        def remove() -> None:
            for hosted in closed:
                hosted.log.close()
            for hosted in removed:
                self.folder.remove_log(hosted.topic, hosted.index)()

        await self._loop.run_in_executor(self._env.executor, remove)
        for hosted in removed:
            self.folder.high_watermarks.pop((topic_id, hosted.index), None)

    def _is_wanted(self, hosted: Partition) -> bool:
        topic = self._metadata.image.topic_by_id(hosted.topic_id)
        image = None if topic is None else topic.partition(hosted.index)
        return image is not None and self._config.node_id in image.replicas

    def _give_away(self, topic: str, topic_id: UUID, index: int) -> None:
        """Have another replica lead, should this node be to, as long as the log is not open here."""

        def led() -> PartitionImage | None:
            known = self.image.topic_by_id(topic_id)
            is_unopened = self._unopened.get((topic, index)) == topic_id
            return known.partition(index) if known is not None and is_unopened else None

        image = led()
        if image is not None and image.leader == self._config.node_id and len(image.replicas) > 1:
            self.replication.give_away(topic, topic_id, index, led)

    def _try_again(self) -> None:
        """What could not be removed; and what could not be opened, where the image still gives it to this node."""
        unremoved, self._unremoved = self._unremoved, []
        for work in unremoved:
            self._work.put_nowait(work)
        unopened, self._unopened = self._unopened, {}
        for (_, index), topic_id in unopened.items():
            topic = self._metadata.image.topic_by_id(topic_id)
            partition = None if topic is None else topic.partition(index)
            if topic is not None and partition is not None:
                self._take_on(topic, (partition,))

    async def sync_all(self) -> None:
        """Have every log on disk as far as it goes now."""
        for partition in self.partitions.values():
            if partition.log.synced_end_offset < partition.log_end_offset:
                self._syncer.request(partition)
        await self._syncer.settled()

    async def record_recovery_points(self) -> None:
        """Note how far each log is safely on disk, so that recovery after a crash reads only what was written since."""
        # The disk may be well again.
        self._try_again()
        await self.sync_all()
        await self._checkpoints.write()

    # -- for those who ask ---------------------------------------------------------------------------------------------

    def require_leader(self, topic: str, index: int, *, is_answer: bool = True) -> Partition:
        """The partition, if this node leads it; otherwise the error that tells the client what to do.

        `is_answer` False: the error is no answer yet, since another node is asked.
        """
        partition = self.partitions.get((topic, index))
        if partition is not None and partition.leads:
            return partition
        if self.image.partition(topic, index) is None:
            raise KafkaError(ErrorCode.unknown_topic_or_partition, f"{topic}-{index} does not exist")
        if is_answer:
            self._metrics.rejected(topic, index)
        node_id = self._config.node_id
        raise KafkaError(ErrorCode.not_leader_or_follower, f"{topic}-{index} is not led by node {node_id}")

    async def append_internal(self, topic: str, index: int, batch: bytes, timeout_s: float) -> int:
        """Append to a topic of the cluster's own, and wait until the batch is committed; the base offset.

        REQUEST_TIMED_OUT after `timeout_s`: the batch is in the log, and may be committed later or never.
        """
        partition = self.require_leader(topic, index)
        partition.check_enough_replicas()
        appended = partition.append_internal(batch, self._env.wall_ms())
        committed: asyncio.Future[None] = self._loop.create_future()

        def done(error: KafkaError | None) -> None:
            if committed.done():
                return
            if error is None:
                committed.set_result(None)
            else:
                committed.set_exception(error)

        partition.when_committed(appended.last_offset + 1, done)
        try:
            async with asyncio.timeout(timeout_s):
                await committed
        except TimeoutError:
            raise KafkaError(
                ErrorCode.request_timed_out, f"{topic}-{index} was not committed within {timeout_s} s"
            ) from None
        return appended.base_offset

    def other_leader(self, topic: str, index: int) -> tuple[tuple[int, int], BrokerImage] | None:
        """The other node that leads, as (id, epoch) and with its address: for a client that came to the wrong node."""
        partition = self.image.partition(topic, index)
        leader = None if partition is None else self.image.brokers.get(partition.leader)
        if partition is None or leader is None or leader.id == self._config.node_id:
            return None
        return (leader.id, partition.leader_epoch), leader

    def has_opened(self, topic: TopicImage) -> bool:
        """Whether every log of the topic that belongs on this node is open, or will be before the node serves."""
        return not self.is_open or all(
            (topic.name, partition.partition) in self.partitions
            for partition in topic.partitions
            if self._config.node_id in partition.replicas
        )

    def partition_by_id(self, topic_id: UUID, index: int) -> Partition | None:
        name = self._metadata.image.names_by_id.get(topic_id)
        partition = None if name is None else self.partitions.get((name, index))
        return partition if partition is not None and partition.topic_id == topic_id else None

    async def _distrust_page_cache(self) -> None:
        """A sync has failed: the next process must not count on what this one has written."""
        try:
            await self._loop.run_in_executor(self._env.executor, self.folder.distrust_page_cache)
        except OSError as error:
            self._log.error("boot_record_not_written", error=str(error))

    def replica_heard(self, replica_id: int) -> None:
        self.replication.replica_heard(replica_id)

    def hand_over(self, hand_overs: Iterable[HandOver]) -> None:
        """Give partitions to others to lead, as the controller asks."""
        if not self.is_open:
            return
        self.replication.hand_over(
            (partition, each.leader_epoch, each.to)
            for each in hand_overs
            if (partition := self.partition_by_id(each.topic_id, each.partition)) is not None
        )

    def gauges(self) -> Iterator[PartitionGauges]:
        for partition in self.partitions.values():
            yield PartitionGauges(
                topic=partition.topic,
                partition=partition.index,
                log_start_offset=partition.log_start_offset,
                log_end_offset=partition.log_end_offset,
                high_watermark=partition.high_watermark,
                replicas=len(partition.replicas),
                in_sync_replicas=len(partition.in_sync_replicas),
                size_bytes=partition.log.size_bytes,
                is_leader=partition.leader is not None,
            )
