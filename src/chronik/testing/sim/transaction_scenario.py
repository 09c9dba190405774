"""The scenario of transactions: three nodes, applications that commit and abort, zombies, and readers.

At the end every transaction ends within its timeout, and all replicas agree about what was aborted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import ClassVar

from chronik.client.topics import Topics
from chronik.metadata.image import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from chronik.node.replicas.partition import Partition
from chronik.storage.aborted import AbortedIndexDamaged
from chronik.testing.sim.client import READ_COMMITTED, TOPIC, Service, SimClient
from chronik.testing.sim.cluster_faults import SEVER_PAUSE_S, ClusterNemesis, LoneCut, SeveredLeader
from chronik.testing.sim.cluster_scenarios import BESIDE, REPLICAS, ROT_SEGMENT_BYTES, ThreeNodes, batches_of
from chronik.testing.sim.disk_faults import FILE_FAULTS, DiskNemesis
from chronik.testing.sim.faults import DECIDED, TRANSACTION_POINTS, Targets
from chronik.testing.sim.group_clients import FinalOffsetReader, MemberSettings, OffsetReader
from chronik.testing.sim.history import TopicPartition
from chronik.testing.sim.host import Host
from chronik.testing.sim.node import SimNode
from chronik.testing.sim.node_files import NodeFiles
from chronik.testing.sim.operators import ReassignmentOperator
from chronik.testing.sim.transactional_clients import (
    COPIERS,
    COPIES_TOPIC,
    CommittedReader,
    FinalCommittedReader,
    PlainProducer,
    StreamMember,
    TransactionalApplication,
    TransactionSettings,
)
from chronik.testing.sim.transactional_table import TABLE_TOPIC, TransactionalTable
from chronik.testing.sim.workload import Workload, WorkloadSettings
from chronik.transactions.transaction import TransactionState
from chronik.wire.batch import check_batches, read_marker
from chronik.wire.errors import ErrorCode, KafkaError

ENDED_S_MAX = 25.0
"""The longest timeout of a transaction is 4 s. A marker on a connection that fell silent is repeated after 15 s."""
REBUILT_S_MAX = 30.0
FILES_SHARE = 0.25
FILES_PAUSE_S = 1.0
INDEX_SHARE = 0.25
SEVER_SHARE = 0.1
COORDINATOR_SHARE = 0.3
"""How often a fault hits a node that coordinates transactions or groups."""


@dataclass(frozen=True, slots=True)
class TransactionWorkloadSettings:
    applications: tuple[TransactionSettings, ...]
    members: tuple[tuple[MemberSettings, TransactionSettings], ...]
    has_table: bool
    has_plain_producer: bool
    has_reassignments: bool

    @staticmethod
    def drawn(random: Random) -> TransactionWorkloadSettings:
        members = random.choice((0, 1, 2, 2, 3))
        applications = tuple(TransactionSettings.drawn(random) for _ in range(random.randint(1, 3)))
        return TransactionWorkloadSettings(
            applications=applications,
            members=tuple((MemberSettings.drawn(random), TransactionSettings.drawn(random)) for _ in range(members)),
            has_table=random.random() < 0.4,
            has_plain_producer=random.random() < 0.5,
            has_reassignments=random.random() < 0.3,
        )


class TransactionWorkload(Workload):
    """The clients of a run with transactions, instead of those of `Workload`."""

    def __init__(
        self,
        service: Service,
        hosts: Sequence[Host],
        settings: WorkloadSettings,
        transactions: TransactionWorkloadSettings,
    ) -> None:
        super().__init__(service, hosts, settings)
        self._transactions = transactions
        inputs = [TopicPartition(TOPIC, each) for each in range(settings.partitions)]
        self._inputs = inputs
        self._partitions = [*inputs, *(TopicPartition(COPIES_TOPIC, each.partition) for each in inputs)]
        self._final: FinalCommittedReader | None = None

    def make_topic(self) -> SimClient:
        maker = CopiesTopicMaker(self._service, self._settings)
        self._start(maker)
        return maker

    def start(self) -> None:
        settings, service, partitions = self._transactions, self._service, self._settings.partitions
        for number, application in enumerate(settings.applications):
            self.others.append(TransactionalApplication(f"x{number}", service, self._inputs, application))
        for number, (member, transactions) in enumerate(settings.members):
            self.others.append(StreamMember(f"s{number}", service, partitions, member, transactions))
        for number, partition in enumerate(self._partitions):
            self.others.append(CommittedReader(f"c{number}", service, partition, READ_COMMITTED))
        self.others.append(CommittedReader("u0", service, self._random.choice(self._inputs), 0))
        if settings.members:
            self.others.append(OffsetReader("q0", service, partitions, only_stable=True))
        if settings.has_table:
            self.others.append(TransactionalTable("k0", service, REPLICAS))
        if settings.has_plain_producer:
            self.others.append(PlainProducer("p0", service))
        if settings.has_reassignments:
            self.others.append(ReassignmentOperator("a0", service, partitions, REPLICAS))
        for client in self.others:
            self._start(client)

    def start_final_readers(self, run: str) -> list[SimClient]:
        self._final = FinalCommittedReader(run, self._service, self._partitions)
        partitions = self._settings.partitions
        offsets = FinalOffsetReader(f"{run}-offsets", self._service, partitions, only_stable=True)
        readers: list[SimClient] = [self._final, offsets]
        for reader in readers:
            self._start(reader)
        return readers

    def check(self) -> None:
        """Check everything that clients saw; after the final readers have ended."""
        assert self._final is not None
        self._service.history.transactions.check(self._final.name)
        if self._transactions.members:
            for partition in self._inputs:
                self._check_copies(self._final, partition)

    def _check_copies(self, final: FinalCommittedReader, partition: TopicPartition) -> None:
        """The copies are those of all records below the group's committed offset, each once and in order."""
        world, index = self._service.world, partition.partition
        committed = self._service.history.group(COPIERS, *partition).committed
        expected = [offset for offset, _ in final.values[partition] if offset < committed]
        copies = final.values[TopicPartition(COPIES_TOPIC, index)]
        sources = [value.rpartition("<")[2] for _, value in copies]
        if sources != [f"{index}@{offset}" for offset in expected]:
            wrong = next(
                (each for each, offset in zip(sources, expected, strict=False) if each != f"{index}@{offset}"), None
            )
            world.violated(
                f"{partition}: {len(expected)} records below the committed offset {committed}, and {len(sources)} "
                f"copies in {COPIES_TOPIC}-{index}; the first wrong copy is that of {wrong}"
            )

    def counts(self) -> dict[str, int]:
        committing = (TransactionalApplication, StreamMember, TransactionalTable)
        operations = self._service.history.transactions.operations
        return {
            "acknowledged": sum(type(operation).__name__ == "SendAcknowledged" for operation in operations),
            "read": sum(each.records_read for each in self.others if isinstance(each, CommittedReader)),
            "transactions": sum(type(operation).__name__ == "TransactionEnded" for operation in operations),
            "commits": sum(each.commits for each in self.others if isinstance(each, committing)),
            "generations": sum(each.generations for each in self.others if isinstance(each, StreamMember)),
        }


