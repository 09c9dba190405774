"""The data folder of a node: its owner, its lock, and the location of each partition's log.

meta.json            format version, node id, cluster id, and the commit log's generation, if it counts (JSON)
commit-log/          see `commit_log`
lock                 held while a node runs
clean-shutdown       exists only between a clean shutdown and the next start: the broker epoch of the stopped process
recovery-points      one line per log (see `small_files`): topic, partition, topic id, offset
high-watermarks      one line per log: topic id, partition, offset
boot-record          the last processes that wrote here, and the machine's boot (see `BootRecord`)
logs/TOPIC-PARTITION one log each, with its topic's id in topic-id; a name that ends in .deleted is being deleted
set-aside/NAME-TTTTTTTTTTTTT/
                     files that are no longer used but may still be needed, moved here instead of deleted;
                     T: when they were set aside, in milliseconds since 1970, 13 digits

A log is listed in `recovery-points` before its first record is acknowledged. So a listed log that is missing, or that
ends below its recovery point, has lost records.

Retention of what was set aside counts from the time in the name. A folder with any other name is never removed.

While the commit log counts, the folder has format 2, which releases without a commit log refuse: they would not replay
it. Opening the folder replays it and ends that; a clean shutdown ends it too.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from threading import Lock
from typing import Any, Final, NamedTuple
from uuid import UUID

from chronik.storage.commit_log import FILES_MAX, PAGE_BYTES, CommitLog, LogId, prepare_files
from chronik.storage.commit_log import FOLDER_NAME as COMMIT_LOG_NAME
from chronik.storage.disk import Disk, File, StorageError, read_file, write_file_atomic
from chronik.storage.replaying import ReplayReport, read_entries, replay
from chronik.storage.small_files import decode_lines, decode_value, encode_lines, encode_value

FORMAT_VERSION: Final = 1
COMMIT_LOG_VERSION: Final = 2
"""The format of a folder whose logs are complete only together with its commit log."""
POINTS_VERSION: Final = "2"
BOOT_VERSION: Final = "1"

META_NAME: Final = "meta.json"
LOCK_NAME: Final = "lock"
CLEAN_NAME: Final = "clean-shutdown"
BOOT_NAME: Final = "boot-record"
POINTS_NAME: Final = "recovery-points"
WATERMARKS_NAME: Final = "high-watermarks"
LOGS_NAME: Final = "logs"
NO_EPOCH: Final = -1
TOPIC_ID_NAME: Final = "topic-id"
DELETED_SUFFIX: Final = ".deleted"
SET_ASIDE_NAME: Final = "set-aside"
INCARNATIONS_MAX: Final = 32

_SET_ASIDE_TIME: Final = re.compile(r".+-(\d{13})")

TopicPartition = tuple[str, int]
TopicIdPartition = tuple[UUID, int]


class DataFolderError(Exception):
    """The data folder cannot be used; the message is one line that says what to do."""


class RecoveryPoint(NamedTuple):
    """A log of this topic was durable below `offset`. The id matters: a topic recreated by name has another log."""

    topic_id: UUID
    offset: int


class BootRecord(NamedTuple):
    """The last processes of the node that wrote here.

    `incarnations` are the last process that certainly registered with the controller, and all later ones that tried.
    The controller knows one of them, unless this folder is an old copy. If the machine has not rebooted since
    `boot_id`, everything that the process of `broker_epoch` wrote is on disk or in the page cache, even after a kill.
    `raft_index` is the durable end of the Raft log in `metadata.db` when that process registered.
    """

    boot_id: str = ""
    broker_epoch: int = NO_EPOCH
    incarnations: tuple[UUID, ...] = ()
    raft_index: int = 0


class Claim(NamedTuple):
    """The outcome of assigning a log's folder to a topic."""

    moved_to: str | None = None
    """Where the log of another topic went."""
    restored: str = ""
    """Why the topic id of a log with records had to be written again: its file was missing or damaged."""


class FolderMeta(NamedTuple):
    """The owner of the folder."""

    format_version: int
    node_id: int
    cluster_id: str
    commit_log: str = ""
    """The generation of the commit log that counts, and a frame that it has, with a checksum; empty if none counts."""


