"""InitProducerId (key 22), versions 0-5.

Behaviour
- An idempotent producer gets an id that no producer of this cluster had before, with epoch 0.
- A producer that sends its id and epoch (after a sequence error, KIP-360) gets the same id with the next epoch, or a
  new id if its epochs are exhausted.
Versions: 2 flexible, 3 id and epoch in the request, 4 PRODUCER_FENCED.
Not supported: a transactional id; `transactions` explains the error.
"""

from chronik.node.apis.transactions import TRANSACTIONS_REFUSED, TRANSACTIONS_REFUSED_MESSAGE
from chronik.node.membership.controller_client import ProducerIds
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

EPOCH_MAX = 0x7FFE


async def handle(producer_ids: ProducerIds, request: Request) -> Values:
    message = request.message
    if message.transactional_id is not None:
        raise KafkaError(TRANSACTIONS_REFUSED, TRANSACTIONS_REFUSED_MESSAGE)
    known_id = getattr(message, "producer_id", -1)
    known_epoch = getattr(message, "producer_epoch", -1)
    if known_id >= 0 and 0 <= known_epoch < EPOCH_MAX:
        return {"error_code": ErrorCode.none, "producer_id": known_id, "producer_epoch": known_epoch + 1}
    return {"error_code": ErrorCode.none, "producer_id": await producer_ids.next(), "producer_epoch": 0}


def on_error(request: Request, code: ErrorCode) -> Values:
    return {"error_code": code, "producer_id": -1, "producer_epoch": -1}


API = Api(ApiKey.INIT_PRODUCER_ID, (0, 5), on_error=on_error)
