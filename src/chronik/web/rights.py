"""What a visitor may see. Without an authorizer, everything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from chronik.authorization.acls import CLUSTER_NAME, Operation, ResourceType
from chronik.metadata.image import TopicImage
from chronik.node.serving.access import Access
from chronik.web import schemas
from chronik.web.answers import Refusal

TOPIC, GROUP = ResourceType.TOPIC, ResourceType.GROUP


def require_visible_topic(access: Access, name: str) -> None:
    """Raise Refusal without DESCRIBE on the topic, whether it exists or not."""
    if not access.allows(Operation.DESCRIBE, TOPIC, name):
        raise Refusal(403, hidden_topic(name))


def require_readable(access: Access, name: str, what: str = "messages") -> None:
    """Raise Refusal without READ on the topic, whether it exists or not."""
    if not access.allows(Operation.READ, TOPIC, name):
        raise Refusal(403, f"you may not read {what} of this topic: ask for READ on topic {name[:260]}")


def require_visible_group(access: Access, name: str) -> None:
    if not access.allows(Operation.DESCRIBE, GROUP, name):
        raise Refusal(403, hidden_group(name))


def require_cluster(access: Access, what: str) -> None:
    if not access.allows(Operation.DESCRIBE, ResourceType.CLUSTER, CLUSTER_NAME):
        raise Refusal(403, f"you may not see {what}: ask for DESCRIBE on the cluster")


def hidden_topic(name: str) -> str:
    return f"you may not see this topic: ask for DESCRIBE on topic {name[:260]}"


def hidden_group(name: str) -> str:
    return f"you may not see this group: ask for DESCRIBE on group {name[:260]}"


def sees_cluster(access: Access) -> bool:
    return access.sees(ResourceType.CLUSTER, CLUSTER_NAME)


def sees_topic(access: Access, name: str) -> bool:
    return access.sees(TOPIC, name)


def reads_topic(access: Access, name: str) -> bool:
    """Return whether the visitor may read the topic. Not audited: for filters."""
    return access.is_open or _is_authorized(access, Operation.READ, name)


def visible_topics(access: Access, topics: Iterable[TopicImage]) -> list[TopicImage]:
    return [topic for topic in topics if access.is_open or sees_topic(access, topic.name)]


def visible_configs(access: Access, topic: str, configs: dict[str, str] | None) -> dict[str, str] | None:
    """Return the settings of a topic, or None if they are hidden. As in Kafka, they need DESCRIBE_CONFIGS."""
    return configs if access.is_open or _is_authorized(access, Operation.DESCRIBE_CONFIGS, topic) else None


def _is_authorized(access: Access, operation: Operation, topic: str) -> bool:
    return bool(access.authorized_operations(TOPIC, topic) >> operation & 1)


def visible_damages(access: Access, damages: Sequence[schemas.Damage]) -> list[schemas.Damage]:
    return [damage for damage in damages if sees_topic(access, damage.topic)]


def visible_shares(access: Access, shares: Sequence[schemas.Share]) -> list[schemas.Share]:
    return [share for share in shares if access.is_open or access.sees(GROUP, share.group)]


def visible_groups(access: Access, groups: schemas.Groups) -> schemas.Groups:
    """Return the groups that the visitor may see, with the topics of them that it may see."""
    if access.is_open:
        return groups
    lines = [_visible_summary(access, line) for line in groups.groups if access.sees(GROUP, line.group)]
    return schemas.Groups(lines, len(lines), groups.silent_nodes)


def _visible_summary(access: Access, line: schemas.GroupSummary) -> schemas.GroupSummary:
    topics = [topic for topic in line.topics if sees_topic(access, topic)]
    if len(topics) == len(line.topics):
        return line
    # The sums would tell how much is in the hidden topics.
    return msgspec.structs.replace(line, topics=topics, lag=None, committed_total=0)


def visible_group(access: Access, group: schemas.Group) -> schemas.Group:
    """Return a group without the topics that the visitor may not see."""
    if access.is_open:
        return group
    topics = {topic for topic in group.topics if sees_topic(access, topic)}
    partitions = [line for line in group.partitions if line.topic in topics]
    lags = [line.lag for line in partitions if line.lag is not None]
    return msgspec.structs.replace(
        group,
        topics=sorted(topics),
        partitions=partitions,
        partition_count=len(partitions),
        lag=sum(lags) if lags else None,
        committed_total=sum(line.committed or 0 for line in partitions),
        members=[
            msgspec.structs.replace(
                member,
                partitions=[held for held in member.partitions if held.topic in topics],
                target=member.target and [held for held in member.target if sees_topic(access, held.topic)],
            )
            for member in group.members
        ],
    )


def visible_transactions(access: Access, found: schemas.Transactions) -> schemas.Transactions:
    if access.is_open:
        return found
    lines = [
        msgspec.structs.replace(
            line, partitions=[each for each in line.partitions if sees_topic(access, each.rpartition("-")[0])]
        )
        for line in found.transactions
        if access.sees(ResourceType.TRANSACTIONAL_ID, line.transactional_id)
    ]
    return schemas.Transactions(lines, len(lines), found.silent_nodes)
