"""Rebuilds the metadata of a cluster whose nodes all lost it, from the logs in their data folders. All functions block.

No node may run: an open `DataFolder` is locked. Logs are only read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from uuid import UUID

from chronik.metadata.image import (
    OFFSETS_TOPIC,
    SHARE_STATE_TOPIC,
    TRACES_TOPIC,
    TRANSACTIONS_TOPIC,
    ClusterImage,
    encode_image,
)
from chronik.metadata.restoration import FoundLog
from chronik.node import trace_topic
from chronik.node.coordinators.coordinator_topic import COORDINATOR_TOPIC_CONFIGS
from chronik.node.membership.cluster_member import FOUNDERS_LARGE, FOUNDERS_SMALL, STORE_NAME
from chronik.node.membership.metadata_mark import MARK_NAME
from chronik.node.membership.raft_store import FIRST, SqliteRaftStore
from chronik.raft.membership import Member, Membership
from chronik.raft.store import HardState, Persist, Snapshot, StoreError
from chronik.storage.folder import LOGS_NAME, DataFolder
from chronik.storage.recovery import LogSurvey, survey_log

OWN_CONFIGS: Mapping[str, Mapping[str, str]] = {
    OFFSETS_TOPIC: COORDINATOR_TOPIC_CONFIGS,
    TRANSACTIONS_TOPIC: COORDINATOR_TOPIC_CONFIGS,
    SHARE_STATE_TOPIC: COORDINATOR_TOPIC_CONFIGS,
    TRACES_TOPIC: trace_topic.CONFIGS,
}
"""The configs of the internal topics."""

NewId = Callable[[], UUID]


def check_without_metadata(folders: Sequence[DataFolder], new_id: NewId) -> None:
    """Raise StoreError if a folder has metadata: that is more complete than the logs."""
    for folder in folders:
        path = f"{folder.path}/{STORE_NAME}"
        if not folder.disk.exists(path):
            continue
        store = SqliteRaftStore(path, new_id)
        try:
            stored = store.load()
            is_blank = stored.snapshot is None and not stored.entries
        except StoreError:
            # The contents are unknown, so an operator must decide to remove it.
            is_blank = False
        finally:
            store.close()
        if not is_blank:
            raise StoreError(
                f"{path} has metadata or cannot be read: start the nodes that have it, and the other nodes rejoin; to "
                f"rebuild it from the logs instead, move {STORE_NAME} out of every data folder"
            )


def logs_of(folder: DataFolder) -> Iterator[tuple[FoundLog, LogSurvey]]:
    """Yield the folder's logs, including those that it has lost."""
    has_logs = folder.disk.exists(f"{folder.path}/{LOGS_NAME}")
    present = folder.partitions() if has_logs else []
    for topic, index in sorted({*present, *folder.recovery_points}):
        path = folder.log_path(topic, index)
        topic_id = folder.topic_id(topic, index)
        point = watermark = 0
        if topic_id is not None:
            point = folder.recovery_point(topic, index, topic_id) or 0
            watermark = folder.high_watermarks.get((topic_id, index), 0)
        survey = survey_log(folder.disk, path, point) if (topic, index) in present else LogSurvey()
        yield FoundLog(folder.meta.node_id, path, topic, index, topic_id, *survey[:3], watermark), survey


def write_metadata(
    folders: Sequence[DataFolder], addresses: Mapping[int, str], image: ClusterImage, new_id: NewId
) -> None:
    """Write a new store to each folder: the image as a snapshot, with all nodes as members. All stores or none."""
    stores: list[SqliteRaftStore] = []
    try:
        members: list[Member] = []
        for folder in sorted(folders, key=lambda folder: folder.meta.node_id):
            _remove(folder)
            stores.append(SqliteRaftStore(f"{folder.path}/{STORE_NAME}", new_id))
            node_id, store_id = folder.meta.node_id, stores[-1].load().store_id
            voters_max = FOUNDERS_LARGE if len(folders) >= FOUNDERS_LARGE else FOUNDERS_SMALL
            members.append(Member(node_id, store_id, len(members) < voters_max, addresses.get(node_id, "")))
        # Higher than any index in the folders' boot records; otherwise the new store would look like an old copy.
        index = max([FIRST, *(folder.boot.raft_index + 1 for folder in folders if folder.boot is not None)])
        snapshot = Snapshot(index, FIRST, Membership(tuple(members)), encode_image(image))
        for store in stores:
            store.persist(Persist(HardState(FIRST, None, index), snapshot))
            store.close()
        for folder in folders:
            folder.disk.sync_dir(folder.path)
    except BaseException:
        for store in stores:
            store.close()
        for folder in folders:
            _remove(folder)
        raise


def _remove(folder: DataFolder) -> None:
    """Remove a store without metadata, or a new one if another store could not be written."""
    for name in (STORE_NAME, f"{STORE_NAME}-wal", f"{STORE_NAME}-shm", MARK_NAME):
        path = f"{folder.path}/{name}"
        if folder.disk.exists(path):
            folder.disk.remove(path)
