"""One partition as a share group sees it, on the partition's leader.

partition = SharePartition(settings, leader_epoch)
partition.load(state_epoch, start_offset, batches)
acquired = partition.acquire("member", batches, limits, now_ms)
token, action = partition.acknowledge("member", acknowledgements, now_ms)
actions = partition.written(write.token, ErrorCode.none, now_ms)
actions = partition.tick(now_ms)                    # not later than next_deadline_ms()

The offsets from the start offset to the end offset are in flight: each is available, acquired by a member, acknowledged
or archived. Consecutive offsets with the same state share an entry, so whole batches are acquired and acknowledged
without one entry for each record.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final, NamedTuple

from chronik.shares.state import COMPLETE, DeliveryState, StateBatch, WrittenState, combine
from chronik.wire.errors import ErrorCode

AVAILABLE, ACQUIRED = DeliveryState.AVAILABLE, DeliveryState.ACQUIRED
ACKNOWLEDGED, ARCHIVING, ARCHIVED = DeliveryState.ACKNOWLEDGED, DeliveryState.ARCHIVING, DeliveryState.ARCHIVED

DELIVERIES_MAX: Final = 32_767
"""The delivery count is an int16."""


COMPLETE_COUNT_MAX: Final = (1 << 31) - 1
"""The number of complete offsets is an int32. It is larger only if a producer's batches claim that many records."""


class AcknowledgeType(IntEnum):
    GAP = 0
    """The offset has no record."""
    ACCEPT = 1
    RELEASE = 2
    REJECT = 3
    RENEW = 4


@dataclass(frozen=True, slots=True)
class ShareSettings:
    """Named after Kafka's group configs."""

    record_lock_duration_ms: int = 30_000
    delivery_count_limit: int = 5
    partition_max_record_locks: int = 2_000
    has_dead_letters: bool = False
    """Whether records that are rejected or reach the limit are copied to a dead-letter topic (KIP-1191)."""


class FetchedBatch(NamedTuple):
    """A batch of the log. One that is not readable has no records for consumers: a marker, or aborted."""

    first_offset: int
    last_offset: int
    is_readable: bool = True


class Acknowledgement(NamedTuple):
    """One type for all offsets, or one for each."""

    first_offset: int
    last_offset: int
    types: tuple[int, ...]


class Acquired(NamedTuple):
    first_offset: int
    last_offset: int
    delivery_count: int


class Limits(NamedTuple):
    """How much a fetch acquires. Unless `is_strict`, the last batch is acquired whole, as in batch-optimized mode."""

    max_records: int
    batch_size: int
    is_strict: bool = False


class Write(NamedTuple):
    """Write this state to the share coordinator, then report `written(token, ...)`. One is in progress at a time."""

    token: int
    state: WrittenState


class Acknowledged(NamedTuple):
    """Answer the acknowledgement with this token."""

    token: int
    error: ErrorCode


class DeadLetter(NamedTuple):
    """Copy these records to the dead-letter topic, then report `dead_letter_written(...)`."""

    first_offset: int
    last_offset: int
    delivery_count: int


Action = Write | Acknowledged | DeadLetter


@dataclass(slots=True)
class _Run:
    """Consecutive offsets with the same state. `target` is the state that is being written, if it is."""

    first: int
    last: int
    state: DeliveryState
    count: int = 0
    member: str = ""
    deadline_ms: int = 0
    target: DeliveryState | None = None
    write: int = 0
    """The token of the write with the target."""

    @property
    def is_free(self) -> bool:
        return self.state is AVAILABLE and self.target is None

    @property
    def is_complete(self) -> bool:
        return self.state in COMPLETE and self.target is None


@dataclass(slots=True)
class _Pending:
    """The changes of one write, and the acknowledgements that wait for it."""

    token: int
    batches: list[StateBatch]
    waiting: list[int]
    start_offset: int = 0
    """The start offset that was sent with it."""


