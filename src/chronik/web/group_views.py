"""Consumer groups of the whole cluster with their lag, as reported by their coordinators."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from chronik.client.errors import ClientError
from chronik.client.groups import read_assignment
from chronik.metadata.image import BrokerImage, ClusterImage
from chronik.web.answers import Refusal
from chronik.web.asked_brokers import AskedBrokers, PartitionName
from chronik.web.node_view import NodeView, require_image
from chronik.web.offsets import OffsetSampler
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

GROUPS_MAX = 200
"""How many groups of one coordinator are described with their lag. `total` counts all groups."""


class DescribedGroup(NamedTuple):
    group: str
    state: str
    assignor: str
    coordinator: int
    members: list[dict[str, Any]]
    owners: dict[PartitionName, str]
    committed: dict[PartitionName, int]


class Found(NamedTuple):
    groups: list[DescribedGroup]
    total: int
    silent: list[int]
    """The brokers that did not answer. Their groups are missing."""


async def groups_view(node: NodeView, sampler: OffsetSampler, brokers: AskedBrokers) -> dict[str, Any]:
    """Return one line per group, the largest lag first."""
    image = require_image(node)
    found = await _find(image, brokers, None)
    await _sample_ends(image, sampler, found.groups)
    lines = [_summary(group, sampler) for group in found.groups]
    lines.sort(key=lambda line: (-(line["lag"] or 0), line["group"]))
    return {"groups": lines, "total": found.total, "silent_nodes": found.silent}


async def group_view(name: str, node: NodeView, sampler: OffsetSampler, brokers: AskedBrokers) -> dict[str, Any]:
    """Return one group with its members and its lag per partition. Raises a 404 Refusal if no coordinator knows it."""
    image = require_image(node)
    found = await _find(image, brokers, name)
    if not found.groups:
        if found.silent:
            silent = ", ".join(map(str, found.silent))
            raise Refusal(503, f"group {name[:260]} is not found, and node {silent} did not answer: ask again")
        raise Refusal(404, f"group {name[:260]} does not exist: see /api/groups")
    group = found.groups[0]
    await _sample_ends(image, sampler, found.groups)
    return {
        **_summary(group, sampler),
        "assignor": group.assignor,
        "members": group.members,
        "partitions": [
            {
                "topic": topic,
                "partition": partition,
                "committed": group.committed.get((topic, partition)),
                "end": _end(sampler, (topic, partition)),
                "lag": _lag(group, sampler, (topic, partition)),
                "member": group.owners.get((topic, partition)),
            }
            for topic, partition in _partitions(group)
        ],
    }


async def _find(image: ClusterImage, brokers: AskedBrokers, name: str | None) -> Found:
    asked = image.live_brokers()
    answers = await asyncio.gather(*(_groups_of(brokers, broker, name) for broker in asked), return_exceptions=True)
    groups: list[DescribedGroup] = []
    total = 0
    silent: list[int] = []
    for broker, answer in zip(asked, answers, strict=True):
        if isinstance(answer, (ClientError, KafkaError)):
            silent.append(broker.id)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            groups += answer[0]
            total += answer[1]
    return Found(groups, total, silent)


async def _groups_of(brokers: AskedBrokers, broker: BrokerImage, name: str | None) -> tuple[list[DescribedGroup], int]:
    listed = await brokers.call(broker, ApiKey.LIST_GROUPS, {"states_filter": [], "types_filter": []})
    _raise_for(listed.error_code, f"groups of node {broker.id}")
    names = sorted(group.group_id for group in listed.groups if name is None or group.group_id == name)
    shown = names[:GROUPS_MAX]
    if not shown:
        return [], len(names)
    described, committed = await asyncio.gather(
        brokers.call(broker, ApiKey.DESCRIBE_GROUPS, {"groups": shown, "include_authorized_operations": False}),
        _committed(brokers, broker, shown),
    )
    groups = []
    for group in described.groups:
        if group.error_code != ErrorCode.none:  # deleted, or moved to another coordinator, since it was listed
            continue
        members = [_member(member) for member in group.members]
        owners = {
            (held["topic"], held["partition"]): member["member"] for member in members for held in member["partitions"]
        }
        offsets = committed.get(group.group_id, {})
        groups.append(
            DescribedGroup(group.group_id, group.group_state, group.protocol_data, broker.id, members, owners, offsets)
        )
    return groups, len(names)


async def _committed(
    brokers: AskedBrokers, broker: BrokerImage, names: Sequence[str]
) -> dict[str, dict[PartitionName, int]]:
    wanted = [{"group_id": name, "member_id": None, "member_epoch": -1, "topics": None} for name in names]
    response = await brokers.call(broker, ApiKey.OFFSET_FETCH, {"groups": wanted, "require_stable": False}, at_most=9)
    return {
        group.group_id: {
            (topic.name, partition.partition_index): partition.committed_offset
            for topic in group.topics
            for partition in topic.partitions
            if partition.error_code == ErrorCode.none and partition.committed_offset >= 0
        }
        for group in response.groups
    }


def _member(member: Any) -> dict[str, Any]:
    return {
        "member": member.member_id,
        "client_id": member.client_id,
        "host": member.client_host,
        "instance": getattr(member, "group_instance_id", None),
        "partitions": [
            {"topic": topic, "partition": partition} for topic, partition in read_assignment(member.member_assignment)
        ],
    }


async def _sample_ends(image: ClusterImage, sampler: OffsetSampler, groups: Sequence[DescribedGroup]) -> None:
    names = {topic for group in groups for topic, _ in _partitions(group)}
    topics = [topic for name in sorted(names) if (topic := image.topic(name)) is not None]
    await sampler.sample(image, topics)


def _summary(group: DescribedGroup, sampler: OffsetSampler) -> dict[str, Any]:
    lags = [_lag(group, sampler, name) for name in _partitions(group)]
    known = [lag for lag in lags if lag is not None]
    return {
        "group": group.group,
        "state": group.state,
        "coordinator": group.coordinator,
        "member_count": len(group.members),
        "topics": sorted({topic for topic, _ in _partitions(group)}),
        "partition_count": len(lags),
        "lag": sum(known) if known else None,
        "committed_total": sum(group.committed.values()),
    }


def _partitions(group: DescribedGroup) -> list[PartitionName]:
    return sorted({*group.committed, *group.owners})


def _end(sampler: OffsetSampler, name: PartitionName) -> int | None:
    sample = sampler.samples.get(name)
    return None if sample is None else sample.high_watermark


def _lag(group: DescribedGroup, sampler: OffsetSampler, name: PartitionName) -> int | None:
    end, committed = _end(sampler, name), group.committed.get(name)
    return None if end is None or committed is None else max(0, end - committed)


def _raise_for(code: ErrorCode, what: str) -> None:
    if code != ErrorCode.none:
        raise KafkaError(code, what)
