"""InitProducerId (key 22), versions 0-5.

Behaviour
- An idempotent producer gets an id that no producer of this cluster had before, with epoch 0.
- A producer that sends its id and epoch (after a sequence error, KIP-360) gets the same id with the next epoch, or a
  new id if its epochs are exhausted.
- With a transactional id, the coordinator of the id answers: each request gets the next epoch, which fences earlier
  producers. An open transaction is aborted first; if that takes longer than 100 ms, CONCURRENT_TRANSACTIONS. A producer
  that sends its id and epoch gets PRODUCER_FENCED if another one has taken over.
- INVALID_TRANSACTION_TIMEOUT above the node's transaction_max_timeout_ms.
Versions: 2 flexible, 3 id and epoch in the request, 4 PRODUCER_FENCED (before that INVALID_PRODUCER_EPOCH).
Not supported: 6 (two-phase commit).
"""

from datetime import timedelta

from chronik.authorization.acls import Operation, ResourceType
from chronik.node.coordinators.transaction_service import TransactionService
from chronik.node.membership.controller_client import ProducerIds
from chronik.node.serving.api import Api, Request, Values
from chronik.transactions.coordinator import ProducerIdAndEpoch
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

EPOCH_MAX = 0x7FFE
FENCED_FROM_VERSION = 4


async def handle(producer_ids: ProducerIds, transactions: TransactionService, request: Request) -> Values:
    message, access = request.message, request.access
    if message.transactional_id is not None:
        access.require(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, message.transactional_id)
    elif not (
        access.has(Operation.IDEMPOTENT_WRITE, ResourceType.CLUSTER)
        or access.allows_any(Operation.WRITE, ResourceType.TOPIC)
    ):
        raise KafkaError(ErrorCode.cluster_authorization_failed)
    known_id = getattr(message, "producer_id", -1)
    known_epoch = getattr(message, "producer_epoch", -1)
    if message.transactional_id is not None:
        return await _transactional(transactions, request, ProducerIdAndEpoch(known_id, known_epoch))
    if known_id >= 0 and 0 <= known_epoch < EPOCH_MAX:
        return {"error_code": ErrorCode.none, "producer_id": known_id, "producer_epoch": known_epoch + 1}
    return {"error_code": ErrorCode.none, "producer_id": await producer_ids.next(), "producer_epoch": 0}


async def _transactional(transactions: TransactionService, request: Request, known: ProducerIdAndEpoch) -> Values:
    message = request.message
    if (known.producer_id < 0) != (known.producer_epoch < 0):
        raise KafkaError(ErrorCode.invalid_request, "a producer id without an epoch, or an epoch without an id")
    timeout_ms = message.transaction_timeout // timedelta(milliseconds=1)
    expected = known if known.producer_id >= 0 else None
    values = await transactions.init_producer(message.transactional_id, timeout_ms, expected)
    if values["error_code"] is ErrorCode.producer_fenced and request.api_version < FENCED_FROM_VERSION:
        return {**values, "error_code": ErrorCode.invalid_producer_epoch}
    return values


def on_error(request: Request, code: ErrorCode) -> Values:
    return {"error_code": code, "producer_id": -1, "producer_epoch": -1}


API = Api(ApiKey.INIT_PRODUCER_ID, (0, 5), on_error=on_error)