class DataFolder:
    """One node's folder, locked while it is open. All methods block; run jobs in a thread."""

    def __init__(self, disk: Disk, path: str, lock: File, meta: FolderMeta) -> None:
        self.disk = disk
        self.path = path
        self.meta = meta
        self._meta_lock = Lock()
        self.was_clean, self.stopped_epoch = _decode_mark(read_file(disk, f"{path}/{CLEAN_NAME}"))
        """Whether the last node here shut down cleanly, so that its logs need no check; and its broker epoch then
        (KIP-966), None if it was not recorded."""
        self.boot = _decode_boot(read_file(disk, f"{path}/{BOOT_NAME}") or b"")
        """None if the file is missing or damaged."""
        self.recovery_points = _decode_points(read_file(disk, f"{path}/{POINTS_NAME}") or b"")
        """For each log, the offset below which data was durable at the last write. Owned by the event loop."""
        self.high_watermarks = _decode_watermarks(read_file(disk, f"{path}/{WATERMARKS_NAME}") or b"")
        """A lower bound of each log's high watermark; by topic id, since a recreated topic starts at 0."""
        self.replayed = self._replay() if meta.commit_log else None
        """What the replay of the commit log did; None if none counted."""
        self._lock = lock

    @staticmethod
    def open(disk: Disk, path: str, node_id: int, new_cluster_id: str) -> "DataFolder":
        """Open a folder and create it if it is missing. Raises DataFolderError, which says what to do.

        `new_cluster_id` is for a folder that has none yet; empty if it is unknown. From now on the folder is marked as
        not cleanly shut down.
        """
        try:
            _make_durable_folder(disk, path)
            disk.mkdir(f"{path}/{LOGS_NAME}")
            lock = disk.lock(f"{path}/{LOCK_NAME}")
        except BlockingIOError:
            raise DataFolderError(
                f"data folder {path} is in use by another node: stop it, or pass another --data-dir"
            ) from None
        except OSError as error:
            raise DataFolderError(
                f"data folder {path} cannot be used ({error.strerror or error}): make it writable, or pass another one"
            ) from error
        try:
            return DataFolder._open_locked(disk, path, lock, node_id, new_cluster_id)
        except OSError as error:
            lock.close()
            raise DataFolderError(f"data folder {path} cannot be used: {error.strerror or error}") from error
        except DataFolderError:
            lock.close()
            raise

    @staticmethod
    def _open_locked(disk: Disk, path: str, lock: File, node_id: int, new_cluster_id: str) -> "DataFolder":
        data = read_file(disk, f"{path}/{META_NAME}")
        if data is None:
            if disk.listdir(f"{path}/{LOGS_NAME}"):
                raise DataFolderError(
                    f"data folder {path} holds logs but no {META_NAME}: restore that file, or pass an empty folder"
                )
            meta = FolderMeta(FORMAT_VERSION, node_id, new_cluster_id)
            _write_meta(disk, path, meta)
        else:
            meta = _read_meta(path, data)
            if meta.node_id != node_id:
                raise DataFolderError(
                    f"data folder {path} belongs to node {meta.node_id}, this is node {node_id}: "
                    f"start with --node-id {meta.node_id}, or pass another folder"
                )
        for name in disk.listdir(f"{path}/{LOGS_NAME}"):
            if name.endswith(DELETED_SUFFIX):
                disk.rmtree(f"{path}/{LOGS_NAME}/{name}")
        folder = DataFolder(disk, path, lock, meta)
        if disk.exists(f"{path}/{CLEAN_NAME}"):
            disk.remove(f"{path}/{CLEAN_NAME}")
            disk.sync_dir(path)
        return folder

    def _replay(self) -> ReplayReport:
        """Write what the commit log covers into the logs. From then on it no longer counts."""
        disk, path = self.disk, f"{self.path}/{COMMIT_LOG_NAME}"
        generation, from_sequence = _counted(self.meta)
        aside = f"{self.path}/{SET_ASIDE_NAME}/{COMMIT_LOG_NAME}-{generation}"
        entries, report = read_entries(disk, path, generation, from_sequence)
        if disk.exists(aside):
            report.damage = report.damage or "an earlier start found it damaged"
        folders: dict[LogId, str] = {}
        for topic, partition in self.partitions() if entries else ():
            topic_id = self.topic_id(topic, partition)
            if topic_id is not None:
                folders[LogId(topic_id, partition)] = self.log_path(topic, partition)
        for log, its_entries in entries.items():
            if log in folders:
                replay(disk, its_entries, folders[log], report)
            else:
                report.unknown_logs += 1
        if report.damage:
            # Until the controller knows, a log that is not listed is not proven complete.
            self.recovery_points.clear()
            self.recovery_points_job({})()
            self._set_commit_log_aside(path, aside)
            report.set_aside = aside
        self.end_commit_log()
        return report

    def _set_commit_log_aside(self, path: str, aside: str) -> None:
        """Move the files of a damaged commit log. Another folder than `set_aside` makes: nothing removes this one."""
        disk = self.disk
        disk.mkdir(aside)
        disk.sync_dir(f"{self.path}/{SET_ASIDE_NAME}")
        disk.sync_dir(self.path)
        for name in disk.listdir(path) if disk.exists(path) else ():
            disk.rename(f"{path}/{name}", f"{aside}/{name}")
        disk.sync_dir(aside)

    def begin_commit_log(self, generation: UUID, size_bytes: int) -> CommitLog:
        """Begin a commit log, which counts from its first frame on. `generation` is new; all files have `size_bytes`.

        Blocks.
        """
        path, file_bytes = f"{self.path}/{COMMIT_LOG_NAME}", size_bytes // FILES_MAX // PAGE_BYTES * PAGE_BYTES
        files = prepare_files(self.disk, path, file_bytes)

        def count(from_sequence: int) -> None:
            counted = _encode_counted(generation, from_sequence)
            named: dict[str, Any] = {"format_version": COMMIT_LOG_VERSION, "commit_log": counted}
            try:
                self._change_meta(**named)
            except OSError:
                # The name may be durable, so that `end_commit_log` must remove it.
                self.meta = self.meta._replace(**named)
                raise

        return CommitLog(self.disk, path, generation, file_bytes, files, count, self.end_commit_log)

    def end_commit_log(self) -> None:
        """Make durable that no commit log counts: every log is complete without it. Blocks."""
        if self.meta.commit_log:
            self._change_meta(format_version=FORMAT_VERSION, commit_log="")

    def remove_commit_log(self) -> None:
        """Remove the files of a commit log that no longer counts."""
        path = f"{self.path}/{COMMIT_LOG_NAME}"
        if not self.meta.commit_log and self.disk.exists(path):
            self.disk.rmtree(path)

    def _change_meta(self, **changes: Any) -> None:
        with self._meta_lock:
            meta = self.meta._replace(**changes)
            _write_meta(self.disk, self.path, meta)
            self.meta = meta

    @staticmethod
    def open_stopped(disk: Disk, path: str) -> "DataFolder":
        """Open and lock the folder of a stopped node. Raises DataFolderError.

        Nothing in it changes, except that a commit log is replayed, as at the node's next start.
        """
        try:
            data = read_file(disk, f"{path}/{META_NAME}")
            if data is None:
                raise DataFolderError(f"{path} is not the data folder of a node: it has no {META_NAME}")
            lock = disk.lock(f"{path}/{LOCK_NAME}")
        except BlockingIOError:
            raise DataFolderError(f"data folder {path} is in use: stop its node first") from None
        except OSError as error:
            raise DataFolderError(
                f"data folder {path} cannot be used ({error.strerror or error}): make it readable and writable"
            ) from error
        try:
            return DataFolder(disk, path, lock, _read_meta(path, data))
        except BaseException:
            lock.close()
            raise

    def set_cluster_id(self, cluster_id: str) -> None:
        """Assign the folder to this cluster: a node learns the id of its first cluster while it runs."""
        self._change_meta(cluster_id=cluster_id)

    def record_start(self, incarnation: UUID) -> None:
        """Record this process before it registers, so that the controller knows no process that this folder lacks."""
        boot = self.boot or BootRecord()
        known = boot.incarnations
        if len(known) >= INCARNATIONS_MAX:
            known = (known[0], *known[2 - INCARNATIONS_MAX :])
        self._write_boot(boot._replace(incarnations=(*known, incarnation)))

    def record_registration(self, boot_id: str, broker_epoch: int, incarnation: UUID, raft_index: int) -> None:
        """Record that this process has registered, and writes here from now on."""
        self._write_boot(BootRecord(boot_id, broker_epoch, (incarnation,), raft_index))

    def distrust_page_cache(self) -> None:
        """Record that written data may be lost although the machine has not rebooted: a sync has failed."""
        if self.boot is not None:
            self._write_boot(self.boot._replace(boot_id=""))

    def _write_boot(self, boot: BootRecord) -> None:
        self.boot = boot
        lines = (boot.boot_id, str(boot.broker_epoch), str(boot.raft_index), *map(str, boot.incarnations))
        write_file_atomic(self.disk, f"{self.path}/{BOOT_NAME}", encode_lines(BOOT_VERSION, lines))

    def log_path(self, topic: str, partition: int) -> str:
        return f"{self.path}/{LOGS_NAME}/{topic}-{partition}"

    def partitions(self) -> list[TopicPartition]:
        names = [name.rpartition("-") for name in self.disk.listdir(f"{self.path}/{LOGS_NAME}")]
        return [(topic, int(partition)) for topic, _, partition in names if topic and partition.isdigit()]

    def topic_id(self, topic: str, partition: int) -> UUID | None:
        """Return the id of the topic whose log is or was here; None if neither its file nor a recovery point has it."""
        data = read_file(self.disk, f"{self.log_path(topic, partition)}/{TOPIC_ID_NAME}")
        try:
            return UUID(decode_value(data or b""))
        except ValueError:
            point = self.recovery_points.get((topic, partition))
            return None if point is None else point.topic_id

    def is_lost(self, topic: str, partition: int, topic_id: UUID) -> bool:
        """Return whether a log with this topic id was here and is gone."""
        point = self.recovery_point(topic, partition, topic_id)
        if point is None:
            return False
        folder = self.log_path(topic, partition)
        if not self.disk.exists(folder):
            return True
        try:
            return UUID(decode_value(read_file(self.disk, f"{folder}/{TOPIC_ID_NAME}") or b"")) != topic_id
        except ValueError:
            # The recovery point proves the owner. Without segments, the records are gone as well.
            return point > 0 and not any(name.endswith(".log") for name in self.disk.listdir(folder))

    def claim_log(self, topic: str, partition: int, topic_id: UUID, now_ms: int) -> Claim:
        """Assign the partition's folder to the topic with this id; set aside a log that another topic left there.

        A crash may come between deleting a topic and deleting its files, and the name may be reused. A missing or
        damaged topic id is written again. Raises StorageError if it is damaged and no recovery point proves that the
        log belongs to this topic. The caller lists new logs in the recovery points before it appends anything to them.
        """
        folder = self.log_path(topic, partition)
        path = f"{folder}/{TOPIC_ID_NAME}"
        moved_to: str | None = None
        restored = ""
        known = read_file(self.disk, path)
        try:
            if known is None:
                restored = "it is missing" if self._has_records(folder) else ""
            elif UUID(decode_value(known)) == topic_id:
                if not self.was_clean:
                    # A kill may have come before its sync: a power loss could then lose this file and keep the records.
                    self._sync(path)
                return Claim()
            else:
                moved_to = self.set_aside_log(topic, partition, now_ms)
        except ValueError as error:
            # Without records, a crash left the file incomplete.
            restored = f"it is damaged: {error}" if self._has_records(folder) else ""
            if restored and self.recovery_point(topic, partition, topic_id) is None:
                raise StorageError(
                    f"{path} is damaged ({error}), and {POINTS_NAME} does not list this log for topic {topic} (id "
                    f"{topic_id}), so it may be the log of another topic. If another replica leads the partition, move "
                    f"{folder} to another place: the node fetches the log again. Otherwise remove {TOPIC_ID_NAME}: the "
                    "node uses the log as it is"
                ) from None
        data = encode_value(str(topic_id))
        if self.disk.exists(folder):
            write_file_atomic(self.disk, path, data)
        else:
            self.disk.mkdir(folder)
            self._sync(path, data)
        return Claim(moved_to, restored)

    def sync_names(self) -> None:
        """Make the folders of new logs durable, before they are listed: a listed log that is missing is lost."""
        self.disk.sync_dir(f"{self.path}/{LOGS_NAME}")

    def set_aside_log(self, topic: str, partition: int, now_ms: int) -> str:
        path = self.log_path(topic, partition)
        return set_aside(self.disk, self.path, [path], f"{topic}-{partition}", now_ms)

    def _sync(self, path: str, data: bytes = b"") -> None:
        """Make the file's content durable, with `data` at its start."""
        with closing(self.disk.open(path, create=True)) as file:
            if data:
                file.pwrite(data, 0)
            file.datasync()

    def _has_records(self, folder: str) -> bool:
        """Return whether a log's folder has a segment that is not empty."""
        if not self.disk.exists(folder):
            return False
        segments = [name for name in self.disk.listdir(folder) if name.endswith(".log")]
        return any(self.disk.size(f"{folder}/{name}") for name in segments)

    def recovery_point(self, topic: str, partition: int, topic_id: UUID) -> int | None:
        """Return the offset below which the log with this topic id was durable."""
        point = self.recovery_points.get((topic, partition))
        return point.offset if point is not None and point.topic_id == topic_id else None

    def recovery_points_job(self, points: Mapping[TopicPartition, RecoveryPoint]) -> Callable[[], None]:
        """Return a job that writes each log's synced end. Run one at a time, in a thread; `points` must not change."""

        def write() -> None:
            lines = (f"{topic} {index} {point.topic_id} {point.offset}" for (topic, index), point in points.items())
            write_file_atomic(self.disk, f"{self.path}/{POINTS_NAME}", encode_lines(POINTS_VERSION, sorted(lines)))

        return write

    def high_watermarks_job(self, watermarks: Mapping[TopicIdPartition, int]) -> Callable[[], None]:
        """Return a job that writes each log's high watermark. Run as above."""

        def write() -> None:
            lines = (f"{topic_id} {index} {offset}" for (topic_id, index), offset in watermarks.items())
            write_file_atomic(self.disk, f"{self.path}/{WATERMARKS_NAME}", encode_lines(POINTS_VERSION, sorted(lines)))

        return write

    def remove_log(self, topic: str, partition: int) -> Callable[[], None]:
        """Rename a deleted topic's log at once; run the returned job in a thread to remove the files."""
        path = self.log_path(topic, partition)
        deleted = path + DELETED_SUFFIX
        if self.disk.exists(deleted):
            self.disk.rmtree(deleted)
        if self.disk.exists(path):
            self.disk.rename(path, deleted)

        def remove() -> None:
            self.disk.sync_dir(f"{self.path}/{LOGS_NAME}")
            if self.disk.exists(deleted):
                self.disk.rmtree(deleted)

        return remove

    def record_clean_shutdown(
        self,
        points: Mapping[TopicPartition, RecoveryPoint],
        watermarks: Mapping[TopicIdPartition, int] | None = None,
        broker_epoch: int = NO_EPOCH,
    ) -> None:
        """Record that every log was closed cleanly at these points: the next start need not check for damage.

        `broker_epoch` proves to the controller that no other process ran between this one and the next: a folder
        restored from a copy also has a clean-shutdown file.
        """
        self.recovery_points_job(points)()
        if watermarks is not None:
            self.high_watermarks_job(watermarks)()
        self.end_commit_log()
        write_file_atomic(self.disk, f"{self.path}/{CLEAN_NAME}", b"%d\n" % broker_epoch)

    def close(self) -> None:
        """Release the folder. Unless a clean shutdown was recorded, the next start recovers the logs."""
        self._lock.close()


