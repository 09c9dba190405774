"""Log-in, sessions and tokens: who gets in, who does not, and when it ends."""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from functools import partial

import msgspec
import pytest
from starlette.types import Message, Scope
from tests.web.support_login import (
    PASSWORDS,
    SECRET,
    Browser,
    SecureNode,
    basic,
    bearer,
    secured,
    send,
    users_with,
)

from chronik.node.serving.failure_delays import ADDRESSES_MAX
from chronik.node.serving.signed import ID_BYTES, Claims, Kind, sign, verify
from chronik.web.app import create_app
from chronik.web.guard import REVOKED_MAX, SESSION_IDLE_MS_MAX, SESSION_MS_MAX, TOKEN_SECONDS_MAX, Guard


@secured
async def test_a_session_starts_with_the_right_password_and_ends_at_the_log_out(node: SecureNode, port: int) -> None:
    browser = Browser(port)
    assert (await browser.get("/api/topics")).status == 401
    entered = await browser.log_in("alice")
    assert (entered.status, entered.json["principal"]) == (200, "User:alice")
    assert b"wonderland" not in entered.body
    cookie = next(value for name, value in entered.headers if name == "set-cookie" and "session" in value)
    assert "; HttpOnly" in cookie and "; Path=/" in cookie and "; SameSite=strict" in cookie
    assert "Secure" not in cookie and "Domain" not in cookie
    assert [topic["name"] for topic in (await browser.get("/api/topics")).json["topics"]] == ["orders"]
    stolen = dict(browser.cookies)
    left = await browser.send("DELETE", "/api/session", X_Chronik_CSRF=await browser.csrf())
    assert left.status == 200
    assert not any("session" in name for name in browser.cookies)
    browser.cookies = stolen
    again = await browser.get("/api/topics")
    assert (again.status, again.json["error"]) == (401, "your session ended: log in again")
    assert again.header("www-authenticate") == 'Bearer realm="chronik"'


@pytest.mark.parametrize("user", ["alice", "nobody", "alice\r\nSet-Cookie: x=1", "a" * 5_000, ""])
def test_a_refused_log_in_gives_no_cookie_and_no_hint(user: str) -> None:
    async def work(node: SecureNode, port: int) -> None:
        browser = Browser(port)
        refused = await browser.log_in(user, "wrong")
        assert (refused.status, refused.json) == (401, {"error": "wrong user or password"})
        assert refused.cookies == {} and refused.header("x") is None
        delayed = await browser.log_in(user, "wrong")
        assert delayed.status == 429 and int(delayed.header("retry-after") or 0) >= 1
        assert "too many wrong passwords from this address" in delayed.json["error"]

    secured(work)()


@secured
async def test_a_session_ends_when_it_is_idle_and_when_it_is_old(node: SecureNode, port: int) -> None:
    browser, idle = Browser(port), Browser(port)
    await browser.log_in("alice")
    await idle.log_in("alice")
    begun_ms = node.now_ms
    while node.now_ms + SESSION_IDLE_MS_MAX // 2 < begun_ms + SESSION_MS_MAX:
        node.now_ms += SESSION_IDLE_MS_MAX // 2
        assert (await browser.get("/api/topics")).status == 200  # each answer renews the cookie
    node.now_ms = begun_ms + SESSION_IDLE_MS_MAX
    assert (await idle.get("/api/topics")).status == 401
    node.now_ms = begun_ms + SESSION_MS_MAX
    assert (await browser.get("/api/topics")).status == 401


@secured
async def test_a_new_password_ends_the_sessions_and_tokens_of_its_user(node: SecureNode, port: int) -> None:
    alice, bob = Browser(port), Browser(port)
    await alice.log_in("alice")
    await bob.log_in("bob")
    token = (await send(port, "POST", "/api/tokens", basic("alice"))).json["token"]
    assert (await send(port, "GET", "/api/topics", bearer(token))).status == 200
    for passwords in ({**PASSWORDS, "alice": "new"}, {"bob": PASSWORDS["bob"]}):
        node.users = users_with(passwords)
        assert (await alice.get("/api/topics")).status == 401
        assert (await send(port, "GET", "/api/topics", bearer(token))).status == 401
        assert (await bob.get("/api/topics")).status == 200


