"""Apply broker changes: registration, fencing, shutdown. Part of `apply`, which states the rules."""

from __future__ import annotations

import msgspec

from chronik.metadata.apply_partitions import bump_epochs, change_partitions
from chronik.metadata.commands import FenceBroker, RegisterBroker, ShutDownBroker, UnfenceBroker, UnregisterBroker
from chronik.metadata.events import (
    BrokerFenced,
    BrokerRegistered,
    BrokerShuttingDown,
    BrokerUnfenced,
    BrokerUnregistered,
    Event,
)
from chronik.metadata.image import NO_CONTROLLER, BrokerImage, ClusterImage
from chronik.wire.errors import ErrorCode, KafkaError


def register_broker(image: ClusterImage, command: RegisterBroker) -> tuple[ClusterImage, list[Event]]:
    """Register the broker: with a new epoch for a new process, unchanged if the same process registers again."""
    version = image.version + 1
    known = image.brokers.get(command.broker_id)
    is_new_process = known is None or known.incarnation != command.incarnation
    broker = BrokerImage(
        id=command.broker_id,
        epoch=version if known is None or is_new_process else known.epoch,
        host=command.host,
        port=command.port,
        incarnation=command.incarnation,
        rack=command.rack,
        is_fenced=command.starts_fenced if known is None or is_new_process else known.is_fenced,
        is_shutting_down=known is not None and not is_new_process and known.is_shutting_down,
        status_version=version if known is None or is_new_process else known.status_version,
        durability=command.durability,
        folder_id=command.folder_id or (None if known is None else known.folder_id),
        internal=command.internal,
        http=command.http,
    )
    events: list[Event] = [BrokerRegistered(broker)]
    image, changed = change_partitions(image, command.changes, is_strict=True)
    events += changed
    if known is not None and is_new_process:
        image, bumped = bump_epochs(image, command.broker_id)
        events += bumped
    controller_id = command.broker_id if image.controller_id == NO_CONTROLLER else image.controller_id
    return msgspec.structs.replace(_with_broker(image, broker), controller_id=controller_id), events


def fence_broker(image: ClusterImage, command: FenceBroker) -> tuple[ClusterImage, list[Event]]:
    broker = _require(image, command.broker_id, command.broker_epoch)
    broker = msgspec.structs.replace(broker, is_fenced=True, status_version=image.version + 1)
    image, events = change_partitions(_with_broker(image, broker), command.changes, is_strict=False)
    return image, [BrokerFenced(broker), *events]


def unfence_broker(image: ClusterImage, command: UnfenceBroker) -> tuple[ClusterImage, list[Event]]:
    broker = _require(image, command.broker_id, command.broker_epoch)
    broker = msgspec.structs.replace(broker, is_fenced=False, status_version=image.version + 1)
    image, events = change_partitions(_with_broker(image, broker), command.changes, is_strict=False)
    return image, [BrokerUnfenced(broker), *events]


def shut_down_broker(image: ClusterImage, command: ShutDownBroker) -> tuple[ClusterImage, list[Event]]:
    broker = _require(image, command.broker_id, command.broker_epoch)
    broker = msgspec.structs.replace(broker, is_shutting_down=True, status_version=image.version + 1)
    image, events = change_partitions(_with_broker(image, broker), command.changes, is_strict=False)
    return image, [BrokerShuttingDown(broker), *events]


def unregister_broker(image: ClusterImage, command: UnregisterBroker) -> tuple[ClusterImage, list[Event]]:
    broker = _require(image, command.broker_id, command.broker_epoch)
    for topic in image.topics.values():
        for partition in topic.partitions:
            if broker.id in partition.replicas:
                raise KafkaError(
                    ErrorCode.invalid_request,
                    f"broker {broker.id} still has replicas, such as {topic.name}-{partition.partition}: "
                    "move them to other brokers first",
                )
    brokers = {broker_id: other for broker_id, other in image.brokers.items() if broker_id != broker.id}
    return msgspec.structs.replace(image, brokers=brokers), [BrokerUnregistered(broker)]


def _require(image: ClusterImage, broker_id: int, broker_epoch: int) -> BrokerImage:
    broker = image.brokers.get(broker_id)
    if broker is None:
        raise KafkaError(ErrorCode.broker_id_not_registered, f"broker {broker_id} is not registered")
    if broker.epoch != broker_epoch:
        raise KafkaError(
            ErrorCode.stale_broker_epoch, f"broker {broker_id} is at epoch {broker.epoch}, not {broker_epoch}"
        )
    return broker


def _with_broker(image: ClusterImage, broker: BrokerImage) -> ClusterImage:
    return msgspec.structs.replace(image, brokers={**image.brokers, broker.id: broker})
