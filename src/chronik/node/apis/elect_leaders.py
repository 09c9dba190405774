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

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from chronik.metadata.elections import BrokerStates, plan_unclean_elections
from chronik.metadata.image import ClusterImage
from chronik.metadata.index import Key
from chronik.node.admin.partition_plans import carry_out
from chronik.node.membership.controller_service import ControllerService
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.serving.api import Api, Handler, Values
from chronik.node.serving.connection import Request
from chronik.node.serving.deadlines import bounded_wait_s
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

PREFERRED = 0
UNCLEAN = 1


class Services(NamedTuple):
    """The parts of the node that this API uses."""

    metadata: MetadataLog
    controller: ControllerService


async def handle(node: Services, request: Request) -> Values:
    message = request.message
    kind = getattr(message, "election_type", PREFERRED)
    if kind not in (PREFERRED, UNCLEAN):
        raise KafkaError(ErrorCode.invalid_request, f"there is no election type {kind}")
    asked = None
    if message.topic_partitions is not None:
        asked = [(topic.topic, index) for topic in message.topic_partitions for index in topic.partitions]
    wanted = _all(node.metadata.image) if asked is None else asked
    if kind == PREFERRED:
        outcomes = await node.controller.elect_preferred(wanted, bounded_wait_s(message.timeout))
    else:
        plan = await carry_out(
            node.metadata, message.timeout, lambda image: plan_unclean_elections(image, BrokerStates.of(image), wanted)
        )
        outcomes = plan.outcomes
    results: dict[str, list[Values]] = {}
    for (name, index), error in zip(wanted, outcomes, strict=True):
        if asked is None and error is not None and error.code == ErrorCode.election_not_needed:
            continue
        results.setdefault(name, []).append(
            {
                "partition_id": index,
                "error_code": ErrorCode.none if error is None else error.code,
                "error_message": None if error is None else error.message,
            }
        )
    return {
        "error_code": ErrorCode.none,
        "replica_election_results": [
            {"topic": name, "partition_result": partitions} for name, partitions in results.items()
        ],
    }


def _all(image: ClusterImage) -> list[Key]:
    return [
        (name, partition.partition) for name, topic in sorted(image.topics.items()) for partition in topic.partitions
    ]


API = Api(ApiKey.ELECT_LEADERS, (0, 2), on_controller=True)


def handler(services: Services) -> Handler:
    return Handler(API, partial(handle, services))
