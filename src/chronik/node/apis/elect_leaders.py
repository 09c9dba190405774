"""ElectLeaders (key 43), versions 0-2.

Behaviour
- type 0 elects the preferred leader, the first replica of each partition: PREFERRED_LEADER_NOT_AVAILABLE if it is not
  in sync or not alive. The current leader hands over; REQUEST_TIMED_OUT if that takes too long.
- type 1, unclean election, elects any live replica of each leaderless partition, in-sync and eligible ones first:
  ELIGIBLE_LEADERS_NOT_AVAILABLE if none is live. Records that only other replicas have are lost, as the client accepts.
- ELECTION_NOT_NEEDED if the partition needs no election. A request without a list covers all partitions, and its
  response omits these.
Versions: 0 preferred leaders only, 1 election type and the top-level error, 2 flexible.
Answered by the controller; other nodes forward the request to it.
"""

from chronik.metadata.elections import BrokerStates, plan_unclean_elections
from chronik.metadata.image import ClusterImage
from chronik.metadata.index import Key
from chronik.node.admin.responses import by_topic, error_values, propose_within
from chronik.node.membership.controller_service import ControllerService
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.serving.api import Api, Request, Values
from chronik.node.serving.deadlines import bounded_wait_s
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

PREFERRED = 0
UNCLEAN = 1


async def handle(metadata: MetadataLog, controller: ControllerService, request: Request) -> Values:
    message = request.message
    kind = getattr(message, "election_type", PREFERRED)
    if kind not in (PREFERRED, UNCLEAN):
        raise KafkaError(ErrorCode.invalid_request, f"there is no election type {kind}")
    covers_all = message.topic_partitions is None
    if covers_all:
        partitions = _all_electable(metadata.image, kind)
    else:
        partitions = [(topic.topic, index) for topic in message.topic_partitions for index in topic.partitions]
    if kind == PREFERRED:
        outcomes = await controller.elect_preferred(partitions, bounded_wait_s(message.timeout))
    else:
        plan = await propose_within(
            metadata, message.timeout, lambda image: plan_unclean_elections(image, BrokerStates.of(image), partitions)
        )
        outcomes = plan.outcomes
    results = by_topic(
        (name, {"partition_id": index, **error_values(error)})
        for (name, index), error in zip(partitions, outcomes, strict=True)
        if not (covers_all and error is not None and error.code == ErrorCode.election_not_needed)
    )
    return {
        "error_code": ErrorCode.none,
        "replica_election_results": [{"topic": name, "partition_result": entries} for name, entries in results.items()],
    }


def _all_electable(image: ClusterImage, kind: int) -> list[Key]:
    """Return the partitions that need such an election: all others would only be refused, one by one."""
    live = frozenset(broker.id for broker in image.live_brokers())
    return [
        (name, partition.partition)
        for name, topic in sorted(image.topics.items())
        for partition in topic.partitions
        if (partition.leader != partition.replicas[0] if kind == PREFERRED else partition.leader not in live)
    ]


def on_error(request: Request, code: ErrorCode) -> Values:
    # Version 0 has no error of the whole request.
    return {
        "error_code": code,
        "replica_election_results": [
            {
                "topic": topic.topic,
                "partition_result": [{"partition_id": index, "error_code": code} for index in topic.partitions],
            }
            for topic in request.message.topic_partitions or ()
        ],
    }


API = Api(ApiKey.ELECT_LEADERS, (0, 2), on_error=on_error, on_controller=True)
