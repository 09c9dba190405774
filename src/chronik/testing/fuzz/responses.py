"""The oracle of one connection: the node's responses are well-formed, in order, and match the requests."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from chronik.node.membership.internal_api import (
    InternalKey,
    decode_call_reply,
    decode_envelope_reply,
    decode_hello_reply,
    decode_proof_reply,
)
from chronik.wire import frames, messages
from chronik.wire.api import ApiKey, response_header_is_flexible
from chronik.wire.errors import ErrorCode, MalformedRequest
from chronik.wire.fetch import read_fetch_request, read_fetch_response
from chronik.wire.frames import RequestHeader, read_request_header
from chronik.wire.primitives import skip_tags
from chronik.wire.produce import read_produce_request, read_produce_response

FRAME_BYTES_LEAST = 8
UNREADABLE = (MalformedRequest, ValueError, KeyError, IndexError, struct.error)
_REPLIES = {
    InternalKey.HELLO: decode_hello_reply,
    InternalKey.PROOF: decode_proof_reply,
    InternalKey.CONTROLLER_CALL: decode_call_reply,
    InternalKey.ENVELOPE: decode_envelope_reply,
}


class BadResponse(Exception):
    """The bytes that came back do not answer the request."""


@dataclass(frozen=True, slots=True)
class SentRequest:
    """One whole frame that was sent. `header` is None if it cannot be parsed."""

    frame: memoryview
    header: RequestHeader | None

    @property
    def is_unanswered_by_design(self) -> bool:
        """Whether it gets no response by design: acks=0, and Raft's messages."""
        return self.header is not None and (self.header.api_key == InternalKey.RAFT or self.acks == 0)

    @property
    def acks(self) -> int | None:
        header = self.header
        if header is None or header.api_key != ApiKey.PRODUCE:
            return None
        try:
            return read_produce_request(header.api_version, self.frame, header.body_at).acks
        except UNREADABLE:
            return None

    def wait_s(self) -> float | None:
        """Return how long the request allows its response to take; None if it has no such field."""
        header = self.header
        if header is None:
            return None
        if header.api_key == ApiKey.FETCH:
            return read_fetch_request(header.api_version, self.frame, header.body_at).max_wait_ms / 1000
        if header.api_key == ApiKey.PRODUCE:
            return read_produce_request(header.api_version, self.frame, header.body_at).timeout_ms / 1000
        if header.api_key >= InternalKey.HELLO:
            return None
        message = messages.read_request(header.api_key, header.api_version, bytes(self.frame[header.body_at :]))
        waits = [getattr(message, name, None) for name in ("timeout", "rebalance_timeout", "session_timeout")]
        known = [wait / timedelta(seconds=1) for wait in waits if isinstance(wait, timedelta)]
        return max(known) if known else None


def requests_in(stream: bytes, frame_bytes_max: int) -> Iterator[SentRequest]:
    """Yield the whole frames of a stream, up to the first size that ends the connection."""
    view = memoryview(stream)
    at = 0
    while at + 4 <= len(view):
        (size,) = struct.unpack_from(">i", view, at)
        if not FRAME_BYTES_LEAST <= size <= min(frame_bytes_max, len(view) - at - 4):
            return
        frame = view[at + 4 : at + 4 + size]
        try:
            header: RequestHeader | None = read_request_header(frame)
        except MalformedRequest:
            header = None
        yield SentRequest(frame, header)
        at += 4 + size


def responses_in(written: bytes) -> Iterator[memoryview]:
    """Yield the frames that the node sent, without their sizes."""
    view = memoryview(written)
    at = 0
    while at < len(view):
        if len(view) - at < 8:
            raise BadResponse(f"{len(view) - at} bytes of an answer that never came")
        (size,) = struct.unpack_from(">i", view, at)
        if not 4 <= size <= len(view) - at - 4:
            raise BadResponse(f"an answer of {size} bytes, of which {len(view) - at - 4} came")
        yield view[at + 4 : at + 4 + size]
        at += 4 + size


def check_response(request: SentRequest, response: memoryview) -> None:
    """Raise `BadResponse` if the bytes do not answer this request."""
    header = request.header
    if header is None:
        raise BadResponse("an answer to a request whose header cannot be read")
    if struct.unpack_from(">i", response)[0] != header.correlation_id:
        raise BadResponse("the answer's correlation id is not the request's")
    try:
        _read_body(header, response[4:])
    except UNREADABLE as error:
        what = f"API {header.api_key} v{header.api_version}"
        raise BadResponse(f"the answer to {what} does not parse: {error!r}") from error


def _read_body(header: frames.RequestHeader, body: memoryview) -> None:
    key, version = header.api_key, header.api_version
    if key in _REPLIES:
        _REPLIES[InternalKey(key)](body)
        return
    if key == ApiKey.API_VERSIONS and struct.unpack_from(">h", body)[0] == ErrorCode.unsupported_version:
        return
    if response_header_is_flexible(key, version):
        body = body[skip_tags(body, 0) :]
    if key == ApiKey.PRODUCE:
        read_produce_response(version, body)
    elif key == ApiKey.FETCH:
        read_fetch_response(version, body)
    else:
        messages.read_response(key, version, bytes(body))
