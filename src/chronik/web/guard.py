"""Who a request is from: log-in and log-out, sessions, bearer tokens, and requests of other nodes.

A session is a signed cookie (see `signed`), because any node of the cluster may get the next request. It ends
- SESSION_IDLE_MS_MAX after its last request, and SESSION_MS_MAX after the log-in;
- when the user's password changes or the user is deleted, since it contains the credentials' fingerprint;
- at the log-out: the browser drops the cookie, and this node refuses it from then on (`_revoked`). Another node, and
  this node after a restart, would accept a stolen copy until it is idle for too long.
A bearer token ends after its lifetime, or with the user's credentials. Only a password or a session obtains one.

A request that changes something (log in, log out, get a token) has to come from the page itself: Sec-Fetch-Site and
Origin say so, and the page sends a token that other sites cannot read. Clients that are no browsers send neither
header; they authenticate with a password or a token, which no browser adds by itself.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from chronik.authorization.acls import ANONYMOUS
from chronik.node.serving.access import OPEN_ACCESS, Access
from chronik.node.serving.failure_delays import FailureDelays
from chronik.node.serving.signed import (
    ID_BYTES,
    Claims,
    Kind,
    csrf_token,
    decode_id,
    encode_id,
    is_csrf_token,
    sign,
    verify,
)
from chronik.web import schemas
from chronik.web.answers import JSON, Number, Parameters, Refusal, Visitor, json_answer
from chronik.web.node_view import NodeView
from chronik.web.openapi import Need
from chronik.web.safe_headers import host_and_port
from chronik.web.users import NAME_CHARACTERS_MAX, PASSWORD_CHARACTERS_MAX, Users

SESSION_MS_MAX = 12 * 3_600_000
SESSION_IDLE_MS_MAX = 30 * 60_000
SESSION_RENEWED_MS = 60_000
"""A cookie that is older is replaced by the response to the next request."""
TOKEN_SECONDS_MAX = 24 * 3_600
TOKEN_SECONDS = Number("seconds", 1, TOKEN_SECONDS_MAX, default=3_600, description="The token's lifetime.")
REVOKED_MAX = 10_000
"""Ended sessions that this node remembers. Beyond this, the one that expires first is forgotten."""
FAILURE_DELAY_MS_MAX = 30_000
FAILURES_PENDING_MAX = 1
"""After a wrong password, the next one of the address is checked when the delay has passed."""
CHECKS_MAX = 4
CHECKS_WAITING_MAX = 64
BODY_BYTES_MAX = 16 * 1024
CSRF_HEADER = "x-chronik-csrf"

WRONG = "wrong user or password"
LOG_IN = "log in: send Authorization: Bearer TOKEN or Basic, or open / in a browser"
STARTING = "this node is starting and cannot check log-ins yet: retry in a second, or use another node"
ENDED = "your session ended: log in again"


EVERYONE = Visitor(OPEN_ACCESS, "open")
"""The visitor of a node that requires no log-in."""


class Credentials(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a log-in."""

    user: str
    password: str

    def __repr__(self) -> str:
        return "Credentials()"


