"""Transactions through random appends, truncations, restarts, lost files, compactions, deletions, and a follower.

The model keeps all batches. From them follow the last stable offset and the decision on every transaction; the log must
give the same answers whatever compaction and retention have removed.
"""

from collections.abc import Iterator
from dataclasses import replace
from inspect import signature
from random import Random
from typing import NamedTuple

import pytest
from tests.storage.faulty_disk import FaultyDisk
from tests.storage.helpers import FOLDER, NOW_MS, SMALL, append, batch, headers, open_transactions, read, reopen, sync

from chronik.replication.follower import (
    PAUSE_MS_MAX,
    Append,
    FetchedBatch,
    LeaderAnswer,
    LocalLog,
    PartitionFollower,
    Truncate,
)
from chronik.storage.log import Log
from chronik.wire.batch import BatchHeader, decode_batch, encode_marker, read_marker

CONFIG = replace(
    SMALL,
    segment_bytes=600,
    cleanup_compact=True,
    cleanup_delete=False,
    min_cleanable_ratio=0.0,
    delete_retention_ms=1000,
    producer_expiration_ms=1 << 50,
)
SEEDS = 120


def between(low: int, high: int, percent: int) -> int:
    return low + (high - low) * percent // 100


class Appended(NamedTuple):
    """A batch of the model: a marker has a decision, other batches have a key."""

    base: int
    last: int
    producer_id: int
    is_commit: bool | None
    key: bytes


class Transaction(NamedTuple):
    producer_id: int
    bases: list[int]
    marker: int | None
    is_commit: bool | None


def transactions(model: list[Appended]) -> list[Transaction]:
    ended: list[Transaction] = []
    ongoing: dict[int, list[int]] = {}
    for each in model:
        if each.is_commit is not None:
            if each.producer_id in ongoing:
                bases = ongoing.pop(each.producer_id)
                ended.append(Transaction(each.producer_id, bases, each.base, each.is_commit))
        elif each.producer_id >= 0:
            ongoing.setdefault(each.producer_id, []).append(each.base)
    return ended + [Transaction(producer_id, bases, None, None) for producer_id, bases in ongoing.items()]


def fetches(log: Log, upto: int, max_bytes: int, offset: int | None = None) -> Iterator[bytes]:
    """Read the log in several fetches."""
    offset = log.log_start_offset if offset is None else offset
    while offset < upto:
        data = read(log, offset, max_bytes, upto)
        if not data:
            break
        yield data
        offset = headers(data)[-1][1].next_offset


def visible(log: Log, upto: int, max_bytes: int) -> list[tuple[BatchHeader, list[int]]]:
    """Return the batches and offsets that a read_committed consumer gets, by the algorithm of Kafka's consumers."""
    seen: list[tuple[BatchHeader, list[int]]] = []
    for data in fetches(log, upto, max_bytes):
        found = headers(data)
        job = log.aborted_job(found[0][1].base_offset, found[-1][1].next_offset)
        aborted = [] if job is None else job()
        assert aborted == sorted(aborted, key=lambda each: each.first_offset)
        ongoing: set[int] = set()
        for at, header in found:
            while aborted and aborted[0].first_offset <= header.last_offset:
                ongoing.add(aborted.pop(0).producer_id)
            if header.is_control:
                if not read_marker(data, at).is_commit:
                    ongoing.discard(header.producer_id)
            elif not (header.is_transactional and header.producer_id in ongoing):
                offsets = [record.offset for record in decode_batch(data, at)]
                seen.append((header, [offset for offset in offsets if offset >= log.log_start_offset]))
    return seen


