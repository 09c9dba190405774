"""All transactional ids of the partitions of `__transaction_state` that this node leads.

coordinator = TransactionCoordinator(settings)
coordinator.partition_count = 50
actions = coordinator.finish_loading(3, leader_epoch, at)     # after start_loading and replay
actions = coordinator.init_producer(request, token, at)
actions = coordinator.appended(append.token, ErrorCode.none, at)
actions = coordinator.marker_written("payments", producer, ("orders", 0), at)
actions = coordinator.tick(at)                      # not later than next_deadline_ms()
"""

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from chronik.groups.records import group_partition
from chronik.groups.step import Append, Moment, Reply
from chronik.transactions.actions import Action, Cause, Ended, Settled, WriteMarkers
from chronik.transactions.records import read_key, read_value, write_key, write_value
from chronik.transactions.transaction import (
    EPOCH_BUMP_VERSION,
    EPOCH_MAX,
    NO_EPOCH,
    NO_PRODUCER_ID,
    TopicPartition,
    TransactionMetadata,
    TransactionState,
)
from chronik.wire.errors import ErrorCode

ID_BYTES_MAX: Final = 16_384
"""A transactional id becomes a string with an int16 length in the log; this is half its limit."""

APPEND_RETRY_MS: Final = 500
"""The coordinator repeats a failed append after this time if no client does: an abort on timeout, or a completion."""

IDS_EXPIRED_MAX: Final = 500
"""The ids that one call of `expire_ids` removes: thousands may be unused for the same time, and each costs a record."""

_ENDED = {
    TransactionState.PREPARE_COMMIT: True,
    TransactionState.COMPLETE_COMMIT: True,
    TransactionState.PREPARE_ABORT: False,
    TransactionState.COMPLETE_ABORT: False,
}


@dataclass(frozen=True, slots=True)
class TransactionSettings:
    """Named after Kafka's broker settings."""

    timeout_ms_max: int = 900_000
    id_expiration_ms: int = 7 * 24 * 3_600_000


class ProducerIdAndEpoch(NamedTuple):
    producer_id: int
    producer_epoch: int


class InitProducerRequest(NamedTuple):
    """`expected` is set if a producer recovers from an error (KIP-360). No producer has `fresh_producer_id` yet."""

    transactional_id: str
    timeout_ms: int
    expected: ProducerIdAndEpoch | None
    fresh_producer_id: int


class EndRequest(NamedTuple):
    """`client_version` is the transaction version that the client speaks."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    is_commit: bool
    client_version: int
    fresh_producer_id: int


class _Transactional:
    """One transactional id.

    `pending` is the value that is being appended: until its outcome is known, no other transition may begin.
    """

    __slots__ = ("cause", "current", "deadline_ms", "id", "last_epoch", "partition", "pending", "timer_ms", "unmarked")

    def __init__(self, transactional_id: str, partition: int, current: TransactionMetadata) -> None:
        self.id = transactional_id
        self.partition = partition
        self.current = current
        self.pending: TransactionMetadata | None = None
        self.last_epoch = NO_EPOCH
        """The producer's epoch before the last bump that it asked for: a repeated request has it."""
        self.unmarked: dict[TopicPartition, None] = {}
        """The partitions of a prepared transaction whose marker is not written yet."""
        self.cause: Cause = "client"
        self.deadline_ms: int | None = None
        self.timer_ms: int | None = None
        """The time of the id's entry in the timer heap: one for each id, however many transactions it has."""

    def will_have(self, producer_id: int) -> bool:
        """Whether the client has this producer id already, but the transaction of the old one is not complete."""
        return producer_id == self.current.next_producer_id != NO_PRODUCER_ID


class _Write(NamedTuple):
    """A pending transition. `done` sends what follows from its outcome."""

    transactional: _Transactional
    metadata: TransactionMetadata | None
    done: Callable[[ErrorCode, list[Action], Moment], None]


