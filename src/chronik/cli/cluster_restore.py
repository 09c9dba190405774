"""`chronik cluster restore-metadata`: rebuild the metadata from the nodes' logs if all metadata.db are lost."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Mapping, Sequence

from chronik.cli.errors import CliError, say
from chronik.cli.output import print_table, progress
from chronik.local.cluster import LocalCluster
from chronik.metadata.image import ClusterImage
from chronik.metadata.restoration import KEEP_ALL, FoundLog, RestorationConflict, restored_image
from chronik.node.metadata_restore import OWN_CONFIGS, check_without_metadata, logs_of, write_metadata
from chronik.raft.store import StoreError
from chronik.storage.disk import RealDisk
from chronik.storage.folder import META_NAME, DataFolder, DataFolderError
from chronik.storage.recovery import LogSurvey


def restore_local(cluster: LocalCluster) -> None:
    """Restore a cluster on this machine from its folders. Skip nodes without data: they join when they start."""
    if cluster.running:
        raise CliError(f"node {cluster.running[0].id} is running: chronik cluster down first")
    nodes = [node for node in cluster.nodes if os.path.exists(os.path.join(node.folder, META_NAME))]
    restore([node.folder for node in nodes], {node.id: str(node.internal) for node in nodes})
    for node in cluster.nodes:
        if node not in nodes:
            say(f"{node.folder} has no data: node {node.id} joins the cluster again when it starts")


def restore(paths: Sequence[str], addresses: Mapping[int, str]) -> None:
    """Restore from these data folders; `addresses` are the known internal addresses of the nodes, for their peers."""
    disk = RealDisk()
    with contextlib.ExitStack() as opened:
        try:
            folders: list[DataFolder] = []
            for path in dict.fromkeys(map(os.path.abspath, paths)):
                folders.append(DataFolder.open_stopped(disk, path))
                opened.callback(folders[-1].close)
            cluster_id = _cluster_id(folders)
            check_without_metadata(folders, uuid.uuid4)
            surveyed = _read_logs(folders)
            logs = [log for log, _ in surveyed]
            if not logs:
                raise CliError("there are no logs to rebuild the metadata from: start the nodes, or pass their folders")
            image = restored_image(cluster_id, logs, OWN_CONFIGS, uuid.uuid4)
            write_metadata(folders, addresses, image, uuid.uuid4)
        except (DataFolderError, StoreError, RestorationConflict) as error:
            raise CliError(str(error)) from None
        except OSError as error:
            raise CliError(f"{error.filename or 'a data folder'}: {error.strerror}; nothing was written") from None
    _print(image, logs, len(folders))
    compacted = sorted({log.topic for log, survey in surveyed if survey.is_compacted and log.topic not in OWN_CONFIGS})
    _print_lost(image, compacted)


def _read_logs(folders: Sequence[DataFolder]) -> list[tuple[FoundLog, LogSurvey]]:
    surveyed: list[tuple[FoundLog, LogSurvey]] = []
    with progress("reading logs", None) as show:
        for folder in folders:
            for log in logs_of(folder):
                surveyed.append(log)
                show(len(surveyed), f"{len(surveyed)} read")
    return surveyed


def _cluster_id(folders: Sequence[DataFolder]) -> str:
    """Return the cluster id in the folders, or "" if none has one. Each folder must belong to a different node."""
    named = [folder for folder in folders if folder.meta.cluster_id]
    for folder in named[1:]:
        if folder.meta.cluster_id != named[0].meta.cluster_id:
            raise CliError(
                f"{named[0].path} belongs to cluster {named[0].meta.cluster_id}, {folder.path} to "
                f"{folder.meta.cluster_id}: pass the folders of one cluster with --node-dir"
            )
    by_node: dict[int, str] = {}
    for folder in folders:
        other = by_node.setdefault(folder.meta.node_id, folder.path)
        if other != folder.path:
            raise CliError(f"{other} and {folder.path} both belong to node {folder.meta.node_id}: pass one of them")
    return named[0].meta.cluster_id if named else ""


def _print(image: ClusterImage, logs: Sequence[FoundLog], nodes: int) -> None:
    rows = []
    # The longest log of each partition.
    ends = {(log.topic, log.partition): log.log_end_offset for log in sorted(logs, key=lambda log: log.log_end_offset)}
    for name, topic in sorted(image.topics.items()):
        end = sum(end for (topic_name, _), end in ends.items() if topic_name == name)
        offline = sum(not partition.isr for partition in topic.partitions)
        replicas = max(len(partition.replicas) for partition in topic.partitions)
        rows.append((name, topic.id, len(topic.partitions), replicas, end, offline))
    columns = ("topic", "id", "partitions", "replicas", "log ends, summed", "offline")
    title = f"metadata of {nodes} nodes of cluster {image.cluster_id or '(without an id)'} rebuilt; start them now"
    print_table(title, columns, rows, columns[2:])


def _print_lost(image: ClusterImage, compacted: Sequence[str]) -> None:
    partitions = [(name, p) for name, topic in sorted(image.topics.items()) for p in topic.partitions if not p.isr]
    for name, partition in partitions:
        print(
            f"{name}-{partition.partition} stays offline because no log has every committed record: see chronik topic "
            f"recover {name} --partition {partition.partition} --from {partition.replicas[0]} once the nodes run"
        )
    off = ", ".join(f"{key}={value}" for key, value in KEEP_ALL.items())
    print(
        f"lost: settings of topics and brokers, and partitions above the last one found. Topics keep all records "
        f"({off}) until chronik topic alter sets their retention again"
        + (f"; these topics were compacted: {', '.join(compacted)}" if compacted else "")
    )
