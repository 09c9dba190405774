"""Every Kafka API that a node serves, and its handler."""

from collections.abc import Awaitable, Callable
from functools import partial

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
from chronik.node.apis.services import Services
from chronik.node.serving.api import Api, Handler, Request, Values

COLD: tuple[tuple[Api, Callable[[Services, Request], Awaitable[Values]]], ...] = (
    (metadata.API, metadata.handle),
    (offset_commit.API, offset_commit.handle),
    (offset_fetch.API, offset_fetch.handle),
    (find_coordinator.API, find_coordinator.handle),
    (join_group.API, join_group.handle),
    (heartbeat.API, heartbeat.handle),
    (leave_group.API, leave_group.handle),
    (sync_group.API, sync_group.handle),
    (describe_groups.API, describe_groups.handle),
    (list_groups.API, list_groups.handle),
    (create_topics.API, create_topics.handle),
    (delete_topics.API, delete_topics.handle),
    (delete_records.API, delete_records.handle),
    (init_producer_id.API, init_producer_id.handle),
    (offset_for_leader_epoch.API, offset_for_leader_epoch.handle),
    (describe_configs.API, describe_configs.handle),
    (alter_configs.API, alter_configs.handle),
    (describe_log_dirs.API, describe_log_dirs.handle),
    (create_partitions.API, create_partitions.handle),
    (delete_groups.API, delete_groups.handle),
    (elect_leaders.API, elect_leaders.handle),
    (incremental_alter_configs.API, incremental_alter_configs.handle),
    (alter_partition_reassignments.API, alter_partition_reassignments.handle),
    (list_partition_reassignments.API, list_partition_reassignments.handle),
    (offset_delete.API, offset_delete.handle),
    (describe_cluster.API, describe_cluster.handle),
    (unregister_broker.API, unregister_broker.handle),
    (list_offsets.API, list_offsets.handle),
)

APIS: tuple[Api, ...] = tuple(
    sorted(
        (
            produce.API,
            fetch.API,
            api_versions.API,
            *(api for api, _ in COLD),
            *(handler.api for handler in transactions.HANDLERS),
        ),
        key=lambda api: api.key,
    )
)
"""Sorted by API key."""


def make_handlers(node: Services) -> list[Handler]:
    return [
        Handler(produce.API, hot=partial(produce.handle, node)),
        Handler(fetch.API, hot=partial(fetch.handle, node)),
        Handler(api_versions.API, partial(api_versions.handle, APIS)),
        *(Handler(api, partial(handle, node)) for api, handle in COLD),
        *transactions.HANDLERS,
    ]
