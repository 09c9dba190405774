"""Admin calls on groups of all types: list, describe, committed offsets, offsets of share groups, reset, delete.

A member's assignment has the encoding of the consumer protocol:

    version int16, topics: int32 count of (name string, partitions: int32 count of int32), user data bytes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from struct import Struct, error
from typing import Any

from chronik.client.cluster import Cluster, Deadline
from chronik.client.errors import UnsupportedByBroker, raise_for
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

_INT16 = Struct(">h")
_INT32 = Struct(">i")

Partition = tuple[str, int]

CLASSIC_MEMBER, CONSUMER_MEMBER = 0, 1
SHARE = "share"
GROUP_RESOURCE = 32
SET, DELETE = 0, 1


@dataclass(frozen=True, slots=True)
class ListedGroup:
    """A listed group; the broker may leave `state` and `group_type` (classic, consumer, share) empty."""

    group: str
    state: str
    protocol_type: str
    group_type: str = ""


@dataclass(frozen=True, slots=True)
class GroupMember:
    member_id: str
    client_id: str
    client_host: str
    instance_id: str | None
    partitions: tuple[Partition, ...]
    epoch: int | None = None
    """The epochs and targets exist only in a consumer group (KIP-848)."""
    target: tuple[Partition, ...] | None = None
    uses_classic_protocol: bool = True


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group's state and members. Kafka reports the state `Dead` for a group that does not exist."""

    group: str
    state: str
    assignor: str
    members: tuple[GroupMember, ...]
    group_type: str = "classic"
    epoch: int | None = None
    assignment_epoch: int | None = None


@dataclass(frozen=True, slots=True)
class ShareOffset:
    """Where a share group starts in a partition; None if nothing was fetched yet, or if it is not known."""

    start: int | None
    lag: int | None


