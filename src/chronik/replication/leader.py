"""One partition as its leader sees it: each replica's position, the high watermark and the in-sync replicas."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from chronik.replication.isr import InSyncReplicas

UNKNOWN: Final = -1
NEVER_MS: Final = -(1 << 60)
LAG_MS_MAX: Final = 3_000
JOIN_WAIT_MS_MAX: Final = 1_000
"""How long the watermark waits for a replica that has caught up and is about to join the ISR."""
ENDS_SEEN_MAX: Final = 4
"""Two are needed: what a replica receives during a sync is durable after the next one."""


class ProposedIsr(NamedTuple):
    """An ISR to propose to the controller: replicas with their broker epochs (KIP-903), -1 if unknown.

    `hand_over_to` is the next leader, or -1 if this node stays leader.
    """

    leader_epoch: int
    partition_epoch: int
    isr: tuple[tuple[int, int], ...]
    hand_over_to: int = -1


@dataclass(slots=True, eq=False)
class Replica:
    """Another node's replica, as known from its fetches in this leader epoch."""

    id: int
    end: int = UNKNOWN
    """The replica has everything below this offset, written as the durability setting requires. What it has received
    beyond that does not count, here or in any rule."""
    start: int = UNKNOWN
    """Its durable log start offset."""
    broker_epoch: int = UNKNOWN
    caught_up_ms: int = NEVER_MS
    """When it last had everything in the leader's log."""
    progressed_ms: int = NEVER_MS
    """When it last made progress or restarted."""
    leader_ends: deque[tuple[int, int]] = field(default_factory=deque)
    """The ends of the leader's log that it has not reached yet, each with the time: one for each progress it made."""


