"""The log compared with a list: both hold the same batches; after a crash, the log has at least what was synced.

The transactions of the log follow from the same list.
"""

from copy import deepcopy
from dataclasses import replace
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.storage.faulty_disk import FaultyDisk
from tests.storage.helpers import FOLDER, NOW_MS, SMALL, append, batch, headers, read, reopen, sync

from chronik.storage.log import Log
from chronik.wire.batch import encode_marker
from chronik.wire.errors import ErrorCode, KafkaError

CONFIG = replace(SMALL, cleanup_delete=False)


class LogMachine(RuleBasedStateMachine):
    """The model is a list of (base offset, last offset, epoch) in the order of appends.

    `roles` has the producer of each transactional batch, and the decision if it is a marker, by base offset.
    """

    def __init__(self) -> None:
        super().__init__()
        self.disk = FaultyDisk()
        self.model: list[tuple[int, int, int]] = []
        self.roles: dict[int, tuple[int, bool | None]] = {}
        self.start = 0
        self.end = 0
        self.synced_end = 0
        self.epoch = 0
        self.now_ms = NOW_MS

    @initialize(is_warm=st.booleans())
    def open(self, is_warm: bool) -> None:
        self.disk.is_warm = is_warm
        self.log: Log = reopen(self.disk, CONFIG)

    # -- operations ----------------------------------------------------------------------------------------------------

    @rule(counts=st.lists(st.integers(1, 4), min_size=1, max_size=3), value_bytes=st.integers(0, 400))
    def append(self, counts: list[int], value_bytes: int) -> None:
        self.now_ms += 1
        records = b"".join(batch(count, value_bytes=value_bytes, timestamp_ms=self.now_ms) for count in counts)
        result = append(self.log, records, epoch=self.epoch, now_ms=self.now_ms)
        assert result.base_offset == self.end
        for count in counts:
            self.roles.pop(self.end, None)
            self.model.append((self.end, self.end + count - 1, self.epoch))
            self.end += count
        assert result.last_offset == self.end - 1

    @rule(producer_id=st.integers(1, 3), count=st.integers(1, 2), value_bytes=st.integers(0, 400))
    def append_in_transaction(self, producer_id: int, count: int, value_bytes: int) -> None:
        records = batch(
            count,
            value_bytes=value_bytes,
            producer_id=producer_id,
            producer_epoch=0,
            base_sequence=0,
            is_transactional=True,
        )
        assert append(self.log, records, epoch=self.epoch).base_offset == self.end
        self.roles[self.end] = producer_id, None
        self.model.append((self.end, self.end + count - 1, self.epoch))
        self.end += count

    @rule(producer_id=st.integers(1, 3), is_commit=st.booleans())
    def end_transaction(self, producer_id: int, is_commit: bool) -> None:
        marker = encode_marker(producer_id, 0, is_commit, 0, self.now_ms)
        assert self.log.append_marker(marker, self.epoch, self.now_ms).base_offset == self.end
        self.roles[self.end] = producer_id, is_commit
        self.model.append((self.end, self.end, self.epoch))
        self.end += 1

    @rule()
    def roll(self) -> None:
        self.log.roll(self.now_ms)

    @rule()
    def sync(self) -> None:
        sync(self.log)
        self.synced_end = self.end
        assert self.log.synced_end_offset == self.end

    @rule()
    def new_epoch(self) -> None:
        self.epoch += 1
        self.log.start_epoch(self.epoch)

    @rule(data=st.data(), max_bytes=st.integers(0, 3000))
    def read(self, data: st.DataObject, max_bytes: int) -> None:
        offset = data.draw(st.integers(self.start, self.end))
        upto = data.draw(st.integers(offset, self.end))
        found = headers(read(self.log, offset, max_bytes, upto)) if offset < self.end else []
        expected = [(first, last) for first, last, _ in self.model if last >= offset and last < upto]
        if expected and expected[0][0] > offset:
            expected = []
        assert [(h.base_offset, h.last_offset) for _, h in found] == expected[: len(found)]
        assert found or not expected
        assert len(found) <= 1 or sum(h.size_bytes for _, h in found) <= max_bytes

    @rule(data=st.data())
    def read_out_of_range(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from([self.start - 1, self.end + 1]))
        try:
            self.log.read(offset, 1000, self.end)
        except KafkaError as error:
            assert error.code == ErrorCode.offset_out_of_range
        else:
            raise AssertionError("an offset out of range was read")

    @precondition(lambda self: self.end > self.start)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        offset = data.draw(st.integers(self.start, self.end))
        self.log.truncate_to(offset)
        if offset == self.end:
            return
        if offset <= self.start:
            self.model, self.end = [], offset
        else:
            dropped = [entry for entry in self.model if entry[1] >= offset]
            self.model = self.model[: len(self.model) - len(dropped)]
            self.end = min(offset, dropped[0][0])
        self.start = min(self.start, self.end)
        self.synced_end = min(self.synced_end, self.end)

    @rule(data=st.data())
    def delete_records(self, data: st.DataObject) -> None:
        self.start = data.draw(st.integers(self.start, self.end))
        self.log.increment_log_start(self.start).run()

    # -- faults --------------------------------------------------------------------------------------------------------

    @rule()
    def close_and_open(self) -> None:
        assert self.log.close()
        self.disk.kill()
        self.log = reopen(self.disk, CONFIG)
        assert self.log.recovery is None
        self.synced_end = self.end

    @rule()
    def kill_and_open(self) -> None:
        self.disk.kill()
        self.log = reopen(self.disk, CONFIG, self.synced_end)
        self.synced_end = self.end

    @rule(seed=st.integers(0, 1 << 30))
    def lose_power_and_open(self, seed: int) -> None:
        self.disk.power_loss(Random(seed))
        self.log = reopen(self.disk, CONFIG, self.synced_end)
        assert self.log.recovery is None or not self.log.recovery.is_damaged
        assert self.synced_end <= self.log.log_end_offset <= max(self.end, self.start)
        self.end = self.log.log_end_offset
        self.model = [entry for entry in self.model if entry[1] < self.end]
        self.synced_end = self.end

    # -- invariants ----------------------------------------------------------------------------------------------------

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        if not hasattr(self, "log"):
            return
        assert (self.log.log_start_offset, self.log.log_end_offset) == (self.start, self.end)
        assert self.log.synced_end_offset >= self.synced_end
        assert self.log.size_bytes == sum(segment.size_bytes for segment in self.log._segments.all)
        offset = self.start
        found: list[tuple[int, int, int]] = []
        while offset < self.end:
            batches = headers(read(self.log, offset))
            assert batches, f"nothing at {offset}"
            found += [(h.base_offset, h.last_offset, h.partition_leader_epoch) for _, h in batches]
            offset = batches[-1][1].next_offset
        assert found == [entry for entry in self.model if entry[1] >= self.start]

    @invariant()
    def knows_its_epochs(self) -> None:
        if not hasattr(self, "log"):
            return
        for first, _, epoch in self.model:
            if first >= self.start:
                assert self.log.epoch_of(first) == epoch

    def decisions(self) -> list[tuple[int, int, int | None, bool]]:
        """Return base offset, first offset, marker offset and decision for each transactional batch of the model."""
        batches: list[tuple[int, int, int | None, bool]] = []
        ongoing: dict[int, list[int]] = {}
        for base, _, _ in self.model:
            producer_id, decision = self.roles.get(base, (-1, None))
            if decision is not None:
                offsets = ongoing.pop(producer_id, [])
                batches += [(offset, offsets[0], base, decision) for offset in offsets]
            elif producer_id >= 0:
                ongoing.setdefault(producer_id, []).append(base)
        return batches + [(offset, each[0], None, False) for each in ongoing.values() for offset in each]

    @rule(data=st.data())
    def check_last_stable_offset(self, data: st.DataObject) -> None:
        watermark = data.draw(st.integers(self.start, self.end))
        undecided = [each for each in self.decisions() if each[2] is None or each[2] >= watermark]
        # At a restart, the log forgets the part of a transaction that was deleted.
        lowest = min([watermark, *(max(self.start, first) for _, first, _, _ in undecided)])
        highest = min([watermark, *(base for base, *_ in undecided if base >= self.start)])
        before = deepcopy(self.log.producers.transactions)
        assert lowest <= self.log.last_stable_offset(watermark) <= highest
        self.log.producers.transactions = before

    @invariant()
    def knows_its_transactions(self) -> None:
        if not hasattr(self, "log"):
            return
        log = self.log
        open_ = {producer_id: state.first_offset for producer_id, state in log.open_transactions()}
        assert open_ == {
            each: state.first_offset for each, state in log.producers.items() if state.first_offset is not None
        }
        job = log.aborted_job(self.start, self.end)
        aborted = [] if job is None else job()
        assert [each.first_offset for each in aborted] == sorted(each.first_offset for each in aborted)
        for base, _, marker, is_commit in self.decisions():
            if base < self.start:
                continue
            producer_id, _ = self.roles[base]
            covering = [e for e in aborted if e.producer_id == producer_id and e.first_offset <= base < e.last_offset]
            assert len(covering) == (marker is not None and not is_commit)
            assert (producer_id in open_ and (open_[producer_id] or 0) <= base) == (marker is None)
            if covering:
                job = log.aborted_job(base, base + 1)
                assert job is not None and covering[0] in job()

    def teardown(self) -> None:
        if hasattr(self, "log"):
            assert self.log.close()
            assert self.disk.open_files == 0
            assert self.disk.exists(FOLDER)


TestLog = LogMachine.TestCase
TestLog.settings = settings(max_examples=80, stateful_step_count=20)
