"""ISR changes that leaders propose: validation and the resulting command.

A proposal carries the epochs of what its leader knew, and all of them must be current: its own broker epoch, the leader
epoch, the partition epoch, and the broker epoch of each member (KIP-903). The last one keeps out a broker that was in
sync, crashed, lost records, and came back before the proposal arrived.
"""

from __future__ import annotations

from chronik.metadata.calls import UNKNOWN_EPOCH, AlterIsrCall
from chronik.metadata.commands import ChangePartition
from chronik.metadata.elections import BrokerStates, Draft, TopicRules
from chronik.metadata.image import NO_LEADER, ClusterImage, PartitionImage
from chronik.wire.errors import ErrorCode, KafkaError


def plan_isr_change(image: ClusterImage, brokers: BrokerStates, call: AlterIsrCall) -> ChangePartition:
    """Return the command for a leader's proposal, or raise the error that says why it is refused."""
    topic = image.topic_by_id(call.topic_id)
    if topic is None:
        raise KafkaError(ErrorCode.unknown_topic_id, f"no topic has the id {call.topic_id}")
    partition = topic.partition(call.partition)
    name = f"{topic.name}-{call.partition}"
    if partition is None:
        raise KafkaError(ErrorCode.unknown_topic_or_partition, f"{name} does not exist")
    _check_sender(image, partition, name, call)
    _check_members(image, partition, name, call)
    draft = Draft(partition)
    proposed = {member.broker_id for member in call.new_isr}
    draft.isr = tuple(replica for replica in partition.replicas if replica in proposed)
    if call.hand_over_to != NO_LEADER:
        if call.hand_over_to not in proposed or call.hand_over_to not in brokers.can_lead:
            raise KafkaError(
                ErrorCode.eligible_leaders_not_available,
                f"broker {call.hand_over_to} cannot lead {name}: keep leading it",
            )
        draft.leader = call.hand_over_to
        draft.has_leader_resigned = True
    draft.settle(brokers, TopicRules.of(image, topic))
    state = (draft.leader, draft.isr, draft.eligible, draft.replicas, draft.adding, draft.removing)
    return ChangePartition(topic.id, partition.partition, partition.partition_epoch, *state)


def _check_sender(image: ClusterImage, partition: PartitionImage, name: str, call: AlterIsrCall) -> None:
    sender = image.brokers.get(call.broker_id)
    if sender is None or (call.broker_epoch != UNKNOWN_EPOCH and call.broker_epoch != sender.epoch):
        raise KafkaError(
            ErrorCode.stale_broker_epoch,
            f"broker {call.broker_id} has registered again since epoch {call.broker_epoch}",
        )
    if call.leader_epoch > partition.leader_epoch or call.partition_epoch > partition.partition_epoch:
        raise KafkaError(ErrorCode.not_controller, f"this controller's image of {name} is older than its leader's")
    if call.leader_epoch < partition.leader_epoch or call.broker_id != partition.leader:
        raise KafkaError(
            ErrorCode.fenced_leader_epoch,
            f"{name} is led by broker {partition.leader} at epoch {partition.leader_epoch}",
        )
    if call.partition_epoch < partition.partition_epoch:
        raise KafkaError(ErrorCode.invalid_update_version, f"{name} is at partition epoch {partition.partition_epoch}")


def _check_members(image: ClusterImage, partition: PartitionImage, name: str, call: AlterIsrCall) -> None:
    members = [member.broker_id for member in call.new_isr]
    if (
        len(set(members)) != len(members)
        or (partition.leader not in members and call.hand_over_to == NO_LEADER)
        or any(member not in partition.replicas for member in members)
    ):
        raise KafkaError(
            ErrorCode.invalid_request,
            f"{members} cannot be the ISR of {name}: its replicas are {[*partition.replicas]}, "
            f"its leader is {partition.leader}",
        )
    for member in call.new_isr:
        if member.broker_id in partition.isr and member.broker_epoch == UNKNOWN_EPOCH:
            continue
        broker = image.brokers.get(member.broker_id)
        reason = None
        if broker is None:
            reason = "is not registered"
        elif broker.epoch != member.broker_epoch:
            reason = f"has registered again with epoch {broker.epoch}"
        elif member.broker_id != partition.leader and not broker.may_join_isr:
            reason = "is fenced" if broker.is_fenced else "is shutting down"
        if reason is not None:
            raise KafkaError(ErrorCode.ineligible_replica, f"broker {member.broker_id} {reason}")