@secured
async def test_forged_truncated_and_foreign_sessions_are_refused(node: SecureNode, port: int) -> None:
    browser = Browser(port)
    await browser.log_in("alice")
    name, text = browser.session
    token = (await send(port, "POST", "/api/tokens", basic("alice"))).json["token"]
    fingerprint = node.users.fingerprint("alice") if node.users is not None else None
    assert fingerprint is not None
    far_ms = node.now_ms + 1_000_000
    claims = Claims("alice", "User:alice", b"i" * ID_BYTES, node.now_ms, far_ms, fingerprint)
    key = SECRET.derived(Kind.SESSION.purpose)[0]
    forged = [
        *(text[:length] for length in range(0, len(text), 7)),
        *(text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :] for at in range(0, len(text), 5)),
        text + "A",
        text.replace("session.", "token.", 1),
        token,
        token.replace("token.", "session.", 1),
        sign(b"x" * 32, Kind.SESSION, claims),
        sign(SECRET.proven, Kind.SESSION, claims),
        sign(key, Kind.TOKEN, claims).replace("token.", "session.", 1),
        sign(key, Kind.SESSION, msgspec.structs.replace(claims, expires_ms=node.now_ms)),
        sign(key, Kind.SESSION, msgspec.structs.replace(claims, user="nobody")),
        sign(key, Kind.SESSION, msgspec.structs.replace(claims, fingerprint=b"")),
        "session..",
        "." * 200,
        "A" * 20_000,
        "é",
    ]
    for value in forged:
        browser.cookies = {name: value}
        assert (await browser.get("/api/topics")).status in (401, 431, 400), value
        bad = value.replace("session.", "token.", 1)
        if bad != token and len(bad) < 8_000 and bad.isascii():
            assert (await send(port, "GET", "/api/topics", bearer(bad))).status == 401, bad
    browser.cookies = {name: sign(key, Kind.SESSION, claims)}  # the positive control
    assert (await browser.get("/api/topics")).status == 200


@secured
async def test_a_token_lasts_as_long_as_requested_and_cannot_be_extended(node: SecureNode, port: int) -> None:
    answer = await send(port, "POST", "/api/tokens?seconds=60", basic("alice"))
    assert (answer.status, answer.json["principal"]) == (200, "User:alice")
    assert answer.json["expires_ms"] == node.now_ms + 60_000
    token = bearer(answer.json["token"])
    assert (await send(port, "GET", "/api/topics", token)).status == 200
    assert (await send(port, "POST", "/api/tokens", token)).status == 403
    assert (await send(port, "DELETE", "/api/session", token)).status == 400
    for seconds in (0, TOKEN_SECONDS_MAX + 1):
        assert (await send(port, "POST", f"/api/tokens?seconds={seconds}", basic("alice"))).status == 400
    node.now_ms += 60_000
    assert (await send(port, "GET", "/api/topics", token)).status == 401
    browser = Browser(port)
    await browser.log_in("bob")
    by_session = await browser.send("POST", "/api/tokens", X_Chronik_CSRF=await browser.csrf())
    assert (by_session.status, by_session.json["principal"]) == (200, "User:bob")


