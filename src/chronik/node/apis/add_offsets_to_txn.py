"""AddOffsetsToTxn (key 25), versions 0-4.

Behaviour
- The transaction's coordinator adds the group's partition of `__consumer_offsets` to the transaction, or begins one.
  The first request creates that topic.
- Errors as of AddPartitionsToTxn.
Versions: 2 PRODUCER_FENCED (before that INVALID_PRODUCER_EPOCH), 3 flexible, 4 TRANSACTION_ABORTABLE (not used).
"""

from chronik.authorization.acls import Operation, ResourceType
from chronik.metadata.image import OFFSETS_TOPIC
from chronik.node.coordinators.group_service import GroupService
from chronik.node.coordinators.transaction_service import TransactionService
from chronik.node.serving.api import Api, Request, Values
from chronik.transactions.coordinator import ProducerIdAndEpoch
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

FENCED_FROM_VERSION = 2


async def handle(transactions: TransactionService, groups: GroupService, request: Request) -> Values:
    message = request.message
    request.access.require(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, message.transactional_id)
    request.access.require(Operation.READ, ResourceType.GROUP, message.group_id)
    await groups.topic.ensure_exists()
    index = groups.partition_of(message.group_id)
    if index is None:
        return {"error_code": ErrorCode.invalid_group_id}
    producer = ProducerIdAndEpoch(message.producer_id, message.producer_epoch)
    partition = (OFFSETS_TOPIC, index)
    error = (await transactions.add_partitions(message.transactional_id, producer, [partition]))[partition]
    if error is ErrorCode.producer_fenced and request.api_version < FENCED_FROM_VERSION:
        error = ErrorCode.invalid_producer_epoch
    return {"error_code": error}


API = Api(ApiKey.ADD_OFFSETS_TO_TXN, (0, 4))
