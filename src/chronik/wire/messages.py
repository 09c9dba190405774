"""Every API's messages but the hot ones: read into kio's entities, written from plain values.

`encode` says how the values to write may look. Produce and Fetch work here too, only slower and with copies.
"""

from collections.abc import Mapping
from typing import Any

from chronik.wire.decode import decode
from chronik.wire.encode import encode

__all__ = ["read_request", "read_response", "write_request", "write_response"]


def read_request(key: int, version: int, body: bytes) -> Any:
    """The request in `body`, which must be all of it; MalformedRequest for anything else."""
    return decode(key, version, "request", body)


def read_response(key: int, version: int, body: bytes) -> Any:
    """The response in `body`, which must be all of it; MalformedRequest for anything else."""
    return decode(key, version, "response", body)


def write_request(key: int, version: int, values: Mapping[str, Any]) -> bytes:
    """A request's body."""
    return encode(key, version, "request", values)


def write_response(key: int, version: int, values: Mapping[str, Any]) -> bytes:
    """A response's body."""
    return encode(key, version, "response", values)