class PartitionLeader:
    """One partition during one leader epoch.

    Invariant: `high_watermark` never falls. It rises at most to the durable end of every replica in the maximal ISR,
    and only while the committed ISR has min.insync.replicas. The durable end is what the durability setting accepts as
    written: the synced end under `synced`, the log end under `replicated`. No log in the maximal ISR starts below what
    clients know as deleted. Owned by the node's event loop; nothing here waits, reads a clock or touches a file.
    """

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
        durable_end: int,
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
        """Clients may learn that records below this are deleted, as of the last call of `update_low_watermark`."""
        # Every offset that earlier leaders reported as deleted is below this: this node was in sync.
        self._deleted_upto = log_start_offset
        self._own_end = durable_end
        self._min_insync_replicas = min_insync_replicas
        self._lag_ms_max = lag_ms_max
        self._since_ms = now_ms
        self._joining: dict[int, int] = {}
        self._others: dict[int, Replica] = {}
        self._waited_for: tuple[Replica, ...] = ()
        self.replicas: tuple[int, ...] = ()
        self.has_enough_replicas = False
        self.isr = InSyncReplicas(isr, partition_epoch)
        if node_id not in self.isr.committed:
            raise ValueError(f"node {node_id} leads without being in sync: {self.isr.committed}")
        self._set_replicas(replicas)
        self._advance()

    # -- queries -------------------------------------------------------------------------------------------------------

    @property
    def in_sync_replicas(self) -> tuple[int, ...]:
        """The ISR as committed by the controller."""
        return self.isr.committed

    @property
    def replicas_needed(self) -> int:
        """The ISR size needed: min.insync.replicas, or all replicas if the partition has fewer."""
        return min(self._min_insync_replicas, len(self.replicas))

    @property
    def has_reached_its_epoch(self) -> bool:
        """Whether the watermark covers everything that earlier leaders may have exposed to clients (KIP-207)."""
        return self.high_watermark >= self.epoch_start_offset

    def durable_end_of(self, replica_id: int) -> int:
        """Return the durable end of a replica, or -1 if it has not fetched in this epoch."""
        if replica_id == self.node_id:
            return self._own_end
        replica = self._others.get(replica_id)
        return UNKNOWN if replica is None else replica.end

    def is_stale(self, replica_id: int, broker_epoch: int) -> bool:
        """Return whether a fetch comes from an earlier incarnation of the replica, whose state may be outdated."""
        replica = self._others.get(replica_id)
        return replica is not None and broker_epoch < replica.broker_epoch

    # -- events: each returns whether the watermark rose ---------------------------------------------------------------

    def acknowledge_durable(self, end: int) -> bool:
        if end > self._own_end:
            self._own_end = end
        if end <= self.high_watermark:
            return False
        if self._waited_for or not self.has_enough_replicas:
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
        """Record a replica's fetch: its log is a prefix of ours, and durable below `offset`.

        Its durable log start is `log_start_offset`. `live` has the epoch of every registered broker that is not fenced.
        """
        replica = self._others.get(replica_id)
        if replica is None or broker_epoch < replica.broker_epoch:
            return False
        ends = replica.leader_ends
        while ends and offset >= ends[0][0]:
            # It has everything that the log had then.
            replica.caught_up_ms = max(replica.caught_up_ms, ends.popleft()[1])
        has_progressed = offset > replica.end or broker_epoch > replica.broker_epoch
        if has_progressed:
            replica.progressed_ms = now_ms
        if offset >= log_end_offset:
            replica.caught_up_ms = now_ms
        elif not ends or (has_progressed and len(ends) < ENDS_SEEN_MAX):
            ends.append((log_end_offset, now_ms))
        replica.broker_epoch = broker_epoch
        # Not the maximum of the two: records that a restart lost must be missing here too.
        replica.end = offset
        replica.start = log_start_offset
        if replica_id not in self.isr.maximal:
            self._note_joining(replica, log_end_offset, now_ms, live)
        return self._advance()

    def partition_changed(self, replicas: Iterable[int], isr: Iterable[int], partition_epoch: int, now_ms: int) -> bool:
        """Apply the partition's replicas and ISR from the metadata, for this leader epoch."""
        before = self.isr.committed
        if not self.isr.committed_as(isr, partition_epoch):
            return False
        self._set_replicas(replicas)
        for replica in self.isr.committed:
            if replica not in before and replica != self.node_id:
                # It joined because of its position; from now on it must keep up.
                self._others[replica].caught_up_ms = max(self._others[replica].caught_up_ms, now_ms)
        return self._advance()

    def configured(self, min_insync_replicas: int) -> bool:
        self._min_insync_replicas = min_insync_replicas
        self._update_waited_for()
        return self._advance()

    def stalled(self, now_ms: int) -> None:
        """Note that this node itself stalled: no replica is blamed for not fetching during that time."""
        self._since_ms = max(self._since_ms, now_ms)

    # -- in-sync replicas ----------------------------------------------------------------------------------------------

    def may_join(self, replica_id: int, live: Mapping[int, int]) -> bool:
        """Return whether a replica outside the ISR has all committed records, and its fetching process is alive."""
        replica = self._others.get(replica_id)
        return (
            replica is not None
            and replica_id not in self.isr.committed
            and replica.end >= self.high_watermark
            and replica.end >= self.epoch_start_offset
            and replica.start >= self._deleted_upto
            and live.get(replica_id) == replica.broker_epoch
        )

    def check_isr(
        self, log_end_offset: int, now_ms: int, live: Mapping[int, int], heard_ms: Mapping[int, int]
    ) -> ProposedIsr | None:
        """Return the ISR to propose to the controller now, if any, and record it as proposed.

        Call this periodically and when a replica may join. It may raise the watermark, because it stops waiting for a
        replica that does not join in time. `heard_ms` is when each node last fetched at all: a replica at the log end
        whose node still fetches is caught up, since fetches may omit idle partitions.
        """
        # Neither replicas nor ISR have a member that the other lacks, and no proposal or join is pending.
        count = len(self._others) + 1
        is_calm = count == len(self.isr.committed) == len(self.replicas) and self.isr.is_settled and not self._joining
        for replica in self._others.values():
            if replica.end >= log_end_offset:
                replica.caught_up_ms = max(replica.caught_up_ms, heard_ms.get(replica.id, 0))
                is_calm = is_calm and now_ms - replica.caught_up_ms <= self._lag_ms_max
            else:
                is_calm = False
        if is_calm:
            # The usual case of idle partitions, of which a node may lead thousands: nothing would change.
            return None
        self._forget_joining(now_ms, live)
        proposed = self._next_isr(log_end_offset, now_ms, live, heard_ms)
        self._advance()
        return proposed

    def _next_isr(
        self, log_end_offset: int, now_ms: int, live: Mapping[int, int], heard_ms: Mapping[int, int]
    ) -> ProposedIsr | None:
        if not self.isr.may_propose(now_ms) or self.node_id not in live:
            return None
        staying = self._staying(log_end_offset, now_ms, live)
        isr = [replica for replica in self.isr.committed if replica in staying]
        isr += [
            replica
            for replica in self.replicas
            if self.may_join(replica, live)
            and self._makes_progress(replica, log_end_offset, now_ms)
            and not self._is_stuck(replica, log_end_offset, now_ms)
            and now_ms - heard_ms.get(replica, 0) <= self._lag_ms_max
        ]
        is_unchanged = tuple(isr) == self.isr.committed
        if is_unchanged and self.isr.is_settled:
            return None
        # A proposal that only resolves a failed one makes no claim about broker epochs.
        return self._propose(isr, {} if is_unchanged else live)

    def propose_hand_over(
        self, to: int, now_ms: int, live: Mapping[int, int], *, leaves: bool = False
    ) -> ProposedIsr | None:
        """Propose to transfer leadership to an in-sync, live replica; None if `to` is neither or a proposal is open.

        If this node `leaves`, it can no longer accept records: drop it from the ISR, so that no request waits for it.
        """
        committed = self.isr.committed
        if not self.isr.may_propose(now_ms) or to not in committed or to not in live:
            return None
        members = [replica for replica in committed if not (leaves and replica == self.node_id)]
        return self._propose(members, {})._replace(hand_over_to=to)

    def _propose(self, isr: Iterable[int], live: Mapping[int, int]) -> ProposedIsr:
        members = tuple(isr)
        self.isr.propose(members)
        self._update_waited_for()
        return ProposedIsr(
            self.leader_epoch,
            self.isr.partition_epoch,
            tuple((replica, self._broker_epoch_of(replica, live)) for replica in members),
        )

    def _staying(self, log_end_offset: int, now_ms: int, live: Mapping[int, int]) -> set[int]:
        """Return the members that stay in the ISR: those that keep up and, if too few, the nearest that make progress.

        Without the latter nothing could be committed: producers with acks=all would get errors and resend the same
        records, although they only need to wait. A replica that is stuck (a full disk) is not waited for. It leaves the
        ISR before it lags, if enough members remain.
        """
        committed = self.isr.committed
        staying = {replica for replica in committed if not self._lags(replica, now_ms)}
        for replica in committed:
            if len(staying) > self.replicas_needed and self._is_stuck(replica, log_end_offset, now_ms):
                staying.discard(replica)
        behind = [
            replica
            for replica in committed
            if replica not in staying and replica in live and self._makes_progress(replica, log_end_offset, now_ms)
        ]
        behind.sort(key=self.durable_end_of, reverse=True)
        staying.update(behind[: max(0, self.replicas_needed - len(staying))])
        return staying

    def _makes_progress(self, replica_id: int, log_end_offset: int, now_ms: int) -> bool:
        """Return whether the replica accepts the records it is sent, or there is nothing to send."""
        replica = self._others[replica_id]
        return replica.end >= log_end_offset or now_ms - replica.progressed_ms <= self._lag_ms_max

    def _is_stuck(self, replica_id: int, log_end_offset: int, now_ms: int) -> bool:
        """Return whether it lacks records and has accepted none for two thirds of the allowed lag: its disk, or the
        replica itself, fails or hangs. Its position is as of its last fetch, which may be a second old.
        """
        replica = self._others.get(replica_id)
        if replica is None or replica.end >= log_end_offset:
            return False
        return now_ms - max(replica.caught_up_ms, replica.progressed_ms, self._since_ms) > self._lag_ms_max * 2 // 3

    def _lags(self, replica_id: int, now_ms: int) -> bool:
        if replica_id == self.node_id:
            return False
        replica = self._others.get(replica_id)
        if replica is None:
            # No longer one of the replicas: the controller removes it.
            return False
        return now_ms - max(replica.caught_up_ms, self._since_ms) > self._lag_ms_max

    def _broker_epoch_of(self, replica_id: int, live: Mapping[int, int]) -> int:
        replica = self._others.get(replica_id)
        if replica is None:
            return live.get(replica_id, UNKNOWN)
        return replica.broker_epoch if live else UNKNOWN

    # A replica outside the ISR that keeps up is always one fetch behind a watermark that follows only the leader. So
    # the watermark waits for it briefly; otherwise it could never join under load.

    def _note_joining(self, replica: Replica, log_end_offset: int, now_ms: int, live: Mapping[int, int]) -> None:
        if replica.id in self._joining or live.get(replica.id) != replica.broker_epoch:
            return
        if self._is_stuck(replica.id, log_end_offset, now_ms):
            return
        if now_ms - replica.caught_up_ms < self._lag_ms_max:
            self._joining[replica.id] = now_ms
            self._update_waited_for()

    def _forget_joining(self, now_ms: int, live: Mapping[int, int]) -> None:
        over = [
            replica
            for replica, since_ms in self._joining.items()
            if now_ms - since_ms > JOIN_WAIT_MS_MAX or replica not in live
        ]
        for replica in over:
            del self._joining[replica]
        if over:
            self._update_waited_for()

    # -- deleted records -----------------------------------------------------------------------------------------------

    def update_low_watermark(self, log_start_offset: int) -> bool:
        """Update the low watermark, the lowest log start in the maximal ISR; return whether it rose.

        This node's own log starts at `log_start_offset`. The low watermark does not rise while too few replicas
        are in sync: a replica that left the ISR may still be elected.
        """
        if not self.has_enough_replicas:
            return False
        others = (self._others[replica].start for replica in self.isr.maximal if replica != self.node_id)
        start = min([log_start_offset, *others])
        if start <= self.low_watermark:
            return False
        self.low_watermark = start
        # Clients now see this. A replica whose log still has the deleted records may no longer join.
        self._deleted_upto = max(self._deleted_upto, start)
        return True

    # -- high watermark ------------------------------------------------------------------------------------------------

    def _set_replicas(self, replicas: Iterable[int]) -> None:
        self.replicas = tuple(replicas)
        # ISR members hold back the watermark even if they are no longer replicas, until the controller removes them.
        for replica in [*self.replicas, *self.isr.committed]:
            if replica != self.node_id and replica not in self._others:
                self._others[replica] = Replica(replica)
        for replica in list(self._others):
            if replica not in self.replicas and replica not in self.isr.committed:
                del self._others[replica]
                self._joining.pop(replica, None)
        self._update_waited_for()

    def _update_waited_for(self) -> None:
        for replica in self.isr.maximal:
            self._joining.pop(replica, None)
        waited_for = (*self.isr.maximal, *self._joining)
        self._waited_for = tuple(self._others[replica] for replica in waited_for if replica != self.node_id)
        self.has_enough_replicas = len(self.isr.committed) >= self.replicas_needed

    def _advance(self) -> bool:
        if not self.has_enough_replicas:
            return False
        end = self._own_end
        for replica in self._waited_for:
            if replica.end < end:
                end = replica.end
        if end <= self.high_watermark:
            return False
        self.high_watermark = end
        return True
