"""Admin calls on consumer groups: list, describe, committed offsets, reset, delete.

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


@dataclass(frozen=True, slots=True)
class ListedGroup:
    """A listed group; `state` is empty if the broker does not report it."""

    group: str
    state: str
    protocol_type: str


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One member of a group and its assigned partitions."""

    member_id: str
    client_id: str
    client_host: str
    instance_id: str | None
    partitions: tuple[Partition, ...]


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group's state and members. Kafka reports the state `Dead` for a group that does not exist."""

    group: str
    state: str
    assignor: str
    members: tuple[GroupMember, ...]


class Groups:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def list(self) -> list[ListedGroup]:
        """Return the groups of all brokers: each broker lists the groups that it coordinates."""

        async def attempt(deadline: Deadline) -> dict[str, ListedGroup]:
            groups: dict[str, ListedGroup] = {}
            for node_id in sorted((await self._cluster.layout([], deadline=deadline)).brokers):
                connection = await self._cluster.connection(node_id, deadline)
                values: dict[str, Any] = {"states_filter": [], "types_filter": []}
                response = await connection.call(ApiKey.LIST_GROUPS, values, timeout_s=deadline.left_s)
                raise_for(response, f"groups of broker {node_id}")
                for group in response.groups:
                    state = getattr(group, "group_state", "")
                    groups[group.group_id] = ListedGroup(group.group_id, state, group.protocol_type)
            return groups

        return [group for _, group in sorted((await self._cluster.retry(attempt)).items())]

    async def describe(self, group: str) -> GroupDescription:
        """Return state and members of a classic or KIP-848 group."""
        classic = await self._describe_classic(group)
        if classic.state != "Dead":
            return classic
        try:
            return await self._describe_consumer(group) or classic
        except UnsupportedByBroker:
            return classic

    async def committed(self, group: str) -> dict[Partition, int]:
        """Return all committed offsets of the group."""

        async def attempt(deadline: Deadline) -> dict[Partition, int]:
            one = {"group_id": group, "member_id": None, "member_epoch": -1, "topics": None}
            values = {"group_id": group, "topics": None, "groups": [one], "require_stable": False}
            response = await self._cluster.call_coordinator(group, ApiKey.OFFSET_FETCH, values, deadline, at_most=9)
            offsets_of_group = response.groups[0] if hasattr(response, "groups") else response
            raise_for(offsets_of_group, f"offsets of group {group}")
            offsets: dict[Partition, int] = {}
            for topic in offsets_of_group.topics:
                for partition in topic.partitions:
                    raise_for(partition, f"offset of {topic.name}-{partition.partition_index}")
                    if partition.committed_offset >= 0:
                        offsets[topic.name, partition.partition_index] = partition.committed_offset
            return dict(sorted(offsets.items()))

        return await self._cluster.retry(attempt)

    async def commit(self, group: str, offsets: Mapping[Partition, int]) -> None:
        """Commit without being a member, which a coordinator allows only while the group is empty."""
        by_topic: dict[str, list[dict[str, Any]]] = {}
        for (topic, partition), offset in offsets.items():
            entry = {
                "partition_index": partition,
                "committed_offset": offset,
                "committed_leader_epoch": -1,
                "committed_metadata": "",
            }
            by_topic.setdefault(topic, []).append(entry)
        values = {
            "group_id": group,
            "generation_id_or_member_epoch": -1,
            "member_id": "",
            "group_instance_id": None,
            "retention_time": -1,
            "topics": [{"name": topic, "partitions": partitions} for topic, partitions in by_topic.items()],
        }

        async def attempt(deadline: Deadline) -> None:
            response = await self._cluster.call_coordinator(group, ApiKey.OFFSET_COMMIT, values, deadline, at_most=9)
            for topic in response.topics:
                for partition in topic.partitions:
                    raise_for(partition, f"{topic.name}-{partition.partition_index} of group {group}")

        await self._cluster.retry(attempt)

    async def delete(self, group: str) -> None:
        async def attempt(deadline: Deadline) -> None:
            values = {"groups_names": [group]}
            response = await self._cluster.call_coordinator(group, ApiKey.DELETE_GROUPS, values, deadline)
            raise_for(response.results[0], f"group {group}")

        await self._cluster.retry(attempt)

    async def _describe_classic(self, group: str) -> GroupDescription:
        async def attempt(deadline: Deadline) -> GroupDescription:
            values = {"groups": [group], "include_authorized_operations": False}
            response = await self._cluster.call_coordinator(group, ApiKey.DESCRIBE_GROUPS, values, deadline)
            description = response.groups[0]
            if description.error_code == ErrorCode.group_id_not_found:  # version 6; older versions return "Dead"
                return GroupDescription(group, "Dead", "", ())
            raise_for(description, f"group {group}")
            members = tuple(
                GroupMember(
                    member.member_id,
                    member.client_id,
                    member.client_host,
                    getattr(member, "group_instance_id", None),
                    read_assignment(member.member_assignment),
                )
                for member in description.members
            )
            return GroupDescription(group, description.group_state, description.protocol_data, members)

        return await self._cluster.retry(attempt)

    async def _describe_consumer(self, group: str) -> GroupDescription | None:
        async def attempt(deadline: Deadline) -> GroupDescription | None:
            values = {"group_ids": [group], "include_authorized_operations": False}
            response = await self._cluster.call_coordinator(group, ApiKey.CONSUMER_GROUP_DESCRIBE, values, deadline)
            description = response.groups[0]
            if description.error_code == ErrorCode.group_id_not_found:
                return None
            raise_for(description, f"group {group}")
            members = tuple(
                GroupMember(
                    member.member_id,
                    member.client_id,
                    member.client_host,
                    member.instance_id,
                    tuple((t.topic_name, p) for t in member.assignment.topic_partitions for p in t.partitions),
                )
                for member in description.members
            )
            return GroupDescription(group, description.group_state, description.assignor_name, members)

        return await self._cluster.retry(attempt)


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
