"""The state machine of one shared partition: acquiring, acknowledging, locks, limits and the start offset."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.planted_share_groups import locks_never_end

from chronik.shares.share_partition import (
    Acknowledged,
    Acknowledgement,
    AcknowledgeType,
    Acquired,
    Action,
    DeadLetter,
    FetchedBatch,
    Limits,
    SharePartition,
    ShareSettings,
    Write,
)
from chronik.shares.state import DeliveryState, StateBatch, WrittenState, combine
from chronik.wire.errors import ErrorCode

ACCEPT, RELEASE, REJECT, RENEW, GAP = (
    AcknowledgeType.ACCEPT,
    AcknowledgeType.RELEASE,
    AcknowledgeType.REJECT,
    AcknowledgeType.RENEW,
    AcknowledgeType.GAP,
)
A, B = "member-a", "member-b"
DONE = (DeliveryState.ACKNOWLEDGED, DeliveryState.ARCHIVED)
LOCK_MS = 1_000


class Scene:
    """A shared partition, the state that was written for it, and a log of batches of 5 records."""

    def __init__(self, batch_records: int = 5, **changed: Any) -> None:
        self.settings = ShareSettings(**{"record_lock_duration_ms": LOCK_MS, "delivery_count_limit": 3, **changed})
        self.batch_records = batch_records
        self.now_ms = 0
        self.durable: tuple[StateBatch, ...] = ()
        self.durable_start = 0
        self.writes: list[Write] = []
        self.answers: dict[int, ErrorCode] = {}
        self.dead_letters: list[DeadLetter] = []
        self.end = 0
        self.unreadable: set[int] = set()
        self.partition = self.load()

    def load(self) -> SharePartition:
        self.partition = SharePartition(self.settings, 1)
        self.writes, self.answers = [], {}
        self.run(self.partition.load(1, self.durable_start, self.durable))
        return self.partition

    def produce(self, batches: int) -> None:
        self.end += batches * self.batch_records

    def fetch(self, member: str, records: int = 500, *, strict: bool = False, batch_size: int = 500) -> list[Acquired]:
        offset = self.partition.next_fetch_offset
        size = self.batch_records
        batches = [
            FetchedBatch(first, first + size - 1, first not in self.unreadable)
            for first in range(offset - offset % size, self.end, size)
        ]
        return self.partition.acquire(member, offset, batches, Limits(records, batch_size, strict), self.now_ms)

    def acknowledge(self, member: str, first: int, last: int, *types: int) -> int:
        token, actions = self.partition.acknowledge(member, [Acknowledgement(first, last, types)], self.now_ms)
        self.run(actions)
        return token

    def settle(self, member: str, first: int, last: int, *types: int) -> ErrorCode:
        token = self.acknowledge(member, first, last, *types)
        self.write()
        return self.answers[token]

    def write(self, error: ErrorCode = ErrorCode.none) -> None:
        while self.writes:
            write = self.writes.pop(0)
            if error is ErrorCode.none:
                self.store(write.state)
            self.run(self.partition.written(write.token, error, self.now_ms))

    def store(self, written: WrittenState) -> None:
        self.durable_start = max(self.durable_start, written.start_offset)
        self.durable = combine(self.durable, written.batches, self.durable_start)

    def pass_time(self, ms: int) -> None:
        self.now_ms += ms
        deadline = self.partition.next_deadline_ms()
        if deadline is not None and deadline <= self.now_ms:
            self.run(self.partition.tick(self.now_ms))

    def run(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Write():
                    assert not self.writes, "one write at a time"
                    assert action.state.delivery_complete_count == self.complete_after(action)
                    self.writes.append(action)
                case Acknowledged(token=token, error=error):
                    assert token not in self.answers, "answered twice"
                    self.answers[token] = error
                case DeadLetter():
                    self.dead_letters.append(action)

    def complete_after(self, write: Write) -> int:
        """Count, one by one, what a write reports as complete from its start offset on."""
        return sum(
            run.last - run.first + 1
            for run in self.partition._runs
            if run.first >= write.state.start_offset
            and (run.target if run.target is not None and run.write == write.token else run.state) in DONE
        )

    def states(self) -> list[tuple[int, int, str, int]]:
        return [(first, last, state.name, count) for first, last, state, count, _ in self.partition.entries()]


@pytest.fixture
def scene() -> Scene:
    scene = Scene()
    scene.produce(4)
    return scene


def test_whole_batches_are_acquired_up_to_the_number_of_records(scene: Scene) -> None:
    assert scene.fetch(A, 7) == [Acquired(0, 9, 1)]
    assert scene.fetch(B, 1) == [Acquired(10, 14, 1)]
    assert scene.states() == [(0, 9, "ACQUIRED", 1), (10, 14, "ACQUIRED", 1)]


def test_record_limit_mode_acquires_no_more_than_the_limit(scene: Scene) -> None:
    assert scene.fetch(A, 7, strict=True) == [Acquired(0, 6, 1)]
    assert scene.fetch(B, 4, strict=True) == [Acquired(7, 10, 1)]
    assert scene.partition.end_offset == 11


def test_acquired_records_are_reported_in_pieces_of_the_batch_size(scene: Scene) -> None:
    assert scene.fetch(A, 20, batch_size=10) == [Acquired(0, 9, 1), Acquired(10, 19, 1)]


def test_acceptance_is_answered_after_its_write_and_moves_the_start_offset(scene: Scene) -> None:
    scene.fetch(A)
    token = scene.acknowledge(A, 0, 9, ACCEPT)
    assert token not in scene.answers and scene.partition.start_offset == 0
    scene.write()
    assert (scene.answers[token], scene.partition.start_offset, scene.durable_start) == (ErrorCode.none, 10, 10)
    assert scene.durable == (), "nothing is stored below the start offset"


def test_start_offset_stops_at_the_first_record_that_is_not_complete(scene: Scene) -> None:
    scene.fetch(A)
    assert scene.settle(A, 5, 9, ACCEPT) is ErrorCode.none
    assert (scene.durable_start, scene.durable) == (0, (StateBatch(5, 9, 2, 1),))
    assert scene.settle(A, 0, 4, ACCEPT, ACCEPT, RELEASE, REJECT, GAP) is ErrorCode.none
    assert scene.durable_start == 2
    assert scene.fetch(B) == [Acquired(2, 2, 2)]


def test_a_failed_write_is_not_a_success_and_keeps_the_lock(scene: Scene) -> None:
    scene.fetch(A)
    token = scene.acknowledge(A, 0, 9, ACCEPT)
    scene.write(ErrorCode.coordinator_not_available)
    assert scene.answers[token] is ErrorCode.coordinator_not_available
    assert scene.states() == [(0, 19, "ACQUIRED", 1)] and scene.fetch(B) == []
    assert scene.settle(A, 0, 9, ACCEPT) is ErrorCode.none


def test_acknowledgements_during_a_write_share_the_next_one(scene: Scene) -> None:
    scene.fetch(A)
    tokens = [scene.acknowledge(A, offset, offset, ACCEPT) for offset in range(6)]
    assert len(scene.writes) == 1
    first = scene.writes[0]
    assert first.state.batches == ()  # Offset 0 alone: the start offset says it.
    scene.store(first.state)
    scene.writes.clear()
    scene.run(scene.partition.written(first.token, ErrorCode.none, 0))
    assert scene.writes[0].state.start_offset == 6
    scene.write()
    assert all(scene.answers[token] is ErrorCode.none for token in tokens)


@pytest.mark.parametrize("member", [A, B])
def test_only_the_member_with_the_lock_can_acknowledge_and_only_once(scene: Scene, member: str) -> None:
    scene.fetch(A)
    pending = scene.acknowledge(A, 0, 4, ACCEPT)
    assert scene.settle(member, 0, 9, ACCEPT) is ErrorCode.invalid_record_state
    assert scene.answers[pending] is ErrorCode.none
    assert scene.settle(member, 0, 4, ACCEPT) is ErrorCode.invalid_record_state
    assert scene.settle(member, 18, 20, ACCEPT) is ErrorCode.invalid_record_state
    assert scene.settle(A, 5, 9, ACCEPT) is ErrorCode.none


@pytest.mark.parametrize("acknowledgement", [(5, 4, 1), (0, 4, 1, 1), (0, 0, 5), (0, 0, -1), (0, 1)])
def test_malformed_acknowledgements_change_nothing(scene: Scene, acknowledgement: tuple[int, ...]) -> None:
    scene.fetch(A)
    assert scene.settle(A, *acknowledgement) is ErrorCode.invalid_request
    assert scene.states() == [(0, 19, "ACQUIRED", 1)]


def test_releases_of_two_writes_take_effect_with_their_own_write(scene: Scene) -> None:
    scene.fetch(A, 5)
    scene.acknowledge(A, 4, 4, RELEASE)
    scene.acknowledge(A, 3, 3, RELEASE)
    scene.fetch(B, 5)  # joins entries with the same state
    write = scene.writes.pop()
    scene.run(scene.partition.written(write.token, ErrorCode.none, 0))
    assert scene.fetch(B, 1, strict=True) == [Acquired(4, 4, 2)]


def test_one_acknowledgement_costs_the_same_among_many_records_in_flight() -> None:
    assert lines_of_a_delivery(2_000) < 1.5 * lines_of_a_delivery(100)


def lines_of_a_delivery(in_flight: int) -> int:
    """Count the lines of Python that run for one more record, while every second of these records is accepted."""
    scene = Scene(batch_records=1, partition_max_record_locks=in_flight + 1)
    scene.produce(in_flight + 1)
    scene.fetch(A, in_flight)
    for offset in range(1, in_flight, 2):
        scene.settle(A, offset, offset, ACCEPT)
    partition, lines = scene.partition, 0
    assert partition.next_fetch_offset == in_flight

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        offset = partition.next_fetch_offset
        partition.acquire(B, offset, [FetchedBatch(offset, offset)], Limits(1, 1, True), 0)
        _, actions = partition.acknowledge(A, [Acknowledgement(50, 50, (ACCEPT,))], 0)
        (write,) = actions
        assert isinstance(write, Write)
        partition.written(write.token, ErrorCode.none, 0)
    finally:
        sys.settrace(before)
    return lines


def test_a_lock_ends_and_the_records_are_delivered_again(scene: Scene) -> None:
    scene.fetch(A)
    scene.pass_time(LOCK_MS - 1)
    assert scene.fetch(B) == []
    scene.pass_time(1)
    assert scene.fetch(B) == [Acquired(0, 19, 2)]
    assert scene.settle(A, 0, 4, ACCEPT) is ErrorCode.invalid_record_state


def test_the_test_of_locks_fails_if_they_never_end(scene: Scene) -> None:
    with locks_never_end(), pytest.raises(AssertionError):
        test_a_lock_ends_and_the_records_are_delivered_again(scene)


def test_a_renewed_lock_lasts_longer_and_writes_nothing(scene: Scene) -> None:
    scene.fetch(A)
    scene.pass_time(LOCK_MS - 1)
    token = scene.acknowledge(A, 0, 4, RENEW)
    assert scene.answers[token] is ErrorCode.none and not scene.writes
    scene.pass_time(1)
    assert scene.states() == [(0, 4, "ACQUIRED", 1), (5, 19, "AVAILABLE", 1)]
    scene.write()
    assert scene.settle(A, 0, 4, ACCEPT) is ErrorCode.none


def test_a_lock_that_ends_during_a_write_is_released_only_if_it_fails(scene: Scene) -> None:
    scene.fetch(A)
    scene.acknowledge(A, 0, 19, ACCEPT)
    scene.pass_time(2 * LOCK_MS)
    assert scene.fetch(B) == []
    scene.write(ErrorCode.request_timed_out)
    assert scene.fetch(B) == [Acquired(0, 19, 2)]


def test_a_lock_that_ended_during_a_write_sets_no_timer_until_the_write_ends(scene: Scene) -> None:
    """A timer that is due again at once would occupy the loop for as long as the share coordinator is away."""
    scene.fetch(A, 5)
    scene.acknowledge(A, 0, 4, ACCEPT)
    scene.pass_time(LOCK_MS)
    assert scene.partition.next_deadline_ms() is None
    scene.write(ErrorCode.coordinator_not_available)
    assert scene.states()[0][2] == "AVAILABLE"


@pytest.mark.parametrize("by_lock", [True, False])
def test_a_record_is_archived_at_its_delivery_limit(scene: Scene, by_lock: bool) -> None:
    for count in (1, 2, 3):
        assert scene.fetch(A, 5) == [Acquired(0, 4, count)]
        if by_lock:
            scene.pass_time(LOCK_MS)
            scene.write()
        else:
            scene.settle(A, 0, 4, RELEASE)
    assert scene.fetch(A, 5) == [Acquired(5, 9, 1)]
    assert scene.durable_start == 5


def test_delivery_counts_survive_a_change_of_the_leader(scene: Scene) -> None:
    scene.fetch(A, 10)
    scene.settle(A, 0, 4, RELEASE)
    scene.settle(A, 7, 9, ACCEPT)
    scene.load()
    assert scene.fetch(B, 7) == [Acquired(0, 4, 2), Acquired(5, 6, 1)]
    assert scene.fetch(B, 10) == [Acquired(10, 19, 1)]


def test_the_end_of_a_session_releases_what_the_member_has_acquired(scene: Scene) -> None:
    scene.fetch(A, 5)
    scene.fetch(B, 5)
    scene.run(scene.partition.release(A, 0))
    assert scene.states() == [(0, 4, "AVAILABLE", 1), (5, 9, "ACQUIRED", 1)]


def test_records_in_flight_are_bounded_but_released_ones_are_always_delivered(scene: Scene) -> None:
    scene = Scene(partition_max_record_locks=10)
    scene.produce(4)
    assert scene.fetch(A) == [Acquired(0, 9, 1)]
    assert not scene.partition.can_acquire and scene.fetch(B) == []
    scene.settle(A, 3, 4, RELEASE)
    assert scene.partition.can_acquire and scene.fetch(B) == [Acquired(3, 4, 2)]
    scene.settle(A, 5, 9, ACCEPT)
    assert scene.fetch(B) == [Acquired(10, 14, 1)]


def test_state_behind_one_held_record_stays_small_whatever_the_outcomes() -> None:
    scene = Scene(batch_records=1)
    scene.produce(1_000)
    assert scene.fetch(A, 1) == [Acquired(0, 0, 1)]
    for at in range(1, 1_000):
        scene.fetch(B, 1)
        if at % 3 == 0:
            scene.settle(B, at, at, RELEASE)
            scene.fetch(B, 1)
        scene.settle(B, at, at, ACCEPT if at % 2 else REJECT)
    assert [entry[:2] for entry in scene.states()] == [(0, 0), (1, 999)]
    assert [batch[:2] for batch in scene.durable] == [(1, 999)]
    scene.settle(A, 0, 0, ACCEPT)
    assert (scene.durable_start, scene.durable) == (1_000, ())


def test_the_number_of_complete_offsets_fits_its_field() -> None:
    """A producer chooses how many offsets a batch claims; Kafka's field for the number is an int32."""
    partition = SharePartition(ShareSettings(), 1)
    partition.load(1, 0, ())
    batches = [FetchedBatch(0, 0), FetchedBatch(1, 1 << 31), FetchedBatch((1 << 31) + 1, 1 << 32)]
    assert partition.acquire(A, 0, batches, Limits(1 << 40, 1 << 40), 0) == [Acquired(0, 1 << 31, 1)]
    write = partition.acknowledge(A, [Acknowledgement(1, 1 << 31, (ACCEPT,))], 0)[1][0]
    assert isinstance(write, Write)
    assert write.state.delivery_complete_count == (1 << 31) - 1


