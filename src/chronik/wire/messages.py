"""Messages of all APIs outside the hot path: decoded into kio's entities, encoded from plain values.

`encode` describes the values. Produce and Fetch work here too, but slower and with copies.
"""

from collections.abc import Mapping
from typing import Any

from chronik.wire.decode import decode
from chronik.wire.encode import encode

__all__ = ["read_request", "read_response", "write_request", "write_response"]


def read_request(key: int, version: int, body: bytes) -> Any:
    """Decode the request at the start of `body`, or raise MalformedRequest."""
    return decode(key, version, "request", body)


def read_response(key: int, version: int, body: bytes) -> Any:
    """Decode the response at the start of `body`, or raise MalformedRequest."""
    return decode(key, version, "response", body)


def write_request(key: int, version: int, values: Mapping[str, Any]) -> bytes:
    """Return the body of a request."""
    return encode(key, version, "request", values)


def write_response(key: int, version: int, values: Mapping[str, Any]) -> bytes:
    """Return the body of a response."""
    return encode(key, version, "response", values)
