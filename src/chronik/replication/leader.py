"""One partition as its leader sees it: how far each replica is, and so the high watermark and who is in sync."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from chronik.replication.isr import InSyncReplicas

UNKNOWN: Final = -1
NEVER_MS: Final = -(1 << 60)
LAG_MS_MAX: Final = 3_000
JOIN_WAIT_MS_MAX: Final = 1_000
"""So long the watermark waits for a replica that has caught up and is about to join the ISR."""


class ProposedIsr(NamedTuple):
    """What the controller is asked to commit: replicas with their broker epochs (KIP-903), -1 where not known.

    `hand_over_to` is who shall lead from then on, -1 where this node goes on.
    """

    leader_epoch: int
    partition_epoch: int
    isr: tuple[tuple[int, int], ...]
    hand_over_to: int = -1


class Replica:
    """Another node's copy, as far as its fetches in this leader epoch tell."""

    __slots__ = ("broker_epoch", "caught_up_ms", "end", "fetched_ms", "id", "leader_end_at_fetch", "moved_ms", "start")

    def __init__(self, replica_id: int, now_ms: int) -> None:
        self.id = replica_id
        self.end = UNKNOWN
        """It has everything below, written as the durability setting asks."""
        self.start = UNKNOWN
        """Where its log starts, durably."""
        self.broker_epoch = UNKNOWN
        self.caught_up_ms = NEVER_MS
        """When it last had all that was there."""
        self.moved_ms = NEVER_MS
        """When it last had more than before, or came anew."""
        self.fetched_ms = now_ms
        self.leader_end_at_fetch = UNKNOWN