def test_markers_and_aborted_batches_are_skipped(scene: Scene) -> None:
    scene.unreadable = {0, 10}
    assert scene.fetch(A) == [Acquired(5, 9, 1), Acquired(15, 19, 1)]
    assert scene.partition.start_offset == 5
    scene.settle(A, 5, 9, ACCEPT)
    assert scene.partition.start_offset == 15
    scene.unreadable |= {15}
    scene.run(scene.partition.release(A, 0))
    assert scene.fetch(A) == [] and scene.partition.start_offset == 20


def test_a_marker_that_follows_what_is_done_is_stored_as_done(scene: Scene) -> None:
    scene.fetch(A)
    scene.settle(A, 0, 19, ACCEPT)
    scene.unreadable = {20}
    scene.produce(1)
    assert scene.fetch(A) == [] and (scene.partition.start_offset, scene.durable_start) == (25, 20)
    scene.run(scene.partition.store_start())
    assert scene.partition.store_start() == [] and not scene.partition.is_idle
    scene.write(ErrorCode.network_exception)
    assert scene.durable_start == 20 and not scene.writes, "the next marker or acknowledgement writes it"
    scene.run(scene.partition.store_start())
    scene.write()
    assert scene.durable_start == 25 and scene.partition.is_idle and scene.partition.store_start() == []