class TransactionModel:
    """`hw` is the high watermark. Compaction ends below it; only the follower, which is not in sync, truncates there.

    `deleted_upto` is the log start that DeleteRecords set, which lasts; retention may be undone by a power loss.
    """

    def __init__(self, keys_max: int) -> None:
        self.disk = FaultyDisk()
        self.model: list[Appended] = []
        self.start = self.end = self.hw = self.synced_end = self.deleted_upto = 0
        self.now_ms = NOW_MS
        self.follower = reopen(FaultyDisk(), CONFIG)
        self.role = PartitionFollower(1, 0, 0)
        self.config = replace(CONFIG, compaction_keys_max=keys_max)
        self.log = reopen(self.disk, self.config)

    # -- appends -------------------------------------------------------------------------------------------------------

    def note(self, count: int, producer_id: int, is_commit: bool | None, key: bytes = b"") -> None:
        self.model.append(Appended(self.end, self.end + count - 1, producer_id, is_commit, key))
        self.end += count

    def put(self, key: bytes, count: int) -> None:
        append(self.log, batch(count, keys=[key] * count), now_ms=self.now_ms)
        self.note(count, -1, None, key)

    def send(self, producer_id: int, key: bytes, count: int) -> None:
        records = batch(
            count,
            keys=[key] * count,
            producer_id=producer_id,
            producer_epoch=0,
            base_sequence=0,
            is_transactional=True,
        )
        append(self.log, records, now_ms=self.now_ms)
        self.note(count, producer_id, None, key)

    def finish(self, producer_id: int, is_commit: bool) -> None:
        self.log.append_marker(encode_marker(producer_id, 0, is_commit, 0, self.now_ms), 0, self.now_ms)
        self.note(1, producer_id, is_commit)

    def roll(self) -> None:
        self.log.roll(self.now_ms)

    def sync(self) -> None:
        sync(self.log)
        self.synced_end = self.end

    def raise_watermark(self, percent: int) -> None:
        self.hw = between(self.hw, self.end, percent)

    # -- what removes records ------------------------------------------------------------------------------------------

    def compact(self, log: Log, watermark: int) -> None:
        job = log.compaction_job(self.now_ms, watermark)
        if job is not None:
            job.run()
            log.finish_compaction(job).run()

    def compact_log(self, days: int) -> None:
        self.now_ms += days * 86_400_000
        sync(self.log)
        self.synced_end = self.end
        self.compact(self.log, self.hw)

    def compact_until_markers_go(self) -> None:
        """A marker goes with the third pass: after the records of its transaction, and after its delete horizon."""
        self.expire_producers()
        for _ in range(3):
            self.put(b"d", 1)
            self.roll()
            self.raise_watermark(100)
            self.compact_log(1)

    def compact_follower(self) -> None:
        self.compact(self.follower, min(self.hw, self.follower.log_end_offset))

    def expire_producers(self) -> None:
        self.log.producers.expire(1 << 60)

    def truncate(self, percent: int) -> None:
        self.cut(between(max(self.start, self.hw), self.end, percent))

    def cut(self, offset: int) -> None:
        self.log.truncate_to(offset)
        if offset >= self.end:
            return
        self.end = self.log.log_end_offset
        self.model = [each for each in self.model if each.last < self.end]
        self.start, self.deleted_upto = min(self.start, self.end), min(self.deleted_upto, self.end)
        self.hw, self.synced_end = min(self.hw, self.end), min(self.synced_end, self.end)
        self.follower.truncate_to(self.end)
        self.role.truncated(self.follower.log_end_offset)

    def delete_records(self, percent: int) -> None:
        self.start = self.deleted_upto = between(self.start, max(self.start, self.hw), percent)
        self.log.increment_log_start(self.start).run()

    def retain(self) -> None:
        self.log.configure(replace(self.config, cleanup_delete=True, retention_bytes=1200))
        job = self.log.apply_retention(self.now_ms, self.hw)
        if job is not None:
            job.run()
        self.log.configure(self.config)
        self.start = self.log.log_start_offset

    # -- restarts and damage -------------------------------------------------------------------------------------------

    def restart(self, is_clean: bool, lost: str) -> None:
        if is_clean:
            assert self.log.close()
        self.disk.kill()
        names = self.disk.listdir(FOLDER)
        snapshots = [name for name in names if name.endswith(".snapshot")]
        indexes = [name for name in names if name.endswith(".txnindex")]
        match lost:
            case ".snapshot" | ".txnindex":
                for name in snapshots if lost == ".snapshot" else indexes:
                    self.disk.remove(f"{FOLDER}/{name}")
            case "newest" if snapshots:
                self.disk.content(f"{FOLDER}/{snapshots[-1]}")[10] ^= 1
            case "rotten" if indexes:
                self.disk.content(f"{FOLDER}/{indexes[0]}")[5] ^= 1
        self.log = reopen(self.disk, self.config, self.synced_end, self.now_ms)
        self.synced_end = self.end

    def lose_power(self, seed: int) -> None:
        self.disk.power_loss(Random(seed))
        self.log = reopen(self.disk, self.config, self.synced_end, self.now_ms)
        assert self.synced_end <= self.log.log_end_offset <= self.end
        assert self.deleted_upto <= self.log.log_start_offset <= self.start
        self.start = self.log.log_start_offset
        self.end = self.synced_end = self.log.log_end_offset
        self.model = [each for each in self.model if each.last < self.end]
        self.hw = min(self.hw, self.end)
        self.follower.truncate_to(self.end)
        self.role.truncated(self.follower.log_end_offset)

    def damage_an_index_and_scrub(self, is_missing: bool) -> None:
        self.log.roll(self.now_ms)
        self.log.write_aborted()
        indexes = [name for name in self.disk.listdir(FOLDER) if name.endswith(".txnindex")]
        if indexes and is_missing:
            self.disk.remove(f"{FOLDER}/{indexes[0]}")
        elif indexes:
            self.disk.content(f"{FOLDER}/{indexes[0]}")[5] ^= 1
        bad: list[int] = []
        for base_offset in self.log.closed_segments():
            scrub = self.log.scrub(base_offset)
            assert scrub is not None
            while not scrub.is_done:
                scrub.step()
            assert not scrub.damage
            if scrub.has_bad_aborted:
                bad.append(base_offset)
                assert self.log.indexes_rebuilt(scrub, self.log.rebuild_indexes_job(scrub)())
        assert bad == [int(name.removesuffix(".txnindex")) for name in indexes[:1]]

    # -- the follower, which is not in sync ----------------------------------------------------------------------------

    def follow(self, responses: int, max_bytes: int) -> None:
        self.now_ms += 2 * PAUSE_MS_MAX
        leader, follower = self.log, self.follower
        for _ in range(responses):
            offset = follower.log_end_offset
            if offset < leader.log_start_offset:
                offset = leader.log_start_offset
                follower.truncate_fully(offset)
                self.role.truncated(offset)
            data = read(leader, offset, max_bytes) if offset < self.end else b""
            batches = headers(data)
            if not batches:
                break
            if batches[0][1].base_offset < offset:
                # The leader's log starts inside this batch.
                follower.truncate_fully(batches[0][1].base_offset)
            last_epoch = follower.epoch_of(follower.log_end_offset - 1)
            is_empty = follower.log_end_offset == follower.log_start_offset
            own = LocalLog(
                follower.log_start_offset,
                follower.log_end_offset,
                -1 if is_empty else last_epoch,
                follower.end_offset_for_epoch,
                follower.undecided_from,
            )
            fetched = [FetchedBatch(h.base_offset, h.next_offset, h.partition_leader_epoch) for _, h in batches]
            answer = LeaderAnswer(own.log_end_offset, own.last_epoch, self.hw, 0, fetched, received_ms=self.now_ms)
            match self.role.decide(answer, own):
                case Append():
                    follower.append_as_follower(data, batches, self.now_ms)
                case Truncate(offset=offset, fetches_again=True):
                    follower.truncate_to(offset)
                    self.role.truncated(follower.log_end_offset)
                case decision:
                    raise AssertionError(decision)
        sync(follower)

    # -- invariants ----------------------------------------------------------------------------------------------------

    def undecided(self, watermark: int) -> list[Transaction]:
        return [each for each in transactions(self.model) if each.marker is None or each.marker >= watermark]

    def the_last_stable_offset_is_right(self) -> None:
        undecided = self.undecided(self.hw)
        # At a restart, the log forgets the part of a transaction that was deleted.
        lowest = min([self.hw, *(max(self.start, each.bases[0]) for each in undecided)])
        remaining = [base for each in undecided for base in each.bases if base >= self.start]
        assert lowest <= self.log.last_stable_offset(self.hw) <= min([self.hw, *remaining])

    def consumers_see_what_is_committed(self) -> None:
        self.check_visible(self.log, self.log.last_stable_offset(self.hw))
        end = min(self.hw, self.follower.log_end_offset)
        self.check_visible(self.follower, self.follower.last_stable_offset(end))

    def check_visible(self, log: Log, stable: int) -> None:
        decisions = {base: each for each in transactions(self.model) for base in each.bases}
        batches = {each.base: each for each in self.model}
        latest: dict[bytes, int] = {}
        for header, offsets in visible(log, stable, Random(stable).choice([150, 400, 5000])):
            of = decisions.get(header.base_offset)
            assert of is None or of.is_commit or not offsets, f"{header.base_offset} is visible, it is in {of}"
            for offset in offsets:
                latest[batches[header.base_offset].key] = offset
        if log is not self.log:
            return
        expected: dict[bytes, int] = {}
        for each in self.model:
            of = decisions.get(each.base)
            if each.is_commit is None and self.start <= each.last < stable and (of is None or of.is_commit):
                expected[each.key] = each.last
        assert latest == expected

    def the_log_knows_its_open_transactions(self) -> None:
        self.check_open(self.log, self.end)
        self.check_open(self.follower, self.follower.log_end_offset)

    def check_open(self, log: Log, end: int) -> None:
        start = max(self.start, log.log_start_offset)
        bases = {header.base_offset for data in fetches(log, end, 5000) for _, header in headers(data)}
        undecided = [
            each for each in self.undecided(end) if any(base >= start and base in bases for base in each.bases)
        ]
        if log is self.log:
            assert all(base in bases for each in self.undecided(self.hw) for base in each.bases if base >= start)
        known = open_transactions(log)
        # Those of which no record remains may be known or not.
        assert {each.producer_id for each in undecided} <= set(known)
        whole = {each.producer_id for each in self.undecided(end) if each.bases[0] < end}
        assert set(known) <= whole

    def close(self) -> None:
        assert self.log.close() and self.disk.open_files == 0


