"""ApiVersions (key 18), versions 0-4.

Behaviour
- Lists every API with the versions that this node supports.
- An unknown version is answered with a v0 body, UNSUPPORTED_VERSION and the version range of key 18, without parsing
  the request: that is how a newer client learns the range.
- The response header is always v0.
- The client's library and its version are kept for subscriptions to its metrics (KIP-511, KIP-714).
- The features are `transaction.version`, finalized at 2: clients that know version 2 (KIP-890) use it;
  `group.version`, finalized at 1: consumer groups of KIP-848; and `share.version`, finalized at 1: share groups of
  KIP-932.
Versions: 3 flexible, client software name and features, 4 supported features that start at 0.
Not supported: other finalized features.
"""

import struct
from collections.abc import Iterable

from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

# error_code int16, one entry: api_key int16, min_version int16, max_version int16
_UNSUPPORTED = struct.Struct(">hihhh")


FEATURES = {"group.version": 1, "share.version": 1, "transaction.version": 2}
"""The version of each feature, which is the highest one and finalized."""
ZERO_FEATURES_FROM_VERSION = 4
SOFTWARE_FROM_VERSION = 3
SOFTWARE_CHARS_MAX = 100
FEATURES_EPOCH = 0
"""The finalized features never change."""


async def handle(apis: Iterable[Api], request: Request) -> Values:
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


def unsupported_version_body() -> bytes:
    return _UNSUPPORTED.pack(ErrorCode.unsupported_version, 1, ApiKey.API_VERSIONS, *API.versions)


API = Api(ApiKey.API_VERSIONS, (0, 4), unsupported_version_body=unsupported_version_body)
