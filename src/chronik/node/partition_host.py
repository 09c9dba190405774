"""The partitions that this node hosts: opens, configures and removes their logs as the metadata says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from chronik.metadata.events import (
    ConfigChanged,
    Event,
    LeaderChanged,
    PartitionsCreated,
    TopicCreated,
    TopicDeleted,
)
from chronik.metadata.image import ClusterImage, PartitionImage, TopicImage
from chronik.node.config import NodeConfig
from chronik.node.environment import Environment
from chronik.node.metadata_log import MetadataLog
from chronik.node.partition import Partition
from chronik.node.syncer import Syncer
from chronik.node.topic_settings import topic_defaults, topic_settings
from chronik.observe.logging import Logger
from chronik.observe.metrics import Metrics, PartitionGauges
from chronik.replication.leader import PartitionLeader
from chronik.storage.folder import DataFolder, RecoveryPoint
from chronik.storage.log import Log, RecoveryReport
from chronik.wire.errors import ErrorCode, KafkaError

OPEN_AT_ONCE = 64
REOPEN = "reopen"
"""Among the events: try again to open the logs that could not be opened."""


class PartitionHost:
    """Invariant: `partitions` holds exactly the partitions whose log is open and that this node leads.

    Metadata events are carried out one after the other by one task, so that a topic that is deleted and made again
    never has two logs in one folder. Owned by the loop; files are opened and removed in the executor.
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
        log: Logger,
    ) -> None:
        self.partitions: dict[tuple[str, int], Partition] = {}
        self.folder = folder
        self._loop = loop
        self._env = env
        self._config = config
        self._metadata = metadata
        self._syncer = syncer
        self._metrics = metrics
        self._log = log.bind(component="storage")
        self._defaults = topic_defaults(config, metadata.image)
        self._events: asyncio.Queue[Event | asyncio.Future[None] | str] = asyncio.Queue()
        self._unopened: dict[tuple[str, int], tuple[TopicImage, PartitionImage]] = {}
        self._follower: asyncio.Task[None] | None = None

    # -- start and stop ------------------------------------------------------------------------------------------------

    async def open_all(self) -> None:
        """Open every partition that the image gives this node, and remove folders that belong to none."""
        image = self._metadata.image
        wanted = [
            (topic, partition)
            for _, topic in sorted(image.topics.items())
            for partition in topic.partitions
            if self._config.node_id in partition.replicas
        ]
        await self._remove_strays(image)
        for at in range(0, len(wanted), OPEN_AT_ONCE):
            await self._open_many(wanted[at : at + OPEN_AT_ONCE])
        self._follower = self._loop.create_task(self._follow(), name="partition-host")

    async def close_all(self) -> None:
        """Close every log cleanly and record that they are."""
        if self._follower is not None:
            self._follower.cancel()
        await self._syncer.settled()
        closing = KafkaError(ErrorCode.not_leader_or_follower, "the node is stopping")
        partitions = list(self.partitions.values())
        self.partitions = {}
        for partition in partitions:
            partition.close(closing)
        outcomes = await self._loop.run_in_executor(
            self._env.executor, _close_logs, [partition.log for partition in partitions]
        )
        for partition, error in zip(partitions, outcomes, strict=True):
            if error is not None:
                self._log.error("log_close_failed", topic=partition.topic, partition=partition.index, error=error)
        if any(outcomes):
            return
        points = _recovery_points(partitions)
        try:
            await self._loop.run_in_executor(self._env.executor, self.folder.record_clean_shutdown, points)
        except OSError as error:
            self._log.warning("shutdown_not_recorded", error=str(error), then="the next start recovers the logs")

    async def _remove_strays(self, image: ClusterImage) -> None:
        """A crash may come between a topic's deletion and that of its files."""
        for topic, index in await self._loop.run_in_executor(self._env.executor, self.folder.partitions):
            if image.partition(topic, index) is None:
                self._log.warning("stray_log_removed", topic=topic, partition=index)
                await self._loop.run_in_executor(self._env.executor, self.folder.remove_log(topic, index))

    # -- following the metadata ----------------------------------------------------------------------------------------

    def metadata_changed(self, image: ClusterImage, events: Sequence[Event]) -> None:
        for event in events:
            self._events.put_nowait(event)

    async def settled(self) -> None:
        """Wait until every event so far has been carried out."""
        reached: asyncio.Future[None] = self._loop.create_future()
        self._events.put_nowait(reached)
        await reached

    async def _follow(self) -> None:
        while True:
            event = await self._events.get()
            if isinstance(event, asyncio.Future):
                if not event.done():
                    event.set_result(None)
                continue
            try:
                await self._carry_out(event)
            except Exception:
                self._log.exception("metadata_event_failed", event_type=type(event).__name__)

    async def _carry_out(self, event: Event | str) -> None:
        match event:
            case str():
                await self._open_many(self._still_wanted())
            case TopicCreated(topic=topic):
                await self._open_many([(topic, partition) for partition in topic.partitions])
            case PartitionsCreated(topic=topic, partitions=added):
                await self._open_many([(topic, partition) for partition in added])
            case TopicDeleted(topic=topic):
                await self._remove(topic)
            case ConfigChanged(resource=resource, name=name):
                self._configure(name if resource == "topic" else None)
            case LeaderChanged(topic=name, partition=changed):
                hosted = self.partitions.get((name, changed.partition))
                if hosted is not None:
                    hosted.lead(changed.leader_epoch)

    def _configure(self, only_topic: str | None) -> None:
        image = self._metadata.image
        self._defaults = topic_defaults(self._config, image)
        for partition in self.partitions.values():
            topic = image.topics.get(partition.topic)
            if topic is not None and (only_topic is None or topic.name == only_topic):
                partition.configure(topic_settings(topic, self._defaults))

    # -- opening and removing ------------------------------------------------------------------------------------------

    async def _open_many(self, wanted: Sequence[tuple[TopicImage, PartitionImage]]) -> None:
        now_ms = self._env.wall_ms()
        settings = [topic_settings(topic, self._defaults) for topic, _ in wanted]

        def open_logs() -> list[Log | Exception]:
            opened: list[Log | Exception] = []
            for (topic, partition), setting in zip(wanted, settings, strict=True):
                try:
                    self.folder.claim_log(topic.name, partition.partition, topic.id)
                    opened.append(
                        Log.open(
                            self._env.disk,
                            self.folder.log_path(topic.name, partition.partition),
                            setting.log_config,
                            now_ms,
                            recovery_point=self.folder.recovery_point(topic.name, partition.partition, topic.id),
                            clean=self.folder.was_clean,
                        )
                    )
                except Exception as error:
                    opened.append(error)
            return opened

        opened = await self._loop.run_in_executor(self._env.executor, open_logs)
        for (topic, partition), setting, log in zip(wanted, settings, opened, strict=True):
            if isinstance(log, Exception):
                self._log.error("log_open_failed", topic=topic.name, partition=partition.partition, error=repr(log))
                self._unopened[(topic.name, partition.partition)] = (topic, partition)
                continue
            self._unopened.pop((topic.name, partition.partition), None)
            if log.recovery is not None:
                self._report_recovery(topic.name, partition.partition, log.recovery)
            log.start_epoch(partition.leader_epoch)
            # On one node everything that recovery kept is committed.
            end = log.log_end_offset
            self.partitions[(topic.name, partition.partition)] = Partition(
                topic.name,
                topic.id,
                partition.partition,
                log,
                PartitionLeader(self._config.node_id, partition.leader_epoch, partition.isr, end, end),
                setting,
                replicas=partition.replicas,
                counts_unsynced=self._config.durability == "replicated",
                env=self._env,
                syncer=self._syncer,
                metrics=self._metrics,
                logger=self._log,
            )

    def _report_recovery(self, topic: str, partition: int, report: RecoveryReport) -> None:
        """One line that says what opening a log found; loud where durable data is bad."""
        say = self._log.error if report.is_damaged else self._log.warning
        if not (report.is_damaged or report.truncated_bytes or report.removed_segments):
            say = self._log.info
        fields = asdict(report)
        del fields["folder"]
        say("log_damaged" if report.is_damaged else "log_recovered", topic=topic, partition=partition, **fields)

    async def _remove(self, topic: TopicImage) -> None:
        gone = KafkaError(ErrorCode.unknown_topic_or_partition, f"{topic.name} was deleted")
        removed = []
        for partition in topic.partitions:
            hosted = self.partitions.pop((topic.name, partition.partition), None)
            if hosted is not None:
                hosted.close(gone)
                removed.append(hosted)
        await self._syncer.settled()

        def remove() -> None:
            for hosted in removed:
                hosted.log.close()
                self.folder.remove_log(hosted.topic, hosted.index)()

        await self._loop.run_in_executor(self._env.executor, remove)

    def _still_wanted(self) -> list[tuple[TopicImage, PartitionImage]]:
        """Of what could not be opened, that which the image still has, as it is there now."""
        image = self._metadata.image
        wanted = []
        for (name, index), (topic, _) in list(self._unopened.items()):
            found = image.topic_by_id(topic.id)
            partition = None if found is None else found.partition(index)
            if found is None or partition is None or (name, index) in self.partitions:
                del self._unopened[(name, index)]
            else:
                wanted.append((found, partition))
        return wanted

    async def sync_all(self) -> None:
        """Have every log on disk as far as it goes now."""
        for partition in self.partitions.values():
            if partition.log.synced_end_offset < partition.log_end_offset:
                self._syncer.request(partition)
        await self._syncer.settled()

    async def record_recovery_points(self) -> None:
        """Note how far each log is safely on disk, so that recovery after a crash reads only what was written since."""
        if self._unopened:
            # The disk may be well again.
            self._events.put_nowait(REOPEN)
        await self.sync_all()
        job = self.folder.recovery_points_job(_recovery_points(self.partitions.values()))
        await self._loop.run_in_executor(self._env.executor, job)

    # -- for those who look --------------------------------------------------------------------------------------------

    def gauges(self) -> Iterator[PartitionGauges]:
        for partition in self.partitions.values():
            yield PartitionGauges(
                topic=partition.topic,
                partition=partition.index,
                log_start_offset=partition.log_start_offset,
                log_end_offset=partition.log_end_offset,
                high_watermark=partition.high_watermark,
                replicas=len(partition.replicas),
                in_sync_replicas=len(partition.leader.in_sync_replicas),
                size_bytes=partition.log.size_bytes,
            )


def _recovery_points(partitions: Iterable[Partition]) -> dict[tuple[str, int], RecoveryPoint]:
    return {
        (partition.topic, partition.index): RecoveryPoint(partition.topic_id, partition.log.synced_end_offset)
        for partition in partitions
    }


def _close_logs(logs: list[Log]) -> list[str | None]:
    """What kept each log from being closed cleanly. Runs in a thread."""
    outcomes: list[str | None] = []
    for log in logs:
        try:
            outcomes.append(None if log.close() else log.read_only_reason)
        except Exception as error:
            outcomes.append(repr(error))
    return outcomes
