"""AddPartitionsToTxn (24) 0-3, AddOffsetsToTxn (25) 0-4, EndTxn (26) 0-4 and TxnOffsetCommit (28) 0-4: refused.

Behaviour
- Transactions are not implemented. Every call is answered with TRANSACTIONAL_ID_AUTHORIZATION_FAILED.
- Why that code: a client must fail at once, with a message. Java, kafka-python, aiokafka and librdkafka treat it as
  fatal in FindCoordinator (type transaction) and InitProducerId, where `init_transactions` begins, and librdkafka shows
  FindCoordinator's error message. librdkafka retries any other error there, including UNSUPPORTED_VERSION and
  INVALID_REQUEST, until the application's timeout; all clients retry the COORDINATOR_ errors. So FindCoordinator and
  InitProducerId return the same code, and so do these four APIs, which a client calls only after those two.
- Why they are advertised: a request for an unadvertised API closes the connection, which a client treats as a network
  failure and retries.
Versions: 3 flexible, in all four. EndTxn and TxnOffsetCommit 5 are omitted: they belong to transaction version 2.
Not supported: all of it. The place to add it: a coordinator beside `groups`, called by these handlers.
"""

from chronik.node.admin.responses import refuse_partitions
from chronik.node.serving.api import Api, Handler, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

TRANSACTIONS_REFUSED = ErrorCode.transactional_id_authorization_failed
TRANSACTIONS_REFUSED_MESSAGE = "This broker does not support transactions: use a producer without a transactional id."


async def add_partitions(request: Request) -> Values:
    return {
        "results_by_topic_v3_and_below": [
            {
                "name": topic.name,
                "results_by_partition": [
                    {"partition_index": partition, "partition_error_code": TRANSACTIONS_REFUSED}
                    for partition in topic.partitions
                ],
            }
            for topic in request.message.v3_and_below_topics
        ]
    }


async def refuse(request: Request) -> Values:
    return {"error_code": TRANSACTIONS_REFUSED}


async def commit_offsets(request: Request) -> Values:
    return refuse_partitions(request, TRANSACTIONS_REFUSED)


HANDLERS = (
    Handler(Api(ApiKey.ADD_PARTITIONS_TO_TXN, (0, 3)), add_partitions),
    Handler(Api(ApiKey.ADD_OFFSETS_TO_TXN, (0, 4)), refuse),
    Handler(Api(ApiKey.END_TXN, (0, 4)), refuse),
    Handler(Api(ApiKey.TXN_OFFSET_COMMIT, (0, 4)), commit_offsets),
)
