"""TxnOffsetCommit (key 28), versions 0-4: refused.

Behaviour
- Every call is answered with TRANSACTIONAL_ID_AUTHORIZATION_FAILED, which all clients treat as fatal.
Not supported: all of it.
"""

from chronik.node.admin.responses import refuse_partitions
from chronik.node.serving.api import Api, Handler, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

TRANSACTIONS_REFUSED = ErrorCode.transactional_id_authorization_failed


async def commit_offsets(request: Request) -> Values:
    return refuse_partitions(request, TRANSACTIONS_REFUSED)


HANDLERS = (Handler(Api(ApiKey.TXN_OFFSET_COMMIT, (0, 4)), commit_offsets),)
