"""Clients' requests that only the controller may answer, on their way there and back.

Any node takes them: it passes the whole request on, and answers once its own image has what the controller did, so that
the client's next request here finds it.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING

from chronik.node.admin.outcomes import WAIT_MS_MAX, WAIT_MS_MIN
from chronik.node.membership.controller_client import CALL_TIMEOUT_S
from chronik.node.membership.internal_api import Envelope, EnvelopeReply, InternalKey, decode_envelope_reply, encode
from chronik.node.serving.request import Request
from chronik.wire.errors import ErrorCode, KafkaError, MalformedRequest
from chronik.wire.messages import read_request

if TYPE_CHECKING:
    from chronik.node.broker import Broker

SLACK_S = 2.0
"""Beyond the request's own timeout, which the controller keeps by itself and answers when it is over."""


class Envelopes:
    """Both ends of the way. Owned by the loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    async def send(self, request: Request, body: bytes) -> tuple[bytes, bool]:
        """The controller's response to a client's request, and whether it is an error. KafkaError where none comes."""
        broker = self._broker
        envelope = Envelope(request.api_key, request.api_version, request.client_id, body)
        deadline_s = broker.loop.time() + _timeout_s(request) + SLACK_S
        reply = await broker.controller_client.ask(
            InternalKey.ENVELOPE,
            encode(envelope),
            decode_envelope_reply,
            lambda: self.open(envelope, request),
            deadline_s,
        )
        try:
            async with asyncio.timeout_at(deadline_s):
                await broker.metadata.applied(reply.version)
                await broker.applied()
        except TimeoutError:
            raise KafkaError(ErrorCode.request_timed_out, "done, but not yet in effect at this node") from None
        return reply.body, reply.is_failed

    async def open(self, envelope: Envelope, carrier: Request) -> EnvelopeReply:
        """Answers the request inside, if this node is the controller."""
        broker = self._broker
        if not broker.is_controller:
            return EnvelopeReply(False, broker.controller_id)
        api = broker.apis.get(envelope.api_key)
        if api is None or not api.on_controller or api.handle is None:
            raise MalformedRequest(f"API {envelope.api_key} is not one that the controller answers for others")
        request = Request(
            carrier.connection,
            envelope.api_key,
            envelope.api_version,
            carrier.correlation_id,
            envelope.client_id,
            memoryview(b""),
            0,
            broker.loop.time(),
        )
        request.message = read_request(envelope.api_key, envelope.api_version, envelope.body)
        answer, is_failed = await broker.server.answer_cold(api, request)
        return EnvelopeReply(True, broker.node_id, broker.image.version, is_failed, answer)


def _timeout_s(request: Request) -> float:
    """The request's own timeout, as `admin.within` keeps it; a default for those that have none."""
    wait = getattr(request.message, "timeout", None)
    if not isinstance(wait, timedelta):
        return CALL_TIMEOUT_S
    return float(min(max(wait / timedelta(milliseconds=1), WAIT_MS_MIN), WAIT_MS_MAX)) / 1000
