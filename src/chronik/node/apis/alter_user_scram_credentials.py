"""AlterUserScramCredentials (key 51), version 0.

Behaviour
- Deletes, creates and replaces SCRAM credentials. Each user has its own outcome: all of its alterations or none.
- The client salts and hashes the password, so the node never sees it. Only the keys derived from that are stored.
- UNACCEPTABLE_CREDENTIAL: an empty user name, fewer than 4,096 or more than 16,384 iterations, no salt, or a salted
  password of another length than the mechanism's hash. UNSUPPORTED_SASL_MECHANISM: an unknown mechanism.
  RESOURCE_NOT_FOUND: a deletion of what does not exist. DUPLICATE_RESOURCE: one credential altered twice.
- The client needs ALTER on the cluster.
- Clients that are connected stay authenticated until they authenticate again.
Answered by the controller; other nodes forward the request to it.
"""

from chronik.authorization.acls import Operation, ResourceType
from chronik.node.admin.responses import error_values
from chronik.node.admin.scram_credentials import ScramAlterations
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode


async def handle(metadata: MetadataLog, request: Request) -> Values:
    request.access.require(Operation.ALTER, ResourceType.CLUSTER)
    message = request.message
    plan = await metadata.propose_plan(lambda image: ScramAlterations(image, message.deletions, message.upsertions))
    return {"results": [{"user": user, **error_values(error)} for user, error in plan.outcomes.items()]}


def refuse(request: Request, code: ErrorCode) -> Values:
    entries = (*request.message.deletions, *request.message.upsertions)
    users = dict.fromkeys(entry.name for entry in entries)
    return {"results": [{"user": user, "error_code": code, "error_message": None} for user in users]}


API = Api(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, (0, 0), on_error=refuse, on_controller=True)
