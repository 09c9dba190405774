"""Who leads a partition and who counts as in sync, given which brokers are there: the rules, as pure functions.

What makes an election safe. Let S be the brokers in `isr` or `eligible` that have not lost records since.
1. Every broker of S holds every committed record: a leader commits a record when all of the ISR has it, and an ISR that
   is smaller than min.insync.replicas commits nothing, so those who leave it then are kept as eligible.
2. A leader comes from S: from the ISR, or from the eligible when nobody of the ISR can lead. Only an unclean election,
   which an administrator asks for or the topic allows, looks further.
3. A broker enters the ISR in one of two ways only: its leader found it in sync, or it was elected.
4. Brokers leave the ISR when they are fenced or shut down and somebody else of it is surely there. If nobody is, all
   stay: whoever returns first leads.
5. A broker that may have lost records leaves S before it can do anything else (`lose`), even if nobody is left. If the
   last of S only lost their page cache, they are `unproven`, and the controller elects the one with the longest log
   among those that report (`recoveries`). Otherwise the partition stays without a leader until an administrator accepts
   the loss.
6. A leader that serves is not followed by another before it knows: it hands over itself (`calls.HandOver`), or the
   partition is without a leader until it has applied that, or its lease is over. Two that serve at once would show
   clients an end that goes back. And only a hand-over keeps what the leader acknowledged alone (acks=1).

Reassignment (KIP-455) ends here too: when all new replicas are in sync, the old ones go in the same change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from chronik.metadata.commands import PartitionChange
from chronik.metadata.image import NO_LEADER, ClusterImage, PartitionImage, TopicImage
from chronik.metadata.min_insync import configured_min_insync, image_value, min_insync_of

UNCLEAN_ELECTION = "unclean.leader.election.enable"


class Loss(Enum):
    """What a replica may have lost. The values travel in `calls.ReplicaReport`."""

    POSSIBLE = "possible"
    """Its machine lost the page cache: nothing shows how much of it was on disk."""
    CERTAIN = "certain"
    """Its log is missing, shorter than it was, from an older copy of the data folder, or broken."""
    SPOILED = "spoiled"
    """Some batches fail their checksum; all others can be read."""


@dataclass(frozen=True, slots=True)
class BrokerStates:
    """Which brokers may do what, as the controller knows it now.

    `serving` are not fenced, nor about to be; `staying` are those of them that are not shutting down; `can_lead` are
    those of them that were heard from, so that a leadership given to them is taken up. `unaware` of those that serve
    may not know yet that a leadership of theirs has ended.
    """

    serving: frozenset[int]
    staying: frozenset[int]
    can_lead: frozenset[int]
    unaware: frozenset[int] = frozenset()

    @classmethod
    def of(cls, image: ClusterImage) -> BrokerStates:
        """As far as the image tells: everybody who is not fenced was heard from, and knows of nothing yet."""
        serving = frozenset(broker.id for broker in image.live_brokers())
        staying = frozenset(broker.id for broker in image.brokers.values() if broker.may_join_isr)
        return cls(serving, staying, staying, serving)


@dataclass(frozen=True, slots=True)
class TopicRules:
    """What a topic's settings say about its elections."""

    min_insync: int | None
    is_unclean_allowed: bool

    @classmethod
    def of(cls, image: ClusterImage, topic: TopicImage) -> TopicRules:
        is_unclean_allowed = image_value(image, topic.configs, UNCLEAN_ELECTION) is True
        return cls(configured_min_insync(image, topic.configs), is_unclean_allowed)


