"""Every Kafka API that a node serves, and its handler with the services that it uses."""

from __future__ import annotations

from dataclasses import dataclass

from chronik.node.admin.topics import Topics
from chronik.node.apis import (
    alter_configs,
    alter_partition_reassignments,
    api_versions,
    create_partitions,
    create_topics,
    delete_groups,
    delete_records,
    delete_topics,
    describe_cluster,
    describe_configs,
    describe_groups,
    describe_log_dirs,
    elect_leaders,
    fetch,
    find_coordinator,
    heartbeat,
    incremental_alter_configs,
    init_producer_id,
    join_group,
    leave_group,
    list_groups,
    list_offsets,
    list_partition_reassignments,
    metadata,
    offset_commit,
    offset_delete,
    offset_fetch,
    offset_for_leader_epoch,
    produce,
    sync_group,
    transactions,
    unregister_broker,
)
from chronik.node.coordinators.group_service import GroupService
from chronik.node.forwarding.forwarding import Forwarding
from chronik.node.membership.controller_client import ProducerIds
from chronik.node.membership.controller_service import ControllerService
from chronik.node.membership.departures import Departures
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Api, Handler
from chronik.node.serving.deadlines import Deadlines
from chronik.node.serving.fetch_sessions import FetchSessions
from chronik.node.serving.server import Server

APIS: tuple[Api, ...] = tuple(
    sorted(
        (
            alter_configs.API,
            alter_partition_reassignments.API,
            api_versions.API,
            create_partitions.API,
            create_topics.API,
            delete_groups.API,
            delete_records.API,
            delete_topics.API,
            describe_cluster.API,
            describe_configs.API,
            describe_groups.API,
            describe_log_dirs.API,
            elect_leaders.API,
            fetch.API,
            find_coordinator.API,
            heartbeat.API,
            incremental_alter_configs.API,
            init_producer_id.API,
            join_group.API,
            leave_group.API,
            list_groups.API,
            list_offsets.API,
            list_partition_reassignments.API,
            metadata.API,
            offset_commit.API,
            offset_delete.API,
            offset_fetch.API,
            offset_for_leader_epoch.API,
            produce.API,
            sync_group.API,
            unregister_broker.API,
            *transactions.APIS,
        ),
        key=lambda api: api.key,
    )
)
"""Sorted by API key."""


@dataclass(frozen=True, slots=True)
class ApiServices:
    """All services of a node that its API handlers use."""

    runtime: Runtime
    metadata: MetadataLog
    controller: ControllerService
    departures: Departures
    producer_ids: ProducerIds
    host: PartitionHost
    groups: GroupService
    topics: Topics
    forwarding: Forwarding
    server: Server
    deadlines: Deadlines
    fetch_sessions: FetchSessions


def make_handlers(node: ApiServices) -> list[Handler]:
    """Create all handlers. Each receives only the services that its API uses."""
    runtime, metadata_log, host, groups = node.runtime, node.metadata, node.host, node.groups
    alteration = incremental_alter_configs.Services(runtime, metadata_log, host)
    return [
        alter_configs.handler(alteration),
        alter_partition_reassignments.handler(metadata_log),
        api_versions.handler(APIS),
        create_partitions.handler(create_partitions.Services(runtime, metadata_log, node.controller)),
        create_topics.handler(create_topics.Services(runtime, metadata_log, node.topics)),
        delete_groups.handler(groups),
        delete_records.handler(delete_records.Services(runtime, host)),
        delete_topics.handler(delete_topics.Services(runtime, metadata_log, host)),
        describe_cluster.handler(metadata_log),
        describe_configs.handler(describe_configs.Services(runtime.config, metadata_log)),
        describe_groups.handler(groups),
        describe_log_dirs.handler(describe_log_dirs.Services(runtime, metadata_log, host)),
        elect_leaders.handler(elect_leaders.Services(metadata_log, node.controller)),
        fetch.handler(fetch.Services(runtime, metadata_log, host, node.server, node.fetch_sessions)),
        find_coordinator.handler(groups),
        heartbeat.handler(groups),
        incremental_alter_configs.handler(alteration),
        init_producer_id.handler(node.producer_ids),
        join_group.handler(join_group.Services(groups, runtime.log)),
        leave_group.handler(leave_group.Services(groups, runtime.log)),
        list_groups.handler(groups),
        list_offsets.handler(list_offsets.Services(runtime, host)),
        list_partition_reassignments.handler(metadata_log),
        metadata.handler(metadata.Services(runtime.config, metadata_log, node.departures, node.topics, groups, host)),
        offset_commit.handler(offset_commit.Services(groups, metadata_log)),
        offset_delete.handler(offset_delete.Services(groups, metadata_log)),
        offset_fetch.handler(offset_fetch.Services(groups, metadata_log)),
        offset_for_leader_epoch.handler(host),
        produce.handler(produce.Services(runtime, metadata_log, host, node.forwarding, node.deadlines)),
        sync_group.handler(groups),
        unregister_broker.handler(node.controller),
        *transactions.handlers(),
    ]