class Guard:
    """Decides who may pass. Owned by the event loop."""

    def __init__(self, node: NodeView) -> None:
        self._node = node
        self._is_on = node.security.http_login
        self._is_metrics_public = node.security.public_metrics
        self._clock = asyncio.get_running_loop().time
        self._delays = FailureDelays(node.failure_delay_ms, FAILURE_DELAY_MS_MAX, FAILURES_PENDING_MAX)
        self._checks = asyncio.Semaphore(CHECKS_MAX)
        self._check_count = 0
        self._revoked: dict[bytes, int] = {}

    # -- requests ------------------------------------------------------------------------------------------------------

    async def admit(self, request: Request, need: Need) -> Visitor:
        """Return the sender. Raise Refusal unless it may use a path with this need."""
        if not self._is_on or need == "nothing" or (need == "metrics" and self._is_metrics_public):
            return EVERYONE
        visitor = await self.identify(request)
        if visitor is None:
            raise Refusal(401, ENDED if self._cookie_name(request) in request.cookies else LOG_IN)
        return visitor

    async def admit_change(self, request: Request) -> Visitor:
        """Return the sender of a request that changes something. A page of another site may not send one."""
        if not self._is_on:
            if self._node.is_authorizing:
                raise Refusal(403, "this node has authorization but no log-in over HTTP: set security.http_login")
            _require_same_origin(request, is_browser=False)
            return EVERYONE
        if "authorization" not in request.headers and self._cookie_name(request) not in request.cookies:
            raise Refusal(401, LOG_IN)
        return await self._changing_visitor(request)

    async def identify(self, request: Request) -> Visitor | None:
        """Return the sender, or None if it is not logged in. An invalid Authorization header is refused."""
        authorization = request.headers.get("authorization")
        if authorization is not None:
            return await self._authorized(request, authorization)
        text = request.cookies.get(self._cookie_name(request))
        claims = None if text is None else verify(self._keys(Kind.SESSION), Kind.SESSION, text, self._node.wall_ms())
        if claims is None or not self.is_current(claims):
            return None
        return Visitor(self._node.access_of(claims.principal, _host(request)), "session", claims)

    async def _authorized(self, request: Request, authorization: str) -> Visitor:
        scheme, _, value = authorization.partition(" ")
        if scheme.lower() == "basic":
            user, password = _basic(value.strip())
            principal = await self._check_password(request, user, password)
            return Visitor(self._node.access_of(principal, _host(request)), "password", self._claims(user, principal))
        if scheme.lower() != "bearer":
            raise Refusal(401, LOG_IN)
        text, now_ms = value.strip(), self._node.wall_ms()
        claims = verify(self._keys(Kind.TOKEN), Kind.TOKEN, text, now_ms)
        if claims is not None and self.is_current(claims):
            return Visitor(self._node.access_of(claims.principal, _host(request)), "token", claims)
        claims = verify(self._keys(Kind.NODE), Kind.NODE, text, now_ms)
        if claims is None:
            raise Refusal(401, "the token is invalid or has expired: get another with POST /api/tokens")
        if not claims.principal:
            return Visitor(Access(ANONYMOUS, claims.host, None), "node", claims)
        return Visitor(self._node.access_of(claims.principal, claims.host), "node", claims)

    def is_current(self, claims: Claims) -> bool:
        """Return whether a verified session or token still holds: not logged out, and the credentials are the same."""
        if claims.expires_ms <= self._node.wall_ms() or claims.id in self._revoked:
            return False
        return self._users().fingerprint(claims.user) == claims.fingerprint

    def has_ended(self, visitor: Visitor) -> bool:
        """Return whether a stream that the visitor opened must end."""
        claims = visitor.claims
        if claims is None:
            return False
        if visitor.how == "node":
            return claims.expires_ms <= self._node.wall_ms()
        return not self.is_current(claims)

    def renew(self, request: Request, visitor: Visitor, response: Response) -> None:
        """Extend the session of a visitor that uses it."""
        claims = visitor.claims
        if visitor.how != "session" or claims is None:
            return
        expires_ms = min(claims.issued_ms + SESSION_MS_MAX, self._node.wall_ms() + SESSION_IDLE_MS_MAX)
        if expires_ms >= claims.expires_ms + SESSION_RENEWED_MS:
            self._set_session(request, response, msgspec.structs.replace(claims, expires_ms=expires_ms))

    # -- the API -------------------------------------------------------------------------------------------------------

    async def session(self, parameters: Parameters) -> Response:
        """Answer who is logged in, and the token for the next change."""
        request = parameters.request
        if not self._is_on:
            return json_answer(schemas.Session(False))
        visitor = await self.identify(request)
        if visitor is None:
            has_ended = self._cookie_name(request) in request.cookies
            visit = decode_id(request.cookies.get(self._visit_cookie(request), "")) or self._new_id()
            answer = json_answer(schemas.Session(True, has_ended=has_ended, csrf=self._csrf(visit)))
            self._set_cookie(request, answer, self._visit_cookie(request), encode_id(visit), None)
            return answer
        claims = visitor.claims
        csrf = self._csrf(claims.id) if visitor.how == "session" and claims is not None else None
        answer = json_answer(schemas.Session(True, visitor.access.principal, csrf=csrf))
        self.renew(request, visitor, answer)
        return answer

    async def log_in(self, parameters: Parameters) -> Response:
        request = parameters.request
        self._require_on()
        _require_same_origin(request, is_browser=True)
        visit = decode_id(request.cookies.get(self._visit_cookie(request), ""))
        if visit is None or not self._is_csrf(visit, request):
            raise Refusal(403, "the page is out of date: reload it, and log in again")
        given = await _credentials(request)
        principal = await self._check_password(request, given.user, given.password)
        claims = self._claims(given.user, principal)
        answer = json_answer(schemas.Session(True, principal, csrf=self._csrf(claims.id)))
        self._set_session(request, answer, claims)
        self._set_cookie(request, answer, self._visit_cookie(request), "", 0)
        return answer

    async def log_out(self, parameters: Parameters) -> Response:
        request = parameters.request
        self._require_on()
        visitor = await self._changing_visitor(request)
        claims = visitor.claims
        if visitor.how != "session" or claims is None:
            raise Refusal(400, "only a session can be logged out: a token ends by itself")
        self._revoke(claims)
        answer = json_answer(schemas.Session(True))
        self._set_cookie(request, answer, self._cookie_name(request), "", 0)
        return answer

    async def new_token(self, parameters: Parameters) -> Response:
        request = parameters.request
        self._require_on()
        seconds = parameters.number(TOKEN_SECONDS)
        visitor = await self._changing_visitor(request)
        owner = visitor.claims
        if visitor.how not in ("session", "password") or owner is None:
            raise Refusal(403, "a token cannot be extended: send your password (Authorization: Basic)")
        now_ms = self._node.wall_ms()
        claims = Claims(owner.user, owner.principal, self._new_id(), now_ms, now_ms + seconds * 1000, owner.fingerprint)
        token = sign(self._keys(Kind.TOKEN)[0], Kind.TOKEN, claims)
        return json_answer(schemas.Token(token, claims.principal, claims.expires_ms))

    async def _changing_visitor(self, request: Request) -> Visitor:
        """Return the sender of a request that changes something."""
        _require_same_origin(request, is_browser="authorization" not in request.headers)
        visitor = await self.identify(request)
        if visitor is None:
            raise Refusal(401, LOG_IN)
        claims = visitor.claims
        if visitor.how == "session" and (claims is None or not self._is_csrf(claims.id, request)):
            raise Refusal(403, "the page is out of date: reload it, and repeat this")
        return visitor

    def _require_on(self) -> None:
        if not self._is_on:
            raise Refusal(409, "this node requires no log-in: see security.http_login")

    # -- passwords -----------------------------------------------------------------------------------------------------

    async def _check_password(self, request: Request, user: str, password: str) -> str:
        """Return the principal. Raise Refusal, the same one for an unknown user and for a wrong password."""
        users, host, metrics = self._users(), _host(request), self._node.metrics
        if self._check_count >= CHECKS_WAITING_MAX:
            raise Refusal(503, f"{CHECKS_WAITING_MAX} log-ins are being checked, the limit: retry")
        wait_s = self._delays.begin(host, self._clock())
        if wait_s > 0:
            metrics.http_logins["delayed"] += 1
            line = f"too many wrong passwords from this address: retry in {wait_s:.0f} s"
            raise Refusal(429, line, retry_after_s=wait_s)
        principal = None
        self._check_count += 1
        try:
            async with self._checks:
                if len(user) <= NAME_CHARACTERS_MAX and len(password) <= PASSWORD_CHARACTERS_MAX:
                    principal = await users.check_password(user, password)
        finally:
            self._check_count -= 1
            # A client that disconnects while its password is checked has used its attempt, too.
            self._delays.end(host, self._clock(), has_failed=principal is None)
        if principal is None:
            metrics.http_logins["refused"] += 1
            raise Refusal(401, WRONG)
        metrics.http_logins["accepted"] += 1
        return principal

    def _users(self) -> Users:
        users = self._node.users
        if users is None:
            raise Refusal(503, STARTING)
        return users

    # -- sessions and their cookies ------------------------------------------------------------------------------------

    def _claims(self, user: str, principal: str) -> Claims:
        """Return the claims of a new session of a user whose password was right."""
        now_ms = self._node.wall_ms()
        fingerprint = self._users().fingerprint(user)
        if fingerprint is None:
            # The user was deleted during the check.
            raise Refusal(401, WRONG)
        return Claims(user, principal, self._new_id(), now_ms, now_ms + SESSION_IDLE_MS_MAX, fingerprint)

    def _new_id(self) -> bytes:
        return self._node.random.randbytes(ID_BYTES)

    def _revoke(self, claims: Claims) -> None:
        now_ms = self._node.wall_ms()
        for ended in [each for each, until_ms in self._revoked.items() if until_ms <= now_ms]:
            del self._revoked[ended]
        # A renewed copy may live as long as the session may.
        self._revoked[claims.id] = claims.issued_ms + SESSION_MS_MAX
        if len(self._revoked) > REVOKED_MAX:
            del self._revoked[min(self._revoked, key=self._revoked.__getitem__)]

    def _keys(self, kind: Kind) -> tuple[bytes, ...]:
        """Return the keys that verify; the first one signs. Raise Refusal before the cluster secret is known."""
        keys = self._node.derived_keys(kind.purpose)
        if not keys:
            raise Refusal(503, STARTING)
        return keys

    def _csrf(self, owner: bytes) -> str:
        return csrf_token(self._keys(Kind.CSRF)[0], owner)

    def _is_csrf(self, owner: bytes, request: Request) -> bool:
        return is_csrf_token(self._keys(Kind.CSRF), owner, request.headers.get(CSRF_HEADER, ""))

    def _set_session(self, request: Request, response: Response, claims: Claims) -> None:
        text = sign(self._keys(Kind.SESSION)[0], Kind.SESSION, claims)
        # A cookie of the browser's session: it ends with the browser, too.
        self._set_cookie(request, response, self._cookie_name(request), text, None)

    def _set_cookie(self, request: Request, response: Response, name: str, value: str, max_age_s: int | None) -> None:
        response.set_cookie(name, value, max_age_s, path="/", secure=_is_tls(request), httponly=True, samesite="strict")

    def _cookie_name(self, request: Request) -> str:
        return self._named(request, "session")

    def _visit_cookie(self, request: Request) -> str:
        """The cookie of a browser before its log-in: without one, another site could log it in as somebody else."""
        return self._named(request, "visit")

    def _named(self, request: Request, what: str) -> str:
        """Return a name with the cluster in it: a browser sends the cookies of one port to all ports of a host."""
        image = self._node.image
        if image is None or not image.cluster_id:
            # Not "log in": the page would drop a session that holds as soon as the node has started.
            raise Refusal(503, STARTING)
        cluster = hashlib.sha256(image.cluster_id.encode()).hexdigest()[:8]
        # A page without TLS, or of another host, cannot set a cookie with this prefix.
        return f"{'__Host-' if _is_tls(request) else ''}chronik-{what}-{cluster}"


