"""SASL on a listener: the state of each connection, and what all connections share.

A connection of a SASL listener has a gate, a `ClientAuthentication`. Until the client has authenticated, it lets
ApiVersions, SaslHandshake and SaslAuthenticate pass, and closes the connection at any other request.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from chronik.authentication.credentials import Credentials, UserCredentials
from chronik.authentication.oauth import OAuthServer, TokenRules, key_id_of
from chronik.authentication.plain import PlainServer, check_password
from chronik.authentication.principals import USER
from chronik.authentication.sasl import (
    OAUTHBEARER,
    PLAIN,
    Authenticated,
    Challenge,
    Outcome,
    Refused,
    ServerExchange,
)
from chronik.authentication.scram import ScramServer
from chronik.authorization.acls import ANONYMOUS
from chronik.node.config import ConfigError
from chronik.node.runtime import Runtime
from chronik.node.serving.access import Access, Decisions, NoRights
from chronik.node.serving.connection import Connection
from chronik.node.serving.failure_delays import FailureDelays
from chronik.node.serving.key_source import KeySource
from chronik.node.serving.limited_log import LimitedLog
from chronik.node.serving.users_file import UsersFile
from chronik.observe.metrics import api_name
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError, MalformedRequest

UNAUTHENTICATED_FRAME_BYTES_MAX = 64 * 1024
UNAUTHENTICATED_MAX = 1_000
"""Connections of a node that have not authenticated. Beyond this the oldest one of the address with most is dropped."""
UNAUTHENTICATED_S_MAX = 15.0
VERIFICATIONS_MAX = 2
"""Passwords and tokens that are verified at a time: the threads are shared with the disks."""
REAUTHENTICATION_INTERVAL_S_MIN = 1.0
LINGER_S = 0.1
"""Between the answer to a refused client and the end of its connection. Some clients (kafka-python) do not read an
answer that arrives together with the end, and would report a lost connection instead of wrong credentials."""
NONCE_BYTES = 24
FAILURE_DELAY_MS_MAX = 10_000
"""Less than the time that clients wait for an answer, usually 30 s."""
FAILURES_PENDING_MAX = 16
"""Failures of one address whose delays have not passed. With this many, its next attempt waits."""
USER_SHOWN_CHARACTERS_MAX = 128

UNAUTHENTICATED_APIS = (ApiKey.API_VERSIONS, ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE)
SASL_APIS = (ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE)


NO_ACCESS = Access(ANONYMOUS, "", NoRights())
"""The access of a client that has not authenticated."""


class State(Enum):
    HANDSHAKE = auto()
    """The client has to choose a mechanism."""
    EXCHANGE = auto()
    """The mechanism's messages follow."""
    DONE = auto()
    FAILED = auto()
    """The connection is about to be closed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The mechanism's message to the client, and how long the session lasts if it is the last one; 0 for no limit."""

    data: bytes
    lifetime_ms: int = 0


