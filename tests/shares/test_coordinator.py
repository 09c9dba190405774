"""The share coordinator's state machine: merging, fencing, loading, and what answers wait for."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

import chronik.shares.coordinator
from chronik.groups.step import Append, Moment, Reply
from chronik.shares.coordinator import Action, ShareCoordinator
from chronik.shares.records import UnreadableRecord
from chronik.shares.state import InitialState, SharePartitionKey, StateBatch, WrittenState, combine
from chronik.wire.errors import ErrorCode

KEY = SharePartitionKey("queue", UUID(int=1), 0)
OTHER = SharePartitionKey("queue", UUID(int=2), 0)
AT = Moment(0, 1_000)
AVAILABLE, ACCEPTED, ARCHIVED = 0, 2, 4


class Log:
    """A coordinator on a log in memory. `commit` completes the appends that wait."""

    def __init__(self) -> None:
        self.records: list[tuple[bytes, bytes | None]] = []
        self.pending: list[Append] = []
        self.replies: dict[int, dict[str, Any]] = {}
        self.token = 0
        self.coordinator = self.load()

    def load(self) -> ShareCoordinator:
        coordinator = ShareCoordinator()
        coordinator.partition_count = 1
        coordinator.start_loading(0)
        coordinator.replay(0, self.records)
        coordinator.finish_loading(0)
        self.coordinator = coordinator
        return coordinator

    def compact(self) -> None:
        """Keep the last record of each key, in its place."""
        last = {key: at for at, (key, _) in enumerate(self.records)}
        self.records = [record for at, record in enumerate(self.records) if last[record[0]] == at and record[1]]

    def run(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Reply(token=token, values=values):
                    assert token not in self.replies, "answered twice"
                    self.replies[token] = values
                case Append():
                    self.pending.append(action)
                case _:
                    raise AssertionError(action)

    def commit(self, error: ErrorCode = ErrorCode.none) -> None:
        while self.pending:
            append = self.pending.pop(0)
            if error is ErrorCode.none:
                self.records += append.records
            self.run(self.coordinator.appended(append.token, error, AT))

    def start(self, name: str, key: SharePartitionKey, *values: Any) -> int:
        self.token += 1
        self.run(getattr(self.coordinator, name)(key, *values, self.token, AT))
        return self.token

    def ask(self, name: str, key: SharePartitionKey, *values: Any) -> dict[str, Any]:
        token = self.start(name, key, *values)
        self.commit()
        return self.replies[token]

    def state(self, key: SharePartitionKey = KEY) -> Any:
        return self.ask("summary", key)["state"]


def written(*batches: StateBatch, start: int = -1, leader: int = 5, state: int = 1, count: int = -1) -> WrittenState:
    return WrittenState(state, leader, start, batches, count)


@pytest.fixture
def log() -> Log:
    log = Log()
    assert log.ask("initialize", KEY, InitialState(1, 0))["error_code"] is ErrorCode.none
    return log


def test_an_answer_waits_until_its_record_is_committed(log: Log) -> None:
    token = log.start("write", KEY, written(StateBatch(0, 4, ACCEPTED, 1)))
    assert token not in log.replies
    log.commit()
    assert log.replies[token] == {"error_code": ErrorCode.none}


def test_a_failed_append_changes_nothing_and_is_not_a_success(log: Log) -> None:
    token = log.start("write", KEY, written(StateBatch(0, 4, ACCEPTED, 1)))
    waiting = log.start("summary", KEY)
    log.commit(ErrorCode.request_timed_out)
    assert log.replies[token] == {"error_code": ErrorCode.coordinator_not_available}
    assert log.replies[waiting]["state"].batches == ()


@pytest.mark.parametrize("name", ["write", "delete", "initialize"])
def test_a_write_after_an_append_that_timed_out_survives_loading(log: Log, name: str) -> None:
    """The records of the append that timed out are in the log, and are committed before those of later writes."""
    many = [StateBatch(2 * each, 2 * each, AVAILABLE, 1) for each in range(20)]
    log.ask("write", KEY, written(*many))
    values = {"write": (written(*many),), "delete": (), "initialize": (InitialState(2, 100),)}[name]
    log.start(name, KEY, *values)
    log.records += log.pending[0].records
    log.commit(ErrorCode.request_timed_out)

    accepted = StateBatch(2, 2, ACCEPTED, 1)
    assert log.ask("write", KEY, written(accepted))["error_code"] is ErrorCode.none
    log.load()
    assert accepted in log.state().batches


def test_reading_fences_leaders_of_earlier_epochs(log: Log) -> None:
    assert log.ask("read", KEY, 7)["state"].start_offset == 0
    assert log.ask("write", KEY, written(leader=6))["error_code"] is ErrorCode.fenced_leader_epoch
    assert log.ask("read", KEY, 6)["error_code"] is ErrorCode.fenced_leader_epoch
    log.load()
    assert log.ask("write", KEY, written(leader=6))["error_code"] is ErrorCode.fenced_leader_epoch
    assert log.ask("write", KEY, written(leader=7))["error_code"] is ErrorCode.none


def test_a_new_state_epoch_replaces_the_state_and_fences_the_leader(log: Log) -> None:
    log.ask("write", KEY, written(StateBatch(3, 4, ACCEPTED, 1), start=2))
    assert log.ask("initialize", KEY, InitialState(2, 10))["error_code"] is ErrorCode.none
    assert (log.state().start_offset, log.state().batches, log.state().leader_epoch) == (10, (), 5)
    assert log.ask("write", KEY, written(state=1))["error_code"] is ErrorCode.fenced_state_epoch
    assert log.ask("initialize", KEY, InitialState(1, 0))["error_code"] is ErrorCode.fenced_state_epoch


def test_a_repeated_initialization_does_not_forget_what_was_accepted(log: Log) -> None:
    log.ask("initialize", OTHER, InitialState(1))
    log.ask("write", OTHER, written(StateBatch(3, 4, ACCEPTED, 1), start=2))
    assert log.ask("initialize", OTHER, InitialState(1))["error_code"] is ErrorCode.none
    assert log.state(OTHER).batches == (StateBatch(3, 4, ACCEPTED, 1),)


def test_a_key_without_state_can_be_neither_read_nor_written(log: Log) -> None:
    assert log.ask("read", OTHER, 1)["error_code"] is ErrorCode.invalid_request
    assert log.ask("write", OTHER, written())["error_code"] is ErrorCode.invalid_request
    assert log.state(OTHER) is None


def test_deleted_state_does_not_return_after_loading(log: Log) -> None:
    log.ask("write", KEY, written(StateBatch(3, 4, ACCEPTED, 1), start=2))
    assert log.ask("delete", KEY)["error_code"] is ErrorCode.none
    assert log.ask("delete", KEY)["error_code"] is ErrorCode.none
    for _ in range(2):
        log.load()
        assert log.state() is None
        log.compact()


def test_state_of_a_deleted_topic_is_removed(log: Log) -> None:
    log.ask("initialize", OTHER, InitialState(1, 0))
    log.run(log.coordinator.topic_deleted(KEY.topic_id, AT))
    log.commit()
    assert (log.state(), log.state(OTHER) is not None) == (None, True)
    assert log.coordinator.topic_ids() == {OTHER.topic_id}


def test_requests_that_wait_get_not_coordinator_when_the_partition_moves(log: Log) -> None:
    tokens = [log.start("write", KEY, written()), log.start("read", KEY, 9), log.start("delete", KEY)]
    log.run(log.coordinator.unload(0, AT))
    assert [log.replies[token] for token in tokens] == [{"error_code": ErrorCode.not_coordinator}] * 3
    log.run(log.coordinator.appended(log.pending[0].token, ErrorCode.none, AT))


def test_an_unreadable_record_stops_the_loading(log: Log) -> None:
    log.records[-1] = (log.records[-1][0], b"\0\1")
    with pytest.raises(UnreadableRecord):
        log.load()


def test_a_state_at_its_limit_accepts_what_makes_it_smaller(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chronik.shares.coordinator, "BATCHES_MAX", 3)
    log.ask("write", KEY, written(*(StateBatch(each, each, AVAILABLE, 1) for each in (1, 3, 5))))
    assert log.ask("write", KEY, written(StateBatch(7, 7, AVAILABLE, 1)))["error_code"] is ErrorCode.invalid_request
    assert log.ask("write", KEY, written(StateBatch(1, 1, ACCEPTED, 1), start=2))["error_code"] is ErrorCode.none
    assert len(log.state().batches) == 2


def test_acquired_or_impossible_states_are_refused(log: Log) -> None:
    for bad in (StateBatch(0, 1, 1, 1), StateBatch(2, 1, 2, 1), StateBatch(0, 1, 2, -1)):
        assert log.ask("write", KEY, written(bad))["error_code"] is ErrorCode.invalid_request


def is_done(batch: StateBatch) -> bool:
    return batch.delivery_state in (ACCEPTED, ARCHIVED)


def progress(batch: StateBatch) -> tuple[bool, int]:
    """How far the offsets of a batch are: done, or delivered that often."""
    return (True, 0) if is_done(batch) else (False, batch.delivery_count)


def offsets(batches: Iterable[StateBatch]) -> dict[int, tuple[bool, int]]:
    return {offset: progress(batch) for batch in batches for offset in range(batch.first_offset, batch.last_offset + 1)}


states = st.builds(
    lambda first, size, state, count: StateBatch(first, first + size, state, count),
    st.integers(0, 40),
    st.integers(0, 6),
    st.sampled_from((AVAILABLE, ACCEPTED, ARCHIVED)),
    st.integers(1, 3),
)
writes = st.lists(st.tuples(st.lists(states, max_size=4), st.integers(-1, 20)), max_size=12)


@given(writes, st.randoms(use_true_random=False))
def test_writes_merge_to_the_latest_state_of_each_offset(changes: list[Any], random: Any) -> None:
    log = Log()
    log.ask("initialize", KEY, InitialState(1, 0))
    model: dict[int, tuple[bool, int]] = {}
    start = 0
    for batches, moved in changes:
        assert log.ask("write", KEY, written(*batches, start=moved))["error_code"] is ErrorCode.none
        start = max(start, moved)
        for batch in batches:
            for offset in range(batch.first_offset, batch.last_offset + 1):
                model[offset] = max(model.get(offset, (False, 0)), progress(batch))
        if random.random() < 0.3:
            log.compact()
        if random.random() < 0.3:
            log.load()
    state = log.state()
    assert state.start_offset == start
    assert offsets(state.batches) == {at: value for at, value in model.items() if at >= start}
    assert not any(is_done(one) and is_done(two) and one[1] + 1 == two[0] for one, two in pairwise(state.batches))


@given(st.lists(states, max_size=8), st.randoms(use_true_random=False))
def test_the_order_of_writes_does_not_matter(batches: list[StateBatch], random: Any) -> None:
    shuffled = list(batches)
    random.shuffle(shuffled)
    merged: tuple[StateBatch, ...] = ()
    for batch in shuffled:
        merged = combine(merged, [batch], 5)
    assert offsets(merged) == offsets(combine((), batches, 5))


@given(st.lists(states, max_size=12), st.lists(states, max_size=3), st.integers(0, 10), st.integers(0, 40))
def test_a_change_has_the_same_result_as_all_changes_at_once(
    earlier: list[StateBatch], changes: list[StateBatch], first_start: int, start: int
) -> None:
    known = combine((), earlier, first_start)
    assert combine(known, changes, start) == combine((), [*known, *changes], start)
