"""A broker's process registers: whether it may, and what that does to the partitions it has replicas of.

The process before it may have died a moment ago without anyone's notice, leading partitions and in their ISRs. So the
registration itself takes the leaderships away (what it leads after all starts a new epoch) and, where the old process
may have lost records, every place in an ISR or among the eligible leaders: in the same command, before anyone can act
on the old picture.

Which brokers may have lost records. Under durability `synced` none by a crash: a log end counts only once it is on
disk. Under `replicated` every broker that did not stop cleanly; the setting of the process that crashed decides. Always
a broker whose data folder is not the one that its last process wrote to: a new folder, or an old copy.
"""

from __future__ import annotations

from chronik.metadata.calls import RegisterBrokerCall
from chronik.metadata.changes import Changes
from chronik.metadata.commands import RegisterBroker, UnregisterBroker
from chronik.metadata.elections import BrokerStates, Draft, Loss, TopicRules
from chronik.metadata.image import BrokerImage, ClusterImage
from chronik.wire.errors import ErrorCode, KafkaError

REPLICATED = "replicated"


def plan_registration(
    image: ClusterImage, brokers: BrokerStates, call: RegisterBrokerCall, *, session_lives: bool, starts_fenced: bool
) -> RegisterBroker:
    """The command that registers the process, or DUPLICATE_BROKER_REGISTRATION while another one lives under its id."""
    known = image.brokers.get(call.broker_id)
    changes = Changes()
    if known is not None and known.incarnation != call.incarnation:
        if session_lives and not _takes_its_place(known, call):
            raise KafkaError(
                ErrorCode.duplicate_broker_registration,
                f"node id {call.broker_id} is in use by the node at {known.host}:{known.port}: "
                f"give the node at {call.host}:{call.port} another id, or stop the other one first",
            )
        _leave(image, brokers, known, call, changes)
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
        starts_fenced=starts_fenced,
        changes=changes.of_topics(),
        http=call.http,
    )


def plan_unregistration(image: ClusterImage, broker_id: int) -> UnregisterBroker:
    """The command that forgets a broker for good, or the error that says what has to be done first.

    It may still run: one without replicas leads nothing, its vote may be needed for its own removal, and a process that
    is not registered gets no lease, and no replicas of topics that are made meanwhile. Applied to one that has replicas
    the command is refused.
    """
    broker = image.brokers.get(broker_id)
    if broker is None:
        raise KafkaError(ErrorCode.broker_id_not_registered, f"broker {broker_id} is not registered")
    return UnregisterBroker(broker_id, broker.epoch)


def was_clean(known: BrokerImage | None, call: RegisterBrokerCall) -> bool:
    """Whether the process that registered before is the one that stopped cleanly."""
    if known is None or not call.was_clean:
        return call.was_clean
    return call.previous_epoch is None or call.previous_epoch == known.epoch


def _takes_its_place(known: BrokerImage, call: RegisterBrokerCall) -> bool:
    """Whether the other process must be over: this one has its address, which two cannot listen on."""
    has_its_address = (known.host, known.port, known.internal) == (call.host, call.port, call.internal)
    return has_its_address and not _has_other_store(known, call)


def _has_other_store(known: BrokerImage, call: RegisterBrokerCall) -> bool:
    return None not in (known.folder_id, call.folder_id) and known.folder_id != call.folder_id


def _loss(known: BrokerImage, call: RegisterBrokerCall) -> Loss | None:
    """What the broker may have lost, as far as its data folder as a whole tells; each log is looked at later."""
    if call.previous_incarnations is None:
        is_same_folder = not _has_other_store(known, call)
    else:
        is_same_folder = known.incarnation in call.previous_incarnations
    if not is_same_folder:
        return Loss.CERTAIN
    may_lack_unsynced = REPLICATED in (known.durability, call.durability)
    return Loss.POSSIBLE if may_lack_unsynced and not was_clean(known, call) else None


def _leave(
    image: ClusterImage, brokers: BrokerStates, known: BrokerImage, call: RegisterBrokerCall, changes: Changes
) -> None:
    loss = _loss(known, call)
    others = BrokerStates(
        brokers.serving - {known.id},
        brokers.staying - {known.id},
        brokers.can_lead - {known.id},
        brokers.unaware - {known.id},
    )
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
