"""The durable state of all shared partitions whose partition of `__share_group_state` this node leads.

coordinator = ShareCoordinator()
coordinator.partition_count = 50
coordinator.finish_loading(3)                       # after start_loading and replay
actions = coordinator.read(key, leader_epoch, token, at)
actions = coordinator.write(key, written, token, at)
actions = coordinator.appended(append.token, ErrorCode.none, at)
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeAlias
from uuid import UUID

from chronik.groups.records import group_partition
from chronik.groups.step import Append, Moment, Reply
from chronik.shares.records import (
    SNAPSHOT,
    UPDATE,
    Snapshot,
    UnreadableRecord,
    Update,
    read_key,
    read_snapshot,
    read_update,
    write_key,
    write_snapshot,
    write_update,
)
from chronik.shares.state import (
    NO_LEADER_EPOCH,
    UNINITIALIZED_OFFSET,
    InitialState,
    SharePartitionKey,
    StateBatch,
    WrittenState,
    combine,
)
from chronik.wire.errors import ErrorCode

Action: TypeAlias = Append | Reply

KEY_CHARS_MAX: Final = 16_384
QUEUED_MAX: Final = 1_000
"""Requests that wait for a pending write of their key. A key has one leader, which sends one write at a time."""

BATCHES_MAX: Final = 100_000
"""State batches of one key: more than the records that may be in flight in a partition."""

SMALL_BATCHES: Final = 8
"""A state up to this size is always written whole: an update would hardly be smaller."""

UPDATES_PER_SNAPSHOT: Final = 500

RETRIABLE = {
    ErrorCode.not_leader_or_follower: ErrorCode.not_coordinator,
    ErrorCode.kafka_storage_error: ErrorCode.not_coordinator,
    ErrorCode.unknown_topic_or_partition: ErrorCode.coordinator_not_available,
    ErrorCode.not_enough_replicas: ErrorCode.coordinator_not_available,
    ErrorCode.not_enough_replicas_after_append: ErrorCode.coordinator_not_available,
    ErrorCode.request_timed_out: ErrorCode.coordinator_not_available,
}
"""The outcome of an append as the client's error."""


@dataclass(slots=True, eq=False)
class _Stored:
    """One key. `state` is committed; `pending` is on its way to the log, and the key's next request waits for it."""

    key: SharePartitionKey
    partition: int
    state: Snapshot | None = None
    changed: tuple[StateBatch, ...] = ()
    """The batches that were written since the last snapshot."""
    updates: int = 0
    pending: "_Write | None" = None
    waiting: deque[tuple[int, Callable[[Moment], list[Action]]]] | None = None


class _Write(NamedTuple):
    """A pending change of a key. `state` is None to delete it; a snapshot has `changed` None."""

    stored: _Stored
    state: Snapshot | None
    changed: tuple[StateBatch, ...] | None
    token: int | None
    values: dict[str, Any]


