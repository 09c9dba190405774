"""EndTxn (key 26), versions 0-5.

Behaviour
- Commits or aborts the transaction. The response is sent when the outcome is committed in `__transaction_state`; the
  coordinator then writes the markers, and a new coordinator writes those that are missing.
- A repeated request succeeds if its outcome is the same. INVALID_TXN_STATE if it is not, or without a transaction.
- Version 5 raises the producer's epoch and returns it, or a new producer id with epoch 0 if the epochs are used up. It
  may abort a transaction that has no partitions.
- CONCURRENT_TRANSACTIONS while another request for the same transactional id is being committed.
Versions: 2 PRODUCER_FENCED (before that INVALID_PRODUCER_EPOCH), 3 flexible, 4 TRANSACTION_ABORTABLE (not used), 5
transaction version 2 (KIP-890).
"""

from chronik.authorization.acls import Operation, ResourceType
from chronik.node.coordinators.transaction_service import TransactionService
from chronik.node.serving.api import Api, Request, Values
from chronik.transactions.coordinator import ProducerIdAndEpoch
from chronik.transactions.transaction import EPOCH_BUMP_VERSION
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

FENCED_FROM_VERSION = 2
EPOCH_BUMP_FROM_VERSION = 5


async def handle(transactions: TransactionService, request: Request) -> Values:
    message = request.message
    request.access.require(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, message.transactional_id)
    values = await transactions.end(
        message.transactional_id,
        ProducerIdAndEpoch(message.producer_id, message.producer_epoch),
        is_commit=message.committed,
        client_version=EPOCH_BUMP_VERSION if request.api_version >= EPOCH_BUMP_FROM_VERSION else 0,
    )
    if values["error_code"] is ErrorCode.producer_fenced and request.api_version < FENCED_FROM_VERSION:
        return {"error_code": ErrorCode.invalid_producer_epoch}
    return values


API = Api(ApiKey.END_TXN, (0, 5))
