"""ApiVersions (key 18), versions 0-4.

Behaviour
- Lists every API with the versions that this node supports.
- An unknown version is answered with a v0 body, UNSUPPORTED_VERSION and the version range of key 18, without parsing
  the request: that is how a newer client learns the range.
- The response header is always v0.
Versions: 3 flexible and client software name, 4 feature ranges starting at 0.
Not supported: finalized features; there is no `transaction.version`, so clients stay with transactions version 1.
"""

import struct
from collections.abc import Iterable

from chronik.node.serving.api import Api, Request, Values
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

# error_code int16, one entry: api_key int16, min_version int16, max_version int16
_UNSUPPORTED = struct.Struct(">hihhh")


async def handle(apis: Iterable[Api], request: Request) -> Values:
    return {
        "error_code": ErrorCode.none,
        "api_keys": [
            {"api_key": int(api.key), "min_version": api.versions[0], "max_version": api.versions[1]} for api in apis
        ],
    }


def unsupported_version_body() -> bytes:
    return _UNSUPPORTED.pack(ErrorCode.unsupported_version, 1, ApiKey.API_VERSIONS, *API.versions)


API = Api(ApiKey.API_VERSIONS, (0, 4), unsupported_version_body=unsupported_version_body)