def _host(request: Request) -> str:
    return request.client.host if request.client is not None else ""


def _is_tls(request: Request) -> bool:
    return request.scope.get("scheme") == "https"


def _basic(value: str) -> tuple[str, str]:
    try:
        user, colon, password = base64.b64decode(value, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        user, colon, password = "", "", ""
    if not colon:
        raise Refusal(401, "the Basic credentials are malformed: send base64 of USER:PASSWORD")
    return user, password


async def _credentials(request: Request) -> Credentials:
    """Return the body of a log-in. Never show it in an error."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise Refusal(400, f"send the log-in as {JSON}")
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES_MAX:
            raise Refusal(413, f"the body is larger than {BODY_BYTES_MAX} bytes")
    try:
        return msgspec.json.decode(body, type=Credentials)
    except msgspec.DecodeError:
        raise Refusal(400, 'send {"user": "NAME", "password": "..."}') from None


def _require_same_origin(request: Request, *, is_browser: bool) -> None:
    """Raise Refusal if a page of another origin sent the request, or if a browser's request does not tell."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    is_other = site not in (None, "same-origin") or (origin is not None and not _is_own_origin(request, origin))
    if is_other or (is_browser and site is None and origin is None):
        raise Refusal(403, "another web site may not do this: open the page of this node")


def _is_own_origin(request: Request, origin: str) -> bool:
    """Return whether the origin is the address in the Host header. A proxy may add TLS in front of a node."""
    scheme, separator, address = origin.lower().partition("://")
    if not separator or scheme not in (("https",) if _is_tls(request) else ("http", "https")):
        return False
    port = 443 if scheme == "https" else 80
    return host_and_port(address, port) == host_and_port(request.headers.get("host", "").lower(), port)
