"""Random sequences of handshakes, messages and requests: nobody gets in without the right credentials."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.node.test_authentication import Client, Node

from chronik.authentication.clients import client_exchange
from chronik.authentication.credentials import local_user
from chronik.authentication.sasl import ClientExchange, SaslError
from chronik.node.serving.authentication import NO_ACCESS, ClientAuthentication
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError, MalformedRequest

MECHANISMS = ("PLAIN", "SCRAM-SHA-256")
USER = "alice"
RIGHT, WRONG = "wonderland", "wrong"
STORED = {USER: local_user(b"secret", USER, RIGHT)}

mutations = st.one_of(
    st.just(lambda data: data),
    st.integers(0, 200).map(lambda at: lambda data: data[:at]),
    st.tuples(st.integers(0, 200), st.integers(1, 255)).map(
        lambda flip: (
            lambda data: bytes(
                byte ^ flip[1] if index == flip[0] % max(1, len(data)) else byte for index, byte in enumerate(data)
            )
        )
    ),
    st.binary(max_size=40).map(lambda extra: lambda data: data + extra),
    st.binary(max_size=40).map(lambda other: lambda data: other),
)
handshakes = st.tuples(st.just("handshake"), st.sampled_from([*MECHANISMS, "OAUTHBEARER", ""]), st.booleans())
messages = st.tuples(st.just("message"), st.sampled_from([RIGHT, WRONG]), mutations)
requests = st.tuples(st.just("request"), st.sampled_from([*ApiKey]), st.just(None))
right_messages = st.tuples(st.just("message"), st.just(RIGHT), st.just(lambda data: data))
sequences = st.lists(st.one_of(handshakes, messages, requests, right_messages), max_size=12)


class Attempt:
    """One connection that a sequence runs on. `is_proven` says whether the client sent a whole right exchange."""

    def __init__(self, node: Node) -> None:
        self.client = Client("10.0.0.1")
        self.client.hold = self.client.release = lambda: None  # type: ignore[attr-defined]
        self.answers: list[bytes] = []
        self.client.send_frame = self.answers.append  # type: ignore[attr-defined]
        self.tasks: list[asyncio.Task[None]] = []
        node.shared.guard(cast(Any, self.client), lambda work: self.tasks.append(asyncio.ensure_future(work)))
        self.gate: ClientAuthentication = self.client.gate
        self.mechanism = ""
        self.with_frames = False
        self.exchanges: dict[str, ClientExchange] = {}
        self.challenge: bytes | None = None
        self.is_genuine = True
        self.is_closed = False

    async def run(self, step: tuple[str, Any, Any]) -> None:
        kind, what, how = step
        if kind == "handshake":
            await self._request(ApiKey.SASL_HANDSHAKE)
            if not self.is_closed and self.gate.handshake(what, with_frames=how) is ErrorCode.none:
                self.mechanism, self.with_frames = what, how
                self.exchanges = {
                    password: client_exchange(what, username=USER, password=password, nonce="n" * 24)
                    for password in (RIGHT, WRONG)
                }
                self.challenge, self.is_genuine = None, True
        elif kind == "request":
            await self._request(what)
        elif self.mechanism:
            await self._send(what, how)

    async def _send(self, password: str, change: Any) -> None:
        exchange = self.exchanges[password]
        try:
            genuine = exchange.first() if self.challenge is None else exchange.next(self.challenge) or b""
        except SaslError:
            genuine = b""
        message = change(genuine)
        # The first message of SCRAM contains no proof: it is right with any password.
        depends = self.mechanism == "PLAIN" or self.challenge is not None
        self.is_genuine &= message == genuine and (password == RIGHT or not depends)
        if self.with_frames:
            await self._request(None, message)
            self.challenge = self.answers.pop() if self.answers else self.challenge
        else:
            await self._request(ApiKey.SASL_AUTHENTICATE)
            if not self.is_closed:
                with suppress(KafkaError):
                    self.challenge = (await self.gate.authenticate(message)).data

    async def _request(self, key: ApiKey | None, message: bytes = b"") -> None:
        """Ask the gate, as the server does for each frame."""
        frame = message if key is None else int(key).to_bytes(2, "big") + b"\0\1\0\0\0\1"
        try:
            is_admitted = self.gate.admits(memoryview(frame))
        except MalformedRequest:
            self.is_closed = True
            return
        for task in self.tasks:
            await task
        self.tasks.clear()
        if is_admitted and key not in (ApiKey.API_VERSIONS, ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE, None):
            assert self.client.access is not NO_ACCESS


def node_with_a_user(executor: ThreadPoolExecutor) -> Node:
    node = Node(executor)
    node.shared._stored = lambda: STORED
    return node


@settings(max_examples=200)
@given(sequences)
def test_only_a_right_exchange_gives_rights(sequence: Sequence[tuple[str, Any, Any]]) -> None:
    async def story() -> None:
        with ThreadPoolExecutor(1) as executor:
            attempt = Attempt(node_with_a_user(executor))
            for step in sequence:
                if attempt.is_closed or attempt.client.end is not None:
                    break
                await attempt.run(step)
                if attempt.client.access is not NO_ACCESS:
                    assert attempt.is_genuine
                    assert attempt.client.access.principal == f"User:{USER}"
                    return

    asyncio.run(story())


def test_right_exchanges_of_the_property_succeed_and_wrong_ones_do_not() -> None:
    """Without it the property above could hold because nobody ever gets in."""

    async def story(password: str, mechanism: str, with_frames: bool) -> bool:
        with ThreadPoolExecutor(1) as executor:
            attempt = Attempt(node_with_a_user(executor))
            await attempt.run(("handshake", mechanism, with_frames))
            for _ in range(2):
                await attempt.run(("message", password, lambda data: data))
            return attempt.client.access is not NO_ACCESS

    for mechanism in MECHANISMS:
        for with_frames in (False, True):
            assert asyncio.run(story(RIGHT, mechanism, with_frames))
            assert not asyncio.run(story(WRONG, mechanism, with_frames))