@dataclass(slots=True)
class Deliveries:
    """What has happened to records since the state was loaded. An offset without a record counts as one."""

    delivered: int = 0
    accepted: int = 0
    released: int = 0
    rejected: int = 0
    exhausted: int = 0
    """Archived because they were not accepted in their last delivery."""
    exhausted_offset: int = -1
    """The last one of those."""

    def left_lock(self, run: _Run, state: DeliveryState, delivery_count_limit: int) -> None:
        """Count records that were acquired, and now have another state."""
        count = run.last - run.first + 1
        if state is ACKNOWLEDGED:
            self.accepted += count
        elif state is AVAILABLE:
            self.released += count
        elif run.count < delivery_count_limit:
            self.rejected += count
        else:
            self.exhausted += count
            self.exhausted_offset = run.last


class SharePartition:
    """The records in flight of one partition in one share group.

    Invariants: the entries are in order, do not overlap, and cover every offset from `start_offset` to `end_offset`. An
    acknowledged record is never available again. An acknowledgement is answered with success only after its state was
    written. Owned by the node's loop; nothing here waits, reads a clock or touches a file.
    """

    def __init__(self, settings: ShareSettings, leader_epoch: int) -> None:
        self.settings = settings
        self.leader_epoch = leader_epoch
        self.state_epoch = 0
        self.start_offset = 0
        self.end_offset = 0
        """The first offset that was never delivered since this node leads."""
        self.fenced: ErrorCode | None = None
        """Why this object is obsolete: another leader or a new state epoch has taken over. Load a new one."""
        self.deliveries = Deliveries()
        self._runs: list[_Run] = []
        self._cut: list[_Run] = []
        """Acquired records that retention has deleted: they can still be acknowledged, without effect."""
        self._free_from = 0
        """No offset before this one is available."""
        self._in_flight = 0
        """The offsets in flight that are neither acknowledged nor archived."""
        self._token = 0
        self._writing: _Pending | None = None
        self._next: _Pending | None = None
        self._deadline_ms: int | None = None
        self._stored_start = 0
        """The start offset that the share coordinator has."""

    # -- loading -------------------------------------------------------------------------------------------------------

    def load(self, state_epoch: int, start_offset: int, batches: Iterable[StateBatch]) -> list[Action]:
        """Start with the durable state. What was acquired, or was never written, is available."""
        self.state_epoch = state_epoch
        self.start_offset = self.end_offset = self._free_from = self._stored_start = start_offset
        actions: list[Action] = []
        for batch in sorted(batches):
            first = max(batch.first_offset, self.end_offset)
            if batch.last_offset < first:
                continue
            if first > self.end_offset:
                self._append(_Run(self.end_offset, first - 1, AVAILABLE))
            state = DeliveryState(batch.delivery_state)
            self._append(_Run(first, batch.last_offset, state, batch.delivery_count))
            if state is ARCHIVING:
                actions.append(DeadLetter(first, batch.last_offset, batch.delivery_count))
        self._advance()
        return actions

    def _append(self, run: _Run) -> None:
        self._runs.append(run)
        self.end_offset = run.last + 1
        if run.state is AVAILABLE:
            self._free_from = min(self._free_from, run.first)
        if run.state not in COMPLETE:
            self._in_flight += run.last - run.first + 1

    # -- fetching ------------------------------------------------------------------------------------------------------

    @property
    def next_fetch_offset(self) -> int:
        """The first offset that can be acquired."""
        # The search resumes where the last one ended: a fetch does not pass all records in flight again.
        for at in range(self._index(self._free_from), len(self._runs)):
            if self._runs[at].is_free:
                self._free_from = self._runs[at].first
                return self._free_from
        self._free_from = self.end_offset
        return self.end_offset

    @property
    def can_acquire(self) -> bool:
        """Whether a fetch may find something: records that were released, or room for new ones."""
        if self.fenced is not None:
            return False
        return self.has_room or self.next_fetch_offset < self.end_offset

    @property
    def has_room(self) -> bool:
        return self._in_flight < self.settings.partition_max_record_locks

    def acquire(
        self, member: str, fetch_offset: int, batches: Sequence[FetchedBatch], limits: Limits, now_ms: int
    ) -> list[Acquired]:
        """Acquire records of the fetched batches for a member, in order of offsets, each for the lock's duration.

        `batches` are consecutive batches of the log, from `fetch_offset` on. Offsets between two of them, and those of
        batches that are not readable, have no records: their delivery is complete.
        """
        acquired: list[Acquired] = []
        if self.fenced is not None:
            return acquired
        left = limits.max_records
        deadline_ms = now_ms + self.settings.record_lock_duration_ms
        next_offset, end_before = fetch_offset, self.end_offset
        for batch in batches:
            if left <= 0:
                break
            self._archive_missing(next_offset, batch.first_offset - 1)
            next_offset = batch.last_offset + 1
            if not self._extend(batch, left if limits.is_strict else None):
                break
            if not batch.is_readable:
                self._archive_missing(batch.first_offset, batch.last_offset)
                continue
            at = self._index(max(batch.first_offset, self.start_offset, self._free_from))
            while at < len(self._runs) and self._runs[at].first <= batch.last_offset:
                run = self._runs[at]
                if not run.is_free or run.last < batch.first_offset:
                    at += 1
                    continue
                if run.first < batch.first_offset:
                    self._split(at, batch.first_offset)
                    at += 1
                    continue
                if run.last > batch.last_offset:
                    self._split(at, batch.last_offset + 1)
                if limits.is_strict:
                    if left <= 0:
                        break
                    if run.last - run.first + 1 > left:
                        self._split(at, run.first + left)
                run.state, run.member, run.deadline_ms = ACQUIRED, member, deadline_ms
                run.count = min(run.count + 1, DELIVERIES_MAX)
                self.deliveries.delivered += run.last - run.first + 1
                left -= run.last - run.first + 1
                self._join(acquired, Acquired(run.first, run.last, run.count), limits.batch_size)
                at += 1
        if acquired:
            self._watch(deadline_ms)
        for first, last, _ in acquired:
            self._merge(first, last)
        self._merge(end_before, self.end_offset - 1)
        self._advance()
        return acquired

    def _archive_missing(self, first: int, last: int) -> None:
        """Archive what is available in a range that has no records: released records may be compacted away."""
        first, last = max(first, self.start_offset), min(last, self.end_offset - 1)
        if last < first:
            return
        for run in self._runs_of(first, last):
            if run.is_free:
                self._set_state(run, ARCHIVED)
        self._merge(first, last)

    @staticmethod
    def _join(acquired: list[Acquired], new: Acquired, batch_size: int) -> None:
        """Add to the last entry, if it continues that one and the entry is not larger than clients want."""
        last = acquired[-1] if acquired else None
        if (
            last is not None
            and last.last_offset + 1 == new.first_offset
            and last.delivery_count == new.delivery_count
            and new.last_offset - last.first_offset + 1 <= batch_size
        ):
            acquired[-1] = last._replace(last_offset=new.last_offset)
        else:
            acquired.append(new)

    def _extend(self, batch: FetchedBatch, left: int | None) -> bool:
        """Let the entries cover a batch, as far as there is room; return whether they cover anything of it."""
        if batch.last_offset < self.end_offset:
            return True
        first = max(batch.first_offset, self.end_offset)
        if first > self.end_offset:
            # Compaction has removed these offsets.
            self._append(_Run(self.end_offset, first - 1, ARCHIVED))
        if not batch.is_readable:
            self._append(_Run(first, batch.last_offset, ARCHIVED))
            return True
        if not self.has_room:
            return first > batch.first_offset
        last = batch.last_offset
        if left is not None:
            # Only what this fetch acquires: nothing is available that was never delivered.
            room = self.settings.partition_max_record_locks - self._in_flight
            last = min(last, first + min(left, room) - 1)
        self._append(_Run(first, last, AVAILABLE))
        return True

    # -- acknowledging -------------------------------------------------------------------------------------------------

    def acknowledge(
        self, member: str, acknowledgements: Sequence[Acknowledgement], now_ms: int
    ) -> tuple[int, list[Action]]:
        """Begin to acknowledge records; return the token of the answer. All of them change, or none.

        INVALID_RECORD_STATE: the member has not acquired a record, or not any more. INVALID_REQUEST: not in order.
        """
        self._token += 1
        token = self._token
        if self.fenced is not None:
            return token, [Acknowledged(token, self.fenced)]
        error = self._check(member, acknowledgements)
        if error is not ErrorCode.none:
            return token, [Acknowledged(token, error)]
        has_changes = False
        for first, last, kind in _parts(acknowledgements):
            self._forget_cut(member, first, last)
            if last < self.start_offset:
                continue
            for run in self._runs_of(max(first, self.start_offset), last):
                if kind is AcknowledgeType.RENEW:
                    run.deadline_ms = now_ms + self.settings.record_lock_duration_ms
                else:
                    self._set_target(run, self._state_after(kind, run.count))
                    has_changes = True
        for first, last, _ in acknowledgements:
            self._merge(first, last)
        if not has_changes:
            return token, [Acknowledged(token, ErrorCode.none)]
        assert self._next is not None
        self._next.waiting.append(token)
        return token, self._start_write()

    def _check(self, member: str, acknowledgements: Sequence[Acknowledgement]) -> ErrorCode:
        previous = -1
        for first, last, types in acknowledgements:
            if first <= previous or last < first or len(types) not in (1, last - first + 1):
                return ErrorCode.invalid_request
            if any(not 0 <= kind <= AcknowledgeType.RENEW for kind in types):
                return ErrorCode.invalid_request
            previous = last
            if not self._has_acquired(member, first, last):
                return ErrorCode.invalid_record_state
        return ErrorCode.none

    def _has_acquired(self, member: str, first: int, last: int) -> bool:
        """Whether every offset is acquired by the member, and no other answer for it is pending."""
        while first < min(self.start_offset, last + 1):
            cut = next((run for run in self._cut if run.member == member and run.first <= first <= run.last), None)
            if cut is None:
                return False
            first = cut.last + 1
        if first > last:
            return True
        if last >= self.end_offset:
            return False
        at = self._index(first)
        while at < len(self._runs) and self._runs[at].first <= last:
            run = self._runs[at]
            if run.state is not ACQUIRED or run.member != member or run.target is not None:
                return False
            at += 1
        return True

    def _state_after(self, kind: AcknowledgeType, count: int) -> DeliveryState:
        if kind is AcknowledgeType.ACCEPT:
            return ACKNOWLEDGED
        if kind is AcknowledgeType.GAP:
            return ARCHIVED
        if kind is AcknowledgeType.RELEASE and count < self.settings.delivery_count_limit:
            return AVAILABLE
        return ARCHIVING if self.settings.has_dead_letters else ARCHIVED

    def release(self, member: str, now_ms: int) -> list[Action]:
        """Release everything that a member has acquired: its session has ended."""
        self._cut = [run for run in self._cut if run.member != member]
        return self._release(lambda run: run.member == member)

    def tick(self, now_ms: int) -> list[Action]:
        """Release what is locked for too long."""
        if self._deadline_ms is None or now_ms < self._deadline_ms or self.fenced is not None:
            return []
        self._cut = [run for run in self._cut if run.deadline_ms > now_ms]
        actions = self._release(lambda run: run.deadline_ms <= now_ms)
        # A lock whose acknowledgement is being written ends with that write: see `written`.
        locked = (run for run in (*self._runs, *self._cut) if run.state is ACQUIRED and run.target is None)
        self._deadline_ms = min((run.deadline_ms for run in locked), default=None)
        return actions

    def next_deadline_ms(self) -> int | None:
        """Return when the next lock may end; None if nothing is locked."""
        return self._deadline_ms if self.fenced is None else None

    def _watch(self, deadline_ms: int) -> None:
        self._deadline_ms = deadline_ms if self._deadline_ms is None else min(self._deadline_ms, deadline_ms)

    def _release(self, is_released: Callable[[_Run], bool]) -> list[Action]:
        """Make acquired records available at once, or archive them. The write that counts the delivery follows.

        If that write fails, a new leader delivers them more often than the limit allows, and loses none.
        """
        actions: list[Action] = []
        for run in self._runs:
            if run.state is not ACQUIRED or run.target is not None or not is_released(run):
                continue
            after = self._state_after(AcknowledgeType.RELEASE, run.count)
            self._gather(StateBatch(run.first, run.last, after, run.count))
            if after is ARCHIVING:
                actions.append(DeadLetter(run.first, run.last, run.count))
            self._set_state(run, after)
        self._merge(self.start_offset, self.end_offset - 1)
        self._advance()
        return actions + self._start_write()

    def dead_letter_written(self, first: int, last: int) -> list[Action]:
        """The copies are durable: archive the records. Their answers were sent before."""
        if self.fenced is not None:
            return []
        for run in self._runs_of(max(first, self.start_offset), last) if last >= self.start_offset else ():
            if run.state is ARCHIVING and run.target is None:
                self._gather(StateBatch(run.first, run.last, ARCHIVED, run.count))
                self._set_state(run, ARCHIVED)
        self._merge(first, last)
        self._advance()
        return self._start_write()

    # -- writes --------------------------------------------------------------------------------------------------------

    def written(self, token: int, error: ErrorCode, now_ms: int) -> list[Action]:
        """Continue with the outcome of a write: answer the acknowledgements, and write what came meanwhile."""
        pending = self._writing
        if pending is None or pending.token != token:
            return []
        self._writing = None
        if error in FENCING:
            return self.fence(error, pending)
        actions: list[Action] = []
        for run in list(self._targets(pending)):
            target, run.target = run.target, None
            if error is not ErrorCode.none:
                self._watch(run.deadline_ms)
            elif target is not None:
                self._set_state(run, target)
                if target is ARCHIVING:
                    actions.append(DeadLetter(run.first, run.last, run.count))
        actions += [Acknowledged(waiting, error) for waiting in pending.waiting]
        for batch in pending.batches:
            self._merge(batch.first_offset, batch.last_offset)
        if error is ErrorCode.none:
            self._stored_start = pending.start_offset
            self._advance()
            actions += self.store_start()
        actions += self._start_write()
        return actions + self.tick(now_ms)

    def store_start(self) -> list[Action]:
        """Write the start offset if nothing else will: it has passed only markers, or what retention has deleted.

        Otherwise the group would have a lag for ever, although there is nothing left to deliver.
        """
        is_written_later = self._in_flight > 0 or self._writing is not None or self._next is not None
        if self.fenced is not None or is_written_later or self.start_offset <= self._stored_start:
            return []
        self._token += 1
        self._next = _Pending(self._token, [], [])
        return self._start_write()

    def fence(self, error: ErrorCode, pending: _Pending | None = None) -> list[Action]:
        """Stop: this object is obsolete. Nothing that it has not answered has an effect here."""
        self.fenced = error
        waiting = [token for each in (pending, self._writing, self._next) if each is not None for token in each.waiting]
        self._writing = self._next = None
        return [Acknowledged(token, error) for token in waiting]

    def _gather(self, batch: StateBatch) -> int:
        """Add a change to the next write; return its token."""
        if self._next is None:
            self._token += 1
            self._next = _Pending(self._token, [], [])
        batches = self._next.batches
        if batches and batches[-1] == (batches[-1].first_offset, batch.first_offset - 1, *batch[2:]):
            batches[-1] = batches[-1]._replace(last_offset=batch.last_offset)
        else:
            batches.append(batch)
        return self._next.token

    def _set_target(self, run: _Run, target: DeliveryState) -> None:
        run.target = target
        run.write = self._gather(StateBatch(run.first, run.last, target, run.count))

    def _start_write(self) -> list[Action]:
        pending = self._next
        if pending is None or self._writing is not None:
            return []
        self._next, self._writing = None, pending
        start = pending.start_offset = self._start_after(pending.token)
        # All offsets that are neither complete nor completed by this write are after `start`.
        completing = sum(run.last - run.first + 1 for run in self._targets(pending) if run.target in COMPLETE)
        complete = min(self.end_offset - start - (self._in_flight - completing), COMPLETE_COUNT_MAX)
        batches = combine((), pending.batches, start)
        written = WrittenState(self.state_epoch, self.leader_epoch, start, batches, complete)
        return [Write(pending.token, written)]

    def _targets(self, pending: _Pending) -> Iterator[_Run]:
        """Yield the entries whose target is written by this write, in order. They are within its batches."""
        end = -1
        for batch in sorted(pending.batches):
            at = self._index(max(batch.first_offset, end))
            while at < len(self._runs) and self._runs[at].first <= batch.last_offset:
                run = self._runs[at]
                if run.first >= end and run.target is not None and run.write == pending.token:
                    yield run
                end = max(end, run.last + 1)
                at += 1

    def _start_after(self, token: int) -> int:
        """Return the start offset if the write succeeds. It never passes a record whose delivery is not complete."""
        start = self.start_offset
        for run in self._runs:
            done = run.is_complete or (run.write == token and run.target in COMPLETE)
            if not done:
                break
            start = run.last + 1
        return start

    # -- the log -------------------------------------------------------------------------------------------------------

    def log_start_moved(self, log_start: int) -> None:
        """Forget records that retention has deleted. Their consumers may still acknowledge them."""
        if log_start <= self.start_offset:
            return
        if log_start < self.end_offset:
            self._split_at(log_start)
        kept = []
        for run in self._runs:
            if run.first >= log_start:
                kept.append(run)
                continue
            if run.state not in COMPLETE:
                self._in_flight -= run.last - run.first + 1
            if run.state is ACQUIRED and run.target is None:
                self._cut.append(run)
        self._runs = kept
        self.start_offset = log_start
        self.end_offset = max(self.end_offset, log_start)
        self._advance()

    # -- figures -------------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, int]:
        """Return the number of offsets in each state."""
        counts = dict.fromkeys((state.name.lower() for state in DeliveryState), 0)
        for run in self._runs:
            counts[run.state.name.lower()] += run.last - run.first + 1
        return counts

    def oldest_lock_ms(self) -> int | None:
        """Return when the lock ends that ends first; None if nothing is locked."""
        return min((run.deadline_ms for run in self._runs if run.state is ACQUIRED), default=None)

    def most_delivered(self) -> tuple[int, int]:
        """Return the record that was delivered most often without being done, and how often; else (-1, 0)."""
        open_runs = [run for run in self._runs if run.state in (AVAILABLE, ACQUIRED) and run.count]
        worst = max(open_runs, key=lambda run: run.count, default=None)
        return (-1, 0) if worst is None else (worst.first, worst.count)

    @property
    def is_idle(self) -> bool:
        """Whether no member has a lock, and nothing is being written or copied."""
        is_busy = any(run.state in (ACQUIRED, ARCHIVING) for run in self._runs)
        return self._writing is None and self._next is None and not is_busy

    def entries(self) -> Iterator[tuple[int, int, DeliveryState, int, str]]:
        """Return the state of all offsets in flight, for tests and pages."""
        for run in self._runs:
            yield run.first, run.last, run.state, run.count, run.member

    # -- entries -------------------------------------------------------------------------------------------------------

    def _index(self, offset: int) -> int:
        """Return the index of the entry that contains an offset."""
        return max(0, bisect_right(self._runs, offset, key=lambda run: run.first) - 1)

    def _split(self, at: int, offset: int) -> None:
        run = self._runs[at]
        self._runs.insert(at + 1, replace(run, first=offset))
        run.last = offset - 1

    def _split_at(self, offset: int) -> None:
        at = self._index(offset)
        if self._runs and self._runs[at].first < offset <= self._runs[at].last:
            self._split(at, offset)

    def _runs_of(self, first: int, last: int) -> list[_Run]:
        """Return the entries of a range, split so that they end with it."""
        self._split_at(first)
        self._split_at(last + 1)
        at = self._index(first)
        end = bisect_right(self._runs, last, key=lambda run: run.first)
        return self._runs[at:end]

    def _set_state(self, run: _Run, state: DeliveryState) -> None:
        if run.state not in COMPLETE and state in COMPLETE:
            self._in_flight -= run.last - run.first + 1
        if run.state is ACQUIRED:
            self.deliveries.left_lock(run, state, self.settings.delivery_count_limit)
        if state is AVAILABLE:
            self._free_from = min(self._free_from, run.first)
        run.state = state
        run.member = ""

    def _forget_cut(self, member: str, first: int, last: int) -> None:
        if self._cut:
            self._cut = [run for run in self._cut if run.member != member or run.last < first or run.first > last]

    def _merge(self, first: int, last: int) -> None:
        """Join neighbours with the same state, from the one before a range to the one after it."""
        begin = max(0, self._index(first) - 1)
        merged: list[_Run] = []
        at = begin
        while at < len(self._runs) and self._runs[at].first <= last + 1:
            run = self._runs[at]
            if merged and _is_same(merged[-1], run):
                merged[-1].last = run.last
                if merged[-1].state is not run.state:
                    merged[-1].state = ARCHIVED
            else:
                merged.append(run)
            at += 1
        if len(merged) < at - begin:
            self._runs[begin:at] = merged

    def _advance(self) -> None:
        """Move the start offset past the records whose delivery is complete."""
        runs = self._runs
        done = 0
        while done < len(runs) and runs[done].is_complete:
            done += 1
        if done:
            self.start_offset = runs[done - 1].last + 1
            del runs[:done]