class CopiesTopicMaker(SimClient):
    """Creates the topic of the applications and that of the stream members."""

    def __init__(self, service: Service, settings: WorkloadSettings) -> None:
        super().__init__("topic-maker", service)
        self._settings = settings

    async def work(self) -> None:
        for topic in (TOPIC, COPIES_TOPIC):
            await self.insist(lambda topic=topic: self._create(topic))  # type: ignore[misc]

    async def _create(self, topic: str) -> None:
        settings = self._settings
        try:
            await Topics(self.cluster).create(
                topic, settings.partitions, settings.replication_factor, settings.topic_configs
            )
        except KafkaError as error:
            if error.code is not ErrorCode.topic_already_exists:
                raise


class TransactionNemesis(ClusterNemesis):
    """Prefers coordinators, and crashes at the steps of a transaction too."""

    def __init__(self, targets: Targets) -> None:
        super().__init__(targets)
        self._points = {**self._points, **TRANSACTION_POINTS}

    def _victim(self) -> SimNode:
        if self._random.random() < COORDINATOR_SHARE:
            topic = self._random.choice((TRANSACTIONS_TOPIC, OFFSETS_TOPIC))
            coordinators = [node for node in self._nodes if self._leads_partition(node, topic)]
            if coordinators:
                return self._random.choice(coordinators)
        return super()._victim()