def test_what_was_skipped_while_a_write_ran_is_stored_after_it(scene: Scene) -> None:
    scene.fetch(A)
    token = scene.acknowledge(A, 0, 19, ACCEPT)
    scene.unreadable = {20}
    scene.produce(1)
    assert scene.fetch(B) == [] and scene.partition.store_start() == []
    scene.write()
    assert scene.answers[token] is ErrorCode.none and scene.durable_start == 25


def test_records_that_compaction_removed_do_not_hold_up_the_partition(scene: Scene) -> None:
    scene.fetch(A)
    scene.run(scene.partition.release(A, 0))
    offset = scene.partition.next_fetch_offset
    acquired = scene.partition.acquire(B, offset, [FetchedBatch(7, 9), FetchedBatch(15, 19)], Limits(500, 500), 0)
    assert acquired == [Acquired(7, 9, 2), Acquired(15, 19, 2)]
    assert scene.partition.start_offset == 7


def test_records_that_retention_deleted_can_still_be_acknowledged_once(scene: Scene) -> None:
    scene.fetch(A)
    scene.partition.log_start_moved(12)
    assert (scene.partition.start_offset, scene.states()) == (12, [(12, 19, "ACQUIRED", 1)])
    assert scene.settle(B, 0, 3, ACCEPT) is ErrorCode.invalid_record_state
    assert scene.settle(A, 0, 14, ACCEPT) is ErrorCode.none
    assert scene.settle(A, 0, 3, ACCEPT) is ErrorCode.invalid_record_state
    assert scene.durable_start == 15


