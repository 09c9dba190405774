"""Frames: how requests and responses are delimited on a connection.

    frame            size int32, then that many bytes: a header and a body
    request header   api_key int16, api_version int16, correlation_id int32, client_id nullable string (int16 length)
                     and, if the version is flexible, tagged fields
    response header  correlation_id int32 and, if the version is flexible, tagged fields

`client_id` keeps its int16 length in flexible versions too.
"""

from struct import Struct, error
from typing import Final, NamedTuple

from chronik.wire.api import is_flexible
from chronik.wire.errors import MalformedRequest
from chronik.wire.primitives import skip_tags

FRAME_SIZE: Final = Struct(">i")

_REQUEST_HEADER: Final = Struct(">hhih")
_REQUEST_PREFIX: Final = Struct(">ihhih")
_RESPONSE_PREFIX: Final = Struct(">ii")
_RESPONSE_PREFIX_FLEXIBLE: Final = Struct(">iiB")


class RequestHeader(NamedTuple):
    """A request's header. `body_at` is the position of the body in its frame."""

    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None
    body_at: int


def read_request_header(frame: memoryview) -> RequestHeader:
    """Read the header of a frame, which starts after the size field."""
    try:
        api_key, api_version, correlation_id, length = _REQUEST_HEADER.unpack_from(frame)
        client_id: str | None = None
        at = 10
        if length >= 0:
            at += length
            if at > len(frame):
                raise MalformedRequest(f"client id of {length} bytes in a frame of {len(frame)}")
            client_id = str(frame[10:at], "utf-8")
        elif length != -1:
            raise MalformedRequest(f"client id with length {length}")
    except error as e:
        raise MalformedRequest(f"request header cut short: {len(frame)} bytes") from e
    except UnicodeDecodeError as e:
        raise MalformedRequest("client id is not UTF-8") from e
    if is_flexible(api_key, api_version):
        at = skip_tags(frame, at)
    # Bypass NamedTuple's constructor, which is Python code: every request takes this path.
    return tuple.__new__(RequestHeader, (api_key, api_version, correlation_id, client_id, at))


def write_request(key: int, version: int, correlation_id: int, client_id: str | None, body: bytes) -> bytes:
    """Return a whole frame, including its size."""
    name = b"" if client_id is None else client_id.encode()
    flexible = is_flexible(key, version)
    size_bytes = 10 + len(name) + flexible + len(body)
    length = -1 if client_id is None else len(name)
    prefix = _REQUEST_PREFIX.pack(size_bytes, key, version, correlation_id, length)
    return b"".join((prefix, name, b"\x00" if flexible else b"", body))


def response_prefix(correlation_id: int, flexible: bool, body_len: int) -> bytes:
    """Return size and header of a response; `flexible` is `api.response_header_is_flexible`."""
    if flexible:
        return _RESPONSE_PREFIX_FLEXIBLE.pack(body_len + 5, correlation_id, 0)
    return _RESPONSE_PREFIX.pack(body_len + 4, correlation_id)