class Groups:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def list(self) -> list[ListedGroup]:
        """Return the groups of all brokers: each broker lists the groups that it coordinates."""

        async def attempt(deadline: Deadline) -> dict[str, ListedGroup]:
            groups: dict[str, ListedGroup] = {}
            for node_id in sorted((await self._cluster.layout([], deadline=deadline)).brokers):
                connection = await self._cluster.connection(node_id, deadline)
                response = await connection.call(ApiKey.LIST_GROUPS, {}, timeout_s=deadline.left_s)
                raise_for(response, f"groups of broker {node_id}")
                for group in response.groups:
                    state = getattr(group, "group_state", "")
                    kind = getattr(group, "group_type", "").lower()
                    groups[group.group_id] = ListedGroup(group.group_id, state, group.protocol_type, kind)
            return groups

        return [group for _, group in sorted((await self._cluster.retry(attempt)).items())]

    async def describe(self, group: str) -> GroupDescription:
        """Return state and members of a group of any type."""
        classic = await self._describe(group, ApiKey.DESCRIBE_GROUPS, "groups")
        for key in (ApiKey.CONSUMER_GROUP_DESCRIBE, ApiKey.SHARE_GROUP_DESCRIBE):
            if classic.state != "Dead":
                break
            try:
                described = await self._describe(group, key, "group_ids")
            except UnsupportedByBroker:
                continue
            if described.state != "Dead":
                return described
        return classic

    async def share_offsets(self, group: str) -> dict[Partition, ShareOffset]:
        """Return where a share group starts in each of its partitions."""

        def read(response: Any) -> dict[Partition, ShareOffset]:
            described = response.groups[0]
            raise_for(described, f"offsets of group {group}")
            offsets: dict[Partition, ShareOffset] = {}
            for topic in described.topics:
                for partition in topic.partitions:
                    raise_for(partition, f"offset of {topic.topic_name}-{partition.partition_index}")
                    start, lag = partition.start_offset, getattr(partition, "lag", -1)
                    offsets[str(topic.topic_name), partition.partition_index] = ShareOffset(
                        start if start >= 0 else None, lag if lag >= 0 else None
                    )
            return dict(sorted(offsets.items()))

        values = {"groups": [{"group_id": group, "topics": None}]}
        return await self._cluster.call(ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS, values, read, group=group)

    async def alter_share_offsets(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        """Set where an empty share group starts in partitions of a topic."""

        def check(response: Any) -> None:
            raise_for(response, f"group {group}")
            for altered in response.responses:
                for partition in altered.partitions:
                    raise_for(partition, f"{altered.topic_name}-{partition.partition_index} of group {group}")

        partitions = [{"partition_index": index, "start_offset": offset} for index, offset in offsets.items()]
        values = {"group_id": group, "topics": [{"topic_name": topic, "partitions": partitions}]}
        await self._cluster.call(ApiKey.ALTER_SHARE_GROUP_OFFSETS, values, check, group=group)

    async def committed(self, group: str, *, is_stable: bool = False) -> dict[Partition, int]:
        """Return the group's offsets; with `is_stable`, wait until no transaction may still change one of them."""

        def read(response: Any) -> dict[Partition, int]:
            offsets_of_group = response.groups[0] if hasattr(response, "groups") else response
            raise_for(offsets_of_group, f"offsets of group {group}")
            offsets: dict[Partition, int] = {}
            for topic in offsets_of_group.topics:
                for partition in topic.partitions:
                    raise_for(partition, f"offset of {topic.name}-{partition.partition_index}")
                    if partition.committed_offset >= 0:
                        offsets[topic.name, partition.partition_index] = partition.committed_offset
            return dict(sorted(offsets.items()))

        groups = [{"group_id": group, "topics": None}]
        values = {"group_id": group, "topics": None, "groups": groups, "require_stable": is_stable}
        return await self._cluster.call(ApiKey.OFFSET_FETCH, values, read, group=group, at_most=9)

    async def commit(self, group: str, offsets: Mapping[Partition, int]) -> None:
        """Commit without being a member, which a coordinator allows only while the group is empty."""
        by_topic: dict[str, list[dict[str, Any]]] = {}
        for (topic, partition), offset in offsets.items():
            entry = {"partition_index": partition, "committed_offset": offset, "committed_metadata": ""}
            by_topic.setdefault(topic, []).append(entry)
        topics = [{"name": topic, "partitions": partitions} for topic, partitions in by_topic.items()]

        def check(response: Any) -> None:
            for topic in response.topics:
                for partition in topic.partitions:
                    raise_for(partition, f"{topic.name}-{partition.partition_index} of group {group}")

        values = {"group_id": group, "topics": topics}
        await self._cluster.call(ApiKey.OFFSET_COMMIT, values, check, group=group, at_most=9)

    async def alter_configs(self, group: str, configs: Mapping[str, str | None]) -> None:
        """Set the given configs and keep all others; None resets a config to its default. The group need not exist."""
        changes = [
            {"name": name, "value": value, "config_operation": SET if value is not None else DELETE}
            for name, value in configs.items()
        ]
        resource = {"resource_type": GROUP_RESOURCE, "resource_name": group, "configs": changes}

        def check(response: Any) -> None:
            raise_for(response.responses[0], f"configs of group {group}")

        values = {"resources": [resource], "validate_only": False}
        await self._cluster.call(ApiKey.INCREMENTAL_ALTER_CONFIGS, values, check)

    async def delete(self, group: str) -> None:
        def check(response: Any) -> None:
            raise_for(response.results[0], f"group {group}")

        await self._cluster.call(ApiKey.DELETE_GROUPS, {"groups_names": [group]}, check, group=group)

    async def _describe(self, group: str, key: ApiKey, groups_field: str) -> GroupDescription:
        def read(response: Any) -> GroupDescription:
            described = response.groups[0]
            if described.error_code == ErrorCode.group_id_not_found:  # DescribeGroups before version 6 returns "Dead"
                return GroupDescription(group, "Dead", "", ())
            raise_for(described, f"group {group}")
            state, members = described.group_state, tuple(map(_member, described.members))
            if key == ApiKey.DESCRIBE_GROUPS:
                return GroupDescription(group, state, described.protocol_data, members)
            epochs = described.group_epoch, described.assignment_epoch
            kind = SHARE if key == ApiKey.SHARE_GROUP_DESCRIBE else "consumer"
            return GroupDescription(group, state, described.assignor_name, members, kind, *epochs)

        return await self._cluster.call(key, {groups_field: [group]}, read, group=group)


def _member(member: Any) -> GroupMember:
    """Convert a member in a response of DescribeGroups, ConsumerGroupDescribe or ShareGroupDescribe."""
    identity = member.member_id, member.client_id, member.client_host
    if hasattr(member, "member_assignment"):
        return GroupMember(
            *identity, getattr(member, "group_instance_id", None), read_assignment(member.member_assignment)
        )
    if not hasattr(member, "target_assignment"):
        partitions = named_partitions(member.assignment)
        return GroupMember(*identity, None, partitions, member.member_epoch, uses_classic_protocol=False)
    return GroupMember(
        *identity,
        member.instance_id,
        named_partitions(member.assignment),
        member.member_epoch,
        named_partitions(member.target_assignment),
        getattr(member, "member_type", CONSUMER_MEMBER) == CLASSIC_MEMBER,
    )


def named_partitions(assignment: Any) -> tuple[Partition, ...]:
    """Return the partitions of an assignment in ConsumerGroupDescribe or ShareGroupDescribe."""
    return tuple(
        (str(topic.topic_name), int(index)) for topic in assignment.topic_partitions for index in topic.partitions
    )


def read_assignment(encoded: bytes) -> tuple[Partition, ...]:
    """Return the partitions in a member's assignment; empty if it is not in the consumer protocol's format."""
    partitions: list[Partition] = []
    try:
        at = 6
        for _ in range(_INT32.unpack_from(encoded, 2)[0]):
            length = _INT16.unpack_from(encoded, at)[0]
            at += 2 + length
            topic = encoded[at - length : at].decode()
            count = _INT32.unpack_from(encoded, at)[0]
            at += 4
            for _ in range(count):
                partitions.append((topic, _INT32.unpack_from(encoded, at)[0]))
                at += 4
    except (error, UnicodeDecodeError):
        return ()
    return tuple(partitions)
