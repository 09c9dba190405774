"""The data folder of a node: whose it is, who uses it now, and where each partition's log lies.

meta.json            format version, node id, cluster id (JSON)
lock                 held while a node runs
clean-shutdown       there only between a clean shutdown and the next start: the broker epoch of who stopped
recovery-points      a line for each log (see `small_files`): topic, partition, topic id, offset
high-watermarks      a line for each log: topic id, partition, offset
boot-record          the processes that wrote here last, and the machine's boot (see `BootRecord`)
logs/TOPIC-PARTITION one log each, with the id of its topic in topic-id; a name that ends in .deleted is on its way out
set-aside/           see `set_aside`

A log is listed in `recovery-points` before its first record is acknowledged. So a log that is listed and missing has
lost records, and so has one that ends below its recovery point.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple
from uuid import UUID

from chronik.storage.disk import Disk, File, read_file, write_file_atomic
from chronik.storage.errors import DataFolderError, StorageError
from chronik.storage.set_aside import set_aside
from chronik.storage.small_files import decode_lines, decode_value, encode_lines, encode_value

__all__ = [
    "FORMAT_VERSION",
    "BootRecord",
    "DataFolder",
    "FolderMeta",
    "RecoveryPoint",
    "TopicIdPartition",
    "TopicPartition",
]

FORMAT_VERSION: Final = 1
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
INCARNATIONS_MAX: Final = 32

TopicPartition = tuple[str, int]
TopicIdPartition = tuple[UUID, int]


class RecoveryPoint(NamedTuple):
    """Below `offset` a log of this topic was durable. By id: a topic made again under the name has another log."""

    topic_id: UUID
    offset: int


class BootRecord(NamedTuple):
    """Which processes of the node wrote here last.

    `incarnations` are the last process that surely registered with the controller, and all processes since that tried
    to. The controller knows one of them, unless this folder is an old copy. While the machine has not booted since
    `boot_id`, all that the process of `broker_epoch` wrote is in the page cache, if not on disk, even if it was killed.
    `raft_index` is how far the Raft log in `metadata.db` was durable when that process registered.
    """

    boot_id: str = ""
    broker_epoch: int = NO_EPOCH
    incarnations: tuple[UUID, ...] = ()
    raft_index: int = 0


class FolderMeta(NamedTuple):
    """Whose folder it is."""

    format_version: int
    node_id: int
    cluster_id: str


class DataFolder:
    """One node's folder, locked while it is open. Everything here blocks; jobs are for a thread."""

    def __init__(
        self,
        disk: Disk,
        path: str,
        lock: File,
        meta: FolderMeta,
        was_clean: bool,
        stopped_epoch: int | None,
        recovery_points: dict[TopicPartition, RecoveryPoint],
        high_watermarks: dict[TopicIdPartition, int] | None = None,
        boot: BootRecord | None = None,
    ) -> None:
        self.disk = disk
        self.path = path
        self.meta = meta
        self.was_clean = was_clean
        """Whether the last node here shut down cleanly, so that logs can be trusted as they are."""
        self.stopped_epoch = stopped_epoch
        """The broker epoch under which it was registered then (KIP-966); None where it did not say."""
        self.boot = boot
        """None where the file is missing or damaged."""
        self.recovery_points = recovery_points
        """The offset of each log below which data was durable when they were last written. Owned by the loop."""
        self.high_watermarks = high_watermarks or {}
        """What each log's watermark was at least; by topic id, since a topic made anew begins at 0."""
        self._lock = lock

    @staticmethod
    def open(disk: Disk, path: str, node_id: int, new_cluster_id: str) -> "DataFolder":
        """Take a folder into use, made where it is missing. Raises DataFolderError with what to do.

        `new_cluster_id` is for a folder that has none yet, empty where it is not known. From here on the folder counts
        as not cleanly shut down.
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
            write_file_atomic(disk, f"{path}/{META_NAME}", json.dumps(meta._asdict(), indent=2).encode() + b"\n")
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
        folder = DataFolder._as_left(disk, path, lock, meta)
        if disk.exists(f"{path}/{CLEAN_NAME}"):
            disk.remove(f"{path}/{CLEAN_NAME}")
            disk.sync_dir(path)
        return folder

    @staticmethod
    def open_stopped(disk: Disk, path: str) -> "DataFolder":
        """The folder of a node that does not run: locked, and nothing in it is changed. Raises DataFolderError."""
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
            return DataFolder._as_left(disk, path, lock, _read_meta(path, data))
        except BaseException:
            lock.close()
            raise

    @staticmethod
    def _as_left(disk: Disk, path: str, lock: File, meta: FolderMeta) -> "DataFolder":
        was_clean, stopped_epoch = _decode_mark(read_file(disk, f"{path}/{CLEAN_NAME}"))
        points = _decode_points(read_file(disk, f"{path}/{POINTS_NAME}") or b"")
        watermarks = _decode_watermarks(read_file(disk, f"{path}/{WATERMARKS_NAME}") or b"")
        boot = _decode_boot(read_file(disk, f"{path}/{BOOT_NAME}") or b"")
        return DataFolder(disk, path, lock, meta, was_clean, stopped_epoch, points, watermarks, boot)

    def set_cluster_id(self, cluster_id: str) -> None:
        """The folder belongs to this cluster from now on: a node learns the id of its first cluster while it runs."""
        meta = self.meta._replace(cluster_id=cluster_id)
        write_file_atomic(self.disk, f"{self.path}/{META_NAME}", json.dumps(meta._asdict(), indent=2).encode() + b"\n")
        self.meta = meta

    def record_start(self, incarnation: UUID) -> None:
        """This process is about to register. Before it does: the controller may know it, and this folder not yet."""
        boot = self.boot or BootRecord()
        known = boot.incarnations
        if len(known) >= INCARNATIONS_MAX:
            known = (known[0], *known[2 - INCARNATIONS_MAX :])
        self._write_boot(boot._replace(incarnations=(*known, incarnation)))

    def record_registration(self, boot_id: str, broker_epoch: int, incarnation: UUID, raft_index: int) -> None:
        """This process has registered, and writes here from now on."""
        self._write_boot(BootRecord(boot_id, broker_epoch, (incarnation,), raft_index))

    def distrust_page_cache(self) -> None:
        """What was written may be gone although the machine keeps running: a sync has failed."""
        if self.boot is not None:
            self._write_boot(self.boot._replace(boot_id=""))

    def _write_boot(self, boot: BootRecord) -> None:
        self.boot = boot
        lines = (boot.boot_id, str(boot.broker_epoch), str(boot.raft_index), *map(str, boot.incarnations))
        write_file_atomic(self.disk, f"{self.path}/{BOOT_NAME}", encode_lines(BOOT_VERSION, lines))

    def log_path(self, topic: str, partition: int) -> str:
        return f"{self.path}/{LOGS_NAME}/{topic}-{partition}"

    def partitions(self) -> list[TopicPartition]:
        """The partitions that have a log here."""
        found: list[TopicPartition] = []
        for name in self.disk.listdir(f"{self.path}/{LOGS_NAME}"):
            topic, _, partition = name.rpartition("-")
            if topic and partition.isdigit():
                found.append((topic, int(partition)))
        return found

    def topic_id(self, topic: str, partition: int) -> UUID | None:
        """The id of the topic whose log is or was here; None where neither the log nor the recovery points tell."""
        data = read_file(self.disk, f"{self.log_path(topic, partition)}/{TOPIC_ID_NAME}")
        try:
            return UUID(decode_value(data or b""))
        except ValueError:
            point = self.recovery_points.get((topic, partition))
            return None if point is None else point.topic_id

    def is_lost(self, topic: str, partition: int, topic_id: UUID) -> bool:
        """Whether a log of this very topic was here and is gone."""
        point = self.recovery_point(topic, partition, topic_id)
        if point is None:
            return False
        folder = self.log_path(topic, partition)
        if not self.disk.exists(folder):
            return True
        path = f"{folder}/{TOPIC_ID_NAME}"
        found = read_file(self.disk, path)
        if found is None:
            return point > 0 and not any(name.endswith(".log") for name in self.disk.listdir(folder))
        return self._owner(topic, partition, path, found) != topic_id

    def claim_log(self, topic: str, partition: int, topic_id: UUID, now_ms: int) -> str | None:
        """Have the partition's folder belong to the topic of this id; what another topic left there is set aside.

        A crash may come between a topic's deletion and that of its files, and the name be used again. Returns where
        that went, if anything did. Raises StorageError where it cannot be told whose the folder is. The caller lists
        new logs in the recovery points before anything is appended to them.
        """
        path = f"{self.log_path(topic, partition)}/{TOPIC_ID_NAME}"
        moved_to: str | None = None
        found = read_file(self.disk, path)
        if found is not None:
            owner = self._owner(topic, partition, path, found)
            if owner == topic_id:
                if not self.was_clean:
                    # Who wrote it may have been killed before its sync: a power loss would take it from the records.
                    self._sync(path)
                return None
            if owner is not None:
                moved_to = self.set_aside_log(topic, partition, now_ms)
        data = encode_value(str(topic_id))
        if self.disk.exists(self.log_path(topic, partition)):
            write_file_atomic(self.disk, path, data)
        else:
            self.disk.mkdir(self.log_path(topic, partition))
            self._sync(path, data)
        return moved_to

    def sync_names(self) -> None:
        """The folders of new logs are durable. Before they are listed: one that is listed and missing was lost."""
        self.disk.sync_dir(f"{self.path}/{LOGS_NAME}")

    def set_aside_log(self, topic: str, partition: int, now_ms: int) -> str:
        """Move a log that no metadata knows out of the way; returns where it went."""
        path = self.log_path(topic, partition)
        return set_aside(self.disk, self.path, [path], f"{topic}-{partition}", now_ms)

    def _sync(self, path: str, data: bytes = b"") -> None:
        """The file's content is durable, `data` at its beginning."""
        file = self.disk.open(path, create=True)
        try:
            if data:
                file.pwrite(data, 0)
            file.datasync()
        finally:
            file.close()

    def _owner(self, topic: str, partition: int, path: str, data: bytes) -> UUID | None:
        """Whose log it is; None where a crash came before it had a record, and left the file unfinished."""
        try:
            return UUID(decode_value(data))
        except ValueError as error:
            folder = self.log_path(topic, partition)
            segments = [name for name in self.disk.listdir(folder) if name.endswith(".log")]
            if not any(self.disk.size(f"{folder}/{name}") for name in segments):
                return None
            line = f"{path} is damaged ({error}): restore it, or remove it to have the log as it is"
            raise StorageError(line) from None

    def recovery_point(self, topic: str, partition: int, topic_id: UUID) -> int | None:
        """How far the log of this very topic was known to be durable."""
        point = self.recovery_points.get((topic, partition))
        return point.offset if point is not None and point.topic_id == topic_id else None

    def recovery_points_job(self, points: Mapping[TopicPartition, RecoveryPoint]) -> Callable[[], None]:
        """Write each log's synced end; run it in a thread, one at a time."""
        data = _encode_points(points)
        return lambda: write_file_atomic(self.disk, f"{self.path}/{POINTS_NAME}", data)

    def high_watermarks_job(self, watermarks: Mapping[TopicIdPartition, int]) -> Callable[[], None]:
        """Write each log's watermark; run it in a thread, one at a time."""
        data = _encode_watermarks(watermarks)
        return lambda: write_file_atomic(self.disk, f"{self.path}/{WATERMARKS_NAME}", data)

    def remove_log(self, topic: str, partition: int) -> Callable[[], None]:
        """A deleted topic's log is gone at once under its name; run the job in a thread to remove the files."""
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
        """Every log was closed cleanly and ends at these points: the next start need not look for damage.

        `broker_epoch` proves to the controller that no other process came between this one and the next: a folder put
        back from a copy has a mark too.
        """
        self.recovery_points_job(points)()
        if watermarks is not None:
            self.high_watermarks_job(watermarks)()
        write_file_atomic(self.disk, f"{self.path}/{CLEAN_NAME}", b"%d\n" % broker_epoch)

    def close(self) -> None:
        """Let go of the folder. Unless a clean shutdown was recorded, the next start recovers the logs."""
        self._lock.close()


