"""Turns requests for new topics and partitions into metadata commands, validated against the image.

The plans run inside `MetadataLog.propose`, so the image cannot change before the command is applied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from chronik.metadata.commands import Assignment, CreatePartitions, CreateTopic
from chronik.metadata.elections import MIN_INSYNC_REPLICAS, configured_min_insync
from chronik.metadata.image import ClusterImage, check_topic_name, is_internal
from chronik.metadata.placement import assign_manually, place_replicas
from chronik.metadata.topic_configs import check_topic_configs
from chronik.node.config import NodeConfig
from chronik.node.environment import Environment
from chronik.node.topic_settings import as_text
from chronik.wire.errors import ErrorCode, KafkaError

PARTITIONS_PER_REQUEST_MAX = 10_000
"""A request for more partitions than this is refused, as in Kafka: one command must stay small."""

DEFAULT = -1


class NewTopic(msgspec.Struct, frozen=True, tag="create_topic"):
    """A requested topic, also as a call to the controller. -1 means the node's default.

    `assignments` replaces `num_partitions` and `replication_factor`. `by_broker` allows internal topics. `charged_to`
    is the principal and client id of the client whose Metadata request creates the topic: the controller charges it.
    """

    name: str
    num_partitions: int = DEFAULT
    replication_factor: int = DEFAULT
    assignments: Mapping[int, Sequence[int]] = {}
    configs: Mapping[str, str | None] = {}
    by_broker: bool = False
    charged_to: tuple[str, str] | None = None


def plan_topic(image: ClusterImage, config: NodeConfig, env: Environment, new: NewTopic) -> CreateTopic:
    """Return the command that creates the topic, or raise KafkaError. Only the broker creates internal topics."""
    check_topic_name(new.name)
    if is_internal(new.name) and not new.by_broker:
        raise KafkaError(
            ErrorCode.invalid_topic_exception, f"{new.name!r} is internal: the cluster creates it when it is needed"
        )
    if new.name in image.topics:
        raise KafkaError(ErrorCode.topic_already_exists, f"Topic {new.name!r} already exists.")
    if new.assignments:
        partitions = _manual_partitions(image, new)
    else:
        partitions = _placed_partitions(image, config, env, new)
    check_topic_configs(new.configs, is_internal(new.name))
    configs = {name: text.strip() for name, text in new.configs.items() if text is not None}
    if MIN_INSYNC_REPLICAS in config.topic_defaults and configured_min_insync(image, configs) is None:
        # Stored with the topic: leaders and the controller must use the same number, whatever their own files say.
        configs[MIN_INSYNC_REPLICAS] = as_text(config.topic_defaults[MIN_INSYNC_REPLICAS])
    return CreateTopic(name=new.name, id=env.new_uuid(), partitions=partitions, configs=configs)


def plan_partitions(
    image: ClusterImage, env: Environment, name: str, count: int, assignments: Sequence[Sequence[int]] | None
) -> CreatePartitions:
    """Return the command that grows the topic to `count` partitions, or raise KafkaError."""
    topic = image.require_topic(name)
    if topic.is_internal:
        raise KafkaError(ErrorCode.invalid_topic_exception, f"{name!r} is internal: its partitions are fixed")
    first = len(topic.partitions)
    if count <= first:
        shrunk = "which would not be an increase" if count == first else f"{count} would not be an increase"
        raise KafkaError(
            ErrorCode.invalid_partitions, f"The topic {name} currently has {first} partition(s); {shrunk}."
        )
    added = count - first
    check_partition_count(added)
    factor = len(topic.partitions[0].target_replicas)
    if assignments is None:
        placed = place_replicas(image.staying_brokers(), added, factor, env.random, first, spare=image.absent_brokers())
        return CreatePartitions(name, topic.id, first, placed)
    if len(assignments) != added:
        raise KafkaError(
            ErrorCode.invalid_replica_assignment,
            f"Attempted to add {added} additional partition(s), but {len(assignments)} assignment(s) were specified.",
        )
    partitions = tuple(assign_manually(image, replicas) for replicas in assignments)
    _check_equal_factors(partitions, factor)
    return CreatePartitions(name, topic.id, first, partitions)


def check_partition_count(count: int) -> None:
    if count > PARTITIONS_PER_REQUEST_MAX:
        raise KafkaError(
            ErrorCode.policy_violation,
            f"{count} partitions in one request are too many: at most {PARTITIONS_PER_REQUEST_MAX} are allowed",
        )


def _placed_partitions(
    image: ClusterImage, config: NodeConfig, env: Environment, new: NewTopic
) -> tuple[Assignment, ...]:
    count = config.num_partitions if new.num_partitions == DEFAULT else new.num_partitions
    if count < 1:
        raise KafkaError(ErrorCode.invalid_partitions, "Number of partitions must be larger than 0.")
    check_partition_count(count)
    factor = new.replication_factor
    if factor == DEFAULT:
        factor = max(1, min(config.default_replication_factor, len(image.brokers)))
    return place_replicas(image.staying_brokers(), count, factor, env.random, spare=image.absent_brokers())


def _manual_partitions(image: ClusterImage, new: NewTopic) -> tuple[Assignment, ...]:
    if new.num_partitions != DEFAULT or new.replication_factor != DEFAULT:
        raise KafkaError(
            ErrorCode.invalid_request,
            "Both assignments and a number of partitions or a replication factor are given: leave the numbers at -1.",
        )
    check_partition_count(len(new.assignments))
    if sorted(new.assignments) != list(range(len(new.assignments))):
        raise KafkaError(
            ErrorCode.invalid_replica_assignment, "The manual assignments must be for partitions 0, 1, 2 and so on."
        )
    partitions = tuple(assign_manually(image, new.assignments[index]) for index in range(len(new.assignments)))
    _check_equal_factors(partitions, len(partitions[0].replicas))
    return partitions


def _check_equal_factors(partitions: Sequence[Assignment], factor: int) -> None:
    for assignment in partitions:
        if len(assignment.replicas) != factor:
            raise KafkaError(
                ErrorCode.invalid_replica_assignment,
                f"The assignment {[*assignment.replicas]} has {len(assignment.replicas)} replicas instead of {factor}.",
            )
