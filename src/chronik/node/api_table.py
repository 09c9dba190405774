"""Every Kafka API that a node serves, and its handler with the services that it uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from chronik.node.admin.telemetry import ClientTelemetry
from chronik.node.admin.topics import Topics
from chronik.node.apis import (
    add_offsets_to_txn,
    add_partitions_to_txn,
    add_raft_voter,
    alter_client_quotas,
    alter_configs,
    alter_partition_reassignments,
    alter_replica_log_dirs,
    alter_share_group_offsets,
    alter_user_scram_credentials,
    api_versions,
    consumer_group_describe,
    consumer_group_heartbeat,
    create_acls,
    create_partitions,
    create_topics,
    delete_acls,
    delete_groups,
    delete_records,
    delete_share_group_offsets,
    delete_topics,
    describe_acls,
    describe_client_quotas,
    describe_cluster,
    describe_configs,
    describe_groups,
    describe_log_dirs,
    describe_producers,
    describe_quorum,
    describe_share_group_offsets,
    describe_topic_partitions,
    describe_transactions,
    describe_user_scram_credentials,
    elect_leaders,
    end_txn,
    fetch,
    find_coordinator,
    get_telemetry_subscriptions,
    heartbeat,
    incremental_alter_configs,
    init_producer_id,
    join_group,
    leave_group,
    list_config_resources,
    list_groups,
    list_offsets,
    list_partition_reassignments,
    list_transactions,
    metadata,
    offset_commit,
    offset_delete,
    offset_fetch,
    offset_for_leader_epoch,
    produce,
    push_telemetry,
    remove_raft_voter,
    sasl_authenticate,
    sasl_handshake,
    share_acknowledge,
    share_fetch,
    share_group_describe,
    share_group_heartbeat,
    share_group_state,
    sync_group,
    txn_offset_commit,
    unregister_broker,
    write_txn_markers,
)
from chronik.node.coordinators.group_service import GroupService
from chronik.node.coordinators.markers import MarkerWriter
from chronik.node.coordinators.share_coordinator import ShareCoordinatorService
from chronik.node.coordinators.transaction_service import TransactionService
from chronik.node.coordinators.transactions import Transactions
from chronik.node.forwarding.forwarding import Forwarding
from chronik.node.membership.controller_client import ProducerIds
from chronik.node.membership.controller_service import ControllerService
from chronik.node.membership.departures import Departures
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.membership.raft_service import RaftService
from chronik.node.replicas.partition_host import PartitionHost
from chronik.node.replicas.schema_checks import RegistryView, SchemaChecks
from chronik.node.replicas.verifier import Verifier
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Api, ColdHandler, Handler
from chronik.node.serving.deadlines import Deadlines
from chronik.node.serving.fetch_sessions import FetchSessions
from chronik.node.serving.held_bytes import HeldBytes
from chronik.node.serving.quotas import ClientQuotas
from chronik.node.serving.server import Server
from chronik.node.shares.share_partitions import SharePartitions


@dataclass(frozen=True, slots=True)
class ApiServices:
    """All services of a node that its API handlers use."""

    runtime: Runtime
    metadata: MetadataLog
    raft: RaftService
    controller: ControllerService
    departures: Departures
    producer_ids: ProducerIds
    host: PartitionHost
    groups: GroupService
    transactions: TransactionService
    share_coordinator: ShareCoordinatorService
    shares: SharePartitions
    transaction_coordinators: Transactions
    marker_writer: MarkerWriter
    topics: Topics
    forwarding: Forwarding
    server: Server
    deadlines: Deadlines
    fetch_sessions: FetchSessions
    verifier: Verifier
    schemas: RegistryView
    quotas: ClientQuotas
    telemetry: ClientTelemetry


def _share_services(node: ApiServices) -> share_fetch.Services:
    return share_fetch.Services(node.runtime, node.host, node.server, node.shares)


COLD: tuple[tuple[Api, Callable[[ApiServices], ColdHandler]], ...] = (
    (
        metadata.API,
        lambda node: partial(
            metadata.handle,
            metadata.Services(
                node.runtime.config,
                node.metadata,
                node.departures,
                node.topics,
                node.groups,
                node.transactions,
                node.share_coordinator,
                node.host,
            ),
        ),
    ),
    (offset_commit.API, lambda node: partial(offset_commit.handle, node.groups, node.metadata)),
    (offset_fetch.API, lambda node: partial(offset_fetch.handle, node.groups, node.metadata)),
    (
        find_coordinator.API,
        lambda node: partial(find_coordinator.handle, node.groups, node.transactions, node.share_coordinator),
    ),
    (join_group.API, lambda node: partial(join_group.handle, node.groups, node.runtime.log.bind(component="groups"))),
    (heartbeat.API, lambda node: partial(heartbeat.handle, node.groups)),
    (leave_group.API, lambda node: partial(leave_group.handle, node.groups, node.runtime.log.bind(component="groups"))),
    (sync_group.API, lambda node: partial(sync_group.handle, node.groups)),
    (describe_groups.API, lambda node: partial(describe_groups.handle, node.groups)),
    (list_groups.API, lambda node: partial(list_groups.handle, node.groups)),
    (consumer_group_heartbeat.API, lambda node: partial(consumer_group_heartbeat.handle, node.groups)),
    (consumer_group_describe.API, lambda node: partial(consumer_group_describe.handle, node.groups)),
    (share_group_heartbeat.API, lambda node: partial(share_group_heartbeat.handle, node.groups)),
    (share_group_describe.API, lambda node: partial(share_group_describe.handle, node.groups)),
    (describe_share_group_offsets.API, lambda node: partial(describe_share_group_offsets.handle, node.groups)),
    (alter_share_group_offsets.API, lambda node: partial(alter_share_group_offsets.handle, node.groups, node.metadata)),
    (
        delete_share_group_offsets.API,
        lambda node: partial(delete_share_group_offsets.handle, node.groups, node.metadata),
    ),
    (list_config_resources.API, lambda node: partial(list_config_resources.handle, node.metadata)),
    (sasl_handshake.API, lambda node: sasl_handshake.handle),
    (sasl_authenticate.API, lambda node: sasl_authenticate.handle),
    (
        describe_user_scram_credentials.API,
        lambda node: partial(describe_user_scram_credentials.handle, node.metadata),
    ),
    (alter_user_scram_credentials.API, lambda node: partial(alter_user_scram_credentials.handle, node.metadata)),
    (api_versions.API, lambda node: partial(api_versions.handle, APIS, node.runtime.config.node_id, node.metadata)),
    (
        create_topics.API,
        lambda node: partial(create_topics.handle, node.runtime, node.metadata, node.topics, node.quotas),
    ),
    (
        delete_topics.API,
        lambda node: partial(delete_topics.handle, node.runtime, node.metadata, node.host, node.quotas),
    ),
    (delete_records.API, lambda node: partial(delete_records.handle, node.runtime, node.host)),
    (init_producer_id.API, lambda node: partial(init_producer_id.handle, node.producer_ids, node.transactions)),
    (offset_for_leader_epoch.API, lambda node: partial(offset_for_leader_epoch.handle, node.host)),
    (add_partitions_to_txn.API, lambda node: partial(add_partitions_to_txn.handle, node.transactions)),
    (add_offsets_to_txn.API, lambda node: partial(add_offsets_to_txn.handle, node.transactions, node.groups)),
    (
        txn_offset_commit.API,
        lambda node: partial(txn_offset_commit.handle, node.groups, node.transaction_coordinators, node.metadata),
    ),
    (end_txn.API, lambda node: partial(end_txn.handle, node.transactions)),
    (write_txn_markers.API, lambda node: partial(write_txn_markers.handle, node.marker_writer)),
    (describe_acls.API, lambda node: partial(describe_acls.handle, node.runtime.config, node.metadata)),
    (create_acls.API, lambda node: partial(create_acls.handle, node.runtime.config, node.metadata)),
    (delete_acls.API, lambda node: partial(delete_acls.handle, node.runtime.config, node.metadata)),
    (describe_configs.API, lambda node: partial(describe_configs.handle, node.runtime, node.metadata)),
    (alter_configs.API, lambda node: partial(alter_configs.handle, node.runtime, node.metadata, node.host)),
    (describe_log_dirs.API, lambda node: partial(describe_log_dirs.handle, node.runtime, node.metadata, node.host)),
    (
        create_partitions.API,
        lambda node: partial(create_partitions.handle, node.runtime, node.metadata, node.controller, node.quotas),
    ),
    (delete_groups.API, lambda node: partial(delete_groups.handle, node.groups)),
    (elect_leaders.API, lambda node: partial(elect_leaders.handle, node.metadata, node.controller)),
    (
        incremental_alter_configs.API,
        lambda node: partial(incremental_alter_configs.handle, node.runtime, node.metadata, node.host),
    ),
    (alter_partition_reassignments.API, lambda node: partial(alter_partition_reassignments.handle, node.metadata)),
    (list_partition_reassignments.API, lambda node: partial(list_partition_reassignments.handle, node.metadata)),
    (offset_delete.API, lambda node: partial(offset_delete.handle, node.groups, node.metadata)),
    (describe_client_quotas.API, lambda node: partial(describe_client_quotas.handle, node.metadata)),
    (alter_client_quotas.API, lambda node: partial(alter_client_quotas.handle, node.runtime, node.metadata)),
    (describe_cluster.API, lambda node: partial(describe_cluster.handle, node.metadata)),
    (describe_producers.API, lambda node: partial(describe_producers.handle, node.host)),
    (alter_replica_log_dirs.API, lambda node: partial(alter_replica_log_dirs.handle, node.runtime, node.host)),
    (describe_quorum.API, lambda node: partial(describe_quorum.handle, node.runtime, node.raft)),
    (
        describe_topic_partitions.API,
        lambda node: partial(describe_topic_partitions.handle, node.metadata, node.departures),
    ),
    (get_telemetry_subscriptions.API, lambda node: partial(get_telemetry_subscriptions.handle, node.telemetry)),
    (push_telemetry.API, lambda node: partial(push_telemetry.handle, node.telemetry)),
    (add_raft_voter.API, lambda node: partial(add_raft_voter.handle, node.metadata, node.controller)),
    (remove_raft_voter.API, lambda node: partial(remove_raft_voter.handle, node.metadata, node.controller)),
    (unregister_broker.API, lambda node: partial(unregister_broker.handle, node.controller)),
    (describe_transactions.API, lambda node: partial(describe_transactions.handle, node.transactions)),
    (share_fetch.API, lambda node: partial(share_fetch.handle, _share_services(node))),
    (share_acknowledge.API, lambda node: partial(share_acknowledge.handle, _share_services(node))),
    (share_group_state.INITIALIZE, lambda node: partial(share_group_state.initialize, node.share_coordinator)),
    (share_group_state.READ, lambda node: partial(share_group_state.read, node.share_coordinator)),
    (share_group_state.WRITE, lambda node: partial(share_group_state.write, node.share_coordinator)),
    (share_group_state.DELETE, lambda node: partial(share_group_state.delete, node.share_coordinator)),
    (share_group_state.READ_SUMMARY, lambda node: partial(share_group_state.read_summary, node.share_coordinator)),
    (list_transactions.API, lambda node: partial(list_transactions.handle, node.runtime, node.transactions)),
)
"""The cold APIs, and the services that each handler receives. `make_handlers` adds the others."""

APIS: tuple[Api, ...] = tuple(
    sorted(
        (
            produce.API,
            fetch.API,
            list_offsets.API,
            *(api for api, _ in COLD),
        ),
        key=lambda api: api.key,
    )
)
"""Sorted by API key."""


def make_handlers(node: ApiServices) -> list[Handler]:
    """Create all handlers. Each receives only the services that its API uses."""
    runtime, metadata_log, host = node.runtime, node.metadata, node.host
    return [
        produce.handler(
            produce.Services(
                runtime,
                metadata_log,
                host,
                node.forwarding,
                node.deadlines,
                node.verifier,
                HeldBytes(runtime.loop, produce.VERIFYING_BYTES_MAX),
                SchemaChecks(runtime, node.schemas),
            )
        ),
        fetch.handler(fetch.Services(runtime, metadata_log, host, node.server, node.fetch_sessions)),
        list_offsets.handler(list_offsets.Services(runtime, host)),
        *(Handler(api, bind(node)) for api, bind in COLD),
    ]