@pytest.mark.parametrize("error", [ErrorCode.fenced_leader_epoch, ErrorCode.fenced_state_epoch])
def test_a_fenced_leader_delivers_and_acknowledges_nothing_more(scene: Scene, error: ErrorCode) -> None:
    scene.fetch(A, 5)
    tokens = [scene.acknowledge(A, 0, 1, ACCEPT), scene.acknowledge(A, 2, 3, ACCEPT)]
    scene.write(error)
    assert [scene.answers[token] for token in tokens] == [error, error]
    assert scene.fetch(B) == [] and not scene.partition.can_acquire
    assert scene.settle(A, 4, 4, ACCEPT) is error
    assert scene.partition.next_deadline_ms() is None


def test_dead_letters_are_archived_after_they_are_copied() -> None:
    scene = Scene(has_dead_letters=True, delivery_count_limit=2)
    scene.produce(2)
    scene.fetch(A)
    assert scene.settle(A, 0, 4, REJECT) is ErrorCode.none
    assert scene.dead_letters == [DeadLetter(0, 4, 1)] and scene.partition.start_offset == 0
    scene.load()
    assert scene.dead_letters == [DeadLetter(0, 4, 1)] * 2, "a new leader copies them again"
    scene.run(scene.partition.dead_letter_written(0, 4))
    scene.write()
    assert (scene.partition.start_offset, scene.durable_start) == (5, 5)
    for _ in range(2):
        assert scene.fetch(A)[0].first_offset == 5
        scene.pass_time(LOCK_MS)
    assert scene.dead_letters[-1] == DeadLetter(5, 9, 2)