class ShareCoordinator:
    """The state of every key of the loaded partitions.

    Invariants: every token is answered exactly once; an answer follows only from what is committed in the log; at most
    one change of a key is pending. Owned by the node's loop; nothing here waits, reads a clock or touches a file.
    """

    def __init__(self) -> None:
        self.partition_count = 0
        """The number of partitions of the state topic; 0 until it exists."""
        self._keys: dict[SharePartitionKey, _Stored] = {}
        self._loaded: set[int] = set()
        self._loading: dict[int, dict[SharePartitionKey, tuple[bytes | None, bytes | None]]] = {}
        self._writes: dict[int, _Write] = {}
        self._token = 0

    # -- partitions ----------------------------------------------------------------------------------------------------

    def start_loading(self, partition: int) -> None:
        self._loading[partition] = {}

    def replay(self, partition: int, records: Iterable[tuple[bytes | None, bytes | None]]) -> None:
        """Keep the last snapshot and the last update of each key; they are parsed when everything is read."""
        latest = self._loading[partition]
        for raw, value in records:
            key = None if raw is None else read_key(raw)
            if key is None:
                if raw is None:
                    raise UnreadableRecord("a record without a key")
                continue
            is_snapshot = key.kind == SNAPSHOT
            snapshot = value if is_snapshot else latest.get(key.partition, (None, None))[0]
            latest[key.partition] = (snapshot, None if is_snapshot else value)

    def finish_loading(self, partition: int) -> None:
        """Serve the keys of the partition. Raise UnreadableRecord if a state cannot be read."""
        for key, (snapshot, update) in self._loading[partition].items():
            if snapshot is None:
                continue
            stored = _Stored(key, partition, read_snapshot(snapshot))
            if update is not None and stored.state is not None:
                changes = read_update(update)
                if changes.snapshot_epoch == stored.state.snapshot_epoch:
                    stored.changed = changes.batches
                    stored.updates = 1
                    stored.state = _updated(stored.state, changes)
            self._keys[key] = stored
        del self._loading[partition]
        self._loaded.add(partition)

    def unload(self, partition: int, at: Moment) -> list[Action]:
        """Drop the keys of a partition that another node now leads; waiting requests get NOT_COORDINATOR."""
        self._loading.pop(partition, None)
        if partition not in self._loaded:
            return []
        self._loaded.discard(partition)
        actions: list[Action] = []
        for stored in [each for each in self._keys.values() if each.partition == partition]:
            del self._keys[stored.key]
            waiting, stored.waiting = stored.waiting, None
            actions += [_reply(token, ErrorCode.not_coordinator) for token, _ in waiting or ()]
        for token in [token for token, write in self._writes.items() if write.stored.partition == partition]:
            write = self._writes.pop(token)
            if write.token is not None:
                actions.append(_reply(write.token, ErrorCode.not_coordinator))
        return actions

    def is_loaded(self, partition: int) -> bool:
        return partition in self._loaded

    @property
    def is_loading(self) -> bool:
        return bool(self._loading)

    def partition_of(self, key: str) -> int | None:
        """Return the partition that owns a coordinator key; None if there are none yet or the key is too long."""
        if not self.partition_count or len(key) > KEY_CHARS_MAX:
            return None
        return group_partition(key, self.partition_count)

    def next_deadline_ms(self) -> int | None:
        return None

    def tick(self, at: Moment) -> list[Action]:
        return []

    # -- requests ------------------------------------------------------------------------------------------------------

    def initialize(self, key: SharePartitionKey, initial: InitialState, token: int, at: Moment) -> list[Action]:
        """Create the state, or replace that of an older state epoch. A repeated request changes nothing."""

        def run(stored: _Stored, at: Moment) -> list[Action]:
            state = stored.state
            if state is not None and initial.state_epoch <= state.state_epoch:
                is_repeated = initial.state_epoch == state.state_epoch and (
                    initial.start_offset in (UNINITIALIZED_OFFSET, state.start_offset)
                )
                return [_reply(token, ErrorCode.none if is_repeated else ErrorCode.fenced_state_epoch)]
            leader_epoch = NO_LEADER_EPOCH if state is None else state.leader_epoch
            snapshot_epoch = 0 if state is None else state.snapshot_epoch + 1
            new = Snapshot(
                snapshot_epoch,
                initial.state_epoch,
                leader_epoch,
                initial.start_offset,
                (),
                0 if initial.start_offset != UNINITIALIZED_OFFSET else -1,
                at.wall_ms,
                at.wall_ms,
            )
            return self._append(_Write(stored, new, None, token, {"error_code": ErrorCode.none}))

        return self._run(key, token, run, at, creates=True)

    def read(self, key: SharePartitionKey, leader_epoch: int, token: int, at: Moment) -> list[Action]:
        """Return the state to the partition's leader, once no earlier leader can change it."""

        def run(stored: _Stored, at: Moment) -> list[Action]:
            state = stored.state
            if state is None:
                return [_reply(token, ErrorCode.invalid_request)]
            if state.leader_epoch > leader_epoch >= 0:
                return [_reply(token, ErrorCode.fenced_leader_epoch)]
            values = {"error_code": ErrorCode.none, "state": state}
            if leader_epoch < 0 or state.leader_epoch == leader_epoch:
                return [Reply(token, values)]
            return self._change(stored, Update(0, leader_epoch, UNINITIALIZED_OFFSET, ()), token, values, at)

        return self._run(key, token, run, at)

    def write(self, key: SharePartitionKey, written: WrittenState, token: int, at: Moment) -> list[Action]:
        """Merge a leader's change into the state."""

        def run(stored: _Stored, at: Moment) -> list[Action]:
            state = stored.state
            if state is None:
                return [_reply(token, ErrorCode.invalid_request)]
            if state.leader_epoch > written.leader_epoch >= 0:
                return [_reply(token, ErrorCode.fenced_leader_epoch)]
            if state.state_epoch > written.state_epoch >= 0:
                return [_reply(token, ErrorCode.fenced_state_epoch)]
            if any(not _is_valid(batch) for batch in written.batches):
                return [_reply(token, ErrorCode.invalid_request)]
            if len(written.batches) > BATCHES_MAX:
                return [_reply(token, ErrorCode.invalid_request)]
            change = Update(
                0,
                max(written.leader_epoch, state.leader_epoch),
                written.start_offset,
                written.batches,
                written.delivery_complete_count,
            )
            return self._change(stored, change, token, {"error_code": ErrorCode.none}, at)

        return self._run(key, token, run, at)

    def summary(self, key: SharePartitionKey, token: int, at: Moment) -> list[Action]:
        """Return the state without any effect; None if there is none."""

        def run(stored: _Stored, at: Moment) -> list[Action]:
            return [Reply(token, {"error_code": ErrorCode.none, "state": stored.state})]

        return self._run(key, token, run, at)

    def delete(self, key: SharePartitionKey, token: int, at: Moment) -> list[Action]:
        """Remove the state. A key without state is deleted already."""

        def run(stored: _Stored, at: Moment) -> list[Action]:
            if stored.state is None:
                return [_reply(token, ErrorCode.none)]
            return self._append(_Write(stored, None, None, token, {"error_code": ErrorCode.none}))

        return self._run(key, token, run, at)

    def topic_deleted(self, topic_id: UUID, at: Moment) -> list[Action]:
        """Remove the state of all partitions of a deleted topic. No request waits for that."""
        actions: list[Action] = []
        for stored in [each for key, each in self._keys.items() if key.topic_id == topic_id]:
            actions += self._start(stored, None, _deletion(self, stored), at)
        return actions

    def topic_ids(self) -> set[UUID]:
        """Return the topics that have state here, deleted ones included."""
        return {key.topic_id for key in self._keys}

    def appended(self, token: int, error: ErrorCode, at: Moment) -> list[Action]:
        """Continue with the outcome of an append."""
        write = self._writes.pop(token, None)
        if write is None:
            return []
        stored = write.stored
        stored.pending = None
        actions: list[Action] = []
        if error is ErrorCode.none:
            self._apply(stored, write)
            if write.token is not None:
                actions.append(Reply(write.token, write.values))
        else:
            # The records may be in the log and be committed later. Only a snapshot replaces whatever they are.
            stored.updates = UPDATES_PER_SNAPSHOT
            if write.token is not None:
                actions.append(_reply(write.token, RETRIABLE.get(error, error)))
        while stored.waiting and stored.pending is None:
            actions += stored.waiting.popleft()[1](at)
        self._drop_if_empty(stored)
        return actions

    # -- changes -------------------------------------------------------------------------------------------------------

    def _run(
        self,
        key: SharePartitionKey,
        token: int,
        run: Callable[[_Stored, Moment], list[Action]],
        at: Moment,
        creates: bool = False,
    ) -> list[Action]:
        """Run a request, after the pending change of its key. An unknown key has no state."""
        partition = self.partition_of(key.coordinator_key)
        if partition is None:
            return [_reply(token, ErrorCode.coordinator_not_available)]
        if partition in self._loading:
            return [_reply(token, ErrorCode.coordinator_load_in_progress)]
        if partition not in self._loaded:
            return [_reply(token, ErrorCode.not_coordinator)]
        stored = self._keys.get(key)
        if stored is None:
            stored = _Stored(key, partition)
            if creates:
                self._keys[key] = stored
        return self._start(stored, token, lambda at: run(stored, at), at)

    def _start(
        self, stored: _Stored, token: int | None, run: Callable[[Moment], list[Action]], at: Moment
    ) -> list[Action]:
        if stored.pending is None:
            actions = run(at)
            self._drop_if_empty(stored)
            return actions
        if stored.waiting is None:
            stored.waiting = deque()
        if token is not None:
            if len(stored.waiting) >= QUEUED_MAX:
                return [_reply(token, ErrorCode.coordinator_load_in_progress)]
            stored.waiting.append((token, run))
        return []

    def _drop_if_empty(self, stored: _Stored) -> None:
        if stored.state is None and stored.pending is None and self._keys.get(stored.key) is stored:
            del self._keys[stored.key]

    def _change(self, stored: _Stored, change: Update, token: int, values: dict[str, Any], at: Moment) -> list[Action]:
        """Append a change: the whole new state if it is small, otherwise what changed since the last snapshot.

        A state that has reached its limit accepts what does not enlarge it: otherwise it could never be completed.
        """
        state = stored.state
        assert state is not None
        new = replace(_updated(state, change), written_ms=at.wall_ms)
        if len(new.batches) > max(BATCHES_MAX, len(state.batches)):
            return [_reply(token, ErrorCode.invalid_request)]
        changed = combine(stored.changed, change.batches, max(new.start_offset, 0))
        is_small = len(new.batches) <= SMALL_BATCHES or 2 * len(changed) > len(new.batches)
        if is_small or stored.updates >= UPDATES_PER_SNAPSHOT:
            return self._append(
                _Write(stored, replace(new, snapshot_epoch=state.snapshot_epoch + 1), None, token, values)
            )
        return self._append(_Write(stored, new, changed, token, values))

    def _append(self, write: _Write) -> list[Action]:
        stored, state, key = write.stored, write.state, write.stored.key
        if state is None:
            records: tuple[tuple[bytes, bytes | None], ...] = (
                (write_key(SNAPSHOT, key), None),
                (write_key(UPDATE, key), None),
            )
        elif write.changed is None:
            records = ((write_key(SNAPSHOT, key), write_snapshot(state)),)
        else:
            update = Update(
                state.snapshot_epoch,
                state.leader_epoch,
                state.start_offset,
                write.changed,
                state.delivery_complete_count,
            )
            records = ((write_key(UPDATE, key), write_update(update)),)
        self._token += 1
        stored.pending = write
        self._writes[self._token] = write
        return [Append(stored.partition, records, self._token)]

    def _apply(self, stored: _Stored, write: _Write) -> None:
        stored.state = write.state
        if write.changed is None:
            stored.changed, stored.updates = (), 0
        else:
            stored.changed = write.changed
            stored.updates += 1


def _deletion(coordinator: ShareCoordinator, stored: _Stored) -> Callable[[Moment], list[Action]]:
    def run(at: Moment) -> list[Action]:
        return coordinator._append(_Write(stored, None, None, None, {})) if stored.state is not None else []

    return run


def _updated(state: Snapshot, update: Update) -> Snapshot:
    """Return the state after a change. The start offset only rises within a state epoch."""
    start_offset = max(state.start_offset, update.start_offset)
    count = update.delivery_complete_count
    return replace(
        state,
        leader_epoch=update.leader_epoch,
        start_offset=start_offset,
        batches=combine(state.batches, update.batches, max(start_offset, 0)),
        delivery_complete_count=state.delivery_complete_count if count < 0 else count,
    )


def _is_valid(batch: StateBatch) -> bool:
    # Acquired records are not durable.
    is_durable = batch.delivery_state in (0, 2, 3, 4)
    return 0 <= batch.first_offset <= batch.last_offset and is_durable and batch.delivery_count >= 0


def _reply(token: int, error: ErrorCode) -> Reply:
    return Reply(token, {"error_code": error})
