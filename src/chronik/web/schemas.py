"""The answers of the HTTP API. Both the JSON and /api/openapi.json are made from these structs.

The name of a struct is its name in the description, and its docstring is its description there. A field with a default
is left out of the JSON while it has that value.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias
from uuid import UUID

import msgspec

from chronik.client.pipelines import PipelineState
from chronik.node.replicas.healing import DamageState
from chronik.node.replicas.partition import HowFound
from chronik.observe.build import Build
from chronik.observe.traces import TraceEvent

TimestampType: TypeAlias = Literal["CreateTime", "LogAppendTime"]


class Error(msgspec.Struct, frozen=True):
    error: Annotated[
        str, msgspec.Meta(pattern=r"^[^\n]+$", description="One line that says what is wrong and what to do.")
    ]


class OpenApi(msgspec.Struct, frozen=True):
    """An OpenAPI description."""

    openapi: str
    info: dict[str, str]
    paths: dict[str, Any]
    components: dict[str, Any]
    security: list[dict[str, list[str]]]


# -- log-ins -----------------------------------------------------------------------------------------------------------


class Session(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who is logged in. `login` is false if this node requires none. `has_ended` if the browser's session is over.

    A browser sends `csrf` as the header X-Chronik-CSRF when it logs in or out.
    """

    login: bool
    principal: str | None = None
    has_ended: bool = False
    csrf: str | None = None


class Token(msgspec.Struct, frozen=True):
    """For the header `Authorization: Bearer TOKEN`."""

    token: str
    principal: str
    expires_ms: int


# -- the cluster and its topics ----------------------------------------------------------------------------------------


class Node(msgspec.Struct, frozen=True):
    """`leaders`, `replicas` and `in_sync` count partitions."""

    id: int
    state: Literal["alive", "fenced", "stopping"]
    kafka: str
    http: str
    rack: str | None
    epoch: int
    leaders: int
    replicas: int
    in_sync: int


class Damage(msgspec.Struct, frozen=True):
    """Damage that was found in a log of this node since its start."""

    topic: str
    partition: int
    offset: int
    how: HowFound
    reason: str
    found_ms: int
    state: DamageState
    waits_for: str
    set_aside: tuple[str, ...]
    healed_ms: int | None


class Cluster(msgspec.Struct, frozen=True):
    """The cluster in the metadata of node `node_id`. `version` shows how recent this metadata is.

    `state`, `disk_error` and `build` are those of this node: whether it serves clients, why its disk does not complete
    writes (null if it does), and whether it runs compiled.
    """

    cluster_id: str
    node_id: int
    state: Literal["ready", "starting", "stopping", "disconnected"]
    disk_error: str | None
    build: Build
    version: int
    controller: int | None
    nodes: list[Node]
    topics: int
    partitions: int
    under_replicated: int
    leaderless: int
    under_replicated_partitions: list[str]
    leaderless_partitions: list[str]
    damages: list[Damage]


class TopicFields(msgspec.Struct, frozen=True):
    """The fields that all views of a topic have."""

    name: str
    id: UUID
    internal: bool
    replication_factor: int
    under_replicated: int
    leaderless: int


class TopicSummary(TopicFields, frozen=True):
    """`partitions`, `under_replicated` and `leaderless` count partitions."""

    partitions: int


class Topics(msgspec.Struct, frozen=True):
    topics: list[TopicSummary]


class Partition(msgspec.Struct, frozen=True):
    """The offsets are null if they are unknown. read_committed consumers see records below `last_stable_offset`."""

    partition: int
    leader: int
    epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    log_start_offset: int | None
    log_end_offset: int | None
    high_watermark: int | None
    last_stable_offset: int | None


class Share(msgspec.Struct, frozen=True):
    """The records of one partition in one share group, since `node` leads it; unless they are done, they are in flight.

    `exhausted` records were archived because they were not accepted in their last delivery. `suspect_offset` was
    delivered most often without being done. Offsets are -1 if there are none.
    """

    group: str
    partition: int
    start_offset: int
    in_flight: int
    oldest_lock_s: float
    delivered: int
    accepted: int
    released: int
    rejected: int
    exhausted: int
    exhausted_offset: int
    suspect_offset: int
    suspect_deliveries: int
    delivery_limit: int


class Topic(TopicFields, frozen=True):
    """Offsets and damages are those of the replicas on `node`, and `shares` those of share groups that it serves.

    `configs` is null if the user may not see them.
    """

    configs: dict[str, str] | None
    node: int
    partitions: list[Partition]
    damages: list[Damage]
    shares: list[Share]


# -- the log of a partition --------------------------------------------------------------------------------------------


class Batch(msgspec.Struct, frozen=True):
    """The header of a batch. Producer id, epoch and sequence are -1 if the producer is not idempotent."""

    base_offset: int
    last_offset: int
    count: int
    size_bytes: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    timestamp_type: TimestampType
    producer_id: int
    producer_epoch: int
    base_sequence: int
    codec: str
    is_control: bool
    is_transactional: bool
    leader_epoch: int
    crc: int


