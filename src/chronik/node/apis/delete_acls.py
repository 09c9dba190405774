"""DeleteAcls (key 31), versions 1-3.

Behaviour
- Removes the ACLs that the filters match, and returns them by filter. A filter that matches none is no error. Filters
  are those of DescribeAcls.
- Answered when the removal is durable and in effect on this node. Other nodes follow within milliseconds.
- POLICY_VIOLATION for more than 10,000 ACLs at once; nothing is removed then.
- SECURITY_DISABLED unless `authorization.enabled`.
Versions: 2 flexible, 3 the resource type USER.
Answered by the controller; other nodes forward the request to it.
"""

from collections.abc import Sequence
from typing import Any

from chronik.authorization.acls import AclBinding
from chronik.authorization.new_acls import ACLS_PER_REQUEST_MAX
from chronik.metadata.commands import DeleteAcls
from chronik.node.admin.acls import acl_values, filter_of, matching, pattern_values, require_authorizer
from chronik.node.admin.responses import error_values
from chronik.node.config import NodeConfig
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError


async def handle(config: NodeConfig, metadata: MetadataLog, request: Request) -> Values:
    filters = request.message.filters
    try:
        return {"filter_results": await _delete(config, metadata, filters)}
    except KafkaError as error:
        return _refused(filters, error)


async def _delete(config: NodeConfig, metadata: MetadataLog, filters: Sequence[Any]) -> list[Values]:
    require_authorizer(config)
    acls = metadata.image.acls
    results: list[Values] = []
    deleted: dict[AclBinding, None] = {}
    for requested in filters:
        try:
            matched = await matching(acls, filter_of(requested))
        except KafkaError as error:
            results.append({**error_values(error), "matching_acls": []})
            continue
        deleted |= dict.fromkeys(matched)
        if len(deleted) > ACLS_PER_REQUEST_MAX:
            raise KafkaError(ErrorCode.policy_violation, f"A request may delete at most {ACLS_PER_REQUEST_MAX} ACLs.")
        results.append({**error_values(None), "matching_acls": [_deleted(acl) for acl in matched]})
    if deleted:
        await metadata.propose(DeleteAcls(tuple(deleted)))
    return results


def _deleted(acl: AclBinding) -> Values:
    return {**error_values(None), **pattern_values(acl), **acl_values(acl)}


def _refused(filters: Sequence[Any], error: KafkaError) -> Values:
    return {"filter_results": [{**error_values(error), "matching_acls": []}] * len(filters)}


def on_error(request: Request, code: ErrorCode) -> Values:
    return _refused(request.message.filters, KafkaError(code))


API = Api(ApiKey.DELETE_ACLS, (1, 3), on_error=on_error, on_controller=True)