@secured
async def test_a_browser_of_another_origin_changes_nothing(node: SecureNode, port: int) -> None:
    browser = Browser(port)
    csrf = await browser.csrf()
    body = {"user": "alice", "password": PASSWORDS["alice"]}
    post = partial(browser.send, "POST", "/api/session", body)
    own = f"http://127.0.0.1:{port}"
    for headers in (
        {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://evil.example"},
        {"Origin": f"http://127.0.0.1:{port + 1}"},
        {"Origin": "null"},
        {"Origin": own, "Sec-Fetch-Site": "same-site"},
        {"Origin": own, "Sec-Fetch-Site": "none"},
        {"Origin": "", "Sec-Fetch-Site": ""},  # not sent: no browser does that
        {"Origin": f"ftp://127.0.0.1:{port}"},
    ):
        assert (await post(X_Chronik_CSRF=csrf, **headers)).status == 403, headers
    for wrong in ("", "x", csrf[:-1], csrf + "x", "é" * 9):
        assert (await post(X_Chronik_CSRF=wrong)).status == 403
    other = Browser(port)
    assert (await post(X_Chronik_CSRF=await other.csrf())).status == 403  # the token of another visit
    assert (await post(X_Chronik_CSRF=csrf, Content_Type="text/plain")).status == 400
    assert node.metrics.http_logins == {"accepted": 0, "refused": 0, "delayed": 0}
    assert (await post(X_Chronik_CSRF=csrf)).status == 200
    for method, path in (("DELETE", "/api/session"), ("POST", "/api/tokens")):
        session_csrf = await browser.csrf()
        assert (await browser.send(method, path)).status == 403
        assert (await browser.send(method, path, X_Chronik_CSRF=csrf)).status == 403  # that before the log-in
        crossed = await browser.send(method, path, X_Chronik_CSRF=session_csrf, Origin="http://evil.example")
        assert crossed.status == 403
    assert (await browser.get("/api/topics")).status == 200
    headers = {**basic("alice"), "Origin": "http://evil.example"}  # a browser that remembers a password
    assert (await send(port, "POST", "/api/tokens", headers)).status == 403
    for answer in (await send(port, "OPTIONS", "/api/session", {"Origin": "http://evil.example"}), crossed):
        assert not any(name.startswith("access-control-") for name, _ in answer.headers)


@secured
async def test_only_names_of_the_node_are_accepted_as_hosts(node: SecureNode, port: int) -> None:
    for host in ("127.0.0.1", f"localhost:{port}", "[::1]:80", "10.0.0.7:6092", "a.localhost", "Balancer.Example:80"):
        assert (await send(port, "GET", "/api/session", {"Host": host})).status == 200, host
    for host in ("evil.example", "balancer.example.evil.example", "127.0.0.1.evil.example:80"):
        for path in ("/", "/api/session", "/page/login.js", "/api/topics"):
            answer = await send(port, "GET", path, {"Host": host})
            assert answer.status == 403 and "security.http_hosts" in answer.json["error"], host
        assert (await send(port, "GET", "/healthz", {"Host": host})).status == 200


@secured
async def test_a_log_in_through_a_proxy_with_tls_has_its_own_origin(node: SecureNode, port: int) -> None:
    browser = Browser(port)
    csrf = await browser.csrf()
    body = {"user": "alice", "password": PASSWORDS["alice"]}
    send_as = partial(browser.send, "POST", "/api/session", body, X_Chronik_CSRF=csrf, Host="balancer.example")
    assert (await send_as(Origin="https://balancer.example:444")).status == 403
    assert (await send_as(Origin="https://balancer.example")).status == 200


@secured
async def test_malformed_log_ins_are_refused_without_repeating_them(node: SecureNode, port: int) -> None:
    browser = Browser(port)
    csrf = await browser.csrf()
    for body in ({"user": "alice"}, {"user": 1, "password": "hush"}, ["hush"], {"user": "a", "password": "x", "y": 1}):
        answer = await browser.send("POST", "/api/session", body, X_Chronik_CSRF=csrf)
        assert answer.status == 400 and b"hush" not in answer.body
    large = {"user": "alice", "password": "x" * 20_000}
    assert (await browser.send("POST", "/api/session", large, X_Chronik_CSRF=csrf)).status == 413
    for value in ("Basic", "Basic ?", "Basic YWxpY2U=", "Basic /////w==", "Digest x", "Bearer", ""):
        answer = await send(port, "GET", "/api/topics", {"Authorization": value})
        assert answer.status == 401, value
    assert node.metrics.http_logins["refused"] == 0


@secured
async def test_a_target_that_is_no_path_is_refused(node: SecureNode, port: int) -> None:
    for method, target in (("OPTIONS", "*"), ("CONNECT", "evil.example:80"), ("GET", "//subjects")):
        assert 400 <= (await send(port, method, target)).status < 500, (method, target)


@secured
async def test_a_client_cannot_choose_its_address(node: SecureNode, port: int) -> None:
    assert (await send(port, "GET", "/api/topics", basic("alice", "wrong"))).status == 401
    for forwarded in ("10.1.2.3", "10.1.2.4"):
        headers = {**basic("alice", "wrong"), "X-Forwarded-For": forwarded, "Forwarded": f"for={forwarded}"}
        assert (await send(port, "GET", "/api/topics", headers)).status == 429


@secured
async def test_without_users_or_keys_or_an_authorizer_nobody_gets_in(node: SecureNode, port: int) -> None:
    browser = Browser(port)
    await browser.log_in("alice")
    token = bearer((await send(port, "POST", "/api/tokens", basic("alice"))).json["token"])

    async def refused() -> None:
        for headers in (basic("alice"), token):
            assert (await send(port, "GET", "/api/topics", headers)).status == 503
        assert (await browser.get("/api/topics")).status == 503
        assert (await browser.get("/")).status == 503

    users, node.users = node.users, None
    await refused()
    node.users, decisions, node.decisions = users, node.decisions, None
    await refused()
    node.decisions, node.broker = decisions, None
    assert (await browser.get("/api/topics")).status == 503
    assert (await browser.get("/healthz")).status == 200


async def test_ten_thousand_wrong_log_ins_keep_memory_flat() -> None:
    node = SecureNode()
    app = create_app(node)
    statuses: Counter[int] = Counter()

    async def fail(number: int) -> None:
        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses[message["status"]] += 1

        headers = [(b"authorization", basic(f"user-{number}", "wrong")["Authorization"].encode())]
        scope: Scope = {
            "type": "http",
            "method": "GET",
            "path": "/api/topics",
            "query_string": b"",
            "headers": headers,
            # Four of five come from few addresses, the others from new ones.
            "client": (f"10.{number >> 16}.{number >> 8 & 255}.{number & 255 if number % 5 == 0 else 1}", 1),
        }
        await app(scope, receive, answer)

    for number in range(ADDRESSES_MAX):
        await fail(number)
    gc.collect()
    blocks = sys.getallocatedblocks()
    for number in range(ADDRESSES_MAX, ADDRESSES_MAX + 10_000):
        await fail(number)
    gc.collect()
    # About 2,000 new addresses; each that is remembered has a few blocks.
    assert sys.getallocatedblocks() - blocks < 15_000
    assert statuses[401] > 4_000 and statuses[429] > 4_000
    assert statuses[401] + statuses[429] == ADDRESSES_MAX + 10_000
    await app.state.close()


@secured
async def test_ended_sessions_are_remembered_up_to_a_bound(node: SecureNode, port: int) -> None:
    guard = Guard(node)
    for number in range(REVOKED_MAX + 10):
        claims = Claims("alice", "User:alice", number.to_bytes(32, "big"), node.now_ms + number, node.now_ms + 10**9)
        guard._revoke(claims)
    assert len(guard._revoked) == REVOKED_MAX
    assert (9).to_bytes(32, "big") not in guard._revoked and (10).to_bytes(32, "big") in guard._revoked


def test_every_accepted_secret_verifies_and_kinds_do_not_mix() -> None:
    claims = Claims("a", "User:a", b"i" * ID_BYTES, 0, 100)
    old, new = b"o" * 32, b"n" * 32
    text = sign(old, Kind.TOKEN, claims)
    assert verify((new, old), Kind.TOKEN, text, 99) == claims
    assert verify((new, old), Kind.TOKEN, text, 100) is None
    assert verify((new,), Kind.TOKEN, text, 0) is None
    assert verify((), Kind.TOKEN, text, 0) is None
    assert verify((old,), Kind.SESSION, text, 0) is None
    assert len({SECRET.derived(kind.purpose) for kind in Kind}) == len(Kind)
    assert json.dumps(str(claims))