def _make_durable_folder(disk: Disk, path: str) -> None:
    """Create the folder with its parents, and make their names durable: without its name the content is lost."""
    holders: list[str] = []
    missing = path
    while missing and not disk.exists(missing):
        missing = missing.rpartition("/")[0]
        holders.append(missing or ("/" if path.startswith("/") else "."))
    disk.mkdir(path)
    for holder in holders:
        disk.sync_dir(holder)


def _write_meta(disk: Disk, path: str, meta: FolderMeta) -> None:
    values = {name: value for name, value in meta._asdict().items() if value or name != "commit_log"}
    write_file_atomic(disk, f"{path}/{META_NAME}", json.dumps(values, indent=2).encode() + b"\n")


def _read_meta(path: str, data: bytes) -> FolderMeta:
    try:
        values = json.loads(data)
        generation = values.get("commit_log", "")
        meta = FolderMeta(int(values["format_version"]), int(values["node_id"]), str(values["cluster_id"]), generation)
        if meta.format_version == COMMIT_LOG_VERSION or generation:
            _counted(meta)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataFolderError(
            f"{META_NAME} in data folder {path} cannot be read: restore it, or pass another folder"
        ) from error
    if meta.format_version not in (FORMAT_VERSION, COMMIT_LOG_VERSION):
        raise DataFolderError(
            f"data folder {path} has format {meta.format_version}, this chronik reads {FORMAT_VERSION} and "
            f"{COMMIT_LOG_VERSION}: "
            "use the version of chronik that wrote it"
        )
    return meta


