"""DescribeUserScramCredentials (key 50), version 0.

Behaviour
- Lists the mechanisms and iterations of each user's credentials: of the named users, or of all without a list.
- RESOURCE_NOT_FOUND: a named user without credentials. DUPLICATE_RESOURCE: a user named twice.
- The client needs DESCRIBE on the cluster. A refused request has the error for each named user, too, as in Kafka.
- Salts and keys never leave the node. Users of the users file are not listed: they have no stored credentials.
Answered by the controller; other nodes forward the request to it.
"""

from collections import Counter

from chronik.authorization.acls import Operation, ResourceType
from chronik.metadata.image import ClusterImage
from chronik.node.admin.responses import error_values
from chronik.node.admin.scram_credentials import NUMBERS
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError


async def handle(metadata: MetadataLog, request: Request) -> Values:
    request.access.require(Operation.DESCRIBE, ResourceType.CLUSTER)
    image, users = metadata.image, request.message.users
    counts = Counter(user.name for user in users) if users else Counter(image.scram.keys())
    return {
        "error_code": ErrorCode.none,
        "error_message": None,
        "results": [_described(image, user, count) for user, count in counts.items()],
    }


def _described(image: ClusterImage, user: str, count: int) -> Values:
    credentials = image.scram.get(user)
    error: KafkaError | None = None
    if count > 1:
        error = KafkaError(
            ErrorCode.duplicate_resource,
            f"Cannot describe SCRAM credentials for the same user twice in a single request: {user}",
        )
    elif credentials is None:
        error = KafkaError(
            ErrorCode.resource_not_found, f"Attempt to describe a user credential that does not exist: {user}"
        )
    infos = [] if error is not None or credentials is None else sorted(credentials.items())
    return {
        "user": user,
        **error_values(error),
        "credential_infos": [
            {"mechanism": NUMBERS[mechanism], "iterations": credential.iterations} for mechanism, credential in infos
        ],
    }


def _failed(request: Request, code: ErrorCode) -> Values:
    users = request.message.users or ()
    results = [{"user": user.name, "error_code": code, "error_message": None, "credential_infos": []} for user in users]
    return {"error_code": code, "error_message": None, "results": results}


API = Api(
    ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS,
    (0, 0),
    on_error=_failed,
    on_controller=True,
)
