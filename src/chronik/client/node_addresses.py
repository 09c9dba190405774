"""The HTTP addresses of Chronik's nodes, for clients that know only the Kafka address of a cluster."""

from __future__ import annotations

from chronik.client.cluster import Cluster, Deadline
from chronik.client.errors import ClientError
from chronik.client.node_http import ANONYMOUS, Caller, HttpError, get_json
from chronik.wire.api import ApiKey
from chronik.wire.errors import KafkaError

BROKER_RESOURCE = 4
ASKED_MAX = 3
REQUEST_TIMEOUT_S = 3.0


async def http_addresses(cluster: Cluster, caller: Caller = ANONYMOUS) -> tuple[str, ...]:
    """Return the addresses, that of a node which answers first; empty for other Kafka clusters, or if none answers.

    Raises ClientError if no broker of the cluster answers.
    """
    layout = await cluster.layout([])
    for node in sorted(layout.brokers)[:ASKED_MAX]:
        address = await _http_address(cluster, node)
        if not address:
            continue
        try:
            view = await get_json(address, "/api/cluster", REQUEST_TIMEOUT_S, caller)
        except HttpError:
            continue
        # Nodes listen on 127.0.0.1 by default. Seen from another machine, a different cluster may listen there.
        if view.get("cluster_id") == layout.cluster_id:
            others = [str(each["http"]) for each in view.get("nodes", ()) if each.get("http")]
            return tuple(dict.fromkeys((address, *others)))
    return ()


async def _http_address(cluster: Cluster, node: int) -> str:
    """Return the HTTP address in a node's configuration. Kafka's brokers have no such setting."""
    resource = {"resource_type": BROKER_RESOURCE, "resource_name": str(node), "configuration_keys": ["listen.http"]}
    try:
        connection = await cluster.connection(node, Deadline(REQUEST_TIMEOUT_S))
        answer = await connection.call(ApiKey.DESCRIBE_CONFIGS, {"resources": [resource]}, timeout_s=REQUEST_TIMEOUT_S)
    except (ClientError, KafkaError):
        return ""
    return next((entry.value or "" for entry in answer.results[0].configs if entry.name == "listen.http"), "")
