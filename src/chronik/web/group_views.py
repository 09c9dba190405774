"""Groups of the whole cluster with their lag, as reported by their coordinators."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from chronik.client.groups import named_partitions, read_assignment
from chronik.client.node_http import HttpError, get_json
from chronik.metadata.image import BrokerImage, ClusterImage
from chronik.web import schemas
from chronik.web.answers import Refusal
from chronik.web.node_view import NodeView, require_image
from chronik.web.offsets import BrokerPool, OffsetSampler, PartitionName, answers_of
from chronik.web.views import shares_view
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

CLASSIC, CONSUMER, SHARE = "classic", "consumer", "share"

LEADER_TIMEOUT_S = 1.0
GROUPS_MAX = 200
"""How many groups of one coordinator are described with their lag. `total` counts all groups."""


class DescribedGroup(NamedTuple):
    group: str
    state: str
    assignor: str
    coordinator: int
    members: list[schemas.Member]
    owners: dict[PartitionName, str]
    committed: dict[PartitionName, int]
    """Of a share group: the start offsets."""
    group_type: str
    share_lags: dict[PartitionName, int | None]
    """Of a share group, whose records after the start offset may be done."""
    epoch: int | None
    assignment_epoch: int | None

    @property
    def partitions(self) -> list[PartitionName]:
        return sorted({*self.committed, *self.owners, *self.share_lags})


async def groups_view(node: NodeView, sampler: OffsetSampler) -> schemas.Groups:
    """Return one line per group, the largest lag first."""
    groups, total, silent = await _find(require_image(node), sampler, None)
    lines = [schemas.GroupSummary(*_summary(group, sampler)) for group in groups]
    lines.sort(key=lambda line: (-(line.lag or 0), line.group))
    return schemas.Groups(lines, total, silent)


async def group_view(name: str, node: NodeView, sampler: OffsetSampler) -> schemas.Group:
    """Return one group with its members and its lag per partition. Raises a 404 Refusal if no coordinator knows it."""
    groups, _, silent = await _find(require_image(node), sampler, name)
    if not groups and silent:
        nodes = ", ".join(map(str, silent))
        raise Refusal(503, f"group {name[:260]} was not found, but node {nodes} did not answer: retry")
    if not groups:
        raise Refusal(404, f"group {name[:260]} does not exist: see /api/groups")
    group = groups[0]
    shares = await _led_shares(node, group) if group.group_type == SHARE else {}
    return schemas.Group(
        *_summary(group, sampler),
        epoch=group.epoch,
        assignment_epoch=group.assignment_epoch,
        assignor=group.assignor,
        members=group.members,
        partitions=[
            schemas.GroupPartition(
                *partition,
                committed=group.committed.get(partition),
                end=_end(sampler, partition),
                lag=_lag(group, sampler, partition),
                member=group.owners.get(partition),
                share=shares.get(partition),
            )
            for partition in group.partitions
        ],
    )


async def _led_shares(node: NodeView, group: DescribedGroup) -> dict[PartitionName, schemas.Share]:
    """Return what the leaders of the partitions report of a share group; nothing of a leader that does not answer."""
    image = require_image(node)
    leaders: dict[tuple[str, int], None] = {}
    for topic, index in group.partitions:
        partition = image.partition(topic, index)
        if partition is not None and partition.leader in image.brokers:
            leaders[topic, partition.leader] = None

    async def ask(topic: str, leader: int) -> list[schemas.Share]:
        if leader == node.node_id:
            return shares_view(node, topic)
        path = f"/api/topics/{topic}"
        try:
            view = await get_json(image.brokers[leader].http, path, LEADER_TIMEOUT_S, node.caller())
        except HttpError:
            return []
        return msgspec.convert(view["shares"], list[schemas.Share])

    answers = await asyncio.gather(*(ask(*each) for each in leaders))
    return {
        (topic, share.partition): share
        for (topic, _), shares in zip(leaders, answers, strict=True)
        for share in shares
        if share.group == group.group
    }


async def _find(
    image: ClusterImage, sampler: OffsetSampler, name: str | None
) -> tuple[list[DescribedGroup], int, list[int]]:
    """Find all groups, or the named one, and sample the ends of their partitions.

    Also return how many there are, and the brokers that did not answer: their groups are missing.
    """
    answers, silent = await answers_of(image.live_brokers(), lambda broker: _groups_of(sampler.brokers, broker, name))
    groups = [group for described, _ in answers for group in described]
    total = sum(count for _, count in answers)
    consumed = {topic for group in groups for topic, _ in group.partitions}
    await sampler.sample(image, [topic for each in sorted(consumed) if (topic := image.topic(each)) is not None])
    return groups, total, silent


async def _groups_of(brokers: BrokerPool, broker: BrokerImage, name: str | None) -> tuple[list[DescribedGroup], int]:
    listed = await brokers.call(broker, ApiKey.LIST_GROUPS, {"states_filter": [], "types_filter": []})
    if listed.error_code != ErrorCode.none:
        raise KafkaError(listed.error_code, f"groups of node {broker.id}")
    names = sorted(group.group_id for group in listed.groups if name is None or group.group_id == name)
    shown = names[:GROUPS_MAX]
    if not shown:
        return [], len(names)
    types = {each.group_id: each.group_type.lower() for each in listed.groups}
    shared = [name for name in shown if types[name] == SHARE]
    described, committed, shares = await asyncio.gather(
        _described(brokers, broker, shown, types),
        _committed(brokers, broker, [name for name in shown if types[name] != SHARE]),
        _share_offsets(brokers, broker, shared),
    )
    groups = []
    for group in described:
        if group.error_code != ErrorCode.none:  # deleted, or moved to another coordinator, since it was listed
            continue
        members = [_member(member) for member in group.members]
        owners = {(held.topic, held.partition): member.member for member in members for held in member.partitions}
        starts = shares.get(group.group_id, {})
        offsets = {name: start for name, (start, _) in starts.items() if start >= 0}
        offsets |= committed.get(group.group_id, {})
        lags = {name: lag if lag >= 0 else None for name, (_, lag) in starts.items()}
        kind = types[group.group_id]
        assignor = group.protocol_data if kind == CLASSIC else group.assignor_name
        epochs = (None, None) if kind == CLASSIC else (group.group_epoch, group.assignment_epoch)
        groups.append(
            DescribedGroup(
                group.group_id, group.group_state, assignor, broker.id, members, owners, offsets, kind, lags, *epochs
            )
        )
    return groups, len(names)


async def _described(
    brokers: BrokerPool, broker: BrokerImage, names: Sequence[str], types: Mapping[str, str]
) -> list[Any]:
    """Describe groups of all types, each by its own API."""
    requests = (
        (ApiKey.DESCRIBE_GROUPS, "groups", CLASSIC),
        (ApiKey.CONSUMER_GROUP_DESCRIBE, "group_ids", CONSUMER),
        (ApiKey.SHARE_GROUP_DESCRIBE, "group_ids", SHARE),
    )
    described: list[Any] = []
    for key, field, kind in requests:
        if some := [name for name in names if types[name] == kind]:
            response = await brokers.call(broker, key, {field: some, "include_authorized_operations": False})
            described += response.groups
    return described


async def _share_offsets(
    brokers: BrokerPool, broker: BrokerImage, names: Sequence[str]
) -> dict[str, dict[PartitionName, tuple[int, int]]]:
    """Return the start offset and the lag of each partition of share groups; -1 if unknown."""
    if not names:
        return {}
    requested = [{"group_id": name, "topics": None} for name in names]
    response = await brokers.call(broker, ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS, {"groups": requested})
    return {
        group.group_id: {
            (topic.topic_name, partition.partition_index): (partition.start_offset, partition.lag)
            for topic in group.topics
            for partition in topic.partitions
            if partition.error_code == ErrorCode.none
        }
        for group in response.groups
    }


async def _committed(
    brokers: BrokerPool, broker: BrokerImage, names: Sequence[str]
) -> dict[str, dict[PartitionName, int]]:
    if not names:
        return {}
    requested = [{"group_id": name, "member_id": None, "member_epoch": -1, "topics": None} for name in names]
    response = await brokers.call(
        broker, ApiKey.OFFSET_FETCH, {"groups": requested, "require_stable": False}, at_most=9
    )
    return {
        group.group_id: {
            (topic.name, partition.partition_index): partition.committed_offset
            for topic in group.topics
            for partition in topic.partitions
            if partition.error_code == ErrorCode.none and partition.committed_offset >= 0
        }
        for group in response.groups
    }


def _member(member: Any) -> schemas.Member:
    if hasattr(member, "target_assignment"):
        return schemas.Member(
            member.member_id,
            member.client_id,
            member.client_host,
            member.instance_id,
            [schemas.AssignedPartition(*partition) for partition in named_partitions(member.assignment)],
            member.member_epoch,
            [schemas.AssignedPartition(*partition) for partition in named_partitions(member.target_assignment)],
        )
    if hasattr(member, "assignment"):  # of a share group
        return schemas.Member(
            member.member_id,
            member.client_id,
            member.client_host,
            None,
            [schemas.AssignedPartition(*partition) for partition in named_partitions(member.assignment)],
            member.member_epoch,
            None,
        )
    return schemas.Member(
        member.member_id,
        member.client_id,
        member.client_host,
        getattr(member, "group_instance_id", None),
        [schemas.AssignedPartition(*partition) for partition in read_assignment(member.member_assignment)],
        None,
        None,
    )


def _summary(
    group: DescribedGroup, sampler: OffsetSampler
) -> tuple[str, str, int, int, list[str], int, int | None, int, str]:
    """Return the values of `schemas.GroupSummary`."""
    partitions = group.partitions
    lags = [lag for name in partitions if (lag := _lag(group, sampler, name)) is not None]
    return (
        group.group,
        group.state,
        group.coordinator,
        len(group.members),
        sorted({topic for topic, _ in partitions}),
        len(partitions),
        sum(lags) if lags else None,
        sum(group.committed.values()),
        group.group_type,
    )


def _end(sampler: OffsetSampler, name: PartitionName) -> int | None:
    sample = sampler.samples.get(name)
    return None if sample is None else sample.high_watermark


def _lag(group: DescribedGroup, sampler: OffsetSampler, name: PartitionName) -> int | None:
    if group.group_type == SHARE:
        return group.share_lags.get(name)
    end, committed = _end(sampler, name), group.committed.get(name)
    return None if end is None or committed is None else max(0, end - committed)