class Authentication:
    """What all SASL listeners of a node share: credentials, keys, limits and delays. Owned by the loop.

    Invariant: `_unauthenticated` holds each open connection that has not authenticated, by address, oldest first; each
    has a timer that closes it.
    """

    def __init__(
        self, runtime: Runtime, cluster_secret: bytes, stored: Callable[[], Mapping[str, UserCredentials]]
    ) -> None:
        """`stored` returns the credentials of the newest metadata: the same object until they change."""
        self.runtime = runtime
        self.loop = runtime.loop
        self.sasl = runtime.config.sasl
        self.metrics = runtime.metrics
        self.decisions: Decisions | None = None
        """The authorizer that the access of an authenticated client uses; None if every client may do everything."""
        self.log = runtime.log.bind(component="node")
        self._secret = _derived_secret(cluster_secret)
        self._stored = stored
        self._users = None if self.sasl.users_file is None else UsersFile(runtime, self.sasl.users_file, self._secret)
        self._keys = KeySource(runtime, self.sasl.jwks) if self.sasl.jwks else None
        self._rules = TokenRules(
            self.sasl.jwt_issuer,
            self.sasl.jwt_audience,
            self.sasl.jwt_scope,
            self.sasl.jwt_principal_claim,
            self.sasl.jwt_clock_skew_s,
        )
        self._credentials_of: tuple[object, object] = (None, None)
        self._credentials = Credentials(self._secret, {}, {})
        self._delays = FailureDelays(self.sasl.failure_delay_ms, FAILURE_DELAY_MS_MAX, FAILURES_PENDING_MAX)
        self._verifying = asyncio.Semaphore(VERIFICATIONS_MAX)
        self._unauthenticated: dict[str, dict[Connection, asyncio.TimerHandle]] = {}
        self._unauthenticated_count = 0
        self._waiting: dict[ClientAuthentication, asyncio.Future[None]] = {}
        """The clients that wait. A result ends the wait early."""
        self._is_stopping = False
        self._log_failure = LimitedLog(runtime, "authentication_failed", "authentications_failed")

    async def start(self) -> None:
        """Load the users file and the key set. Raise ConfigError if one cannot be used."""
        uses_sasl = any(listener.uses_sasl for listener in self.runtime.config.kafka_listeners)
        if uses_sasl and OAUTHBEARER in self.sasl.mechanisms and self._keys is None:
            raise ConfigError("sasl.mechanisms has OAUTHBEARER, which needs sasl.jwks: a file, or a URL with https")
        for source in (self._users, self._keys):
            if source is not None:
                await source.start()

    def end_delays(self) -> None:
        """Answer refused clients at once: the node is stopping."""
        self._is_stopping = True
        for client in list(self._waiting):
            self.wake(client)

    async def stop(self) -> None:
        for source in (self._users, self._keys):
            if source is not None:
                source.stop()

    # -- credentials ---------------------------------------------------------------------------------------------------

    @property
    def credentials(self) -> Credentials:
        stored: Mapping[str, UserCredentials] = self._stored()
        local: Mapping[str, UserCredentials] = {} if self._users is None else self._users.users
        known_stored, known_local = self._credentials_of
        if stored is not known_stored or (local is not known_local and self._users is not None):
            self._credentials = Credentials(self._secret, stored, local)
            self._credentials_of = (stored, local)
        return self._credentials

    def new_exchange(self, mechanism: str) -> ServerExchange:
        if mechanism == PLAIN:
            return PlainServer(self.credentials)
        if mechanism == OAUTHBEARER:
            keys = self._keys
            if keys is None:
                raise KafkaError(ErrorCode.unsupported_sasl_mechanism, "OAUTHBEARER needs sasl.jwks")
            return OAuthServer(lambda: keys.keys, self._rules, self.runtime.env.wall_ms)
        nonce = base64.urlsafe_b64encode(self.runtime.env.random.randbytes(NONCE_BYTES)).decode()
        # The newest credentials, when the message arrives: the client may take its time after the handshake.
        return ScramServer(mechanism, lambda *key: self.credentials.lookup(*key), nonce)

    async def attempt(self, exchange: ServerExchange, message: bytes, client: ClientAuthentication) -> Outcome | None:
        """Run one step of an exchange, and wait after a refusal. None if the client has gone before its turn.

        A client that authenticates again has no turn: failures of other clients at its address must not interrupt it,
        and it cannot try the passwords of other users.
        """
        is_new, address = client.name is None, client.address
        if isinstance(exchange, OAuthServer):
            await self._load_key(message)
        while not (client.has_gone or self._is_stopping):
            async with self._verifying if exchange.is_blocking else nullcontext():
                wait_s = self._delays.begin(address, self.loop.time()) if is_new else 0.0
                if not wait_s:
                    outcome = client.checked(await self._respond(exchange, message))
                    break
            await self._wait(client, wait_s)
        else:
            return None
        is_refused, now_s, delay_s = isinstance(outcome, Refused), self.loop.time(), 0.0
        if is_new:
            delay_s = self._delays.end(address, now_s, has_failed=is_refused)
        elif is_refused:
            delay_s = self._delays.failed(address, now_s)
        if isinstance(outcome, Refused):
            self._count_failure(client, outcome, delay_s)
            if not self._is_stopping:
                await self._wait(client, delay_s)
        return outcome

    async def _load_key(self, message: bytes) -> None:
        """Load the keys again if they do not have the token's. The exchange refuses a token without a key."""
        if self._keys is not None:
            with self._logged_error():
                key_id = await self.runtime.run_blocking(lambda: key_id_of(message))
                await self._keys.refresh_for(key_id)

    async def _respond(self, exchange: ServerExchange, message: bytes) -> Outcome:
        """Return the answer of the mechanism. An error inside it is a refusal."""
        with self._logged_error():
            if not exchange.is_blocking:
                return exchange.respond(message)
            if isinstance(exchange, PlainServer):
                # Here, since only the loop may read the property.
                exchange.credentials = self.credentials
            return await self.runtime.run_blocking(lambda: exchange.respond(message))
        return Refused("an error inside the mechanism")

    @contextmanager
    def _logged_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # Neither text nor values of the error: they may contain what the client sent.
            self.log.error("authentication_error", error=type(error).__name__, at=_place_of(error))

    async def _wait(self, client: ClientAuthentication, wait_s: float) -> None:
        """Wait, at most until `wake`."""
        woken = self._waiting[client] = self.loop.create_future()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await woken
        finally:
            self._waiting.pop(client, None)

    def wake(self, client: ClientAuthentication) -> None:
        """End the client's wait, if it waits: its connection is closed, or the node is stopping."""
        woken = self._waiting.pop(client, None)
        if woken is not None and not woken.done():
            woken.set_result(None)

    async def check_password(self, name: str, password: str) -> bool:
        """Return whether `name` is a user with this password: for logins other than SASL, which delay failures."""
        credentials = self.credentials
        async with self._verifying:
            return await self.runtime.run_blocking(lambda: check_password(credentials, name, password))

    # -- failures ------------------------------------------------------------------------------------------------------

    def _count_failure(self, client: ClientAuthentication, refused: Refused, delay_s: float) -> None:
        failures = self.metrics.authentication_failures
        failures[client.mechanism] = failures.get(client.mechanism, 0) + 1
        self._log_failure(
            client=client.address,
            mechanism=client.mechanism,
            user=refused.name[:USER_SHOWN_CHARACTERS_MAX],
            reason=refused.reason,
            delay_s=delay_s,
        )

    # -- connections that have not authenticated -----------------------------------------------------------------------

    def guard(self, connection: Connection, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        """Give a new connection its gate. It has to authenticate soon."""
        if self._unauthenticated_count >= UNAUTHENTICATED_MAX:
            most = max(self._unauthenticated.values(), key=len)
            self._drop(next(iter(most)), f"{UNAUTHENTICATED_MAX} connections have not authenticated yet")
        connection.gate = ClientAuthentication(self, connection, spawn)
        connection.access = NO_ACCESS
        connection.frame_bytes_max = min(connection.frame_bytes_max, UNAUTHENTICATED_FRAME_BYTES_MAX)
        timer = self._deadline(connection, UNAUTHENTICATED_S_MAX)
        self._unauthenticated.setdefault(connection.client_host, {})[connection] = timer
        self._unauthenticated_count += 1

    def _deadline(self, connection: Connection, wait_s: float) -> asyncio.TimerHandle:
        return self.loop.call_later(wait_s, self._drop, connection, f"not authenticated within {wait_s:g} s")

    def postpone(self, connection: Connection) -> None:
        """Extend the deadline of a refused client: the delay of its answer is longer than it would be."""
        of_address = self._unauthenticated.get(connection.client_host, {})
        timer = of_address.get(connection)
        if timer is not None:
            timer.cancel()
            of_address[connection] = self._deadline(connection, UNAUTHENTICATED_S_MAX + self._delays.delay_s_max)

    def settle(self, connection: Connection) -> None:
        """The connection has authenticated, or is closed."""
        of_address = self._unauthenticated.get(connection.client_host, {})
        timer = of_address.pop(connection, None)
        if timer is None:
            return
        timer.cancel()
        self._unauthenticated_count -= 1
        if not of_address:
            del self._unauthenticated[connection.client_host]

    def _drop(self, connection: Connection, reason: str) -> None:
        self.settle(connection)
        connection.drop(reason)


class ClientAuthentication:
    """One client's authentication: the gate of its connection. Owned by the loop.

    Invariant: the connection's access is NO_ACCESS until the state has been DONE. During a re-authentication it stays
    that of the last session, and no other request is served.
    """

    def __init__(
        self, shared: Authentication, connection: Connection, spawn: Callable[[Coroutine[Any, Any, None]], None]
    ) -> None:
        self._shared = shared
        self._connection = connection
        self._spawn = spawn
        self._frame_bytes_max = connection.frame_bytes_max
        self._state = State.HANDSHAKE
        self.mechanism = ""
        self._exchange: ServerExchange | None = None
        self.address = connection.client_host
        self.has_gone = False
        """Whether the connection is closed."""
        self.name: str | None = None
        """The user of the last session; None before the first one."""
        self._authenticated_s = 0.0
        self._expires_s: float | None = None
        self.reads_tokens = False
        """Whether frames are the mechanism's messages, without a Kafka header (SaslHandshake v0)."""

    @property
    def mechanisms(self) -> tuple[str, ...]:
        return self._shared.sasl.mechanisms

    @property
    def has_failed(self) -> bool:
        """Whether the connection is about to be closed, and serves nothing until then."""
        return self._state is State.FAILED

    def admits(self, frame: memoryview) -> bool:
        """Whether a request may run now. Raise MalformedRequest, with the reason, if the connection has to close."""
        if self._state is State.DONE:
            expires_s = self._expires_s
            if expires_s is None or self._shared.loop.time() < expires_s:
                return True
            if _key(frame) in SASL_APIS:
                return True
            self._shared.metrics.sessions_expired += 1
            raise MalformedRequest("its session expired, and the client did not authenticate again")
        if self._state is State.FAILED:
            return False
        if self.reads_tokens:
            self._connection.hold()
            self._spawn(self._run_token(bytes(frame)))
            return False
        if _key(frame) not in (UNAUTHENTICATED_APIS if self.name is None else SASL_APIS):
            when = "before" if self.name is None else "during"
            raise MalformedRequest(f"{api_name(_key(frame))} {when} authentication")
        return True

    def closed(self) -> None:
        self.has_gone = True
        self._shared.wake(self)
        self._shared.settle(self._connection)

    # -- the two requests ----------------------------------------------------------------------------------------------

    def handshake(self, mechanism: str, *, with_frames: bool) -> ErrorCode:
        """Begin an authentication, or the next one of this connection. Return the error code of the answer."""
        is_again = self._state is State.DONE
        if is_again:
            since_s = self._shared.loop.time() - self._authenticated_s
            if with_frames or since_s < REAUTHENTICATION_INTERVAL_S_MIN:
                return ErrorCode.illegal_sasl_state
        elif self._state is not State.HANDSHAKE:
            self._close_soon()
            return ErrorCode.illegal_sasl_state
        if mechanism not in self.mechanisms or (is_again and mechanism != self.mechanism):
            self._close_soon()
            return ErrorCode.unsupported_sasl_mechanism
        try:
            self._exchange = self._shared.new_exchange(mechanism)
        except KafkaError as error:
            self._close_soon()
            return error.code
        self._state = State.EXCHANGE
        self.mechanism = mechanism
        self.reads_tokens = with_frames
        return ErrorCode.none

    async def authenticate(self, message: bytes) -> Answer:
        """Run one step of the mechanism. Raise KafkaError, after the delay, if the client is refused."""
        exchange = self._exchange
        if self._state is not State.EXCHANGE or exchange is None or self.reads_tokens:
            if self.name is None:
                self._close_soon()
            raise KafkaError(
                ErrorCode.illegal_sasl_state, "SaslAuthenticate is not expected now: send SaslHandshake first."
            )
        return await self._step(exchange, message)

    async def _run_token(self, message: bytes) -> None:
        """Run one step whose messages are frames without a header. A refused client gets no answer, as in Kafka."""
        assert self._exchange is not None
        try:
            answer = await self._step(self._exchange, message)
            self._connection.send_frame(answer.data)
        except KafkaError:
            self._connection.close()
        finally:
            self._connection.release()

    async def _step(self, exchange: ServerExchange, message: bytes) -> Answer:
        match await self._shared.attempt(exchange, message, self):
            case Challenge(data=data):
                return Answer(data)
            case Authenticated(name=name, data=data, expires_ms=expires_ms):
                return Answer(data, self._accept(name, expires_ms))
            case None:
                # It is closed, or the node is stopping: not a wrong password, which the client would report.
                self._connection.close()
        self._close_soon()
        raise KafkaError(
            ErrorCode.sasl_authentication_failed,
            f"Authentication failed during authentication due to invalid credentials with SASL mechanism "
            f"{self.mechanism}",
        )

    def checked(self, outcome: Outcome) -> Outcome:
        """Return the outcome, or a refusal if the session of another user would follow."""
        if isinstance(outcome, Authenticated) and self.name not in (None, outcome.name):
            outcome = Refused("another user in a re-authentication", outcome.name)
        if isinstance(outcome, Refused):
            self._exchange = None
            self._state = State.FAILED
            self._shared.postpone(self._connection)
        return outcome

    def _accept(self, name: str, expires_ms: int | None) -> int:
        """Begin the session; return its lifetime in ms, 0 for no limit."""
        shared, connection = self._shared, self._connection
        limits_ms = [] if not shared.sasl.reauthenticate_ms else [shared.sasl.reauthenticate_ms]
        if expires_ms is not None:
            # At least 1: with the clock skew a token may be accepted after its expiry, and 0 would mean no limit.
            limits_ms.append(max(1, expires_ms - shared.runtime.env.wall_ms()))
        lifetime_ms = min(limits_ms, default=0)
        now_s = shared.loop.time()
        counts = shared.metrics.authentications if self.name is None else shared.metrics.reauthentications
        counts[self.mechanism] = counts.get(self.mechanism, 0) + 1
        self._exchange = None
        self._state = State.DONE
        self.reads_tokens = False
        self.name = name
        self._authenticated_s = now_s
        self._expires_s = now_s + lifetime_ms / 1000 if lifetime_ms else None
        connection.access = Access(USER + name, connection.client_host, shared.decisions)
        connection.frame_bytes_max = self._frame_bytes_max
        shared.settle(connection)
        return lifetime_ms

    def _close_soon(self) -> None:
        """Close the connection after the answer of the current request. Nothing else is served until then."""
        self._state = State.FAILED
        self._shared.loop.call_later(LINGER_S, self._connection.close)


def _key(frame: memoryview) -> int:
    return int.from_bytes(frame[:2], "big")


def _derived_secret(cluster_secret: bytes) -> bytes:
    return hmac.digest(cluster_secret, b"chronik: salts of names", "sha256")


def _place_of(error: Exception) -> str:
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return "" if place is None else f"{place.tb_frame.f_code.co_filename.rpartition('/')[2]}:{place.tb_lineno}"
