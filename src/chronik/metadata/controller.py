"""The controller keeps the image in line with the state of the brokers. It runs on the Raft leader.

It takes events with their time and returns commands to propose. All state that must survive the controller is in the
image: fenced and stopping brokers, leaders, ISRs, eligible leaders, reassignments. A new controller rebuilds the
remaining state (sessions, requested hand-overs) and gives every broker a full timeout to send a heartbeat.

One task of the node drives it:
- `image_applied` with each applied image, in order;
- `heartbeat` and `broker_gone` as they arrive;
- `due` after each of these, and at least every DUE_INTERVAL_MS. Its commands are proposed in order. `due` is not called
  again until all of them are applied or refused; a refused command is decided again on a newer image.
- `register`, `alter_isr` and `report` inside `MetadataLog.propose`, with the image of all proposals so far.

`due` decides from the image, not from memory of past decisions. A refused command, a controller that died between two
commands, and a new controller therefore all lead to the same decision. It examines only partitions that changed, or
whose brokers changed, so a healthy cluster with thousands of partitions costs nothing. One call examines at most
PARTITIONS_PER_STEP partitions, so that it does not delay the node's other work: heartbeats, Raft messages. If that was
not enough, `is_behind`, and the caller calls again as soon as other work had its turn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import msgspec

from chronik.metadata.calls import (
    AlterIsrCall,
    HandOver,
    HeartbeatCall,
    HeartbeatResult,
    RegisterBrokerCall,
    ReportReplicasCall,
)
from chronik.metadata.commands import (
    ChangePartition,
    ChangePartitions,
    Command,
    FenceBroker,
    RegisterBroker,
    ShutDownBroker,
    UnfenceBroker,
)
from chronik.metadata.elections import BrokerStates, Draft, TopicRules, is_settled
from chronik.metadata.fitness import Recoveries, plan_report
from chronik.metadata.hand_overs import HandOvers, preferred_hand_over, preferred_hand_overs
from chronik.metadata.image import NO_LEADER, BrokerImage, ClusterImage
from chronik.metadata.index import Key, PartitionIndex
from chronik.metadata.isr import plan_isr_change
from chronik.metadata.liveness import Liveness
from chronik.metadata.plans import Changes, Plan, outcomes_of
from chronik.metadata.reassignment import grow_internal_topics
from chronik.metadata.registration import plan_registration
from chronik.metadata.shutdown import Shutdowns
from chronik.wire.errors import ErrorCode, KafkaError

DUE_INTERVAL_MS = 100
PARTITIONS_PER_STEP = 2_000
"""One step takes about 10 ms, here and on the nodes that apply its changes."""


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """`lease_margin_ms` is how much shorter a lease is than a session: two machines' clocks may drift apart by 10 %."""

    session_timeout_ms: int = 2_000
    lease_margin_ms: int = 200
    stall_ms: int = 500
    """A longer pause between two calls of `due` means that the controller itself was stalled."""
    hand_over_ms: int = 150
    """How long a stopping broker may hand over its partitions before the controller moves them."""
    shutdown_patience_ms: int = 5_000
    """How long a stopping broker waits while partitions that only it can lead have other replicas catching up."""
    rebalance_interval_ms: int = 5_000
    requested_hand_over_ms: int = 1_000
    """How long a leader that stays up may take to hand over a partition before the controller moves it."""
    rebalance_partitions_max: int = 500
    """The maximum number of partitions that change leader in one interval."""
    recovery_wait_ms: int = 10_000
    """How long to wait for unproven replicas that do not report, counted from the first report."""
    internal_replicas: int = 3