def _make_durable_folder(disk: Disk, path: str) -> None:
    """Make the folder with its parents, and their names durable: all that is in it would be lost with its name."""
    holders: list[str] = []
    made = path
    while made and not disk.exists(made):
        made = made.rpartition("/")[0]
        holders.append(made or ("/" if path.startswith("/") else "."))
    disk.mkdir(path)
    for holder in holders:
        disk.sync_dir(holder)


def _read_meta(path: str, data: bytes) -> FolderMeta:
    try:
        values = json.loads(data)
        meta = FolderMeta(int(values["format_version"]), int(values["node_id"]), str(values["cluster_id"]))
    except (ValueError, KeyError, TypeError) as error:
        raise DataFolderError(
            f"{META_NAME} in data folder {path} cannot be read: restore it, or pass another folder"
        ) from error
    if meta.format_version != FORMAT_VERSION:
        raise DataFolderError(
            f"data folder {path} has format {meta.format_version}, this chronik reads {FORMAT_VERSION}: "
            "use the version of chronik that wrote it"
        )
    return meta


def _decode_mark(mark: bytes | None) -> tuple[bool, int | None]:
    """Whether there was a clean shutdown, and the epoch in its mark: none in those of the first versions."""
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


def _encode_points(points: Mapping[TopicPartition, RecoveryPoint]) -> bytes:
    return _encode_lines(f"{topic} {partition} {at.topic_id} {at.offset}" for (topic, partition), at in points.items())


def _decode_points(data: bytes) -> dict[TopicPartition, RecoveryPoint]:
    """Empty where the file is missing or damaged: a log with records that is not listed is not proven to be whole."""
    try:
        return {
            (topic, int(partition)): RecoveryPoint(UUID(topic_id), int(offset))
            for topic, partition, topic_id, offset in _decode_lines(data)
        }
    except ValueError:
        return {}


def _encode_watermarks(watermarks: Mapping[TopicIdPartition, int]) -> bytes:
    return _encode_lines(f"{topic_id} {partition} {offset}" for (topic_id, partition), offset in watermarks.items())


def _decode_watermarks(data: bytes) -> dict[TopicIdPartition, int]:
    """Empty where the file is missing or damaged: replicas then learn the watermark from their leader."""
    try:
        return {(UUID(topic_id), int(partition)): int(offset) for topic_id, partition, offset in _decode_lines(data)}
    except ValueError:
        return {}


def _encode_lines(entries: Iterable[str]) -> bytes:
    return encode_lines(POINTS_VERSION, sorted(entries))


def _decode_lines(data: bytes) -> list[list[str]]:
    """The fields of each line. Raises ValueError unless the file is whole."""
    return [line.split(" ") for line in decode_lines(POINTS_VERSION, data)]
