"""TxnOffsetCommit (key 28), versions 0-6.

Behaviour
- Writes offsets to `__consumer_offsets` as part of the producer's transaction, and answers when they are committed
  there. They become the group's offsets when the transaction commits, unless a later commit has replaced them by then.
- The coordinator of the transaction first confirms that it is open and contains the group's partition of
  `__consumer_offsets` (KIP-890). From version 5 on this request adds the partition; before, AddOffsetsToTxn does.
- A member commits with its generation (KIP-447): an older one is ILLEGAL_GENERATION. A request without a member id and
  a generation is accepted at any time, as are all requests below version 3.
- Errors of single partitions as in OffsetCommit. A fenced producer is INVALID_PRODUCER_EPOCH, a transaction that has
  ended INVALID_TXN_STATE. One without the partition is TRANSACTION_ABORTABLE, before version 4 INVALID_TXN_STATE. If
  the coordinator cannot be reached, the error is COORDINATOR_LOAD_IN_PROGRESS, after which all clients retry.
Versions: 2 leader epoch and COORDINATOR_LOAD_IN_PROGRESS (before, COORDINATOR_NOT_AVAILABLE), 3 flexible, and member,
instance and generation, 4 TRANSACTION_ABORTABLE, 5 adds the partition to the transaction, 6 topic ids,
STALE_MEMBER_EPOCH and GROUP_ID_NOT_FOUND as in OffsetCommit (KIP-1319; before, ILLEGAL_GENERATION).
"""

from typing import Any

from chronik.authorization.acls import Operation, ResourceType
from chronik.groups.commits import CommitRequest
from chronik.groups.offsets import Producer
from chronik.groups.records import TopicPartition
from chronik.node.admin.responses import each_partition, find_topic, may_read, refuse_partitions, topic_of
from chronik.node.coordinators.group_service import GroupService
from chronik.node.coordinators.transactions import Transactions
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

FIRST_VERSION_WITH_LOADING = 2
FIRST_VERSION_WITH_ABORTABLE = 4
FIRST_VERSION_THAT_ADDS = 5
FIRST_VERSION_WITH_TOPIC_IDS = 6


async def handle(groups: GroupService, transactions: Transactions, metadata: MetadataLog, request: Request) -> Values:
    message, version = request.message, request.api_version
    access = request.access
    access.require(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, message.transactional_id)
    access.require(Operation.READ, ResourceType.GROUP, message.group_id)
    topics = {topic_of(entry): find_topic(metadata.image, entry) for entry in message.topics}
    refused = {topic_of(entry) for entry in message.topics if not may_read(request, entry, topics[topic_of(entry)])}
    offsets: list[tuple[TopicPartition, int, int, str]] = []
    for entry in message.topics:
        topic = topics[topic_of(entry)]
        if topic is None or topic_of(entry) in refused:
            continue
        for each in entry.partitions:
            if topic.partition(each.partition_index) is not None:
                leader_epoch = getattr(each, "committed_leader_epoch", -1)
                partition = (topic.name, int(each.partition_index))
                offsets.append((partition, each.committed_offset, leader_epoch, each.committed_metadata or ""))
    producer = Producer(message.producer_id, message.producer_epoch)

    async def verify(partition: TopicPartition) -> ErrorCode:
        adds = version >= FIRST_VERSION_THAT_ADDS
        errors = await transactions.verify(message.transactional_id, *producer, (partition,), adds)
        return _verification_error(errors[partition], version)

    errors: dict[TopicPartition, ErrorCode] = {}
    if offsets:
        commit = CommitRequest(
            group_id=message.group_id,
            generation=getattr(message, "generation_id", -1),
            member_id=getattr(message, "member_id", ""),
            instance_id=getattr(message, "group_instance_id", None),
            offsets=tuple(offsets),
            knows_epochs=version >= FIRST_VERSION_WITH_TOPIC_IDS,
        )
        try:
            errors = await groups.commit_transactional(commit, producer, verify)
        except KafkaError as error:
            errors = {partition: error.code for partition, *_ in offsets}

    def outcome(entry: Any, each: Any) -> Values:
        topic = topics[topic_of(entry)]
        if topic_of(entry) in refused:
            return {"error_code": ErrorCode.topic_authorization_failed}
        if topic is None:
            by_id = version >= FIRST_VERSION_WITH_TOPIC_IDS
            return {"error_code": ErrorCode.unknown_topic_id if by_id else ErrorCode.unknown_topic_or_partition}
        error = errors.get((topic.name, each.partition_index), ErrorCode.unknown_topic_or_partition)
        if error is ErrorCode.coordinator_load_in_progress and version < FIRST_VERSION_WITH_LOADING:
            error = ErrorCode.coordinator_not_available
        return {"error_code": error}

    return {"topics": each_partition(message.topics, outcome)}


def _verification_error(error: ErrorCode, version: int) -> ErrorCode:
    """Return the client's error for that of the transaction's coordinator, of which clients know nothing here."""
    match error:
        case ErrorCode.transaction_abortable if version < FIRST_VERSION_WITH_ABORTABLE:
            return ErrorCode.invalid_txn_state
        case ErrorCode.concurrent_transactions if version >= FIRST_VERSION_THAT_ADDS:
            return error
        case (
            ErrorCode.concurrent_transactions
            | ErrorCode.coordinator_not_available
            | ErrorCode.not_coordinator
            | ErrorCode.network_exception
        ):
            return ErrorCode.coordinator_load_in_progress
        case _:
            return error


API = Api(ApiKey.TXN_OFFSET_COMMIT, (0, 6), on_error=refuse_partitions)