def _is_same(before: _Run, run: _Run) -> bool:
    if before.is_complete and run.is_complete:
        return True  # Which state they have does not matter any more.
    if (before.state, before.target) != (run.state, run.target):
        return False
    if run.target is not None and before.write != run.write:
        return False
    if run.state is AVAILABLE and before.count == run.count:
        return True
    return (before.count, before.member, before.deadline_ms) == (run.count, run.member, run.deadline_ms)


FENCING = frozenset(
    {
        ErrorCode.fenced_leader_epoch,
        ErrorCode.fenced_state_epoch,
        ErrorCode.invalid_request,
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.group_id_not_found,
    }
)
"""The errors of a write after which this leader's state is obsolete."""


def _parts(acknowledgements: Iterable[Acknowledgement]) -> Iterator[tuple[int, int, AcknowledgeType]]:
    """Return the ranges with one type each, as few as possible."""
    joined: tuple[int, int, AcknowledgeType] | None = None
    for first, last, kind in _typed(acknowledgements):
        if joined is not None and (joined[1] + 1, joined[2]) == (first, kind):
            joined = (joined[0], last, kind)
            continue
        if joined is not None:
            yield joined
        joined = (first, last, kind)
    if joined is not None:
        yield joined


def _typed(acknowledgements: Iterable[Acknowledgement]) -> Iterator[tuple[int, int, AcknowledgeType]]:
    for first, last, types in acknowledgements:
        if len(types) == 1:
            yield first, last, AcknowledgeType(types[0])
            continue
        start = first
        for offset in range(first, last + 1):
            if offset == last or types[offset + 1 - first] != types[offset - first]:
                yield start, offset, AcknowledgeType(types[offset - first])
                start = offset + 1