steps = st.lists(
    st.tuples(
        st.sampled_from(
            (
                "fetch",
                "strict",
                "accept",
                "release",
                "reject",
                "renew",
                "time",
                "write",
                "fail",
                "load",
                "close",
                "trim",
            )
        ),
        st.integers(0, 39),
        st.integers(0, 9),
        st.sampled_from((A, B)),
    ),
    max_size=60,
)


@settings(max_examples=150)
@given(steps)
def test_no_record_is_lost_accepted_twice_or_delivered_after_an_acceptance(plan: list[Any]) -> None:
    """Random members, failed writes and new leaders. The model knows what was answered with success."""
    scene = Scene(partition_max_record_locks=15, delivery_count_limit=100)
    scene.produce(8)
    accepted: set[int] = set()
    unknown: set[int] = set()
    deleted = 0
    pending: dict[int, range] = {}

    def check_answers() -> None:
        for token, asked in list(pending.items()):
            if token in scene.answers:
                del pending[token]
                if scene.answers[token] is ErrorCode.none:
                    counted = {offset for offset in asked if offset >= deleted}
                    assert not accepted & counted, "accepted twice"
                    accepted.update(counted)
                elif scene.answers[token] is not ErrorCode.invalid_record_state:
                    unknown.update(asked)

    for step, first, size, member in plan:
        last = first + size
        match step:
            case "fetch" | "strict":
                for got in scene.fetch(member, size + 1, strict=step == "strict"):
                    offsets = set(range(got.first_offset, got.last_offset + 1))
                    assert not offsets & accepted, "delivered after an acceptance"
                    assert got.delivery_count >= 1
            case "accept":
                token = scene.acknowledge(member, first, last, ACCEPT)
                pending[token] = range(first, last + 1)
            case "release" | "reject" | "renew":
                if step != "reject":
                    scene.acknowledge(member, first, last, RELEASE if step == "release" else RENEW)
            case "time":
                scene.pass_time(size * 200)
            case "write":
                scene.write()
            case "fail":
                scene.write(ErrorCode.request_timed_out)
            case "load":
                for asked in pending.values():
                    unknown.update(asked)
                pending.clear()
                scene.load()
            case "close":
                scene.run(scene.partition.release(member, 0))
            case "trim":
                if first > 36:
                    deleted = max(deleted, size)
                    scene.partition.log_start_moved(deleted)
        check_answers()
        entries = list(scene.partition.entries())
        at = scene.partition.start_offset
        for begin, end, _, _, _ in entries:
            assert begin == at and end >= begin, "entries cover all offsets"
            at = end + 1
        assert at == scene.partition.end_offset
        assert scene.partition._in_flight == sum(e - b + 1 for b, e, state, _, _ in entries if state not in DONE)
        available = (b for b, _, state, _, _ in entries if state is DeliveryState.AVAILABLE)
        assert scene.partition.next_fetch_offset == next(available, at)
        for offset in range(max(deleted, 0), scene.partition.start_offset):
            assert offset in accepted | unknown, "the start offset passed a record that nobody accepted"
    scene.write()
    check_answers()
    scene.load()
    remaining: set[int] = set()
    for _ in range(40):
        scene.partition.log_start_moved(deleted)
        for got in scene.fetch(B):
            remaining.update(range(got.first_offset, got.last_offset + 1))
            scene.settle(B, got.first_offset, got.last_offset, ACCEPT)
    assert not remaining & accepted
    assert remaining | accepted | unknown | set(range(deleted)) >= set(range(40)), "a record was lost"
