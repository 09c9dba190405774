"""Any sequence of events keeps the promises: markers follow the log, and a new coordinator continues where it ends."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.transactions.driver import ID, PARTITIONS, Driver

from chronik.groups.records import group_partition
from chronik.transactions.coordinator import ProducerIdAndEpoch
from chronik.transactions.records import read_value
from chronik.transactions.transaction import TransactionMetadata, TransactionState
from chronik.wire.errors import ErrorCode

PARTITION = group_partition(ID, PARTITIONS)
COMMITS = {TransactionState.PREPARE_COMMIT: True, TransactionState.PREPARE_ABORT: False}


class AnyEvents(RuleBasedStateMachine):
    """Producers of one transactional id, zombies among them, appends that fail or hang, and failovers."""

    @initialize()
    def begin(self) -> None:
        self.driver = Driver()
        self.producers = [ProducerIdAndEpoch(1, 0)]
        self.waiting: list[tuple[int, ProducerIdAndEpoch, bool]] = []
        self.committed: set[ProducerIdAndEpoch] = set()

    def records(self) -> list[TransactionMetadata]:
        return [read_value(value) for _, value in self.driver.log[PARTITION] if value is not None]

    @rule(recovers=st.booleans(), which=st.integers(0, 9))
    def init(self, recovers: bool, which: int) -> None:
        expected = self.producers[-1 - which % len(self.producers)] if recovers else None
        token = self.driver.init(expected)
        if token in self.driver.replies and self.driver.error(token) is ErrorCode.none:
            self.producers.append(self.driver.producer(token))

    @rule(which=st.integers(0, 3), index=st.integers(0, 3))
    def add(self, which: int, index: int) -> None:
        self.driver.add(self.producers[-1 - which % len(self.producers)], ("orders", index))

    @rule(which=st.integers(0, 3), commit=st.booleans(), version=st.sampled_from([0, 2]))
    def end(self, which: int, commit: bool, version: int) -> None:
        producer = self.producers[-1 - which % len(self.producers)]
        token = self.driver.end(producer, commit=commit, version=version)
        self.waiting.append((token, producer, commit))
        if token in self.driver.replies and self.driver.error(token) is ErrorCode.none:
            self.producers.append(self.driver.producer(token))

    @rule()
    def hold_appends(self) -> None:
        self.driver.holds_appends = True

    @rule(error=st.sampled_from([ErrorCode.none, ErrorCode.request_timed_out]), is_written=st.booleans())
    def settle(self, error: ErrorCode, is_written: bool) -> None:
        self.driver.holds_appends = False
        self.driver.settle(error, is_written=is_written or error is ErrorCode.none)

    @rule()
    def write_markers(self) -> None:
        for marker in self.driver.write_markers():
            decided = [each for each in self.records() if each.state in COMMITS]
            assert any(
                (each.producer_id, each.producer_epoch, COMMITS[each.state])
                == (marker.producer_id, marker.producer_epoch, marker.is_commit)
                and set(marker.partitions) == each.partitions
                for each in decided
            ), "a marker without a record"

    @rule(elapsed_ms=st.sampled_from([1, 1_000, 70_000]))
    def tick(self, elapsed_ms: int) -> None:
        self.driver.tick(elapsed_ms)

    @rule()
    def fail_over(self) -> None:
        driver = self.driver
        driver.unload(PARTITION)
        self.driver = driver.failed_over()
        self.waiting = []

    @invariant()
    def outcome_never_changes(self) -> None:
        """Of the records of one producer epoch after its first markers, none has another outcome."""
        outcomes: dict[tuple[int, int], set[bool]] = {}
        for token, producer, commit in self.waiting:
            values = self.driver.replies.get(token)
            if values is not None and values["error_code"] is ErrorCode.none and commit:
                self.committed.add(producer)
        for marker in self.driver.markers:
            outcomes.setdefault((marker.producer_id, marker.producer_epoch), set()).add(marker.is_commit)
        assert all(len(each) == 1 for each in outcomes.values()), "two outcomes wait for their markers"

    @invariant()
    def memory_is_what_the_log_says(self) -> None:
        records = self.records()
        if self.driver.held or self.driver.holds_appends or not records:
            return
        error, known = self.driver.coordinator.describe(ID)
        if error is ErrorCode.none and known is not None:
            # Of a decided transaction, only the partitions without a marker are described.
            assert any(
                replace(each, partitions=known.partitions) == known and known.partitions <= each.partitions
                for each in records
            )

    def teardown(self) -> None:
        """When faults are over, the transaction ends within its timeout."""
        self.driver.holds_appends = False
        self.driver.settle()
        self.driver.tick(120_000)
        self.driver.write_markers()
        self.driver.tick(1_000)
        if self.records():
            assert self.driver.state().state not in (TransactionState.ONGOING, *COMMITS)


TestAnyEvents = AnyEvents.TestCase
