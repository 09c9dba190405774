"""ApiVersions (key 18), versions 0-5.

Behaviour
- Lists every API with the versions that this node supports.
- An unknown version is answered with a v0 body, UNSUPPORTED_VERSION and the version range of key 18, without parsing
  the request: that is how a newer client learns the range.
- The response header is always v0.
- A client may name the cluster and the node that it means to reach (KIP-1242). If it reached another one, by old DNS or
  a proxy, the answer is REBOOTSTRAP_REQUIRED without APIs. One without the other is INVALID_REQUEST.
- The client's library and its version are kept for subscriptions to its metrics (KIP-511, KIP-714).
- The features are `transaction.version`, finalized at 2: clients that know version 2 (KIP-890) use it;
  `group.version`, finalized at 1: consumer groups of KIP-848; and `share.version`, finalized at 1: share groups of
  KIP-932.
Versions: 3 flexible, client software name and features, 4 supported features that start at 0, 5 the
expected cluster and node.
Not supported: other finalized features.
"""

import struct
from collections.abc import Iterable

from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

# error_code int16, one entry: api_key int16, min_version int16, max_version int16
_UNSUPPORTED = struct.Struct(">hihhh")


FEATURES = {"group.version": 1, "share.version": 1, "transaction.version": 2}
"""The version of each feature, which is the highest one and finalized."""
ZERO_FEATURES_FROM_VERSION = 4
SOFTWARE_FROM_VERSION = 3
DESTINATION_FROM_VERSION = 5
NO_NODE = -1
SOFTWARE_CHARS_MAX = 100
FEATURES_EPOCH = 0
"""The finalized features never change."""


async def handle(apis: Iterable[Api], node_id: int, metadata: MetadataLog, request: Request) -> Values:
    error = _check_destination(node_id, metadata.image.cluster_id, request)
    if error is not ErrorCode.none:
        return {"error_code": error, "api_keys": []}
    if request.api_version >= SOFTWARE_FROM_VERSION:
        message = request.message
        names = (message.client_software_name, message.client_software_version)
        request.connection.software = (names[0][:SOFTWARE_CHARS_MAX], names[1][:SOFTWARE_CHARS_MAX])
    supported = [{"name": name, "min_version": 0, "max_version": version} for name, version in FEATURES.items()]
    return {
        "error_code": ErrorCode.none,
        "api_keys": [
            {"api_key": int(api.key), "min_version": api.versions[0], "max_version": api.versions[1]} for api in apis
        ],
        # Older clients reject a range that starts at 0.
        "supported_features": supported if request.api_version >= ZERO_FEATURES_FROM_VERSION else [],
        "finalized_features_epoch": FEATURES_EPOCH,
        "finalized_features": [
            {"name": name, "min_version_level": version, "max_version_level": version}
            for name, version in FEATURES.items()
        ],
    }


def _check_destination(node_id: int, cluster_id: str, request: Request) -> ErrorCode:
    if request.api_version < DESTINATION_FROM_VERSION:
        return ErrorCode.none
    expected_cluster, expected_node = request.message.cluster_id, request.message.node_id
    if (expected_cluster is None) is not (expected_node == NO_NODE):
        return ErrorCode.invalid_request
    if expected_cluster in (None, cluster_id) and expected_node in (NO_NODE, node_id):
        return ErrorCode.none
    return ErrorCode.rebootstrap_required


def unsupported_version_body() -> bytes:
    return _UNSUPPORTED.pack(ErrorCode.unsupported_version, 1, ApiKey.API_VERSIONS, *API.versions)


API = Api(ApiKey.API_VERSIONS, (0, 5), unsupported_version_body=unsupported_version_body)