class Controller:
    """Owned by the node's loop. The caller passes images in the order in which they were applied."""

    def __init__(self, image: ClusterImage, now_ms: int, settings: ControllerSettings | None = None) -> None:
        self._settings = settings = settings or ControllerSettings()
        self._image = image
        self._liveness = Liveness(settings.session_timeout_ms, settings.stall_ms, now_ms)
        self._index = PartitionIndex()
        self._states = BrokerStates(frozenset(), frozenset(), frozenset())
        self._suspects: dict[Key, None] = {}
        """Partitions to examine, in this order."""
        self._undecided: dict[Key, None] = {}
        """Suspects that were examined, and must be again when all others have been."""
        self.is_behind = False
        """Whether partitions are left to examine, so that `due` should be called again soon."""
        self._hand_overs = HandOvers(settings.requested_hand_over_ms)
        self._next_rebalance_ms = now_ms + settings.rebalance_interval_ms
        self._shutdowns = Shutdowns(self._index, self._liveness, settings.hand_over_ms, settings.shutdown_patience_ms)
        self._recoveries = Recoveries(settings.recovery_wait_ms)
        self._liveness.update(image, now_ms)

    def image_applied(self, image: ClusterImage) -> None:
        self._image = image

    def broker_gone(self, broker_id: int, now_ms: int) -> None:
        self._liveness.refused(broker_id, now_ms)

    def heartbeat(self, call: HeartbeatCall, now_ms: int, confirmed_ms: int | None = None) -> HeartbeatResult:
        """Record a heartbeat and return the reply. Raises KafkaError if the sender is not the registered process.

        `confirmed_ms` is the latest time at which a majority is known to have had this node as its leader: when the
        last round of messages that a majority answered was sent. Leases start there, so that none outlasts the time
        that the next controller waits.
        """
        broker = self._registered(call)
        self._update_index(now_ms, 0)
        session = self._liveness.heard(broker, call, now_ms)
        states = self._states_now(self._image, now_ms)
        lease_ms = 0
        knows = session.knows_demotions(now_ms, self._settings.session_timeout_ms)
        if broker.id in states.serving and knows and not session.cannot_write:
            lease_ms = self._settings.session_timeout_ms - self._settings.lease_margin_ms
            if confirmed_ms is not None:
                lease_ms = max(0, lease_ms - max(0, now_ms - confirmed_ms))
        if session.leaves_since_ms is None:
            hand_overs = self._hand_overs.of(self._image, broker.id) if lease_ms else ()
            return HeartbeatResult(lease_ms, broker.is_fenced, False, hand_overs)
        hand_overs = self._shutdowns.hand_overs(self._image, states, broker)
        may_stop = self._shutdowns.may_stop(self._image, states, broker, session, now_ms)
        return HeartbeatResult(lease_ms, broker.is_fenced, may_stop, hand_overs)

    def register(self, image: ClusterImage, call: RegisterBrokerCall, now_ms: int) -> RegisterBroker:
        states = self._states_now(image, now_ms)
        return plan_registration(
            image,
            # This image is not applied yet, so which brokers know of its changes is unknown.
            states._replace(unaware=states.serving),
            call,
            is_session_alive=self._liveness.is_alive(call.broker_id, now_ms),
        )

    def alter_isr(self, image: ClusterImage, call: AlterIsrCall, now_ms: int) -> ChangePartition:
        return plan_isr_change(image, self._states_now(image, now_ms), call)

    def report(self, image: ClusterImage, call: ReportReplicasCall, now_ms: int) -> Plan:
        """Plan the changes that follow from a broker's report on its replicas, or raise the error that refuses it."""
        plan = plan_report(image, self._states_now(image, now_ms), call)
        for report in call.reports:
            topic = image.topic_by_id(report.topic_id)
            partition = None if topic is None else topic.partition(report.partition)
            if topic is not None and partition is not None and call.broker_id in partition.unproven:
                key = (topic.name, report.partition)
                self._recoveries.reported(key, call.broker_id, call.broker_epoch, report, now_ms)
                self._suspects[key] = None
        return plan

    def elect_preferred(self, requested: Sequence[Key], now_ms: int) -> list[KafkaError | None]:
        """Request hand-overs to the preferred leaders of these partitions; return the reason for each refusal."""
        states = self._states_now(self._image, now_ms)

        def request(key: Key) -> None:
            self._hand_overs.request(key, preferred_hand_over(self._image, states, key), now_ms)

        return outcomes_of(request, requested)

    def has_applied(self, version: int, broker_ids: Iterable[int]) -> bool:
        """Whether all unfenced brokers in `broker_ids` have reported that they applied the version."""
        sessions = self._liveness.sessions
        return all(
            broker_id in sessions and sessions[broker_id].applied_version >= version
            for broker_id in broker_ids
            if broker_id in self._image.brokers and not self._image.brokers[broker_id].is_fenced
        )

    def due(self, now_ms: int) -> list[Command]:
        """Return the commands to propose now, in order. The module docstring describes the protocol."""
        image = self._image
        self._liveness.update(image, now_ms)
        self._update_index(now_ms, PARTITIONS_PER_STEP)
        fenced = self._liveness.expired(image, now_ms)
        unfenced = self._liveness.returned(image, now_ms)
        leaving = self._shutdowns.leaving(image, self._states_now(image, now_ms), now_ms)
        unfenced_ids, leaving_ids = [broker.id for broker in unfenced], [broker.id for broker in leaving]
        states = self._states_now(image, now_ms, unfenced=unfenced_ids, leaving=leaving_ids)
        self._suspect_changed_brokers(states)
        changes = self._plan_suspects(states, now_ms)
        grow_internal_topics(image, states, self._settings.internal_replicas, changes)
        self._rebalance(states, now_ms)
        self._move_overdue(states, changes, now_ms)
        return _commands(fenced, unfenced, leaving, changes)

    def _states_now(
        self, image: ClusterImage, now_ms: int, *, unfenced: Collection[int] = (), leaving: Collection[int] = ()
    ) -> BrokerStates:
        """Return what each broker may do. Until all partitions are known, any broker may be unaware of a lost one."""
        states = self._liveness.states(image, now_ms, unfenced=unfenced, leaving=leaving)
        return states if self._index.is_complete else states._replace(unaware=states.serving)

    def _update_index(self, now_ms: int, partitions_max: int) -> None:
        for key in self._index.update(self._image, partitions_max):
            self._suspects[key] = None
        for broker_id, version in self._index.demoted_version.items():
            session = self._liveness.sessions.get(broker_id)
            if session is not None:
                session.demoted(version, now_ms)

    def _suspect_changed_brokers(self, states: BrokerStates) -> None:
        """Mark the partitions of every broker whose state changed as suspects, unless they are settled either way.

        The others lack something in the image, or have a replica on a broker that is not staying.
        """
        before, self._states = self._states, states
        changed = frozenset[int]().union(*(old ^ new for old, new in zip(before, states, strict=True)))
        hosted = [self._index.hosted_by(broker_id) for broker_id in sorted(changed)]
        if not any(hosted):
            return
        absent = [self._index.hosted_by(host) for host in self._index.hosts if host not in states.staying]
        for key in chain(self._index.unsettled, *absent):
            if any(key in of_broker for of_broker in hosted):
                self._suspects[key] = None

    def _rebalance(self, states: BrokerStates, now_ms: int) -> None:
        """Once per interval, request hand-overs to the preferred leaders of some partitions, by topic and number."""
        if now_ms < self._next_rebalance_ms:
            return
        self._next_rebalance_ms = now_ms + self._settings.rebalance_interval_ms
        possible = preferred_hand_overs(self._image, states, sorted(self._index.not_preferred))
        for key, hand_over in islice(possible, self._settings.rebalance_partitions_max):
            self._hand_overs.request(key, hand_over, now_ms)

    def _move_overdue(self, states: BrokerStates, changes: Changes, now_ms: int) -> None:
        """Replace the leaders that did not hand over in time."""
        for (name, index), hand_over in self._hand_overs.take_overdue(self._image, now_ms):
            topic = self._image.topics[name]
            draft = Draft(topic.partitions[index])
            if hand_over.to in draft.isr and hand_over.to in states.can_lead:
                draft.leader = hand_over.to
                draft.is_forced = True
                draft.settle(states, TopicRules.of(self._image, topic))
                changes.add(topic.id, draft.change())

    def _plan_suspects(self, states: BrokerStates, now_ms: int) -> Changes:
        """Return the changes that the next suspects need. A suspect stays one until the next image shows the change."""
        changes = Changes()
        image = self._image
        rules: dict[str, TopicRules] = {}
        if not self.is_behind:
            self._suspects |= self._undecided
            self._undecided = {}
        examined = sorted(islice(self._suspects, PARTITIONS_PER_STEP))
        for key in examined:
            del self._suspects[key]
        for name, index in examined:
            topic = image.topics.get(name)
            partition = None if topic is None else topic.partition(index)
            if topic is None or partition is None:
                self._recoveries.forget((name, index))
                continue
            if is_settled(partition, states):
                self._recoveries.forget((name, index))
                continue
            if name not in rules:
                rules[name] = TopicRules.of(image, topic)
            draft = Draft(partition)
            draft.settle(states, rules[name])
            if draft.hand_over_to is not None:
                hand_over = HandOver(topic.id, index, partition.leader_epoch, draft.hand_over_to)
                self._hand_overs.request((name, index), hand_over, now_ms)
            if draft.needs_recovery and not draft.is_waiting:
                candidate = self._recoveries.candidate(image, (name, index), partition, states, now_ms)
                if candidate is not None:
                    draft.elect_alone(candidate)
            elif draft.leader != NO_LEADER:
                self._recoveries.forget((name, index))
            change = draft.change()
            if change is not None:
                changes.add(topic.id, change)
            if change is not None or draft.is_waiting or draft.hand_over_to is not None or draft.needs_recovery:
                self._undecided[(name, index)] = None
        self.is_behind = bool(self._suspects) or not self._index.is_complete
        return changes

    def _registered(self, call: HeartbeatCall) -> BrokerImage:
        broker = self._image.brokers.get(call.broker_id)
        if broker is None:
            raise KafkaError(ErrorCode.broker_id_not_registered, f"broker {call.broker_id} is not registered")
        if broker.incarnation != call.incarnation:
            raise KafkaError(
                ErrorCode.duplicate_broker_registration,
                f"node id {call.broker_id} was taken over by the node at {broker.host}:{broker.port}: "
                "stop one of the two, or give it another id",
            )
        if broker.epoch != call.broker_epoch:
            raise KafkaError(
                ErrorCode.stale_broker_epoch,
                f"broker {call.broker_id} is registered as epoch {broker.epoch}, not {call.broker_epoch}",
            )
        return broker


def _commands(
    fenced: list[BrokerImage], unfenced: list[BrokerImage], leaving: list[BrokerImage], changes: Changes
) -> list[Command]:
    """Broker commands come first; the last one carries partition changes, so that one version does both."""
    parts = changes.in_parts()
    of_brokers: list[UnfenceBroker | ShutDownBroker | FenceBroker] = [
        *(UnfenceBroker(broker.id, broker.epoch) for broker in unfenced),
        *(ShutDownBroker(broker.id, broker.epoch) for broker in leaving),
        *(FenceBroker(broker.id, broker.epoch) for broker in fenced),
    ]
    if of_brokers and parts:
        of_brokers[-1] = msgspec.structs.replace(of_brokers[-1], changes=parts.pop(0))
    return [*of_brokers, *map(ChangePartitions, parts)]
