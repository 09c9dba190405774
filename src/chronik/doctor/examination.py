"""Watch a topic for a few seconds. Every request has a deadline, so that nodes that are down or paused are detected.

Two activities run concurrently. One samples metadata, offsets and groups about every second. The other sends one fetch
after another for each partition, as a consumer would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from chronik.client.cluster import Cluster
from chronik.client.errors import ClientError, Unreachable
from chronik.client.groups import Groups
from chronik.client.topics import Topics
from chronik.client.transactions import Transactions
from chronik.doctor.brokers import FIRST_TIMEOUT_S, Address, Brokers
from chronik.doctor.chronik_nodes import ChronikNodes, all_http_addresses
from chronik.doctor.consumption import COMMITS_S, needs_longer
from chronik.doctor.diagnosis import Diagnosis
from chronik.doctor.means import Means
from chronik.doctor.observations import (
    DOCTOR_CLIENT_ID,
    BlockingTransaction,
    Fetch,
    GroupSample,
    Member,
    Observations,
    PartitionSample,
    Refusal,
    Throttle,
)
from chronik.doctor.rules import judge
from chronik.doctor.transactions import held_back
from chronik.wire.errors import ErrorCode, KafkaError

SECONDS = 5.0
SECONDS_MAX = 300.0
PROBE_TIMEOUT_S = 10.0
PROBED_PARTITIONS_MAX = 12
GROUPS_MAX = 10
GROUP_TIMEOUT_S = 2.0
HIDDEN = "(hidden)"
"""Instead of a transactional id that the user may not see."""
MEANS = Means()


async def diagnose(
    bootstrap: Sequence[Address],
    topic: str,
    group: str | None = None,
    seconds: float = SECONDS,
    *,
    wall_ms: Callable[[], int],
    means: Means = MEANS,
) -> Diagnosis:
    """Examine a topic and the named group, or all groups that consume the topic if none is named.

    `wall_ms` is the wall clock: the brokers report since when a transaction is open by theirs.
    Raises UNKNOWN_TOPIC_OR_PARTITION, GROUP_ID_NOT_FOUND, or a ClientError if no broker can be reached.
    """
    async with aclosing(Examination(bootstrap, topic, group, means)) as examination:
        try:
            await examination.run(min(seconds, SECONDS_MAX), wall_ms)
        except (ClientError, KafkaError):
            # Without access there is nothing to examine, but a verdict: why there is no access.
            if not examination.explains_failure():
                raise
    return judge(examination.seen)


class Examination:
    """One examination. Owned by its event loop; `aclose` cancels the fetches that still run."""

    def __init__(self, bootstrap: Sequence[Address], topic: str, group: str | None, means: Means = MEANS) -> None:
        self._means = means
        self.seen = Observations(topic, group, who=means.who)
        self._topic = topic
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._brokers = Brokers(bootstrap, means.connect)
        self._cluster = self._new_cluster(bootstrap)
        self._groups: tuple[str, ...] = () if group is None else (group,)
        self._nodes = ChronikNodes({}, topic)
        self._probes: dict[int, asyncio.Task[None]] = {}
        self._open_probes: dict[int, Fetch] = {}

    def _new_cluster(self, addresses: Sequence[Address]) -> Cluster:
        connect = self._means.connect
        return Cluster(addresses, client_id=DOCTOR_CLIENT_ID, timeout_s=GROUP_TIMEOUT_S, connect=connect)

    def explains_failure(self) -> bool:
        """Return whether what was seen so far explains why the examination cannot continue."""
        self.seen.connection_faults = self._brokers.faults
        return bool(self.seen.connection_faults or self.seen.refusals)

    @property
    def _now_s(self) -> float:
        return self._loop.time() - self._began_s

    async def aclose(self) -> None:
        for task in self._probes.values():
            task.cancel()
        await asyncio.gather(*self._probes.values(), return_exceptions=True)
        self._brokers.close()
        await self._cluster.close()

    async def run(self, seconds: float, wall_ms: Callable[[], int]) -> None:
        await self._begin()
        has_read_halfway = False
        began_s = self._now_s
        while True:
            elapsed_s = self._now_s - began_s
            if not has_read_halfway and elapsed_s >= seconds / 2:
                has_read_halfway = True
                await self._nodes.read_metrics(self.seen, self._now_s)
            seconds_max = seconds + COMMITS_S + 2 * GROUP_TIMEOUT_S
            if elapsed_s >= seconds_max or (elapsed_s >= seconds and not needs_longer(self.seen)):
                break
            await asyncio.sleep(0.8)
            await self._sample()
        await self._finish()
        await self._read_transactions(wall_ms)

    async def _begin(self) -> None:
        """Collect what is needed once. Raises KafkaError if the topic or the group does not exist."""
        layout = await self._brokers.layout(self._topic, FIRST_TIMEOUT_S)
        topic = layout.topics.get(self._topic)
        if topic is not None and topic.error is ErrorCode.topic_authorization_failed:
            self.seen.refused(Refusal("DESCRIBE", f"topic {self._topic}", topic.error.name.upper()))
            raise KafkaError(topic.error, f"topic {self._topic}: {self.seen.who} is not allowed to DESCRIBE")
        if topic is None or topic.error is ErrorCode.unknown_topic_or_partition or not topic.partitions:
            raise KafkaError(ErrorCode.unknown_topic_or_partition, f"topic {self._topic} does not exist")
        reachable = [a for node, a in self._brokers.addresses.items() if node not in self._brokers.silent]
        self._cluster = self._new_cluster(reachable)
        caller = self._means.caller
        addresses = await all_http_addresses(await self._brokers.http_addresses(), caller)
        self._nodes = ChronikNodes(addresses, self._topic, caller)
        if not self._nodes.addresses:
            self.seen.note("no broker has a Chronik HTTP address: the verdict is based on the Kafka protocol alone")
        await asyncio.gather(self._read_min_insync(), self._find_groups())
        await self._nodes.read_metrics(self.seen, self._now_s)
        await self._sample(is_first=True)

    async def _read_min_insync(self) -> None:
        try:
            configs = await Topics(self._cluster).configs(self._topic)
        except (KafkaError, ClientError) as error:
            self.seen.note(f"the topic's settings could not be read: {error}")
            return
        value = next((config.value for config in configs if config.name == "min.insync.replicas"), None)
        self.seen.min_insync_replicas = int(value) if value is not None and value.isdigit() else None

    async def _find_groups(self) -> None:
        """Find the groups that have committed offsets of the topic, if no group was named."""
        if self._groups:
            return
        groups = Groups(self._cluster)
        consuming: list[str] = []
        try:
            names = await self._means.visible_groups(await self._brokers.groups())
            for name in names[: 10 * GROUPS_MAX]:
                if any(topic == self._topic for topic, _ in await groups.committed(name)):
                    consuming.append(name)
        except (KafkaError, ClientError) as error:
            self.seen.note(f"the groups could not be listed: {error}")
        self._groups = tuple(consuming[:GROUPS_MAX])
        if len(consuming) > GROUPS_MAX:
            self.seen.note(
                f"{len(consuming)} groups consume the topic, and {GROUPS_MAX} were examined: name one with --group"
            )

    async def _sample(self, *, is_first: bool = False) -> None:
        await asyncio.gather(self._sample_partitions(), *(self._sample_group(g, is_first) for g in self._groups))
        self.seen.seconds = self._now_s

    async def _sample_partitions(self) -> None:
        try:
            layout = await self._brokers.layout(self._topic)
        except ClientError as error:
            self._note_no_answer(error)
            return
        topic = layout.topics.get(self._topic)
        if topic is None or not topic.partitions:
            self.seen.note(f"at {self._now_s:.0f} s the topic no longer existed")
            return
        self.seen.silent_nodes = dict(self._brokers.silent)
        self.seen.connection_faults = self._brokers.faults
        self.seen.unreachable_advertised = self._brokers.unreachable_advertised
        leaders = {partition.partition: partition.leader for partition in topic.partitions}
        offsets = await self._brokers.offsets(self._topic, leaders)
        at_s = self._now_s
        for partition in topic.partitions:
            index = partition.partition
            sample = PartitionSample(at_s, partition.leader, partition.replicas, partition.isr, *offsets[index])
            self.seen.partitions.setdefault(index, []).append(sample)
            if index not in self._probes and len(self._probes) < PROBED_PARTITIONS_MAX:
                self._probes[index] = self._loop.create_task(self._probe(index), name=f"probe-{index}")

    def _note_no_answer(self, error: ClientError) -> None:
        """Mark every partition's leader as unavailable, because the earlier samples no longer hold."""
        self.seen.note(f"at {self._now_s:.0f} s no broker returned metadata: {error}")
        self.seen.silent_nodes = dict.fromkeys(self._brokers.addresses, str(error))
        for samples in self.seen.partitions.values():
            known = samples[-1]
            samples.append(
                PartitionSample(self._now_s, known.leader, known.replicas, known.isr, error="no broker answered")
            )

    async def _sample_group(self, group: str, is_first: bool) -> None:
        groups = Groups(self._cluster)
        try:
            description = await groups.describe(group)
            committed = await groups.committed(group)
        except (KafkaError, ClientError) as error:
            self.seen.note(f"group {group} could not be queried: {error}")
            if isinstance(error, KafkaError) and error.code is ErrorCode.group_authorization_failed:
                self.seen.refused(Refusal("DESCRIBE", f"group {group}", error.code.name.upper(), group=group))
            return
        if is_first and description.state == "Dead" and not committed:
            raise KafkaError(ErrorCode.group_id_not_found, f"group {group} does not exist")
        members = tuple(
            Member(
                member.member_id,
                member.client_id,
                member.client_host.removeprefix("/"),
                tuple(index for topic, index in member.partitions if topic == self._topic),
                member.epoch,
            )
            for member in description.members
        )
        here = {index: offset for (topic, index), offset in committed.items() if topic == self._topic and offset >= 0}
        sample = GroupSample(self._now_s, description.state, members, here, description.assignment_epoch)
        self.seen.groups.setdefault(group, []).append(sample)

    async def _probe(self, partition: int) -> None:
        """Send one fetch after another. Ignore errors: the partition samples show them."""
        while True:
            sample = self.seen.partitions[partition][-1]
            offset = self._probe_offset(partition, sample)
            if offset is not None and sample.leader in self._brokers.addresses:
                probe = Fetch(self._now_s, partition, sample.leader, offset, 0.0, is_over=False)
                self._open_probes[partition] = probe
                try:
                    await self._brokers.fetch(sample.leader, self._topic, partition, offset, PROBE_TIMEOUT_S)
                    self.seen.fetches.append(self._timed(probe, is_over=True))
                except (ClientError, KafkaError) as error:
                    if isinstance(error, KafkaError) and error.code is ErrorCode.topic_authorization_failed:
                        self.seen.refused(Refusal("READ", f"topic {self._topic}", error.code.name.upper()))
                    timed = self._timed(probe, is_over=False)
                    if timed.elapsed_ms >= PROBE_TIMEOUT_S * 1000:
                        self.seen.fetches.append(timed)
                del self._open_probes[partition]
            await asyncio.sleep(1.0)

    def _timed(self, probe: Fetch, *, is_over: bool) -> Fetch:
        return replace(probe, elapsed_ms=(self._now_s - probe.at_s) * 1000, is_over=is_over)

    def _probe_offset(self, partition: int, sample: PartitionSample) -> int | None:
        """Return a group's committed offset or the log start offset, or None if there is nothing to fetch."""
        start, end = sample.log_start_offset, sample.high_watermark
        if start is None or end is None or start >= end:
            return None
        for samples in self.seen.groups.values():
            committed = samples[-1].committed.get(partition)
            if committed is not None and start <= committed < end:
                return committed
        return start

    async def _finish(self) -> None:
        if not self.seen.partitions:
            raise Unreachable(f"no broker returned the partitions of {self._topic}")
        now_s = self._now_s
        self.seen.throttles = [Throttle(now_s, node, delay_ms) for node, delay_ms in self._brokers.throttles]
        self.seen.fetches += [self._timed(probe, is_over=False) for probe in self._open_probes.values()]
        nodes, seen = self._nodes, self.seen
        await asyncio.gather(nodes.read_metrics(seen, now_s), nodes.read_replicas(seen), nodes.read_traces(seen))

    async def _read_transactions(self, wall_ms: Callable[[], int]) -> None:
        """Find the transaction at the last stable offset of each partition that does not advance, and its coordinator.

        A transaction may end meanwhile, and look like one that no coordinator knows: so the logs are queried again.
        """
        seen, transactions, held = self.seen, Transactions(self._cluster), held_back(self.seen)
        if not held:
            return
        try:
            blocking = [
                each
                for each in await transactions.open_in(self._topic)
                if each.partition in held and each.start_offset == held[each.partition].last_stable_offset
            ]
            coordinated = await transactions.coordinated(blocking)
            still_open = {each.key for each in await transactions.open_in(self._topic)}
        except (KafkaError, ClientError) as error:
            seen.note(f"the open transactions could not be queried: {error}")
            return
        named = await self._means.visible_transactions([each.transactional_id for each in coordinated.values()])
        coordinated = {
            key: each if each.transactional_id in named else replace(each, transactional_id=HIDDEN)
            for key, each in coordinated.items()
        }
        seen.wall_ms = wall_ms()
        seen.transactions = [
            BlockingTransaction(each, coordinated.get(each.key)) for each in blocking if each.key in still_open
        ]
