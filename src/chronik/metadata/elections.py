"""Rules for leaders and in-sync replicas, given the state of the brokers. Pure functions.

Why an election is safe. Let S be the brokers in `isr` or `eligible` that have lost no records since they joined.
1. Every broker in S holds every committed record. A leader commits a record only when the whole ISR has it. An ISR
   smaller than min.insync.replicas commits nothing, so brokers that leave such an ISR stay eligible.
2. Leaders come from S: from the ISR first, then from the eligible leaders if no ISR member can lead. Only an unclean
   election, which an administrator requests or the topic allows, may choose any other replica.
3. A broker joins the ISR only if its leader finds it in sync, or if it is elected.
4. Fenced or stopping brokers leave the ISR only if another member is known to be able to lead. Otherwise all members
   stay, and the first to return leads.
5. A broker that may have lost records leaves S before it can do anything else (`lose`), even if S becomes empty. If the
   last brokers of S lost only their page cache, they become `unproven`: the controller elects the longest log among
   those that report (`fitness`). Otherwise the partition has no leader until an administrator accepts the loss.
6. No new leader replaces a serving leader before that leader knows. Either the old leader hands over
   (`calls.HandOver`), or the partition has no leader until the old one applies the change or its lease expires. If two
   leaders served at once, clients would see the end offset go back. Only a hand-over keeps records that the leader
   alone acknowledged (acks=1).

A reassignment (KIP-455) also completes here: one change removes the old replicas once all new ones are in sync.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from chronik.metadata.broker_configs import CLUSTER_DEFAULT
from chronik.metadata.commands import PartitionChange
from chronik.metadata.config_definitions import ConfigValue
from chronik.metadata.image import NO_LEADER, ClusterImage, PartitionImage, TopicImage
from chronik.metadata.index import Key
from chronik.metadata.plans import Plan, outcomes_of
from chronik.metadata.topic_configs import TOPIC_CONFIGS
from chronik.wire.errors import ErrorCode, KafkaError

UNCLEAN_ELECTION = "unclean.leader.election.enable"
MIN_INSYNC_REPLICAS = "min.insync.replicas"
REPLICATION_FACTOR_SAFE = 3
"""With at least this many replicas, min.insync.replicas is 2 unless the topic or the cluster sets another number."""


class Loss(Enum):
    """What a replica may have lost. `calls.ReplicaReport` carries these values."""

    POSSIBLE = "possible"
    """Its machine lost the page cache; how much of it was on disk is unknown."""
    CERTAIN = "certain"
    """Its log is missing, truncated, corrupt, or from an older copy of the data folder."""
    SPOILED = "spoiled"
    """Some batches fail their checksum; all other batches are readable."""


class BrokerStates(NamedTuple):
    """What each broker may do, as the controller currently knows it.

    `serving` brokers are neither fenced nor about to be. `staying` is the subset that is not shutting down. `can_lead`
    is the subset of `staying` that sent a heartbeat, so a leadership assigned to it takes effect. `unaware` is the
    subset of `serving` that may not know yet that one of its leaderships has ended.
    """

    serving: frozenset[int]
    staying: frozenset[int]
    can_lead: frozenset[int]
    unaware: frozenset[int] = frozenset()

    @classmethod
    def of(cls, image: ClusterImage) -> BrokerStates:
        """Derive the states from the image alone: every unfenced broker counts as heard from, and as unaware."""
        serving = frozenset(broker.id for broker in image.live_brokers())
        staying = frozenset(broker.id for broker in image.brokers.values() if broker.may_join_isr)
        return cls(serving, staying, staying, serving)

    def without(self, broker_id: int) -> BrokerStates:
        return BrokerStates(*(brokers - {broker_id} for brokers in self))


class TopicRules(NamedTuple):
    """The topic settings that affect elections."""

    min_insync: int | None
    is_unclean_allowed: bool

    @classmethod
    def of(cls, image: ClusterImage, topic: TopicImage) -> TopicRules:
        is_unclean_allowed = image_value(image, topic.configs, UNCLEAN_ELECTION) is True
        return cls(configured_min_insync(image, topic.configs), is_unclean_allowed)


class Draft:
    """A pending change of one partition: create it from the image, adjust it, call `settle`, then take the `change`.

    `has_leader_resigned`: the leader itself requested a new leader and no longer serves. `is_forced`: the leader's time
    to hand over has run out. `begins_epoch`: the leader stays and starts a new leader epoch. After `settle`,
    `hand_over_to` is the broker that should receive the leadership. `is_waiting` means that the election waits until
    the previous leader knows that it no longer leads.
    """

    def __init__(self, image: PartitionImage) -> None:
        self.image = image
        self.leader, self.replicas, self.isr = image.leader, image.replicas, image.isr
        self.eligible, self.unproven = image.eligible, image.unproven
        self.adding, self.removing = image.adding, image.removing
        self.begins_epoch = self.has_leader_resigned = self.is_forced = self.is_waiting = self._is_unclean = False
        self.hand_over_to: int | None = None
        self._lost: int | None = None

    def lose(self, broker_id: int, loss: Loss) -> None:
        """Record that `broker_id` may lack committed records from now on.

        The last replica stays if its log is only spoiled, and a sole replica stays if it lost only its page cache:
        there is nothing better to read.
        """
        is_member = broker_id in self.isr or broker_id in self.eligible
        is_last = is_member and len(self.isr) + len(self.eligible) == 1
        if loss is Loss.SPOILED and is_last:
            return
        if loss is Loss.POSSIBLE and len(self.replicas) == 1:
            return
        self._lost = broker_id
        self.isr = _without(self.isr, broker_id)
        self.eligible = _without(self.eligible, broker_id)
        if loss is not Loss.POSSIBLE:
            self.unproven = _without(self.unproven, broker_id)
        elif is_member:
            self.unproven = (*self.unproven, broker_id)

    @property
    def needs_recovery(self) -> bool:
        """Whether only replicas that may lack committed records are left."""
        return not self.isr and not self.eligible and bool(self.unproven)

    def settle(self, brokers: BrokerStates, rules: TopicRules) -> None:
        """Set the leader, ISR and eligible leaders to what they must be now, and complete a finished reassignment."""
        self._trim(brokers)
        self._elect(brokers, rules)
        if self.adding or self.removing:
            self._complete(brokers, rules)
        if self.leader not in (self.image.leader, NO_LEADER) and self._still_serves(brokers):
            self.leader = NO_LEADER
        if self.leader != NO_LEADER:
            # From now on the leader may commit records without them.
            self.unproven = ()
        self._keep_eligible(rules)

    def elect_unclean(self, brokers: BrokerStates, order: Sequence[int]) -> None:
        """Elect the first broker in `order` that can lead. Records that only other replicas have are lost."""
        candidate = first_able(order, self.replicas, brokers)
        if candidate is not None:
            self.elect_alone(candidate)
            self._is_unclean = True

    def elect_alone(self, candidate: int) -> None:
        """Elect `candidate` with an ISR of one; other replicas rejoin the ISR once they catch up."""
        self.leader = candidate
        self.isr = (candidate,)
        self.eligible = self.unproven = ()

    def change(self) -> PartitionChange | None:
        old = self.image
        state = (self.leader, self.isr, self.eligible)
        is_same = (*state, self.unproven) == (old.leader, old.isr, old.eligible, old.unproven)
        placing = (self.replicas, self.adding, self.removing)
        is_placed = placing == (old.replicas, old.adding, old.removing)
        if is_placed and is_same and not self.begins_epoch:
            return None
        flags = (self.unproven, self._is_unclean, self.begins_epoch)
        if is_placed:
            return PartitionChange(old.partition, old.partition_epoch, *state, None, None, None, *flags)
        return PartitionChange(old.partition, old.partition_epoch, *state, *placing, *flags)

    def _still_serves(self, brokers: BrokerStates) -> bool:
        """Whether the current leader may still answer clients."""
        return self.image.leader in brokers.serving and not self.has_leader_resigned

    def _trim(self, brokers: BrokerStates) -> None:
        staying = tuple(member for member in self.isr if member in brokers.staying)
        if any(member in brokers.can_lead for member in staying):
            self.isr = staying

    def _elect(self, brokers: BrokerStates, rules: TopicRules) -> None:
        if self.leader in self.isr and self.leader in brokers.staying:
            return
        if self.image.leader == NO_LEADER and self.image.last_known_leader in brokers.unaware:
            self.is_waiting = True
            return
        candidate = first_able(self.replicas, self.isr, brokers)
        if candidate is not None:
            self.leader = candidate
            return
        if self.leader in self.isr and self.leader in brokers.serving:
            # It is shutting down, but no other replica can take over: it leads as long as it can.
            return
        candidate = first_able(self.replicas, self.eligible, brokers)
        if candidate is not None:
            self.leader = candidate
            self.isr = (candidate,)
            return
        self.leader = NO_LEADER
        if rules.is_unclean_allowed and not any(member in brokers.can_lead for member in self.unproven):
            self.elect_unclean(brokers, (self.image.last_known_leader, *self.replicas))

    def _complete(self, brokers: BrokerStates, rules: TopicRules) -> None:
        if any(replica not in self.isr for replica in self.adding):
            return
        target = tuple(replica for replica in self.replicas if replica not in self.removing)
        isr = tuple(member for member in self.isr if member in target)
        candidate = first_able(target, isr, brokers)
        if candidate is None or len(isr) < min_insync_of(rules.min_insync, len(target)):
            return
        if self.leader not in isr and self._still_serves(brokers) and not self.is_forced:
            self.hand_over_to = candidate
            return
        self.replicas, self.isr = target, isr
        self.adding = self.removing = ()
        if self.leader not in isr:
            self.leader = candidate

    def _keep_eligible(self, rules: TopicRules) -> None:
        if self._is_unclean or len(self.isr) >= min_insync_of(rules.min_insync, len(self.replicas) - len(self.adding)):
            self.eligible = ()
            return
        safe = (*self.image.isr, *self.eligible)
        self.eligible = tuple(
            replica
            for replica in self.replicas
            if replica in safe and replica not in self.isr and replica != self._lost
        )


def is_settled(partition: PartitionImage, brokers: BrokerStates) -> bool:
    """Whether a `Draft` would change nothing, whatever the rules are: nothing is missing, and no replica is leaving.

    A new controller examines all partitions, and nearly all are settled: this check is 20 times as fast.
    """
    return partition.is_settled and brokers.staying.issuperset(partition.isr)


def plan_unclean_elections(image: ClusterImage, brokers: BrokerStates, requested: Sequence[Key]) -> Plan:
    """Plan the requested unclean elections, in the order of the replicas, which an administrator can set."""
    plan = Plan()
    # The administrator chose not to wait for the previous leader or for replicas that may have longer logs.
    brokers = brokers._replace(unaware=frozenset())

    def plan_election(key: Key) -> None:
        topic, partition = image.require_partition(*key)
        name = f"{topic.name}-{partition.partition}"
        if partition.leader != NO_LEADER and partition.leader in brokers.serving:
            raise KafkaError(ErrorCode.election_not_needed, f"{name} is led by broker {partition.leader}")
        draft = Draft(partition)
        draft.unproven = ()
        draft.settle(brokers, TopicRules.of(image, topic)._replace(is_unclean_allowed=False))
        if draft.leader == NO_LEADER:
            draft.elect_unclean(brokers, partition.replicas)
        if draft.leader == NO_LEADER:
            raise KafkaError(
                ErrorCode.eligible_leaders_not_available,
                f"none of the replicas {[*partition.replicas]} of {name} is alive",
            )
        plan.changes.add(topic.id, draft.change())

    plan.outcomes = outcomes_of(plan_election, requested)
    return plan


def first_able(order: Sequence[int], members: Sequence[int], brokers: BrokerStates) -> int | None:
    return next((replica for replica in order if replica in members and replica in brokers.can_lead), None)


def _without(members: tuple[int, ...], broker_id: int) -> tuple[int, ...]:
    return tuple(member for member in members if member != broker_id)


# -- min.insync.replicas -----------------------------------------------------------------------------------------------
# How many in-sync replicas a partition needs to commit a record: one rule for leaders and the controller. The leader
# holds its high watermark while the ISR is smaller; the controller relies on that when it keeps replicas as eligible
# leaders. So both take the number from the image alone, at the version that holds the ISR. A node's own settings must
# not matter, or a leader could commit records that an eligible leader lacks.


def min_insync_replicas(image: ClusterImage, topic: TopicImage, partition: PartitionImage) -> int:
    """The topic's setting, the cluster's, or 2 for three or more replicas; at most the number of replicas.

    Replicas being added do not count: otherwise a partition that gains some would have to wait for them.
    """
    return min_insync_of(configured_min_insync(image, topic.configs), len(partition.settled_replicas))


def configured_min_insync(image: ClusterImage, topic_configs: Mapping[str, str]) -> int | None:
    value = image_value(image, topic_configs, MIN_INSYNC_REPLICAS)
    return value if isinstance(value, int) else None


def min_insync_of(configured: int | None, settled_replicas: int) -> int:
    """Return the number for a partition with that many replicas, not counting those being added."""
    if configured is None:
        configured = 2 if settled_replicas >= REPLICATION_FACTOR_SAFE else 1
    return max(1, min(configured, settled_replicas))


def image_value(image: ClusterImage, topic_configs: Mapping[str, str], name: str) -> ConfigValue | None:
    """Return a topic config set in the image, on the topic or as the cluster default; None if neither sets it."""
    definition = TOPIC_CONFIGS[name]
    defaults = image.broker_configs.get(CLUSTER_DEFAULT, {})
    for text in (topic_configs.get(name), defaults.get(definition.synonym or name)):
        if text is None:
            continue
        try:
            return definition.parse(text)
        except KafkaError:
            # Another version of the software accepted this value.
            continue
    return None