class Transactions(ThreeNodes):
    """Three nodes and transactions of both protocol versions: all or nothing, exactly once.

    Faults and guarantees are those of `ThreeNodes`, in some seeds those of `BadDisks`. In addition each transaction is
    visible as a whole or not at all, its offsets are committed if and only if it is, and when all faults are repaired,
    no transaction stays open longer than its timeout.
    """

    name: ClassVar[str] = "transactions"
    always_severs: ClassVar[bool] = False
    audited: ClassVar[tuple[str, ...]] = (TOPIC, COPIES_TOPIC, TABLE_TOPIC, OFFSETS_TOPIC, TRANSACTIONS_TOPIC)

    def build(self) -> None:
        drawn = self.world.random("transactions")
        self._kinds: list[str] = []
        if not self.always_severs and drawn.random() < FILES_SHARE:
            self.strike_pause_s = FILES_PAUSE_S
            self.strikes_from_the_start = False
            self._kinds = [*drawn.sample(sorted(FILE_FAULTS), 2), *drawn.sample(BESIDE, drawn.randint(1, 3))]
        self._severs = self.always_severs or (not self._kinds and drawn.random() < SEVER_SHARE)
        if self._severs:
            self.busy_s = 9.0
            self.strike_pause_s = SEVER_PAUSE_S
            self.strikes_from_the_start = False
        self._indexes = self.world.random("index")
        self._rots_indexes = self._indexes.random() < INDEX_SHARE
        super().build()
        if self._rots_indexes:
            self._rot_index()

    def _rot_index(self) -> None:
        """Damage an index of aborted transactions now and then, of a node that runs or is down."""
        if self.nemesis.is_over:
            return
        node = self._indexes.choice(self.nodes)
        files = NodeFiles(node.host, node.config.data_folder, node.config.node_id)
        what = files.rot_index(self._indexes, is_running=node.is_up)
        if what is not None:
            self.nemesis.counts["rot_index"] += 1
            self.world.note(f"{node.host.name} {what}")
        self.world.after(self._indexes.uniform(0.1, 0.5), self._rot_index)

    def draws_lone_cut(self) -> bool:
        return not self._kinds and not self._severs and super().draws_lone_cut()

    def draw_workload(self) -> WorkloadSettings:
        min_insync = None if self.is_synced and not self._kinds else 2
        settings = WorkloadSettings.drawn(self.random, REPLICAS, min_insync_replicas=min_insync)
        if not self._rots_indexes:
            return settings
        # Only small segments are closed, and have indexes, before the run ends.
        return replace(settings, topic_configs={**settings.topic_configs, "segment.bytes": ROT_SEGMENT_BYTES})

    def make_workload(self, settings: WorkloadSettings) -> Workload:
        drawn = TransactionWorkloadSettings.drawn(self.world.random("transactional clients"))
        if self.has_lone_cut:
            slow = tuple(replace(each, pause_s=0.15) for each in drawn.applications[:2])
            drawn = replace(drawn, applications=slow, has_table=False, has_reassignments=False)
        if self._severs:
            lasting = tuple(each.with_one_epoch() for each in drawn.applications[:2])
            drawn = replace(drawn, applications=lasting, members=drawn.members[:1], has_table=False)
        return TransactionWorkload(self.service(), self.client_hosts, settings, drawn)

    def make_nemesis(self, targets: Targets) -> ClusterNemesis:
        if self.has_lone_cut:
            return LoneCut(targets, self.world.random("lone-cut topic").choice((OFFSETS_TOPIC, TRANSACTIONS_TOPIC)))
        if self._severs:
            return SeveredLeader(targets, TRANSACTIONS_TOPIC, DECIDED)
        return DiskNemesis(targets, self._kinds) if self._kinds else TransactionNemesis(targets)

    def _clients_end(self) -> bool:
        return (
            super()._clients_end()
            and self._reaches(
                ENDED_S_MAX, lambda: not self._open_transaction(), "all transactions have ended", self._open_transaction
            )
            and self._reaches(
                REBUILT_S_MAX, lambda: not self._damaged_index(), "damaged indexes are rebuilt", self._damaged_index
            )
        )

    def _open_transaction(self) -> str:
        """Describe a transaction that has not ended, as a coordinator or a replica sees it; empty if there is none."""
        for node in self.nodes:
            broker = node.ready_broker
            if broker is None:
                return f"{node.host.name} is not ready"
            try:
                transactions = list(broker.transactions.transactions())
            except KafkaError as error:  # it loads them
                return f"{node.host.name}: {error}"
            for transactional_id, state in transactions:
                if state.state is TransactionState.ONGOING or state.state.is_prepared:
                    return f"{transactional_id} is {state.state.label} at {node.host.name}, in {set(state.partitions)}"
        for topic, index in self._audited():
            for name, hosted, _ in self._copies(topic, index):
                if hosted.leader is not None and hosted.last_stable_offset < hosted.high_watermark:
                    return (
                        f"{topic}-{index} at {name}: last stable offset {hosted.last_stable_offset} of "
                        f"{hosted.high_watermark}, open: {dict(hosted.log.open_transactions())}"
                    )
        return ""

    def _damaged_index(self) -> str:
        """Read every index of aborted transactions, as a consumer does: that has a damaged one rebuilt. Name one."""
        for topic, index in self._audited():
            for name, hosted, _ in self._copies(topic, index):
                try:
                    job = hosted.aborted_job(hosted.log_start_offset, hosted.log_end_offset)
                    if job is not None:
                        job()
                except AbortedIndexDamaged as error:
                    hosted.lookup_failed(error)
                    return f"{name}: {error}"
        return ""

    def check_at_rest(self) -> None:
        super().check_at_rest()
        for topic, index in self._audited():
            for name, hosted, _ in self._copies(topic, index):
                if not hosted.log.config.cleanup_compact:
                    self._check_aborted(name, hosted)

    def _check_aborted(self, name: str, hosted: Partition) -> None:
        """Compare the replica's list of aborted transactions with its own batches: all replicas have the same ones."""
        job = hosted.log.aborted_job(hosted.log_start_offset, hosted.log_end_offset)
        listed = [] if job is None else [entry[:3] for entry in job()]
        derived = sorted(_aborted(hosted), key=lambda each: each[1])
        if listed != derived:
            self.world.violated(
                f"{hosted.topic}-{hosted.index} at {name} lists the aborted transactions {listed}, it has {derived}"
            )

    def _is_all_there(self, run: str) -> bool:
        if not super()._is_all_there(run):
            return False
        if isinstance(self.workload, TransactionWorkload):
            self.workload.check()
        return self.world.violation is None


def _aborted(hosted: Partition) -> Iterator[tuple[int, int, int]]:
    """Yield producer, first offset and marker offset of each aborted transaction, in the order of the markers."""
    first_offsets: dict[int, int] = {}
    for data in batches_of(hosted):
        for start, header in check_batches(data, len(data), from_producer=False):
            if header.is_transactional and not header.is_control:
                first_offsets.setdefault(header.producer_id, header.base_offset)
            elif header.is_control:
                first = first_offsets.pop(header.producer_id, None)
                if first is not None and not read_marker(data, start).is_commit:
                    yield header.producer_id, first, header.base_offset


class SeveredCoordinators(Transactions):
    """Transactions whose coordinators are cut off when they have decided one: late markers must be refused."""

    name: ClassVar[str] = "severed-coordinators"
    always_severs: ClassVar[bool] = True
