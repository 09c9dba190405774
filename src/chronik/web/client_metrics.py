"""Metrics that clients have pushed to this node (KIP-714)."""

from __future__ import annotations

from chronik.node.admin.telemetry import ClientInstance
from chronik.web import schemas
from chronik.web.node_view import NodeView

CLIENTS_MAX = 200
"""How many clients are shown. `total` counts all of them."""


def client_metrics_view(node: NodeView, *, with_values: bool = True) -> schemas.ClientMetrics:
    """Return the clients that this node heard last, and the last values of their metrics."""
    instances = node.pushing_clients
    newest = reversed(instances[-CLIENTS_MAX:])
    return schemas.ClientMetrics([_client(each, with_values) for each in newest], len(instances))


def _client(instance: ClientInstance, with_values: bool) -> schemas.PushingClient:
    attributes = instance.attributes
    return schemas.PushingClient(
        instance.client_id,
        instance.id,
        instance.principal,
        attributes["client_software_name"],
        attributes["client_software_version"],
        attributes["client_source_address"],
        instance.interval_ms,
        list(instance.metrics),
        instance.pushed_ms,
        len(instance.series),
        [
            schemas.PushedMetric(point.name, dict(point.attributes), point.value, point.is_counter)
            for _, point in sorted(instance.series.items())
        ]
        if with_values
        else [],
    )
