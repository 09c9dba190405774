"""Every Kafka API that a node serves, and its handler with the services that it uses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

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
from chronik.node.membership.controller_service import ControllerService
from chronik.node.membership.departures import Departures
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.membership.producer_ids import ProducerIds
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Api, ColdHandler, Handler
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
            *(handler.api for handler in transactions.HANDLERS),
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
    runtime, log, host, groups, controller = node.runtime, node.metadata, node.host, node.groups, node.controller
    group_log = runtime.log.bind(component="groups")
    alteration = incremental_alter_configs.Services(runtime, log, host)
    cold: list[tuple[Api, ColdHandler]] = [
        (alter_configs.API, partial(alter_configs.handle, alteration)),
        (alter_partition_reassignments.API, partial(alter_partition_reassignments.handle, log)),
        (api_versions.API, partial(api_versions.handle, APIS)),
        (
            create_partitions.API,
            partial(create_partitions.handle, create_partitions.Services(runtime, log, controller)),
        ),
        (create_topics.API, partial(create_topics.handle, create_topics.Services(runtime, log, node.topics))),
        (delete_groups.API, partial(delete_groups.handle, groups)),
        (delete_records.API, partial(delete_records.handle, runtime, host)),
        (delete_topics.API, partial(delete_topics.handle, delete_topics.Services(runtime, log, host))),
        (describe_cluster.API, partial(describe_cluster.handle, log)),
        (describe_configs.API, partial(describe_configs.handle, runtime.config, log)),
        (describe_groups.API, partial(describe_groups.handle, groups)),
        (describe_log_dirs.API, partial(describe_log_dirs.handle, runtime, log, host)),
        (elect_leaders.API, partial(elect_leaders.handle, log, controller)),
        (find_coordinator.API, partial(find_coordinator.handle, groups)),
        (heartbeat.API, partial(heartbeat.handle, groups)),
        (incremental_alter_configs.API, partial(incremental_alter_configs.handle, alteration)),
        (init_producer_id.API, partial(init_producer_id.handle, node.producer_ids)),
        (join_group.API, partial(join_group.handle, groups, group_log)),
        (leave_group.API, partial(leave_group.handle, groups, group_log)),
        (list_groups.API, partial(list_groups.handle, groups)),
        (list_partition_reassignments.API, partial(list_partition_reassignments.handle, log)),
        (
            metadata.API,
            partial(
                metadata.handle,
                metadata.Services(runtime.config, log, node.departures, node.topics, groups, host),
            ),
        ),
        (offset_commit.API, partial(offset_commit.handle, groups, log)),
        (offset_delete.API, partial(offset_delete.handle, groups, log)),
        (offset_fetch.API, partial(offset_fetch.handle, groups, log)),
        (offset_for_leader_epoch.API, partial(offset_for_leader_epoch.handle, host)),
        (sync_group.API, partial(sync_group.handle, groups)),
        (unregister_broker.API, partial(unregister_broker.handle, controller)),
    ]
    return [
        *(Handler(api, handle) for api, handle in cold),
        *transactions.HANDLERS,
        fetch.handler(fetch.Services(runtime, log, host, node.server, node.fetch_sessions)),
        list_offsets.handler(list_offsets.Services(runtime, host)),
        produce.handler(produce.Services(runtime, log, host, node.forwarding, node.deadlines)),
    ]
