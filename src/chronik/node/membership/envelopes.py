"""Forwards clients' requests that only the controller may answer.

Any node accepts them. It forwards the whole request, and responds once its own image includes the effect, so that the
client's next request to this node sees it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from datetime import timedelta

from chronik.node.membership.controller_client import CALL_TIMEOUT_S, ControllerClient
from chronik.node.membership.internal_api import Envelope, EnvelopeReply, InternalKey, decode_envelope_reply, encode
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.runtime import Runtime
from chronik.node.serving.access import Access, Decisions, NoRights
from chronik.node.serving.api import Handler
from chronik.node.serving.connection import Request
from chronik.node.serving.deadlines import bounded_wait_s
from chronik.node.serving.server import answer_cold, decode_request
from chronik.observe.metrics import api_name
from chronik.wire.errors import ErrorCode, KafkaError, MalformedRequest

SLACK_S = 2.0
"""Added to the request's own timeout, which the controller enforces itself by answering when it expires."""

WARNING_INTERVAL_S = 60.0
NO_RIGHTS = NoRights()


class Envelopes:
    """Both the sender and the receiver of envelopes. Owned by the loop."""

    def __init__(
        self,
        runtime: Runtime,
        metadata: MetadataLog,
        client: ControllerClient,
        applied: Callable[[], Awaitable[None]],
        decisions: Decisions | None = None,
    ) -> None:
        """`applied` waits until the partitions on this node have applied the current image.

        `decisions` authorize the requests in envelopes; None if every client may do everything.
        """
        self._runtime = runtime
        self._loop = runtime.loop
        self._node_id = runtime.node_id
        self._metadata = metadata
        self._client = client
        self._applied = applied
        self._decisions = decisions
        self._log = runtime.log.bind(component="node")
        self._handlers: dict[int, Handler] = {}
        self._warned_s = -WARNING_INTERVAL_S

    def serve(self, handlers: Iterable[Handler]) -> None:
        """Set the handlers that answer for other nodes while this node is the controller."""
        self._handlers = {handler.api.key: handler for handler in handlers if handler.api.on_controller}

    @property
    def is_controller(self) -> bool:
        return self._metadata.is_controller

    async def send(self, request: Request, body: bytes) -> tuple[bytes, bool]:
        """Return the controller's response body and whether it is an error. Raise KafkaError if none arrives."""
        access = request.access
        envelope = Envelope(
            request.api_key,
            request.api_version,
            request.client_id,
            body,
            access.principal,
            access.host,
            has_authorizer=not access.is_open,
        )
        wait = getattr(request.message, "timeout", None)
        timeout_s = bounded_wait_s(wait) if isinstance(wait, timedelta) else CALL_TIMEOUT_S
        # A client without a response may have sent another request: this one must not be carried out after that one.
        retry_until_s = self._loop.time() + timeout_s
        deadline_s = retry_until_s + SLACK_S
        reply = await self._client.ask(
            InternalKey.ENVELOPE,
            encode(envelope),
            decode_envelope_reply,
            lambda: self.open(envelope, request),
            retry_until_s,
            deadline_s,
        )
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._metadata.applied(reply.version)
                await self._applied()
        except TimeoutError:
            late = "the change is committed, but not yet applied on this node"
            raise KafkaError(ErrorCode.request_timed_out, late) from None
        return reply.body, reply.is_failed

    async def open(self, envelope: Envelope, carrier: Request) -> EnvelopeReply:
        """Answer the enclosed request if this node is the controller."""
        if not self._metadata.is_controller:
            return EnvelopeReply(False, self._metadata.controller_id)
        handler = self._handlers.get(envelope.api_key)
        if handler is None:
            raise MalformedRequest(f"API {envelope.api_key} is not forwarded to the controller")
        request = Request(
            carrier.connection,
            envelope.api_key,
            envelope.api_version,
            carrier.correlation_id,
            envelope.client_id,
            memoryview(b""),
            0,
            self._loop.time(),
            None,
            # The client's rights, not those of the node that sent the envelope.
            Access(envelope.principal, envelope.host, self._decisions_for(envelope), api_name(envelope.api_key)),
        )
        request.message = await decode_request(self._runtime, envelope.api_key, envelope.api_version, envelope.body)
        answer, is_failed = await answer_cold(self._runtime, handler, request, self._log)
        return EnvelopeReply(True, self._node_id, self._metadata.version, is_failed, answer)

    def _decisions_for(self, envelope: Envelope) -> Decisions | None:
        """Return what authorizes the request. If only its sender has an authorizer, this node refuses the request.

        Otherwise one node without `authorization.enabled` would give every client all rights, on every node.
        """
        if self._decisions is not None or not envelope.has_authorizer:
            return self._decisions
        now_s = self._loop.time()
        if now_s >= self._warned_s + WARNING_INTERVAL_S:
            self._warned_s = now_s
            self._log.error(
                "authorizer_missing",
                api=api_name(envelope.api_key),
                reason="this node is the controller and cannot authorize requests that other nodes authorize: "
                "set authorization.enabled = true and the same super_users on each node",
            )
        return NO_RIGHTS