def _encode_counted(generation: UUID, from_sequence: int) -> str:
    return encode_value(f"{generation}/{from_sequence}").decode().removesuffix("\n")


def _counted(meta: FolderMeta) -> tuple[UUID, int]:
    """Return the generation of the commit log, and from which frame on it must have one.

    Raises ValueError if that is damaged: no frame would count.
    """
    generation, _, from_sequence = decode_value(f"{meta.commit_log}\n".encode()).partition("/")
    return UUID(generation), int(from_sequence)


def _decode_mark(mark: bytes | None) -> tuple[bool, int | None]:
    """Return whether there was a clean shutdown, and its epoch: None in files of the first versions."""
    if not mark:
        return mark is not None, None
    try:
        return True, int(mark)
    except ValueError:
        return False, None


def _decode_boot(data: bytes) -> BootRecord | None:
    try:
        boot_id, broker_epoch, raft_index, *incarnations = decode_lines(BOOT_VERSION, data)
        return BootRecord(boot_id, int(broker_epoch), tuple(map(UUID, incarnations)), int(raft_index))
    except ValueError:
        return None


def _decode_points(data: bytes) -> dict[TopicPartition, RecoveryPoint]:
    """Empty if the file is missing or damaged: a log with records that is not listed is not proven complete."""
    try:
        return {
            (topic, int(partition)): RecoveryPoint(UUID(topic_id), int(offset))
            for topic, partition, topic_id, offset in _fields_of_lines(data)
        }
    except ValueError:
        return {}


