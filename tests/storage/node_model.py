"""A node's logs and its commit log on a faulty disk, without a loop: random operations and crashes, and what survives.

`Node` does what `node.replicas` does with logs: group commit with frames, flushes before files are recycled,
truncation, compaction, deletion of records, removal of replicas, stops, and starts without a commit log.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from uuid import UUID

from tests.storage.faulty_disk import Crash, FaultyDisk
from tests.storage.helpers import NOW_MS, SMALL, append, batch, read_all

from chronik.storage.commit_log import CommitLog, LogFrames, LogId
from chronik.storage.folder import NO_EPOCH, DataFolder, RecoveryPoint
from chronik.storage.log import Log
from chronik.storage.syncing import SyncJob

PATH = "/data"
COMMIT_LOG_BYTES = 128 * 1024
CONFIG = replace(SMALL, cleanup_compact=True, cleanup_delete=True, min_cleanable_ratio=0.0)
LOGS = 4


@dataclass
class Copy:
    """What one replica must hold."""

    topic_id: UUID
    values: dict[int, bytes] = field(default_factory=dict)
    """All appended values, by offset."""
    acked: int = 0
    """The end of what was acknowledged."""
    before: tuple[dict[int, bytes], int] | None = None
    """The two before a truncation that runs or was interrupted: a later power loss may show them."""
    is_going: bool = False
    """The replica is being removed, so that nothing of it has to survive."""


class Node:
    """One node, and a model of what its logs must hold. `has_commit_log` may change at each start."""

    def __init__(self, seed: str) -> None:
        self.random = Random(seed)
        self.disk = FaultyDisk()
        self.copies: dict[int, Copy] = {}
        self.logs: dict[int, Log] = {}
        self.folder: DataFolder
        self.commit_log: CommitLog | None = None
        self.unflushed: dict[int, dict[int, None]] = {}
        self.frames = self.replayed = self.voids = self.recycled = 0
        self.numbers = 0

    # -- starts and crashes --------------------------------------------------------------------------------------------

    def start(self, has_commit_log: bool) -> None:
        self.logs, self.unflushed, self.commit_log = {}, {}, None
        self.folder = DataFolder.open(self.disk, PATH, 1, "cluster")
        report = self.folder.replayed
        assert report is None or not report.damage, report
        self.replayed += 0 if report is None else report.written_bytes
        if has_commit_log:
            self.commit_log = self.folder.begin_commit_log(self.uuid(), COMMIT_LOG_BYTES)
            while self.commit_log.wants_file:
                self.commit_log.add_file()
        else:
            self.folder.remove_commit_log()
        for index in range(LOGS):
            self.open_log(index)

    def uuid(self) -> UUID:
        return UUID(int=self.random.getrandbits(128), version=4)

    def open_log(self, index: int) -> None:
        copy = self.copies.setdefault(index, Copy(self.uuid()))
        topic = f"t{index}"
        point = self.folder.recovery_point(topic, 0, copy.topic_id)
        self.folder.claim_log(topic, 0, copy.topic_id, NOW_MS)
        log = Log.open(self.disk, self.folder.log_path(topic, 0), CONFIG, NOW_MS, point)
        assert log.recovery is None or not log.recovery.is_damaged, log.recovery
        if self.commit_log is not None:
            log.frames = LogFrames(self.commit_log, LogId(copy.topic_id, 0))
        self.logs[index] = log
        self.check(index)
        if point is None:
            self.folder.sync_names()
            self.folder.recovery_points[(topic, 0)] = RecoveryPoint(copy.topic_id, 0)
            self.write_points()

    def check(self, index: int) -> None:
        """Compare the log with the model, which then continues from what the log has."""
        copy, log = self.copies[index], self.logs[index]
        held = {record.offset: record.value or b"" for record in read_all(log)}
        states = [(copy.values, copy.acked), *([copy.before] if copy.before is not None else [])]
        matches = [
            all(values.get(offset) == value for offset, value in held.items())
            and (log.log_end_offset >= acked or copy.is_going)
            and all(offset in held for offset in values if log.log_start_offset <= offset < log.log_end_offset)
            for values, acked in states
        ]
        assert any(matches), f"t{index}: {held} of {states}, {log.log_start_offset}-{log.log_end_offset}"
        # Deleted records may reappear if a truncation is interrupted.
        deleted = {offset: value for offset, value in copy.values.items() if offset < log.log_start_offset}
        copy.values, copy.acked, copy.is_going = deleted | held, log.log_end_offset, False

    def write_points(self) -> None:
        points = {
            (f"t{index}", 0): RecoveryPoint(self.copies[index].topic_id, log.synced_end_offset)
            for index, log in self.logs.items()
        }
        self.folder.recovery_points_job({**self.folder.recovery_points, **points})()

    def stop(self) -> None:
        is_clean = all(log.close() for log in self.logs.values())
        assert is_clean
        points = {
            (f"t{index}", 0): RecoveryPoint(self.copies[index].topic_id, log.synced_end_offset)
            for index, log in self.logs.items()
        }
        self.folder.record_clean_shutdown(points, None, NO_EPOCH)
        for index, log in self.logs.items():
            self.copies[index].acked = log.log_end_offset
        if self.commit_log is not None:
            self.commit_log.close()
        self.folder.close()

    def crash(self, has_power: bool) -> None:
        if has_power:
            self.disk.kill()
        else:
            self.disk.power_loss(self.random)

    # -- operations ----------------------------------------------------------------------------------------------------

    def append(self, index: int) -> None:
        log, copy = self.logs[index], self.copies[index]
        for _ in range(self.random.randint(1, 4)):
            self.numbers += 1
            value = b"%d" % self.numbers + b"." * self.random.choice((0, 10, 400))
            copy.values[log.log_end_offset] = value
            append(log, batch(1, keys=[b"%d" % self.numbers], values=[value]), epoch=self.numbers // 50)

    def round(self) -> None:
        """Sync all logs as one round of group commit."""
        jobs = [(index, job) for index, log in self.logs.items() if (job := log.sync_job()) is not None]
        framed = [(index, job) for index, job in jobs if job.entry_bytes] if self.commit_log is not None else []
        serial = None
        if framed and self.random.random() < 0.9:
            assert self.commit_log is not None
            for _, job in framed:
                job.is_direct = False
            entries = [job.read_entry() for _, job in framed]
            serial = self.commit_log.write([entry for entry in entries if entry is not None])
            self.frames += serial is not None
        for index, job in jobs:
            if serial is not None and job.entry_bytes:
                job.framed(serial)
                self.unflushed.setdefault(serial, {})[index] = None
            else:
                job.is_direct = True
                job.run()
            self.acknowledge(index, job)

    def acknowledge(self, index: int, job: SyncJob) -> None:
        self.logs[index].synced(job)
        self.copies[index].acked = max(self.copies[index].acked, self.logs[index].synced_end_offset)

    def flush(self) -> None:
        """Sync the segments of all full files of the commit log, so that they are recycled."""
        for serial in list(self.unflushed)[:-1]:
            for index in self.unflushed[serial]:
                job = self.logs[index].flush_job()
                if job is not None:
                    job.run()
                    assert self.logs[index].flushed(job)
            del self.unflushed[serial]
            assert self.commit_log is not None
            self.commit_log.flushed_upto = serial
            self.recycled += 1

    def truncate(self, index: int) -> None:
        log, copy = self.logs[index], self.copies[index]
        offset = self.random.randint(log.log_start_offset, log.log_end_offset)
        self.begin_truncation(index, offset)
        log.truncate_to(offset)
        self.end_truncation(index)
        assert copy.before is None

    def start_over(self, index: int) -> None:
        log = self.logs[index]
        offset = self.random.choice((0, log.log_end_offset + 7, log.log_start_offset))
        self.begin_truncation(index, 0)
        log.truncate_fully(offset)
        self.end_truncation(index)

    def begin_truncation(self, index: int, offset: int) -> None:
        """Let anything at or above `offset` be lost, and lower the recovery point."""
        copy = self.copies[index]
        copy.before = dict(copy.values), min(copy.acked, offset)
        self.folder.recovery_points[(f"t{index}", 0)] = RecoveryPoint(copy.topic_id, 0)
        self.folder.recovery_points_job(self.folder.recovery_points)()
        self.is_voided(index)
        copy.acked = min(copy.acked, offset)

    def is_voided(self, index: int) -> None:
        frames = self.logs[index].frames
        self.voids += frames is not None and frames.exist

    def end_truncation(self, index: int) -> None:
        copy, log = self.copies[index], self.logs[index]
        end = log.log_end_offset
        copy.values = {offset: value for offset, value in copy.values.items() if offset < end}
        copy.acked, copy.before = min(copy.acked, end), None
        copy.acked = max(copy.acked, min(log.synced_end_offset, end))

    def compact(self, index: int) -> None:
        log = self.logs[index]
        job = log.compaction_job(NOW_MS, log.synced_end_offset)
        if job is not None:
            self.is_voided(index)
            job.run()
            log.finish_compaction(job).run()

    def delete_records(self, index: int) -> None:
        log = self.logs[index]
        log.increment_log_start(self.random.randint(log.log_start_offset, log.synced_end_offset)).run()

    def roll(self, index: int) -> None:
        self.logs[index].roll(NOW_MS)

    def remove(self, index: int) -> None:
        """Remove the replica; then host the partition again, of the same topic or of a new one with its name."""
        log, copy = self.logs[index], self.copies[index]
        copy.is_going = True
        copy.acked = 0
        self.folder.recovery_points.pop((f"t{index}", 0), None)
        self.folder.recovery_points_job(self.folder.recovery_points)()
        if log.frames is not None:
            self.is_voided(index)
            log.frames.void()
        log.close()
        del self.logs[index]
        self.folder.remove_log(f"t{index}", 0)()
        self.copies[index] = Copy(self.random.choice((copy.topic_id, self.uuid())))
        self.open_log(index)

    def act(self) -> None:
        index = self.random.randrange(LOGS)
        kind = self.random.random()
        if kind < 0.4:
            self.append(index)
        elif kind < 0.75:
            self.round()
        elif kind < 0.82:
            self.flush()
        elif kind < 0.87:
            self.truncate(index)
        elif kind < 0.885:
            self.start_over(index)
        elif kind < 0.94:
            self.compact(index)
        elif kind < 0.96:
            self.delete_records(index)
        elif kind < 0.98:
            self.roll(index)
        elif kind < 0.985:
            self.remove(index)
        else:
            self.write_points()

    def live(self, crashes: int) -> None:
        """Run until the node has crashed this many times; check it at every start."""
        random = self.random
        is_up = False
        for _ in range(crashes):
            self.disk.crash_at = self.disk.steps + random.choice((3, 30, 100, 300, 600)) + random.randrange(60)
            try:
                while True:
                    if not is_up:
                        self.start(random.random() < 0.9)
                        is_up = True
                    for _ in range(random.randint(10, 120)):
                        self.act()
                    if random.random() < 0.2:
                        self.stop()
                        is_up = False
            except Crash:
                is_up = False
            self.crash(has_power=random.random() < 0.3)
        self.disk.crash_at = None
        self.start(has_commit_log=False)
