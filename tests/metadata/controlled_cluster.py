"""A cluster as the controller sees it: brokers with or without heartbeats, and commands that apply immediately."""

from __future__ import annotations

from uuid import UUID

from chronik.metadata.apply import apply
from chronik.metadata.calls import (
    AlterIsrCall,
    HeartbeatCall,
    HeartbeatResult,
    IsrMember,
    RegisterBrokerCall,
    ReplicaReport,
    ReportReplicasCall,
)
from chronik.metadata.commands import Assignment, Command, CreateTopic
from chronik.metadata.controller import Controller, ControllerSettings
from chronik.metadata.elections import Loss
from chronik.metadata.events import Event
from chronik.metadata.image import NO_LEADER, BrokerImage, ClusterImage, PartitionImage
from chronik.wire.errors import KafkaError

ORDERS = UUID(int=1_000)


class Cluster:
    """Brokers 1 to `brokers`, registered and unfenced. Those in `alive` send heartbeats as time passes."""

    def __init__(
        self, brokers: int = 3, *, durability: str = "synced", settings: ControllerSettings | None = None
    ) -> None:
        self.durability = durability
        self.settings = settings or ControllerSettings()
        self.now_ms = 10_000
        self.image = ClusterImage()
        self.events: list[Event] = []
        self.commands: list[Command] = []
        self.controller = Controller(self.image, self.now_ms, self.settings)
        self.incarnations = {broker_id: UUID(int=broker_id) for broker_id in range(1, brokers + 1)}
        self.alive = set(self.incarnations)
        self.leaving: set[int] = set()
        self.sick: set[int] = set()
        """Brokers whose disk accepts no writes."""
        self.applied: dict[int, int] = {}
        """Brokers that do not follow the metadata, and the version that each has applied."""
        for broker_id in sorted(self.alive):
            self.register(broker_id)
        self.run(400)

    # -- events --------------------------------------------------------------------------------------------------------

    def apply(self, command: Command) -> list[Event]:
        self.image, events = apply(self.image, command)
        self.controller.image_applied(self.image)
        self.commands.append(command)
        self.events += events
        return events

    def create(self, name: str = "orders", *replicas: tuple[int, ...], topic_id: UUID = ORDERS, **configs: str) -> None:
        """Create a topic with the given replicas for each partition, all in sync."""
        assigned = tuple(Assignment(each, each) for each in replicas or ((1, 2, 3),))
        named = {key.replace("_", "."): value for key, value in configs.items()}
        self.apply(CreateTopic(name, topic_id, assigned, named))

    def due(self) -> list[Command]:
        """Apply and return the commands that the controller now issues."""
        commands = self.controller.due(self.now_ms)
        for command in commands:
            self.apply(command)
        return commands

    def run(self, ms: int) -> None:
        """Advance the clock: live brokers heartbeat every 300 ms, and the controller runs every 100 ms."""
        for _ in range(ms // 100):
            self.now_ms += 100
            if self.now_ms % 300 == 0:
                for broker_id in sorted(self.alive):
                    self.beat(broker_id)
            self.due()

    def beat(self, broker_id: int) -> HeartbeatResult:
        call = HeartbeatCall(
            broker_id,
            self.incarnations[broker_id],
            self.image.brokers[broker_id].epoch,
            self.applied.get(broker_id, self.image.version),
            wants_shutdown=broker_id in self.leaving,
            cannot_write=broker_id in self.sick,
        )
        return self.controller.heartbeat(call, self.now_ms)

    def die(self, *broker_ids: int, is_noticed: bool = True) -> None:
        """Kill the processes. If `is_noticed`, their addresses refuse connections."""
        self.alive -= set(broker_ids)
        if is_noticed:
            for broker_id in broker_ids:
                self.controller.broker_gone(broker_id, self.now_ms)
            self.due()

    def restart(self, broker_id: int, *, was_clean: bool = False, port: int = 9092, **fields: object) -> None:
        """Register a new process, which sends heartbeats from now on."""
        self.incarnations[broker_id] = UUID(int=self.incarnations[broker_id].int + 100)
        self.register(broker_id, was_clean=was_clean, port=port, **fields)
        self.alive.add(broker_id)
        self.leaving.discard(broker_id)

    def register(self, broker_id: int, *, was_clean: bool = True, port: int = 9092, **fields: object) -> None:
        call = RegisterBrokerCall(
            broker_id,
            self.incarnations[broker_id],
            f"host-{broker_id}",
            port,
            was_clean=was_clean,
            **{"durability": self.durability, **fields},  # type: ignore[arg-type]
        )
        self.apply(self.controller.register(self.image, call, self.now_ms))

    def report(
        self, broker_id: int, last_epoch: int = 0, log_end_offset: int = 0, *, loss: Loss | None = None
    ) -> KafkaError | None:
        """Report the broker's replica of partition 0; return why the controller refuses it, or None."""
        report = ReplicaReport(ORDERS, 0, log_end_offset, last_epoch, "" if loss is None else loss.value)
        call = ReportReplicasCall(broker_id, self.image.brokers[broker_id].epoch, (report,))
        plan = self.controller.report(self.image, call, self.now_ms)
        if plan.command is not None:
            self.apply(plan.command)
        return plan.outcomes[0]

    def change_controller(self) -> None:
        self.controller = Controller(self.image, self.now_ms, self.settings)

    # -- leaders -------------------------------------------------------------------------------------------------------

    def proposal(self, isr: tuple[int, ...], *, partition: int = 0, hand_over_to: int = NO_LEADER) -> AlterIsrCall:
        """Build the leader's ISR proposal, with all current epochs."""
        now = self.partition(partition)
        members = tuple(IsrMember(member, self.image.brokers[member].epoch) for member in isr)
        return AlterIsrCall(
            now.leader,
            ORDERS,
            partition,
            now.leader_epoch,
            now.partition_epoch,
            members,
            self.image.brokers[now.leader].epoch if now.leader in self.image.brokers else -1,
            hand_over_to,
        )

    def alter_isr(self, call: AlterIsrCall) -> None:
        self.apply(self.controller.alter_isr(self.image, call, self.now_ms))

    def join(self, *isr: int, partition: int = 0) -> None:
        """Let the leader find these replicas in sync."""
        self.alter_isr(self.proposal(isr, partition=partition))

    # -- queries -------------------------------------------------------------------------------------------------------

    def partition(self, partition: int = 0, topic: str = "orders") -> PartitionImage:
        return self.image.topics[topic].partitions[partition]

    def broker(self, broker_id: int) -> BrokerImage:
        return self.image.brokers[broker_id]

    @property
    def leader(self) -> int:
        return self.partition().leader

    @property
    def isr(self) -> tuple[int, ...]:
        return self.partition().isr
