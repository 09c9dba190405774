"""CreateAcls (key 30), versions 1-3.

Behaviour
- Each ACL has its own outcome. One that exists already is created without an effect, as in Kafka.
- Answered when the ACLs are durable and in effect on this node. Other nodes follow within milliseconds.
- INVALID_REQUEST for an ACL that could never apply: an empty name, a cluster that is not `kafka-cluster`, a principal
  that is not TYPE:NAME, pattern types ANY and MATCH, operation ANY, a range of hosts that is none.
- POLICY_VIOLATION for more than 100,000 ACLs in a cluster, or 10,000 in a request.
- SECURITY_DISABLED unless `authorization.enabled`.
Versions: 2 flexible, 3 the resource type USER.
Answered by the controller; other nodes forward the request to it.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from chronik.authorization.acls import AclBinding
from chronik.authorization.new_acls import ACLS_MAX, ACLS_PER_REQUEST_MAX, check_new_acl
from chronik.metadata.commands import CreateAcls
from chronik.metadata.image import ClusterImage
from chronik.node.admin.acls import COMPARED_AT_ONCE, binding_of, require_authorizer
from chronik.node.admin.responses import error_values
from chronik.node.config import NodeConfig
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError


async def handle(config: NodeConfig, metadata: MetadataLog, request: Request) -> Values:
    creations = request.message.creations
    try:
        return {"results": await _create(config, metadata, creations)}
    except KafkaError as error:
        return {"results": [error_values(error)] * len(creations)}


async def _create(config: NodeConfig, metadata: MetadataLog, creations: Sequence[Any]) -> list[Values]:
    require_authorizer(config)
    if len(creations) > ACLS_PER_REQUEST_MAX:
        raise KafkaError(ErrorCode.policy_violation, f"A request may create at most {ACLS_PER_REQUEST_MAX} ACLs.")
    results: list[Values] = []
    valid: list[AclBinding] = []
    for count, creation in enumerate(creations, 1):
        acl = binding_of(creation)
        try:
            check_new_acl(acl)
        except KafkaError as error:
            results.append(error_values(error))
        else:
            valid.append(acl)
            results.append(error_values(None))
        if count % COMPARED_AT_ONCE == 0:
            await asyncio.sleep(0)
    if valid:
        await metadata.propose(lambda image: _plan(image, tuple(dict.fromkeys(valid))))
    return results


def _plan(image: ClusterImage, acls: tuple[AclBinding, ...]) -> CreateAcls:
    if len(image.acls.union(acls)) > ACLS_MAX:
        raise KafkaError(ErrorCode.policy_violation, f"A cluster may have at most {ACLS_MAX} ACLs.")
    return CreateAcls(acls)


def on_error(request: Request, code: ErrorCode) -> Values:
    return {"results": [error_values(KafkaError(code))] * len(request.message.creations)}


API = Api(ApiKey.CREATE_ACLS, (1, 3), on_error=on_error, on_controller=True)