class Draft:
    """A partition while a change of it is decided: start from its image, adjust, `settle`, take the `change`.

    `is_given_up`: the leader itself asks for another one, and serves no more. `is_forced`: it had its time for that.
    `begins_epoch`: a leader that stays starts a new leader epoch.
    After `settle`, `hand_over_to` is who it should give the partition to, and `is_waiting` tells that the next leader
    waits for the last one to know.
    """

    __slots__ = (
        "_is_unclean",
        "_lost",
        "adding",
        "begins_epoch",
        "eligible",
        "hand_over_to",
        "image",
        "is_forced",
        "is_given_up",
        "is_waiting",
        "isr",
        "leader",
        "removing",
        "replicas",
        "unproven",
    )

    def __init__(self, image: PartitionImage) -> None:
        self.image = image
        self.leader = image.leader
        self.replicas = image.replicas
        self.isr = image.isr
        self.eligible = image.eligible
        self.unproven = image.unproven
        self.adding = image.adding
        self.removing = image.removing
        self.begins_epoch = False
        self.is_given_up = False
        self.is_forced = False
        self.is_waiting = False
        self.hand_over_to: int | None = None
        self._lost: int | None = None
        self._is_unclean = False

    def lose(self, broker_id: int, loss: Loss) -> None:
        """`broker_id` may lack committed records from now on.

        The last replica whose log is only spoiled stays, and so does an only replica that lost its page cache: there is
        nothing better to read.
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
        """Whether all that is left are replicas that may lack committed records."""
        return not self.isr and not self.eligible and bool(self.unproven)

    def settle(self, brokers: BrokerStates, rules: TopicRules) -> None:
        """Leader, ISR and eligible leaders as they have to be now; and the end of a reassignment that has arrived."""
        self._trim(brokers)
        self._elect(brokers, rules)
        if self.adding or self.removing:
            self._complete(brokers, rules)
        if self.leader not in (self.image.leader, NO_LEADER) and self._still_serves(brokers):
            self.leader = NO_LEADER
        if self.leader != NO_LEADER:
            # It may commit records without them from now on.
            self.unproven = ()
        self._keep_eligible(rules)

    def elect_unclean(self, brokers: BrokerStates, order: Sequence[int]) -> None:
        """The first in `order` that can lead; what the other replicas have beyond it is lost."""
        candidate = first_able(order, self.replicas, brokers)
        if candidate is not None:
            self.elect_alone(candidate)
            self._is_unclean = True

    def elect_alone(self, candidate: int) -> None:
        """The others come back into the ISR once they have caught up with it."""
        self.leader = candidate
        self.isr = (candidate,)
        self.eligible = self.unproven = ()

    def change(self) -> PartitionChange | None:
        """The change that leads from the image to the draft; None where nothing differs."""
        old = self.image
        is_moved = self.replicas != old.replicas or self.adding != old.adding or self.removing != old.removing
        state = (self.leader, self.isr, self.eligible, self.unproven)
        is_same = state == (old.leader, old.isr, old.eligible, old.unproven)
        if not is_moved and is_same and not self.begins_epoch:
            return None
        return PartitionChange(
            old.partition,
            old.partition_epoch,
            self.leader,
            self.isr,
            self.eligible,
            self.replicas if is_moved else None,
            self.adding if is_moved else None,
            self.removing if is_moved else None,
            self.unproven,
            self._is_unclean,
            self.begins_epoch,
        )

    def _still_serves(self, brokers: BrokerStates) -> bool:
        """Whether the present leader may be answering clients."""
        return self.image.leader in brokers.serving and not self.is_given_up

    def _trim(self, brokers: BrokerStates) -> None:
        staying = tuple(member for member in self.isr if member in brokers.staying)
        if len(staying) == len(self.isr):
            return
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
            # It shuts down, but nobody can take over: it leads while it can.
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
        self.replicas = target
        self.isr = isr
        self.adding = ()
        self.removing = ()
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


def first_able(order: Sequence[int], members: Iterable[int], brokers: BrokerStates) -> int | None:
    """The first in `order` of `members` that can lead."""
    members = tuple(members)
    for replica in order:
        if replica in members and replica in brokers.can_lead:
            return replica
    return None


def _without(members: tuple[int, ...], broker_id: int) -> tuple[int, ...]:
    return tuple(member for member in members if member != broker_id)
