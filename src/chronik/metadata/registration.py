"""Broker registration: whether a process may register, and how that changes the partitions it has replicas of.

The previous process may have just died, unnoticed, while it led partitions and was in ISRs. So the registration itself
ends those leaderships; partitions that the broker still leads get a new epoch. If the old process may have lost
records, the same command removes the broker from every ISR and all eligible leaders, before any node can act on the old
state.

Which brokers may have lost records? Under durability `synced`, a crash loses none: records are acknowledged only once
they are on disk. If the crashed process or the new one runs under `replicated`, a broker that did not stop cleanly may
have lost records. Under either setting, so may a broker whose data folder is not the one its last process wrote to: a
new folder, or an old copy.
"""

from __future__ import annotations

from chronik.metadata.calls import RegisterBrokerCall
from chronik.metadata.commands import RegisterBroker, UnregisterBroker
from chronik.metadata.elections import BrokerStates, Draft, Loss, TopicRules
from chronik.metadata.image import BrokerImage, ClusterImage
from chronik.metadata.plans import Changes
from chronik.wire.errors import ErrorCode, KafkaError

REPLICATED = "replicated"


def plan_registration(
    image: ClusterImage, brokers: BrokerStates, call: RegisterBrokerCall, *, is_session_alive: bool
) -> RegisterBroker:
    """Return the registration command. Raises DUPLICATE_BROKER_REGISTRATION while another process uses the id."""
    known = image.brokers.get(call.broker_id)
    changes = Changes()
    if known is not None and known.incarnation != call.incarnation:
        if is_session_alive and not _has_replaced(known, call):
            raise KafkaError(
                ErrorCode.duplicate_broker_registration,
                f"node id {call.broker_id} is in use by the node at {known.host}:{known.port}: "
                f"give the node at {call.host}:{call.port} another id, or stop the other one first",
            )
        _plan_departure(image, brokers, known, call, changes)
    return RegisterBroker(
        broker_id=call.broker_id,
        incarnation=call.incarnation,
        host=call.host,
        port=call.port,
        rack=call.rack,
        was_clean=was_clean(known, call),
        durability=call.durability,
        folder_id=call.folder_id,
        internal=call.internal,
        starts_fenced=True,
        changes=changes.of_topics(),
        http=call.http,
        listeners=call.listeners,
    )


def plan_unregistration(image: ClusterImage, broker_id: int) -> UnregisterBroker:
    """Return the command that removes a broker for good, or raise the error that says what to do first.

    The broker may still be running. Without replicas it leads nothing, and its vote may be needed for its own removal.
    An unregistered process gets no lease, and no replicas of topics created meanwhile. The command is refused when
    applied to a broker that has replicas.
    """
    broker = image.brokers.get(broker_id)
    if broker is None:
        raise KafkaError(ErrorCode.broker_id_not_registered, f"broker {broker_id} is not registered")
    return UnregisterBroker(broker_id, broker.epoch)


def was_clean(known: BrokerImage | None, call: RegisterBrokerCall) -> bool:
    """Whether the previously registered process is the one that stopped cleanly."""
    if known is None or not call.was_clean:
        return call.was_clean
    return call.previous_epoch is None or call.previous_epoch == known.epoch


def _has_replaced(known: BrokerImage, call: RegisterBrokerCall) -> bool:
    """Whether the other process must have ended: this one has its address, and two cannot listen on it."""
    has_its_address = (known.host, known.port, known.internal) == (call.host, call.port, call.internal)
    return has_its_address and not _has_other_store(known, call)


def _has_other_store(known: BrokerImage, call: RegisterBrokerCall) -> bool:
    return None not in (known.folder_id, call.folder_id) and known.folder_id != call.folder_id


def _loss(known: BrokerImage, call: RegisterBrokerCall) -> Loss | None:
    """Return what the broker may have lost, judged by its data folder as a whole; each log is checked later."""
    if call.previous_incarnations is None:
        is_same_folder = not _has_other_store(known, call)
    else:
        is_same_folder = known.incarnation in call.previous_incarnations
    if not is_same_folder:
        return Loss.CERTAIN
    may_lack_unsynced = REPLICATED in (known.durability, call.durability)
    return Loss.POSSIBLE if may_lack_unsynced and not was_clean(known, call) else None


def _plan_departure(
    image: ClusterImage, brokers: BrokerStates, known: BrokerImage, call: RegisterBrokerCall, changes: Changes
) -> None:
    loss = _loss(known, call)
    others = brokers.without(known.id)
    for _, topic in sorted(image.topics.items()):
        rules = None
        for partition in topic.partitions:
            if known.id not in partition.replicas:
                continue
            draft = Draft(partition)
            if loss is not None:
                draft.lose(known.id, loss)
            rules = rules or TopicRules.of(image, topic)
            draft.settle(others, rules)
            changes.add(topic.id, draft.change())
