"""The oracle for node state: invariants that no client can see and that must always hold.

- Each Raft term has at most one leader, and so has each leader epoch of a partition.
- Below their watermarks, all replicas have the same batches forever.
- The leader of the newest epoch has every batch that was ever below a watermark.
- Under `synced`, the devices of all in-sync replicas have everything below the leader's watermark.
- Of a replica with a commit log, the mark of the durable end is not above its log's end: after a kill it would report a
  loss.
- The last stable offset of a replica is never above its watermark, and never goes backwards while its process runs.

This applies to the topics of clients and to internal topics. Replicas compact at different times: in a compacted topic,
only the offsets and the epoch of a batch are compared, if the replica has the batch.

The auditor inspects the nodes from outside every few milliseconds; nothing in the nodes depends on it.
"""

from __future__ import annotations

from collections.abc import Container

from chronik.node.broker import Broker
from chronik.node.replicas.partition import Partition
from chronik.testing.sim.durable_ends import DurableEnds, marked_end
from chronik.testing.sim.node import SimNode
from chronik.testing.sim.world import World
from chronik.wire.batch import check_batches
from chronik.wire.errors import KafkaError

CHECK_S = 10e-3
READ_BYTES = 1 << 20


class CommittedLog:
    """The batches of one partition that were ever below a watermark.

    Invariant: they have no gap from 0 to `end`, except in a compacted topic.
    """

    def __init__(self) -> None:
        self.end = 0
        self.newest_epoch = -1
        self.leaders: dict[int, str] = {}
        self.batches: dict[int, tuple[int, int, int]] = {}
        """By base offset: the next offset, the leader epoch, the checksum."""


class Auditor:
    """Checks the partitions of some topics, and the Raft group."""

    def __init__(self, world: World, nodes: list[SimNode], topics: Container[str]) -> None:
        self._world = world
        self._nodes = nodes
        self._topics = topics
        self._terms: dict[int, str] = {}
        self._logs: dict[tuple[str, int], CommittedLog] = {}
        self._checked: dict[tuple[object, str, int], int] = {}
        """By process and partition: the offset up to which its log was compared."""
        self._stable: dict[Partition, int] = {}
        """The last stable offset that a replica had at the last check."""
        self._durable_ends = DurableEnds()

    def check(self) -> None:
        """Check all nodes now, and again every `CHECK_S`."""
        for node in self._nodes:
            if (broker := node.running_broker) is not None:
                self._check_node(node, broker)
        if self._world.violation is None:
            self._world.after(CHECK_S, self.check)

    def _check_node(self, node: SimNode, broker: Broker) -> None:
        raft = broker.member.raft.node
        if raft.is_leader:
            self._check_only_leader(self._terms, raft.term, node.host.name, "term")
        if not broker.host.is_open:
            return
        for hosted in list(broker.host.partitions.values()):
            if hosted.is_closed or hosted.jobs.is_exclusive:
                continue
            if hosted.topic in self._topics:
                self._check_partition(node, hosted)
            self._check_mark(node, hosted)

    def _check_partition(self, node: SimNode, hosted: Partition) -> None:
        name = f"{hosted.topic}-{hosted.index}"
        log = self._logs.setdefault((hosted.topic, hosted.index), CommittedLog())
        epoch = hosted.leader_epoch
        log.newest_epoch = max(log.newest_epoch, epoch)
        if hosted.leader is not None:
            self._check_only_leader(log.leaders, epoch, node.host.name, f"{name}, epoch")
        self._compare(node, hosted, log)
        self._check_stable(node, hosted)
        if hosted.leader is not None and epoch == log.newest_epoch and not hosted.acknowledges_unsynced:
            self._check_durable(name, hosted)
        if hosted.leader is not None and epoch == log.newest_epoch and hosted.log_end_offset < log.end:
            self._world.violated(
                f"{node.host.name} leads {name} in epoch {epoch}, but its log ends at {hosted.log_end_offset}, "
                f"and {log.end} is committed"
            )

    def _check_stable(self, node: SimNode, hosted: Partition) -> None:
        stable, before = hosted.last_stable_offset, self._stable.get(hosted, 0)
        # The log of a damaged replica may begin anew.
        if stable > hosted.high_watermark or (stable < before and not node.may_log):
            self._world.violated(
                f"{node.host.name}, {hosted.topic}-{hosted.index}: the last stable offset is {stable} after {before}, "
                f"the watermark {hosted.high_watermark}"
            )
        self._stable[hosted] = stable

    def _check_durable(self, name: str, led: Partition) -> None:
        """Check that the watermark does not pass what the devices of in-sync replicas have.

        Replicas are skipped that may lack records: with damaged files, or that know another state of the partition.
        """
        watermark = led.high_watermark
        if led.image is None or led.log.config.cleanup_compact:
            return
        for node in self._nodes:
            broker = node.ready_broker
            if broker is None or node.may_log or node.config.node_id not in led.in_sync_replicas:
                continue
            copy = broker.host.partitions.get((led.topic, led.index))
            if copy is None or copy.log.frames is not None or copy.image is None or copy.jobs.is_exclusive:
                continue
            if copy.is_damaged or copy.is_closed or copy.image.partition_epoch != led.image.partition_epoch:
                continue
            if not self._durable_ends.reaches(node.host.disk, copy, watermark):
                self._world.violated(
                    f"the watermark of {name} is {watermark}, but the device of {node.host.name}, which is in sync, "
                    f"lacks records below it; its log ends at {copy.log_end_offset}"
                )

    def _check_mark(self, node: SimNode, hosted: Partition) -> None:
        if hosted.log.frames is None or node.may_log or hosted.is_damaged:
            return
        mark = marked_end(node.host.disk, hosted.log.folder)
        if mark > hosted.log_end_offset:
            self._world.violated(
                f"{node.host.name}, {hosted.topic}-{hosted.index}: the log ends at {hosted.log_end_offset}, but its "
                f"mark of the durable end is {mark}"
            )

    def _check_only_leader(self, known: dict[int, str], number: int, name: str, what: str) -> None:
        if known.setdefault(number, name) != name:
            self._world.violated(f"{known[number]} and {name} both lead: {what} {number}")

    def _compare(self, node: SimNode, hosted: Partition, log: CommittedLog) -> None:
        """Compare this process's replica from where the last comparison ended up to its watermark."""
        key = (node.host.process, hosted.topic, hosted.index)
        end = min(hosted.high_watermark, hosted.log_end_offset)
        position = self._checked.get(key, hosted.log_start_offset)
        is_compacted = hosted.log.config.cleanup_compact
        while position < end:
            try:
                data = memoryview(bytes(hosted.log.read_job(position, READ_BYTES, end)()))
                batches = check_batches(data, len(data), from_producer=False) if len(data) else []
            except KafkaError as error:
                if not node.may_log:
                    self._world.violated(f"{node.host.name} cannot read {hosted.topic}-{hosted.index}: {error}")
                return
            for _, batch in batches:
                identity = batch.next_offset, batch.partition_leader_epoch, 0 if is_compacted else batch.crc
                known = log.batches.get(batch.base_offset, identity if is_compacted else None)
                if batch.base_offset < log.end and known != identity:
                    self._world.violated(
                        f"{node.host.name} has committed in {hosted.topic}-{hosted.index} at {batch.base_offset} "
                        f"{identity}, and {known} was committed there"
                    )
                    return
                log.batches[batch.base_offset] = identity
                log.end = max(log.end, batch.next_offset)
                position = batch.next_offset
            if not len(data):
                break
        self._checked[key] = position