WEIGHTS = {
    "put": 6,
    "send": 14,
    "finish": 12,
    "roll": 8,
    "sync": 2,
    "raise_watermark": 10,
    "compact_log": 6,
    "compact_until_markers_go": 4,
    "compact_follower": 2,
    "expire_producers": 3,
    "truncate": 2,
    "delete_records": 1,
    "retain": 1,
    "restart": 4,
    "lose_power": 2,
    "damage_an_index_and_scrub": 2,
    "follow": 8,
}


def arguments(step: str, random: Random) -> dict[str, object]:
    values: dict[str, object] = {
        "producer_id": random.randint(1, 3),
        "key": random.choice([b"a", b"b", b"c"]),
        "count": random.randint(1, 2),
        "is_commit": random.random() < 0.5,
        "percent": random.choice([100, random.randint(0, 100)]),
        "days": random.randint(0, 1),
        "is_clean": random.random() < 0.4,
        "lost": random.choice(["", "", ".snapshot", "newest", ".txnindex", "rotten"]),
        "seed": random.randint(0, 1 << 30),
        "is_missing": random.random() < 0.5,
        "responses": random.randint(1, 30),
        "max_bytes": random.choice([100, 400]),
    }
    return {name: values[name] for name in signature(getattr(TransactionModel, step)).parameters if name != "self"}


def test_a_log_and_its_follower_know_every_decision_of_the_model() -> None:
    for seed in range(SEEDS):
        random = Random(seed)
        model = TransactionModel(keys_max=random.choice([1, 2, 1000]))
        steps: list[str] = []
        try:
            for step in random.choices(list(WEIGHTS), list(WEIGHTS.values()), k=random.choice([20, 40, 60])):
                chosen = arguments(step, random)
                steps.append(f"{step}({', '.join(f'{name}={value!r}' for name, value in chosen.items())})")
                getattr(model, step)(**chosen)
                model.the_last_stable_offset_is_right()
                model.consumers_see_what_is_committed()
                model.the_log_knows_its_open_transactions()
            model.close()
        except Exception as error:
            pytest.fail(f"seed {seed}: {error!r} after\n" + "\n".join(steps))