def _decode_watermarks(data: bytes) -> dict[TopicIdPartition, int]:
    """Empty if the file is missing or damaged: replicas then learn the watermark from their leader."""
    try:
        return {(UUID(topic_id), int(partition)): int(offset) for topic_id, partition, offset in _fields_of_lines(data)}
    except ValueError:
        return {}


def _fields_of_lines(data: bytes) -> list[list[str]]:
    """Return the fields of each line. Raises ValueError if the file is incomplete or damaged."""
    return [line.split(" ") for line in decode_lines(POINTS_VERSION, data)]


def set_aside(disk: Disk, data_path: str, source_paths: Sequence[str], name: str, now_ms: int) -> str:
    """Move files or folders of the node, in this order, into a new folder, and return its path. Blocks.

    Durable when it returns. A source that does not exist is skipped. After an OSError, sources that were not yet moved
    are still in place: no file is ever lost.
    """
    parent = f"{data_path}/{SET_ASIDE_NAME}"
    while disk.exists(folder := f"{parent}/{name}-{now_ms:013d}"):
        now_ms += 1
    disk.mkdir(folder)
    # Sync the folder's name first: a crash must not lose it together with the files moved there.
    disk.sync_dir(parent)
    disk.sync_dir(data_path)
    holders: dict[str, None] = {}
    for path in source_paths:
        if disk.exists(path):
            holder, _, last = path.rpartition("/")
            disk.rename(path, f"{folder}/{last}")
            holders[holder] = None
    disk.sync_dir(folder)
    for holder in holders:
        disk.sync_dir(holder)
    return folder


def expired_set_aside(disk: Disk, data_path: str, now_ms: int, retention_ms: int) -> list[str]:
    """Return the folders set aside at least `retention_ms` ago; none if that is negative. Blocks."""
    parent = f"{data_path}/{SET_ASIDE_NAME}"
    if retention_ms < 0 or not disk.exists(parent):
        return []
    return [
        f"{parent}/{name}"
        for name in disk.listdir(parent)
        if (match := _SET_ASIDE_TIME.fullmatch(name)) is not None and int(match[1]) <= now_ms - retention_ms
    ]