class PartitionLeader:
    """One partition during one leader epoch.

    Invariant: `high_watermark` never falls, and rises to no more than the counted end of every replica of the maximal
    ISR, while the committed ISR has min.insync.replicas. "Counted" is what the durability setting lets count as
    written: the synced end under `synced`, the log end under `replicated`. No log of the maximal ISR starts below what
    clients were told is deleted. Owned by the node's loop; nothing here waits, reads a clock or touches a file.
    """

    __slots__ = (
        "_counted",
        "_deleted_upto",
        "_isr",
        "_joining",
        "_lag_ms_max",
        "_min_insync_replicas",
        "_others",
        "_own_end",
        "_since_ms",
        "epoch_start_offset",
        "has_enough_replicas",
        "high_watermark",
        "leader_epoch",
        "low_watermark",
        "node_id",
        "replicas",
    )

    def __init__(
        self,
        node_id: int,
        leader_epoch: int,
        *,
        replicas: Iterable[int],
        isr: Iterable[int],
        partition_epoch: int = 0,
        min_insync_replicas: int = 1,
        log_end_offset: int,
        counted_end: int,
        high_watermark: int,
        log_start_offset: int = 0,
        now_ms: int = 0,
        lag_ms_max: int = LAG_MS_MAX,
    ) -> None:
        self.node_id = node_id
        self.leader_epoch = leader_epoch
        self.epoch_start_offset = log_end_offset
        self.high_watermark = high_watermark
        self.low_watermark = UNKNOWN
        """What a client may be told is deleted: as it was when last asked for by `deletes`."""
        # What earlier leaders told is deleted lies below: this node was in sync.
        self._deleted_upto = log_start_offset
        self._own_end = counted_end
        self._min_insync_replicas = min_insync_replicas
        self._lag_ms_max = lag_ms_max
        self._since_ms = now_ms
        self._joining: dict[int, int] = {}
        self._others: dict[int, Replica] = {}
        self._counted: tuple[Replica, ...] = ()
        self.replicas: tuple[int, ...] = ()
        self.has_enough_replicas = False
        self._isr = InSyncReplicas(isr, partition_epoch)
        if node_id not in self._isr.committed:
            raise ValueError(f"node {node_id} leads without being in sync: {self._isr.committed}")
        self._set_replicas(replicas, now_ms)
        self._advance()

    # -- what others may know ------------------------------------------------------------------------------------------

    @property
    def in_sync_replicas(self) -> tuple[int, ...]:
        """As committed by the controller."""
        return self._isr.committed

    @property
    def maximal_isr(self) -> tuple[int, ...]:
        return self._isr.maximal

    @property
    def partition_epoch(self) -> int:
        return self._isr.partition_epoch

    @property
    def replicas_needed(self) -> int:
        """A partition with fewer replicas than min.insync.replicas asks for needs all it has."""
        return min(self._min_insync_replicas, len(self.replicas))

    @property
    def has_reached_its_epoch(self) -> bool:
        """Whether all that earlier leaders may have shown to clients is below the watermark (KIP-207)."""
        return self.high_watermark >= self.epoch_start_offset

    def counted_end_of(self, replica_id: int) -> int:
        """How far a replica is known to be; -1 where it has not fetched in this epoch."""
        if replica_id == self.node_id:
            return self._own_end
        replica = self._others.get(replica_id)
        return UNKNOWN if replica is None else replica.end

    def is_stale(self, replica_id: int, broker_epoch: int) -> bool:
        """Whether a fetch comes from a former process of the replica: what it says may no longer be true."""
        replica = self._others.get(replica_id)
        return replica is not None and broker_epoch < replica.broker_epoch

    # -- events: each tells whether the watermark rose -----------------------------------------------------------------

    def counted(self, end: int) -> bool:
        """This node's own copy counts as written below `end`."""
        if end > self._own_end:
            self._own_end = end
        if end <= self.high_watermark:
            return False
        if self._counted or not self.has_enough_replicas:
            return self._advance()
        self.high_watermark = end
        return True

    def replica_fetched(
        self,
        replica_id: int,
        broker_epoch: int,
        offset: int,
        log_end_offset: int,
        now_ms: int,
        live: Mapping[int, int],
        log_start_offset: int,
    ) -> bool:
        """A replica asks from `offset`, after its log was found to be a prefix of ours: it has all that lies below.

        Its log starts at `log_start_offset`, durably. `live` has the epoch of every broker that is registered and not
        fenced.
        """
        replica = self._others.get(replica_id)
        if replica is None or broker_epoch < replica.broker_epoch:
            return False
        if offset >= log_end_offset:
            replica.caught_up_ms = now_ms
        elif offset >= replica.leader_end_at_fetch >= 0:
            # It has all that was there when it last asked.
            replica.caught_up_ms = max(replica.caught_up_ms, replica.fetched_ms)
        if offset > replica.end or broker_epoch > replica.broker_epoch:
            replica.moved_ms = now_ms
        replica.fetched_ms = now_ms
        replica.leader_end_at_fetch = log_end_offset
        replica.broker_epoch = broker_epoch
        # Not the larger of the two: what a restart took from it must be missing here too.
        replica.end = offset
        replica.start = log_start_offset
        if replica_id not in self._isr.maximal:
            self._note_joining(replica, log_end_offset, now_ms, live)
        return self._advance()

    def partition_changed(self, replicas: Iterable[int], isr: Iterable[int], partition_epoch: int, now_ms: int) -> bool:
        """The metadata says so, for this leader epoch."""
        before = self._isr.committed
        if not self._isr.committed_as(isr, partition_epoch):
            return False
        self._set_replicas(replicas, now_ms)
        for replica in self._isr.committed:
            if replica not in before and replica != self.node_id:
                # It joined by what it has; from here on it is measured by how it keeps up.
                self._others[replica].caught_up_ms = max(self._others[replica].caught_up_ms, now_ms)
        return self._advance()

    def configured(self, min_insync_replicas: int) -> bool:
        self._min_insync_replicas = min_insync_replicas
        self._count()
        return self._advance()

    def proposal_ended(self, partition_epoch: int, is_committed: bool, now_ms: int) -> None:
        """The answer to a proposal came, or will not."""
        self._isr.ended(partition_epoch, is_committed, now_ms)

    def advanced(self) -> bool:
        """Nothing happened but time: `check_isr` may have stopped waiting for somebody."""
        return self._advance()

    def stalled(self, now_ms: int) -> None:
        """This node itself stood still: nobody can be blamed for not having fetched meanwhile."""
        self._since_ms = max(self._since_ms, now_ms)

    # -- who is in sync ------------------------------------------------------------------------------------------------

    def may_join(self, replica_id: int, live: Mapping[int, int]) -> bool:
        """Whether a replica outside the ISR has all that is committed, and is alive as the process that fetched."""
        replica = self._others.get(replica_id)
        return (
            replica is not None
            and replica_id not in self._isr.committed
            and replica.end >= self.high_watermark
            and replica.end >= self.epoch_start_offset
            and replica.start >= self._deleted_upto
            and live.get(replica_id) == replica.broker_epoch
        )

    def check_isr(
        self, log_end_offset: int, now_ms: int, live: Mapping[int, int], heard_ms: Mapping[int, int]
    ) -> ProposedIsr | None:
        """What to propose to the controller now, if anything; from here on it counts as proposed.

        To be asked now and then, and when a replica may join; then ask `advanced`, since it may stop waiting for one
        that wanted to. `heard_ms` says when each node last fetched at all: one that is at the end and still asks is
        caught up, even if it need not name a partition in which nothing happens.
        """
        for replica in self._others.values():
            if replica.end >= log_end_offset:
                replica.caught_up_ms = max(replica.caught_up_ms, heard_ms.get(replica.id, 0))
        self._forget_joining(now_ms, live)
        if not self._isr.may_propose(now_ms) or self.node_id not in live:
            return None
        staying = self._staying(log_end_offset, now_ms, live)
        isr = [replica for replica in self._isr.committed if replica in staying]
        isr += [
            replica
            for replica in self.replicas
            if self.may_join(replica, live)
            and self._is_moving(replica, log_end_offset, now_ms)
            and not self._is_stuck(replica, log_end_offset, now_ms)
            and now_ms - heard_ms.get(replica, 0) <= self._lag_ms_max
        ]
        is_unchanged = tuple(isr) == self._isr.committed
        if is_unchanged and self._isr.is_settled:
            return None
        # One that only settles what failed before says nothing new of anybody.
        return self._propose(isr, {} if is_unchanged else live)

    def propose_hand_over(
        self, to: int, now_ms: int, live: Mapping[int, int], *, leaves: bool = False
    ) -> ProposedIsr | None:
        """Give the leadership to a replica that has everything; None while another proposal is open.

        One that `leaves` cannot take records any more: nobody should have to wait for it until it is found to lag.
        """
        committed = self._isr.committed
        if not self._isr.may_propose(now_ms) or to not in committed or to not in live:
            return None
        members = [replica for replica in committed if not (leaves and replica == self.node_id)]
        return self._propose(members, {})._replace(hand_over_to=to)

    @property
    def is_settled(self) -> bool:
        """Whether nothing was proposed that may still become true."""
        return self._isr.is_settled

    def _propose(self, isr: Iterable[int], live: Mapping[int, int]) -> ProposedIsr:
        members = tuple(isr)
        self._isr.propose(members)
        self._count()
        return ProposedIsr(
            self.leader_epoch,
            self._isr.partition_epoch,
            tuple((replica, self._broker_epoch_of(replica, live)) for replica in members),
        )

    def _staying(self, log_end_offset: int, now_ms: int, live: Mapping[int, int]) -> set[int]:
        """Who of the ISR stays in it: who keeps up; and, where these are too few, who is nearest behind and moves.

        Without the latter nothing could be committed at all, and producers with acks=all would be sent away, to write
        the same once more, while all they have to do is wait. One that stands still (a full disk) is not waited for,
        and leaves before it lags if enough are left without it.
        """
        committed = self._isr.committed
        staying = {replica for replica in committed if not self._lags(replica, now_ms)}
        for replica in committed:
            if len(staying) > self.replicas_needed and self._is_stuck(replica, log_end_offset, now_ms):
                staying.discard(replica)
        behind = [
            replica
            for replica in committed
            if replica not in staying and replica in live and self._is_moving(replica, log_end_offset, now_ms)
        ]
        behind.sort(key=self.counted_end_of, reverse=True)
        staying.update(behind[: max(0, self.replicas_needed - len(staying))])
        return staying

    def _is_moving(self, replica_id: int, log_end_offset: int, now_ms: int) -> bool:
        """Whether it takes what it is sent, or there is nothing to send."""
        replica = self._others[replica_id]
        return replica.end >= log_end_offset or now_ms - replica.moved_ms <= self._lag_ms_max

    def _is_stuck(self, replica_id: int, log_end_offset: int, now_ms: int) -> bool:
        """Whether it lacks records and has taken none for two thirds of the time that it may lag: its disk fails or
        hangs, or the replica itself does. What it took last is known as of its last fetch, which may be a second old.
        """
        replica = self._others.get(replica_id)
        if replica is None or replica.end >= log_end_offset:
            return False
        return now_ms - max(replica.caught_up_ms, replica.moved_ms, self._since_ms) > self._lag_ms_max * 2 // 3

    def _lags(self, replica_id: int, now_ms: int) -> bool:
        if replica_id == self.node_id:
            return False
        replica = self._others.get(replica_id)
        if replica is None:
            # Not among the replicas any more: the controller takes it out.
            return False
        return now_ms - max(replica.caught_up_ms, self._since_ms) > self._lag_ms_max

    def _broker_epoch_of(self, replica_id: int, live: Mapping[int, int]) -> int:
        replica = self._others.get(replica_id)
        if replica is None:
            return live.get(replica_id, UNKNOWN)
        return replica.broker_epoch if live else UNKNOWN

    # A replica outside the ISR that keeps up is always one fetch behind a watermark that follows the leader alone; so
    # the watermark waits for it, briefly, or it could never join under load.

    def _note_joining(self, replica: Replica, log_end_offset: int, now_ms: int, live: Mapping[int, int]) -> None:
        if replica.id in self._joining or live.get(replica.id) != replica.broker_epoch:
            return
        if self._is_stuck(replica.id, log_end_offset, now_ms):
            return
        if now_ms - replica.caught_up_ms < self._lag_ms_max:
            self._joining[replica.id] = now_ms
            self._count()

    def _forget_joining(self, now_ms: int, live: Mapping[int, int]) -> None:
        over = [
            replica
            for replica, since_ms in self._joining.items()
            if now_ms - since_ms > JOIN_WAIT_MS_MAX or replica not in live
        ]
        for replica in over:
            del self._joining[replica]
        if over:
            self._count()

    # -- deleted records -----------------------------------------------------------------------------------------------

    def deletes(self, log_start_offset: int) -> bool:
        """Whether the low watermark rose: the smallest start of the maximal ISR, this node's being `log_start_offset`.

        It stands while too few are in sync, since then one that has left the ISR may still be elected.
        """
        if not self.has_enough_replicas:
            return False
        others = (self._others[replica].start for replica in self._isr.maximal if replica != self.node_id)
        start = min([log_start_offset, *others])
        if start <= self.low_watermark:
            return False
        self.low_watermark = start
        # Told to clients: nobody joins from here on in whose log the deleted records would be back.
        self._deleted_upto = max(self._deleted_upto, start)
        return True

    # -- the watermark -------------------------------------------------------------------------------------------------

    def _set_replicas(self, replicas: Iterable[int], now_ms: int) -> None:
        self.replicas = tuple(replicas)
        # The ISR's members count even where they are no replicas any more: a record is theirs until they are removed.
        for replica in (*self.replicas, *self._isr.committed):
            if replica != self.node_id and replica not in self._others:
                self._others[replica] = Replica(replica, now_ms)
        for replica in list(self._others):
            if replica not in self.replicas and replica not in self._isr.committed:
                del self._others[replica]
                self._joining.pop(replica, None)
        self._count()

    def _count(self) -> None:
        """Who holds the watermark back, after a change of that."""
        for replica in self._isr.maximal:
            self._joining.pop(replica, None)
        waited_for = (*self._isr.maximal, *self._joining)
        self._counted = tuple(self._others[replica] for replica in waited_for if replica != self.node_id)
        self.has_enough_replicas = len(self._isr.committed) >= self.replicas_needed

    def _advance(self) -> bool:
        if not self.has_enough_replicas:
            return False
        end = self._own_end
        for replica in self._counted:
            if replica.end < end:
                end = replica.end
        if end <= self.high_watermark:
            return False
        self.high_watermark = end
        return True
