"""The clients of a run: drawn from the seed, most of them on one topic, on their own machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from chronik.client.cluster import Deadline
from chronik.client.topics import Topics
from chronik.testing.sim.client import ACKS_ALL, REQUEST_TIMEOUT_S, TOPIC, Service, SimClient
from chronik.testing.sim.consumer import FinalReader, SimConsumer, SimObserver
from chronik.testing.sim.consumer_group_clients import (
    ClassicConsumerMember,
    ConsumerMember,
    ConsumerOwnership,
    ConsumerSettings,
)
from chronik.testing.sim.group_clients import (
    FinalOffsetReader,
    MemberSettings,
    OffsetCommitter,
    OffsetReader,
    SimMember,
)
from chronik.testing.sim.host import Host, Process
from chronik.testing.sim.operators import ReassignmentOperator
from chronik.testing.sim.producer import ProducerSettings, SimProducer
from chronik.testing.sim.share_group_clients import ShareHistory, ShareMember, ShareSettings
from chronik.testing.sim.topic_clients import CompactionClient, TopicChurn
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError


@dataclass(frozen=True, slots=True)
class WorkloadSettings:
    partitions: int
    replication_factor: int
    topic_configs: dict[str, str]
    producers: tuple[ProducerSettings, ...]
    members: tuple[MemberSettings, ...]
    has_offset_clients: bool
    """Whether clients outside the group commit offsets and query every node for committed offsets."""
    has_compacted_topic: bool
    has_churned_topic: bool
    has_reassignments: bool
    assignments: tuple[tuple[int, ...], ...] = ()
    """The replicas of each partition of the topic; empty if the cluster places them."""
    consumers: tuple[ConsumerSettings, ...] = ()
    """The members of a consumer group (KIP-848)."""
    sharers: tuple[ShareSettings, ...] = ()
    """The members of a share group (KIP-932)."""
    reread_share: float = 0.02
    """How often a consumer returns to old records."""

    @staticmethod
    def drawn(random: Random, replication_factor: int, min_insync_replicas: int | None = None) -> WorkloadSettings:
        is_alone = replication_factor == 1
        producers = [_producer(random, True, is_alone), _producer(random, random.random() < 0.5, is_alone)]
        if random.random() < 0.5:
            producers.append(_producer(random, False, is_alone))
        return WorkloadSettings(
            partitions=random.randint(1, 3),
            replication_factor=replication_factor,
            topic_configs={
                "segment.bytes": str(random.choice((4_096 if is_alone else 16_384, 30_000, 1 << 20))),
                "index.interval.bytes": str(random.choice((64, 4_096))),
                **({} if is_alone else {"min.insync.replicas": str(min_insync_replicas or random.choice((1, 2, 2)))}),
            },
            producers=tuple(producers),
            members=tuple(MemberSettings.drawn(random) for _ in range(random.randint(0, 3))),
            has_offset_clients=random.random() < 0.5,
            has_compacted_topic=random.random() < 0.4,
            has_churned_topic=random.random() < 0.4,
            has_reassignments=not is_alone and random.random() < 0.4,
        )

    def for_groups(self, random: Random) -> WorkloadSettings:
        """Return the same settings with group members and little else, for long runs."""
        return replace(
            self.unhurried(),
            members=tuple(MemberSettings.drawn(random) for _ in range(random.randint(2, 4))),
            has_offset_clients=True,
        )

    def unhurried(self) -> WorkloadSettings:
        """Return the same settings with one slow producer, for long runs."""
        producer = replace(self.producers[0], pause_s=0.4)
        return replace(
            self, producers=(producer,), has_compacted_topic=False, has_churned_topic=False, has_reassignments=False
        )


def _producer(random: Random, is_idempotent: bool, is_alone: bool) -> ProducerSettings:
    acks = ACKS_ALL if is_idempotent else random.choice((0, 1, 1, ACKS_ALL))
    in_flight_max = random.randint(1, 5)
    return ProducerSettings(
        acks=acks,
        is_promise=acks == ACKS_ALL or is_alone,
        is_idempotent=is_idempotent,
        in_flight_max=in_flight_max,
        batch_records_max=random.choice((1, 5, 20)),
        record_bytes_max=random.choice((20, 200, 2_000)),
        pause_s=random.choice((10e-3, 30e-3, 80e-3)),
        is_patient=is_idempotent and not is_alone and in_flight_max >= 4,
    )


class TopicMaker(SimClient):
    """Creates the topic; retries until it exists."""

    def __init__(self, service: Service, settings: WorkloadSettings) -> None:
        super().__init__("topic-maker", service)
        self._settings = settings

    async def work(self) -> None:
        await self.insist(self._create)

    async def _create(self) -> None:
        settings = self._settings
        try:
            if settings.assignments:
                await self._place()
            else:
                await Topics(self.cluster).create(
                    TOPIC, settings.partitions, settings.replication_factor, settings.topic_configs
                )
        except KafkaError as error:
            if error.code is not ErrorCode.topic_already_exists:
                raise

    async def _place(self) -> None:
        """Create the topic with the replica assignments of the settings."""
        settings = self._settings
        placed = enumerate(settings.assignments)
        topic = {
            "name": TOPIC,
            "num_partitions": -1,
            "replication_factor": -1,
            "assignments": [{"partition_index": index, "broker_ids": list(replicas)} for index, replicas in placed],
            "configs": [{"name": name, "value": value} for name, value in settings.topic_configs.items()],
        }
        connection = await self.cluster.any_connection(Deadline(REQUEST_TIMEOUT_S))
        values = {"topics": [topic], "timeout": 1000, "validate_only": False}
        response = await connection.call(ApiKey.CREATE_TOPICS, values, timeout_s=REQUEST_TIMEOUT_S)
        code = ErrorCode(response.topics[0].error_code)
        if code is not ErrorCode.none:
            # An assigned broker is not registered yet: retry.
            is_early = code is ErrorCode.invalid_replica_assignment
            raise KafkaError(ErrorCode.leader_not_available if is_early else code, f"topic {TOPIC}")


class Workload:
    """All clients of one run."""

    def __init__(
        self, service: Service, hosts: Sequence[Host], settings: WorkloadSettings, operators: Sequence[SimClient] = ()
    ) -> None:
        """`operators` are additional clients, started with all others."""
        self.producers: list[SimProducer] = []
        self.others: list[SimClient] = list(operators)
        self._settings = settings
        self._service = service
        self._random = service.world.random("workload")
        self._processes: list[Process] = [host.start(_idle) for host in hosts]

    def make_topic(self) -> SimClient:
        maker = TopicMaker(self._service, self._settings)
        self._start(maker)
        return maker

    def start(self) -> None:
        settings, service, random = self._settings, self._service, self._random
        partitions = settings.partitions
        for number, producer in enumerate(settings.producers):
            self.producers.append(SimProducer(f"p{number}", service, partitions, producer))
        for partition in range(partitions):
            max_bytes = random.choice((200, 4_096, 65_536))
            max_wait_ms = random.choice((10, 100, 400))
            consumer = SimConsumer(f"c{partition}", service, partition, max_bytes, max_wait_ms, settings.reread_share)
            self.others.append(consumer)
        for number, member in enumerate(settings.members):
            self.others.append(SimMember(f"m{number}", service, partitions, member))
        ownership = ConsumerOwnership(service.world, partitions)
        for number, consumer_settings in enumerate(settings.consumers):
            kind = ClassicConsumerMember if consumer_settings.is_classic else ConsumerMember
            self.others.append(kind(f"g{number}", service, consumer_settings, ownership))
        shares = ShareHistory(service.world, partitions)
        for number, share_settings in enumerate(settings.sharers):
            self.others.append(ShareMember(f"s{number}", service, share_settings, shares))
        if settings.has_offset_clients:
            self.others.append(OffsetCommitter("l0", service, partitions))
            self.others.append(OffsetReader("q0", service, partitions))
        self.others.append(SimObserver("o0", service, partitions, random.choice((10e-3, 50e-3))))
        if settings.has_compacted_topic:
            self.others.append(CompactionClient("k0", service, settings.replication_factor))
        if settings.has_churned_topic:
            self.others.append(TopicChurn("t0", service, settings.replication_factor))
        if settings.has_reassignments:
            self.others.append(ReassignmentOperator("a0", service, partitions, settings.replication_factor))
        for client in (*self.producers, *self.others):
            self._start(client)

    def start_final_readers(self, run: str) -> list[SimClient]:
        service, partitions = self._service, self._settings.partitions
        readers: list[SimClient] = [FinalReader(f"{run}-{number}", service, number) for number in range(partitions)]
        readers.append(FinalOffsetReader(f"{run}-offsets", service, partitions))
        for reader in readers:
            self._start(reader)
        return readers

    def _start(self, client: SimClient) -> None:
        process = self._random.choice(self._processes)
        process.loop.call_soon_threadsafe(lambda: process.run(client.run()))

    def counts(self) -> dict[str, int]:
        return {
            "acknowledged": self._service.history.acknowledged_count,
            "read": sum(each.records_read for each in self.others if isinstance(each, SimConsumer)),
            "accepted": sum(each.records_accepted for each in self.others if isinstance(each, ShareMember)),
            "commits": sum(each.commits for each in self.others if isinstance(each, SimMember | ConsumerMember)),
            "generations": sum(each.generations for each in self.others if isinstance(each, SimMember))
            + sum(each.epochs for each in self.others if isinstance(each, ConsumerMember)),
        }


async def _idle(process: Process) -> None:
    """The main program of a client machine; its clients are started separately."""
