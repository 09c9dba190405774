"""ShareAcknowledge (key 79), versions 1-2.

Behaviour
- Acknowledges acquired records in a share session: accept, release, reject, gap, and from version 2 renew (KIP-1222).
  All batches of a partition are acknowledged, or none. Success means that the share coordinator has committed it.
- INVALID_RECORD_STATE: the member has not acquired a record, or its lock has ended. INVALID_REQUEST: the batches of a
  partition are not in order.
- After an error of the share coordinator, COORDINATOR_NOT_AVAILABLE, the outcome is unknown and the records stay
  locked; a client may acknowledge them again.
- The final epoch (-1) ends the session and releases what the member has acquired.
Versions: 2 renewals and the duration of the lock.
"""

from __future__ import annotations

from chronik.node.apis.share_fetch import (
    Services,
    acknowledge,
    add_leaders,
    by_topic,
    check_renewals,
    open_session,
)
from chronik.node.serving.api import Api, Request, Values
from chronik.node.shares.share_sessions import FINAL_EPOCH, PartitionId
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError


async def handle(node: Services, request: Request) -> Values:
    message = request.message
    try:
        session = open_session(node, request, may_open=False)
        check_renewals(node, request, is_fetch=False)
    except KafkaError as error:
        return {"error_code": error.code, "error_message": error.message or None}
    answers: dict[PartitionId, Values] = {}
    for partition, refused in (await acknowledge(node, request, message.topics)).items():
        answers[partition] = {
            "error_code": ErrorCode.none if refused is None else refused.code,
            "error_message": None if refused is None else refused.message or None,
        }
    if message.share_session_epoch == FINAL_EPOCH:
        node.shares.sessions.close(session)
    return {
        "acquisition_lock_timeout": node.shares.group_settings(message.group_id).records.record_lock_duration_ms,
        "responses": by_topic(answers),
        "node_endpoints": add_leaders(node, request, answers),
    }


def on_error(request: Request, code: ErrorCode) -> Values:
    return {"error_code": code}


API = Api(ApiKey.SHARE_ACKNOWLEDGE, (1, 2), on_error=on_error)
