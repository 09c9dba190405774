"""The Kafka APIs that this node answers, one module each."""

from importlib import import_module

from chronik.node.serving.request import Api

MODULES = (
    "produce",
    "fetch",
    "list_offsets",
    "metadata",
    "offset_commit",
    "offset_fetch",
    "find_coordinator",
    "join_group",
    "heartbeat",
    "leave_group",
    "sync_group",
    "describe_groups",
    "list_groups",
    "api_versions",
    "create_topics",
    "delete_topics",
    "delete_records",
    "init_producer_id",
    "transactions",
    "offset_for_leader_epoch",
    "describe_configs",
    "alter_configs",
    "describe_log_dirs",
    "create_partitions",
    "delete_groups",
    "incremental_alter_configs",
    "offset_delete",
    "describe_cluster",
    "elect_leaders",
    "alter_partition_reassignments",
    "list_partition_reassignments",
    "unregister_broker",
)


def load_apis() -> dict[int, Api]:
    """Every API by its key, in the order of the keys."""
    apis: dict[int, Api] = {}
    for name in MODULES:
        module = import_module(f"{__name__}.{name}")
        for api in getattr(module, "APIS", None) or (module.API,):
            apis[api.key] = api
    return dict(sorted(apis.items()))