class _Replay:
    """The records of a partition that loads: the latest value of every id read so far.

    Values are parsed only at the end: most of them are replaced by a later value before that.
    """

    __slots__ = ("_latest",)

    def __init__(self) -> None:
        self._latest: dict[bytes | None, bytes] = {}

    def read(self, records: Iterable[tuple[bytes | None, bytes | None]]) -> None:
        latest = self._latest
        for key, value in records:
            if value is None:
                latest.pop(key, None)
            else:
                latest[key] = value

    def latest(self) -> Iterator[tuple[str, TransactionMetadata]]:
        """Raise UnreadableRecord if the state of an id cannot be read: to go on without it could undo a commit."""
        for key, value in self._latest.items():
            transactional_id = None if key is None else read_key(key)
            if transactional_id is not None:
                yield transactional_id, read_value(value)


class TransactionCoordinator:
    """The transactional ids of every loaded partition.

    Invariants: every token is answered exactly once; an answer and a marker follow only from what is committed in the
    log; at most one transition of a transactional id is pending. Owned by the node's loop; nothing here waits, reads a
    clock or touches a file.
    """

    def __init__(self, settings: TransactionSettings) -> None:
        self.settings = settings
        self.partition_count = 0
        """The number of partitions of the transaction topic; 0 until it exists."""
        self._ids: dict[str, _Transactional] = {}
        self._epochs: dict[int, int] = {}
        """The leader epoch of each loaded partition."""
        self._loading: dict[int, _Replay] = {}
        self._writes: dict[int, _Write] = {}
        self._token = 0
        self._timers: list[tuple[int, int, str]] = []
        self._timer_count = 0

    # -- partitions ----------------------------------------------------------------------------------------------------

    def start_loading(self, partition: int) -> None:
        """Start loading a partition that this node now leads. Its ids are unknown until `finish_loading`."""
        self._loading[partition] = _Replay()

    def replay(self, partition: int, records: Iterable[tuple[bytes | None, bytes | None]]) -> None:
        """Read the next records of a loading partition, in log order."""
        self._loading[partition].read(records)

    def finish_loading(self, partition: int, leader_epoch: int, at: Moment) -> list[Action]:
        """Add the partition's ids, resume their timeouts, and finish the transactions that were prepared.

        If a record is unreadable, raise UnreadableRecord; the partition is still loading then.
        """
        latest = list(self._loading[partition].latest())
        del self._loading[partition]
        self._epochs[partition] = leader_epoch
        actions: list[Action] = []
        for transactional_id, metadata in latest:
            loaded = self._ids[transactional_id] = _Transactional(transactional_id, partition, metadata)
            if metadata.state is TransactionState.ONGOING:
                # The wall clock may have jumped: no transaction lives longer than its timeout from here.
                open_ms = min(max(at.wall_ms - metadata.start_ms, 0), metadata.timeout_ms)
                self._set_deadline(loaded, at.now_ms + metadata.timeout_ms - open_ms)
            elif metadata.state.is_prepared:
                self._write_markers(loaded, actions, at)
        return actions

    def unload(self, partition: int, at: Moment) -> list[Action]:
        """Drop the ids of a partition that another node now leads; waiting clients get NOT_COORDINATOR."""
        if partition not in self._epochs and partition not in self._loading:
            return []  # Every leader change unloads: do not search all ids in vain.
        self._loading.pop(partition, None)
        self._epochs.pop(partition, None)
        for transactional_id in [each.id for each in self._ids.values() if each.partition == partition]:
            del self._ids[transactional_id]
        actions: list[Action] = []
        for token in [token for token, write in self._writes.items() if write.transactional.partition == partition]:
            self._writes.pop(token).done(ErrorCode.not_coordinator, actions, at)
        return actions

    def is_loaded(self, partition: int) -> bool:
        return partition in self._epochs

    @property
    def is_loading(self) -> bool:
        return bool(self._loading)

    def partition_of(self, transactional_id: str) -> int | None:
        """Return the partition that owns an id; None if there are no partitions yet or the id is too long."""
        if not self.partition_count or len(transactional_id) > ID_BYTES_MAX:
            return None
        return group_partition(transactional_id, self.partition_count)

    def _check(self, transactional_id: str) -> ErrorCode:
        """Return why this coordinator cannot answer for the id, if it cannot."""
        if not transactional_id or len(transactional_id.encode()) > ID_BYTES_MAX:
            return ErrorCode.invalid_request
        partition = self.partition_of(transactional_id)
        if partition is None:
            return ErrorCode.coordinator_not_available
        if partition in self._loading:
            return ErrorCode.coordinator_load_in_progress
        return ErrorCode.none if partition in self._epochs else ErrorCode.not_coordinator

    # -- producers -----------------------------------------------------------------------------------------------------

    def knows(self, transactional_id: str) -> bool:
        return transactional_id in self._ids

    def needs_producer_id(self, transactional_id: str) -> bool:
        """Whether the next request for this id may need a producer id that nothing uses yet."""
        known = self._ids.get(transactional_id)
        return known is None or known.current.epochs_are_used_up

    def init_producer(self, request: InitProducerRequest, token: int, at: Moment) -> list[Action]:
        """Give a producer its id and epoch; earlier producers with the same transactional id are fenced."""
        actions: list[Action] = []
        error = self._check(request.transactional_id)
        if error is ErrorCode.none and not 0 < request.timeout_ms <= self.settings.timeout_ms_max:
            error = ErrorCode.invalid_transaction_timeout
        if error is not ErrorCode.none:
            return [_init_reply(token, error)]
        known = self._ids.get(request.transactional_id)
        if known is None:
            if request.fresh_producer_id < 0:
                return [_init_reply(token, ErrorCode.coordinator_not_available)]
            known = self._create(request, at)
        error, following = self._next_producer(known, request, at)
        if error is not ErrorCode.none or following is None:
            return [_init_reply(token, error)]
        if following.state is TransactionState.PREPARE_ABORT:
            self._abort(known, following, "fenced", actions, lambda error: _init_reply(token, error))
            return actions
        last_epoch = NO_EPOCH if request.expected is None else request.expected.producer_epoch

        def done(error: ErrorCode, actions: list[Action], at: Moment) -> None:
            if error is ErrorCode.none:
                known.last_epoch = last_epoch
                actions.append(_init_reply(token, error, following.producer_id, following.producer_epoch))
            else:
                actions.append(_init_reply(token, error))

        self._append(known, following, done, actions)
        return actions

    def _create(self, request: InitProducerRequest, at: Moment) -> _Transactional:
        partition = group_partition(request.transactional_id, self.partition_count)
        empty = TransactionMetadata(
            request.fresh_producer_id, NO_EPOCH, request.timeout_ms, TransactionState.EMPTY, at.wall_ms
        )
        created = self._ids[request.transactional_id] = _Transactional(request.transactional_id, partition, empty)
        return created

    def _next_producer(
        self, known: _Transactional, request: InitProducerRequest, at: Moment
    ) -> tuple[ErrorCode, TransactionMetadata | None]:
        """Return the value with the producer's id and epoch, or the one that aborts an open transaction first."""
        current, expected = known.current, request.expected
        if known.pending is not None or current.state.is_prepared:
            return ErrorCode.concurrent_transactions, None
        if expected is not None and not self._is_expected(known, expected):
            return ErrorCode.producer_fenced, None
        if current.state is TransactionState.ONGOING:
            return ErrorCode.none, current.fenced(at.wall_ms)
        if expected is not None and expected.producer_epoch != current.producer_epoch >= 0:
            # The repetition of a request that succeeded: its producer already has the current epoch.
            return ErrorCode.none, current.with_same_epoch(request.timeout_ms, at.wall_ms)
        if not current.epochs_are_used_up:
            return ErrorCode.none, current.with_next_epoch(request.timeout_ms, at.wall_ms)
        if request.fresh_producer_id < 0:
            return ErrorCode.concurrent_transactions, None
        return ErrorCode.none, current.with_producer_id(request.fresh_producer_id, request.timeout_ms, at.wall_ms)

    @staticmethod
    def _is_expected(known: _Transactional, expected: ProducerIdAndEpoch) -> bool:
        """Whether the producer that recovers is the last one that got this transactional id."""
        current = known.current
        if current.producer_epoch == NO_EPOCH:
            return True
        if expected.producer_id == current.producer_id:
            return expected.producer_epoch in (current.producer_epoch, known.last_epoch)
        # It missed the answer that gave it a new producer id.
        is_previous = expected.producer_id == current.previous_producer_id
        return is_previous and expected.producer_epoch == known.last_epoch >= EPOCH_MAX - 1

    # -- transactions --------------------------------------------------------------------------------------------------

    def add_partitions(
        self,
        transactional_id: str,
        producer: ProducerIdAndEpoch,
        partitions: frozenset[TopicPartition],
        token: int,
        at: Moment,
    ) -> list[Action]:
        """Add partitions to the transaction, or begin one. The reply has one error for all partitions."""
        error, known = self._check_producer(transactional_id, producer)
        if error is ErrorCode.none and known is not None:
            current = known.current
            if known.pending is not None or current.state.is_prepared:
                error = ErrorCode.concurrent_transactions
            elif current.state is not TransactionState.ONGOING or not partitions <= current.partitions:
                return self._add(known, partitions, token, at)
        return [Reply(token, {"error_code": error})]

    def _add(
        self, known: _Transactional, partitions: frozenset[TopicPartition], token: int, at: Moment
    ) -> list[Action]:
        following = known.current.with_partitions(partitions, at.wall_ms)
        begins = known.current.state is not TransactionState.ONGOING
        deadline_ms = at.now_ms + following.timeout_ms

        def done(error: ErrorCode, actions: list[Action], at: Moment) -> None:
            if error is ErrorCode.none and begins:
                known.cause = "client"
                self._set_deadline(known, deadline_ms)
            actions.append(Reply(token, {"error_code": error}))

        actions: list[Action] = []
        self._append(known, following, done, actions)
        return actions

    def verify_partitions(
        self, transactional_id: str, producer: ProducerIdAndEpoch, partitions: Iterable[TopicPartition]
    ) -> tuple[ErrorCode, dict[TopicPartition, bool]]:
        """Return whether each partition is in the producer's open transaction; for leaders, before they append."""
        error, known = self._check_producer(transactional_id, producer)
        if error is ErrorCode.none and known is not None and known.current.state.is_prepared:
            error = ErrorCode.concurrent_transactions
        if error is not ErrorCode.none or known is None:
            return error, {}
        is_open = known.current.state is TransactionState.ONGOING
        return error, {each: is_open and each in known.current.partitions for each in partitions}

    def _check_producer(
        self, transactional_id: str, producer: ProducerIdAndEpoch
    ) -> tuple[ErrorCode, _Transactional | None]:
        error = self._check(transactional_id)
        known = self._ids.get(transactional_id)
        if error is not ErrorCode.none:
            return error, known
        if known is None:
            return ErrorCode.invalid_producer_id_mapping, None
        current = known.current
        if known.will_have(producer.producer_id):
            return ErrorCode.concurrent_transactions, known
        if producer.producer_id != current.producer_id:
            return ErrorCode.invalid_producer_id_mapping, known
        if current.fences(producer.producer_epoch):
            return ErrorCode.producer_fenced, known
        return ErrorCode.none, known

    def end(self, request: EndRequest, token: int, at: Moment) -> list[Action]:
        """Commit or abort. The reply has the producer's id and epoch for its next transaction."""
        error = self._check(request.transactional_id)
        known = self._ids.get(request.transactional_id)
        if error is ErrorCode.none and known is None:
            error = ErrorCode.invalid_producer_id_mapping
        if error is not ErrorCode.none or known is None:
            return [_end_reply(token, error, None)]
        error, is_repeated = self._check_end(known, request)
        if error is not ErrorCode.none or is_repeated:
            return [_end_reply(token, error, known.current)]
        current = known.current
        next_producer_id = NO_PRODUCER_ID
        if request.client_version >= EPOCH_BUMP_VERSION and current.epochs_are_used_up:
            next_producer_id = request.fresh_producer_id
            if next_producer_id < 0:
                return [_end_reply(token, ErrorCode.concurrent_transactions, None)]
        following = current.ended(
            is_commit=request.is_commit,
            client_version=request.client_version,
            next_producer_id=next_producer_id,
            wall_ms=at.wall_ms,
        )

        def done(error: ErrorCode, actions: list[Action], at: Moment) -> None:
            if error is ErrorCode.none:
                known.last_epoch = request.producer_epoch
                self._decided(known, "client", actions, at)
            actions.append(_end_reply(token, error, following))

        actions: list[Action] = []
        self._append(known, following, done, actions)
        return actions

    def _check_end(self, known: _Transactional, request: EndRequest) -> tuple[ErrorCode, bool]:
        """Return the error of an EndTxn request, or whether it repeats one that succeeded."""
        current = known.current
        state = current.state
        is_repeated = False
        if current.client_version >= EPOCH_BUMP_VERSION and state in _ENDED:
            # Each of these has its own epoch: an equal one ends the next transaction, which is empty so far.
            is_bumped = (request.producer_id, request.producer_epoch + 1) == (
                current.producer_id,
                current.producer_epoch,
            )
            has_new_id = (
                request.producer_id == current.previous_producer_id
                and request.producer_epoch == EPOCH_MAX - 1
                and current.producer_epoch == 0
            )
            is_repeated = is_bumped or has_new_id
        if not is_repeated:
            if known.will_have(request.producer_id):
                return ErrorCode.concurrent_transactions, False
            if request.producer_id != current.producer_id:
                return ErrorCode.invalid_producer_id_mapping, False
            if current.fences(request.producer_epoch):
                return ErrorCode.producer_fenced, False
        if known.pending is not None and not is_repeated:
            return ErrorCode.concurrent_transactions, False
        if state is TransactionState.ONGOING:
            return ErrorCode.none, False
        if state in _ENDED and (is_repeated or request.client_version < EPOCH_BUMP_VERSION):
            if _ENDED[state] is not request.is_commit:
                return ErrorCode.invalid_txn_state, False
            if state.is_prepared:
                return ErrorCode.concurrent_transactions, False
            return ErrorCode.none, True
        if state.is_prepared:
            return ErrorCode.concurrent_transactions, False
        # Version 2 adds partitions with the first batch: to abort before that is no mistake of the client.
        may_be_empty = request.client_version >= EPOCH_BUMP_VERSION and not request.is_commit
        return ErrorCode.none if may_be_empty else ErrorCode.invalid_txn_state, False

    def _abort(
        self,
        known: _Transactional,
        following: TransactionMetadata,
        cause: Cause,
        actions: list[Action],
        reply: Callable[[ErrorCode], Reply] | None,
    ) -> None:
        """Abort an open transaction and fence its producer. The client that caused it retries."""

        def done(error: ErrorCode, actions: list[Action], at: Moment) -> None:
            if error is ErrorCode.none:
                known.last_epoch = NO_EPOCH
                self._decided(known, cause, actions, at)
            else:
                # Also after NOT_COORDINATOR: a lease gap or a hand-over that fails ends without a new leader epoch.
                self._set_deadline(known, at.now_ms + APPEND_RETRY_MS)
            if reply is not None:
                actions.append(reply(ErrorCode.concurrent_transactions if error is ErrorCode.none else error))

        self._append(known, following, done, actions)

    def _decided(self, known: _Transactional, cause: Cause, actions: list[Action], at: Moment) -> None:
        current = known.current
        known.cause = cause
        known.deadline_ms = None
        is_commit = current.state is TransactionState.PREPARE_COMMIT
        open_ms = max(at.wall_ms - current.start_ms, 0)
        actions.append(Ended(known.id, current.producer_id, is_commit, cause, open_ms))
        self._write_markers(known, actions, at)

    # -- markers -------------------------------------------------------------------------------------------------------

    def _write_markers(self, known: _Transactional, actions: list[Action], at: Moment) -> None:
        current = known.current
        partitions = tuple(sorted(current.partitions))
        known.unmarked = dict.fromkeys(partitions)
        if not partitions:
            self._complete(known, actions, at)
            return
        actions.append(
            WriteMarkers(
                known.id,
                known.partition,
                self._epochs[known.partition],
                current.producer_id,
                current.producer_epoch,
                current.state is TransactionState.PREPARE_COMMIT,
                partitions,
            )
        )

    def marker_written(
        self, transactional_id: str, producer: ProducerIdAndEpoch, partition: TopicPartition, at: Moment
    ) -> list[Action]:
        """The marker is committed in the partition, or the partition was deleted."""
        known = self._ids.get(transactional_id)
        actions: list[Action] = []
        if known is None or (known.current.producer_id, known.current.producer_epoch) != producer:
            return actions
        if known.unmarked.pop(partition, partition) is None and not known.unmarked:
            self._complete(known, actions, at)
        return actions

    def _complete(self, known: _Transactional, actions: list[Action], at: Moment) -> None:
        def done(error: ErrorCode, actions: list[Action], at: Moment) -> None:
            if error is not ErrorCode.none:
                self._set_deadline(known, at.now_ms + APPEND_RETRY_MS)

        self._append(known, known.current.completed(at.wall_ms), done, actions)

    # -- queries -------------------------------------------------------------------------------------------------------

    def describe(self, transactional_id: str) -> tuple[ErrorCode, TransactionMetadata | None]:
        """Return the state of one id. The partitions of a prepared transaction are those without a marker."""
        error = self._check(transactional_id)
        known = self._ids.get(transactional_id)
        if error is ErrorCode.none and (known is None or known.current.producer_epoch == NO_EPOCH):
            return ErrorCode.transactional_id_not_found, None
        if known is None or not known.current.state.is_prepared:
            return error, None if known is None else known.current
        return error, replace(known.current, partitions=frozenset(known.unmarked))

    def transactions(self) -> Iterator[tuple[str, TransactionMetadata]]:
        """Yield every transactional id with its state."""
        for known in self._ids.values():
            if known.current.producer_epoch != NO_EPOCH:
                yield known.id, known.current

    # -- log and clock -------------------------------------------------------------------------------------------------

    def _append(
        self,
        known: _Transactional,
        following: TransactionMetadata,
        done: Callable[[ErrorCode, list[Action], Moment], None],
        actions: list[Action],
    ) -> None:
        self._token += 1
        known.pending = following
        self._writes[self._token] = _Write(known, following, done)
        actions.append(Append(known.partition, ((write_key(known.id), write_value(following)),), self._token))

    def appended(self, token: int, error: ErrorCode, at: Moment) -> list[Action]:
        """Record that an append is committed (`ErrorCode.none`) or failed. Ignored if its partition was unloaded.

        After a failure it is unknown whether the record is in the log. That is safe: its effect was not visible, and
        the next transition of the same id is appended after it.
        """
        actions: list[Action] = []
        write = self._writes.pop(token, None)
        if write is None:
            return actions
        known = write.transactional
        known.pending = None
        if error is ErrorCode.none:
            if write.metadata is None:
                self._ids.pop(known.id, None)
            else:
                known.current = write.metadata
        elif known.current.producer_epoch == NO_EPOCH:
            self._ids.pop(known.id, None)
        write.done(_refusal(error), actions, at)
        if known.pending is None and not known.current.state.is_prepared:
            actions.append(Settled(known.id))
        return actions

    def _set_deadline(self, known: _Transactional, deadline_ms: int) -> None:
        known.deadline_ms = deadline_ms
        if known.timer_ms is None or deadline_ms < known.timer_ms:
            known.timer_ms = deadline_ms
            self._timer_count += 1
            heapq.heappush(self._timers, (deadline_ms, self._timer_count, known.id))

    def next_deadline_ms(self) -> int | None:
        return self._timers[0][0] if self._timers else None

    def tick(self, at: Moment) -> list[Action]:
        """Abort the transactions whose timeout has passed, and repeat appends that failed."""
        actions: list[Action] = []
        while self._timers and self._timers[0][0] <= at.now_ms:
            deadline_ms, _, transactional_id = heapq.heappop(self._timers)
            known = self._ids.get(transactional_id)
            if known is None or known.timer_ms != deadline_ms:
                continue
            known.timer_ms = None
            if known.deadline_ms is None:
                continue  # The transaction ended.
            if known.deadline_ms > at.now_ms:
                self._set_deadline(known, known.deadline_ms)
                continue
            if known.pending is not None:
                self._set_deadline(known, at.now_ms + APPEND_RETRY_MS)
                continue
            known.deadline_ms = None
            if known.current.state is TransactionState.ONGOING:
                self._abort(known, known.current.fenced(at.wall_ms), "timeout", actions, None)
            elif known.current.state.is_prepared and not known.unmarked:
                self._complete(known, actions, at)
        return actions

    def expire_ids(self, at: Moment) -> list[Action]:
        """Remove transactional ids that were not used for `id_expiration_ms`, at most IDS_EXPIRED_MAX of them.

        The node calls this periodically, and again soon if the result has that many actions.
        """
        oldest_ms = at.wall_ms - self.settings.id_expiration_ms
        actions: list[Action] = []
        for known in self._ids.values():
            current = known.current
            is_idle = known.pending is None and current.state is not TransactionState.ONGOING
            if is_idle and not current.state.is_prepared and current.updated_ms < oldest_ms:
                self._token += 1
                known.pending = current
                self._writes[self._token] = _Write(known, None, _nothing_follows)
                actions.append(Append(known.partition, ((write_key(known.id), None),), self._token))
                if len(actions) == IDS_EXPIRED_MAX:
                    break
        return actions


