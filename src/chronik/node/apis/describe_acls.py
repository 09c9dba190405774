"""DescribeAcls (key 29), versions 1-3.

Behaviour
- Returns the ACLs that the filter matches, in this node's image, grouped by resource pattern. Null and ANY match
  everything. Pattern type MATCH returns every ACL that applies to the named resource, also wildcards and prefixes.
- SECURITY_DISABLED unless `authorization.enabled`.
Versions: 2 flexible, 3 the resource type USER.
"""

from itertools import groupby

from chronik.node.admin.acls import acl_values, filter_of, matching, pattern_values, require_authorizer
from chronik.node.admin.responses import error_values
from chronik.node.config import NodeConfig
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey


async def handle(config: NodeConfig, metadata: MetadataLog, request: Request) -> Values:
    require_authorizer(config)
    acls = await matching(metadata.image.acls, filter_of(request.message))
    return {
        **error_values(None),
        "resources": [
            {**pattern, "acls": [acl_values(acl) for acl in of_pattern]}
            for pattern, of_pattern in groupby(acls, key=pattern_values)
        ],
    }


API = Api(ApiKey.DESCRIBE_ACLS, (1, 3))