class Batches(msgspec.Struct, frozen=True):
    """One page. `next` is the start offset of the next page, or null at the end of the range."""

    topic: str
    partition: int
    leader: int
    log_start_offset: int
    high_watermark: int
    next: int | None
    batches: list[Batch]


class Content(msgspec.Struct, frozen=True):
    """`data` is text if `encoding` is `utf-8`, else base64. If `is_cut`, it holds only the first bytes."""

    encoding: Literal["utf-8", "base64"]
    data: str
    size_bytes: int
    is_cut: bool


class Header(msgspec.Struct, frozen=True):
    name: str
    value: Content | None


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One record. If `error` is set, a batch that cannot be decoded, with what is known of it."""

    offset: int
    timestamp_ms: int
    timestamp_type: TimestampType
    key: Content | None
    value: Content | None
    headers: list[Header]
    headers_left_out: int = 0
    error: str = ""


class Messages(msgspec.Struct, frozen=True):
    """One page. `source` is `replica` if the leader did not answer. `next` is null at the end."""

    topic: str
    partition: int
    node: int
    source: Literal["leader", "replica"]
    log_start_offset: int
    high_watermark: int
    next: int | None
    messages: list[Message]


# -- consumer groups ---------------------------------------------------------------------------------------------------


class GroupSummary(msgspec.Struct, frozen=True):
    """`group_type` is classic, consumer or share. `lag` is null if it is unknown for all partitions.

    Of a share group, start offsets take the place of committed offsets.
    """

    group: str
    state: str
    coordinator: int
    member_count: int
    topics: list[str]
    partition_count: int
    lag: int | None
    committed_total: int
    group_type: str


class Groups(msgspec.Struct, frozen=True):
    """The groups with the largest lag come first. Groups that `silent_nodes` coordinate are missing."""

    groups: list[GroupSummary]
    total: int
    silent_nodes: list[int]


class AssignedPartition(msgspec.Struct, frozen=True):
    topic: str
    partition: int


class Member(msgspec.Struct, frozen=True):
    """`epoch` and `target`, the partitions that it will have, are null in a classic group."""

    member: str
    client_id: str
    host: str
    instance: str | None
    partitions: list[AssignedPartition]
    epoch: int | None
    target: list[AssignedPartition] | None


class GroupPartition(msgspec.Struct, frozen=True):
    """`end` is the high watermark, and `member` the assigned member, of a share group one of them.

    `share` is what the leader reports of a share group. Unknown values are null.
    """

    topic: str
    partition: int
    committed: int | None
    end: int | None
    lag: int | None
    member: str | None
    share: Share | None


class Group(GroupSummary, frozen=True):
    """`assignment_epoch` is the epoch of the members' targets. Both epochs are null in a classic group."""

    epoch: int | None
    assignment_epoch: int | None
    assignor: str
    members: list[Member]
    partitions: list[GroupPartition]


# -- transactions ------------------------------------------------------------------------------------------------------


class Transaction(msgspec.Struct, frozen=True):
    """An open transaction, or an ended one whose markers are not written everywhere.

    The coordinator aborts an open one at `times_out_ms`, which is null for an ended one. `partitions` are those of an
    open one, or those that lack the marker.
    """

    transactional_id: str
    state: str
    coordinator: int
    producer_id: int
    producer_epoch: int
    start_ms: int
    times_out_ms: int | None
    partitions: list[str]


class Transactions(msgspec.Struct, frozen=True):
    """Those that have been open for longest come first. Transactions that `silent_nodes` coordinate are missing."""

    transactions: list[Transaction]
    total: int
    silent_nodes: list[int]


# -- pipelines ---------------------------------------------------------------------------------------------------------


class Pipelines(msgspec.Struct, frozen=True):
    """The pipelines that report to this cluster, by name. One without a report for 30 s is `lost`."""

    pipelines: list[PipelineState]


# -- metrics of clients ------------------------------------------------------------------------------------------------


class PushedMetric(msgspec.Struct, frozen=True):
    name: str
    attributes: dict[str, str]
    value: float
    is_counter: bool


class PushingClient(msgspec.Struct, frozen=True):
    """A client and what it pushed last. `interval_ms` and `subscribed` are its current subscription.

    The events of the page have no `metrics`, only their number, `series`.
    """

    client_id: str
    instance_id: UUID
    principal: str
    software_name: str
    software_version: str
    address: str
    interval_ms: int
    subscribed: list[str]
    pushed_ms: int
    series: int
    metrics: list[PushedMetric]


class ClientMetrics(msgspec.Struct, frozen=True):
    """The clients that this node heard last come first. `total` counts all that it knows."""

    clients: list[PushingClient]
    total: int


# -- traces ------------------------------------------------------------------------------------------------------------


class Traces(msgspec.Struct, frozen=True):
    """`next` is the `after` of the next request. `dropped` counts the events that never reached the traces topic."""

    node: int
    next: int
    last: int
    dropped: int
    traced_topics: list[str]
    events: list[TraceEvent]