def _nothing_follows(error: ErrorCode, actions: list[Action], at: Moment) -> None:
    """An id that could not be removed is removed later."""


def _refusal(error: ErrorCode) -> ErrorCode:
    """Return the error for the client: each of these makes it find the coordinator again, or wait and retry."""
    if error in (ErrorCode.none, ErrorCode.not_coordinator):
        return error
    if error is ErrorCode.not_leader_or_follower:
        return ErrorCode.not_coordinator
    return ErrorCode.coordinator_not_available


def _init_reply(
    token: int, error: ErrorCode, producer_id: int = NO_PRODUCER_ID, producer_epoch: int = NO_EPOCH
) -> Reply:
    return Reply(token, {"error_code": error, "producer_id": producer_id, "producer_epoch": producer_epoch})


def _end_reply(token: int, error: ErrorCode, metadata: TransactionMetadata | None) -> Reply:
    values: dict[str, Any] = {"error_code": error, "producer_id": NO_PRODUCER_ID, "producer_epoch": NO_EPOCH}
    if error is ErrorCode.none and metadata is not None:
        changes_id = metadata.next_producer_id != NO_PRODUCER_ID
        values["producer_id"] = metadata.next_producer_id if changes_id else metadata.producer_id
        values["producer_epoch"] = 0 if changes_id else metadata.producer_epoch
    return Reply(token, values)
