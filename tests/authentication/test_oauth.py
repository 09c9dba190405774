"""OAUTHBEARER: messages, key sets, and tokens that must not be accepted."""

from __future__ import annotations

import base64
import json
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tokens import AUDIENCE, ISSUER, NOW_MS, claims, key_set, private_key, public_jwk, token

from chronik.authentication.oauth import (
    KeySet,
    KeySetError,
    OAuthClient,
    OAuthServer,
    TokenRules,
    key_id_of,
    validate,
)
from chronik.authentication.sasl import Authenticated, Challenge, Refused, SaslError

RULES = TokenRules(ISSUER, (AUDIENCE, "other"), ("read",))
KEYS = KeySet.parse(key_set())
NOW_S = NOW_MS // 1000


def server(keys: KeySet = KEYS, rules: TokenRules = RULES) -> OAuthServer:
    return OAuthServer(lambda: keys, rules, lambda: NOW_MS)


def encoded(part: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=")


def test_client_with_a_valid_token_is_its_subject_until_it_expires() -> None:
    outcome = server().respond(OAuthClient(token()).first())
    assert outcome == Authenticated("alice", expires_ms=NOW_MS + 300_000)


ALGORITHMS = [
    ("rsa", "RS256"),
    ("rsa", "RS384"),
    ("rsa", "RS512"),
    ("rsa", "PS256"),
    ("rsa", "PS512"),
    ("ec", "ES256"),
    ("ed25519", "EdDSA"),
]


@pytest.mark.parametrize(("kind", "algorithm"), ALGORITHMS)
@pytest.mark.parametrize("key_id", ["k", None])
def test_each_asymmetric_algorithm_is_accepted(kind: str, algorithm: str, key_id: str | None) -> None:
    keys = KeySet.parse(
        key_set(public_jwk("rsa", "other") if kind != "rsa" else public_jwk("ec", "other"), public_jwk(kind, "k"))
    )
    assert validate(token(kind, algorithm, key_id), keys, RULES, NOW_MS)[0] == "alice"


def without_signature() -> str:
    return f"{encoded({'alg': 'none', 'typ': 'JWT'})}.{encoded(claims())}."


def signed_with_the_public_key(encoding: serialization.Encoding, form: serialization.PublicFormat) -> str:
    """Key confusion: the verifier's public key as the secret of an HMAC."""
    import hashlib
    import hmac

    public = private_key("rsa").public_key().public_bytes(encoding, form)
    text = f"{encoded({'alg': 'HS256', 'typ': 'JWT', 'kid': 'rsa'})}.{encoded(claims())}"
    mac = hmac.new(public, text.encode(), hashlib.sha256).digest()
    return f"{text}.{base64.urlsafe_b64encode(mac).decode().rstrip('=')}"


def with_other_claims() -> str:
    header, _, signature = token().split(".")
    return f"{header}.{encoded(claims(sub='root'))}.{signature}"


FORGED = {
    "none": (without_signature(), "'none' is not accepted"),
    "none in capitals": (
        without_signature().replace(encoded({"alg": "none", "typ": "JWT"}), encoded({"alg": "NONE", "typ": "JWT"})),
        "is not accepted",
    ),
    "HMAC with the PEM": (
        signed_with_the_public_key(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo),
        "'HS256' is not accepted",
    ),
    "HMAC with the DER": (
        signed_with_the_public_key(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo),
        "'HS256' is not accepted",
    ),
    "no algorithm": (f"{encoded({'typ': 'JWT'})}.{encoded(claims())}.AAAA", "not a JWT|not accepted"),
    "other claims": (with_other_claims(), "no key of the key set has signed"),
    "cut signature": (token()[:-8], "no key of the key set has signed|not a JWT"),
    "key of another issuer": (
        jwt.encode(claims(), private_key("ed25519"), "EdDSA", headers={"kid": "rsa"}),
        "no key of the key set has signed",
    ),
    "algorithm of another key": (token("ec", "ES256", "rsa"), "no key of the key set has signed"),
    "unknown key": (token(key_id="unknown"), "no key of the key set has signed"),
    "own key in the header": (
        jwt.encode(claims(), private_key("ed25519"), "EdDSA", headers={"jwk": public_jwk("ed25519")}),
        "no key of the key set has signed",
    ),
    "critical extension": (
        jwt.encode(claims(), private_key("rsa"), "RS256", headers={"kid": "rsa", "crit": ["x"], "x": 1}),
        "crit|not a JWT",
    ),
    "not a JWT": ("abc", "not a JWT"),
    "two parts": ("a.b", "not a JWT"),
    "long": ("a" * 40_000, "allowed are"),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_token_is_refused(name: str) -> None:
    forged, reason = FORGED[name]
    with pytest.raises(SaslError, match=reason):
        validate(forged, KEYS, RULES, NOW_MS)


CLAIMS: list[tuple[dict[str, Any], str]] = [
    ({"exp": None}, "no expiry"),
    ({"exp": NOW_S - 31}, "expired 31 s ago"),
    ({"exp": "soon"}, "exp is not a time"),
    ({"exp": True}, "exp is not a time"),
    ({"exp": float("inf")}, "exp is not a time"),
    ({"exp": -1}, "exp is not a time"),
    ({"nbf": NOW_S + 31}, r"only in 31 s \(nbf\)"),
    ({"iat": NOW_S + 31}, r"only in 31 s \(iat\)"),
    ({"iss": "https://evil.test"}, "issuer 'https://evil.test'"),
    ({"iss": None}, "issuer None"),
    ({"aud": "chronik-too"}, "audience is not chronik or other"),
    ({"aud": None}, "audience"),
    ({"aud": ["a", "b"]}, "audience"),
    ({"aud": [1]}, "aud is not text"),
    ({"scope": "write"}, "lacks the scope read"),
    ({"scope": "reader"}, "lacks the scope read"),
    ({"scope": None}, "lacks the scope read"),
    ({"scope": 1}, "scope is not text"),
    ({"sub": None}, "no principal"),
    ({"sub": ""}, "no principal"),
    ({"sub": " "}, "no principal"),
]


@pytest.mark.parametrize(("changed", "reason"), CLAIMS)
def test_signed_token_is_refused_for_its_claims(changed: dict[str, Any], reason: str) -> None:
    # PyJWT's encoder checks some of these claims itself.
    signed = jwt.PyJWS().encode(json.dumps(claims(**changed)).encode(), private_key("rsa"), "RS256", {"kid": "rsa"})
    with pytest.raises(SaslError, match=reason):
        validate(signed, KEYS, RULES, NOW_MS)


@pytest.mark.parametrize(
    "changed",
    [
        {"exp": NOW_S - 29},
        {"nbf": NOW_S + 30},
        {"iat": NOW_S + 30},
        {"iat": None},
        {"aud": ["x", "other"]},
        {"scope": None, "scp": ["read"]},
        {"scope": ["write", "read"]},
    ],
)
def test_signed_token_is_accepted_within_the_rules(changed: dict[str, Any]) -> None:
    assert validate(token(**changed), KEYS, RULES, NOW_MS)[0] == "alice"


def test_principal_is_the_configured_claim() -> None:
    signed = token(email="a@b.c")
    assert validate(signed, KEYS, TokenRules(principal_claim="email"), NOW_MS)[0] == "a@b.c"


MESSAGES = [
    (b"", "malformed"),
    (b"n,,\x01\x01", "0 `auth` values"),
    (b"n,,\x01auth=Basic abc\x01\x01", "not a bearer token"),
    (b"n,,\x01auth=Bearer \x01\x01", "not a bearer token"),
    (b"n,,\x01auth=Bearer a.b.c\x01", "malformed"),
    (b"n,,\x01auth=Bearer a.b.c\x01auth=Bearer a.b.c\x01\x01", "2 `auth` values"),
    (b"p=x,,\x01auth=Bearer a.b.c\x01\x01", "malformed"),
    (b"n,,\x01auth=Bearer \xff\x01\x01", "not UTF-8"),
    (b"n,a=root,\x01auth=Bearer " + token().encode() + b"\x01\x01", "authorization id differs"),
    (b"n,,\x01auth=Bearer " + token(exp=1).encode() + b"\x01\x01", "expired"),
]


@pytest.mark.parametrize(("message", "reason"), MESSAGES)
def test_refused_client_gets_the_error_as_json_first(message: bytes, reason: str) -> None:
    node = server()
    answer = node.respond(message)
    assert answer == Challenge(b'{"status":"invalid_token","scope":"read"}')
    assert OAuthClient("x").next(answer.data) == b"\x01"
    outcome = node.respond(b"\x01")
    assert isinstance(outcome, Refused)
    assert reason in outcome.reason
    assert isinstance(node.respond(OAuthClient(token()).first()), Refused)


VALID = OAuthClient(token()).first()
ODD_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*claims(), "alg", "kid"]), inner),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=200)
    | st.tuples(st.integers(0, len(VALID) - 1), st.integers(1, 255)).map(
        lambda flip: VALID[: flip[0]] + bytes((VALID[flip[0]] ^ flip[1],)) + VALID[flip[0] + 1 :]
    )
    | st.integers(0, len(VALID) - 1).map(lambda end: VALID[:end])
    | st.tuples(ODD_JSON, ODD_JSON, st.text(max_size=8)).map(
        lambda parts: OAuthClient(f"{encoded(parts[0])}.{encoded(parts[1])}.{parts[2]}").first()
    )
)
def test_no_damaged_or_odd_message_raises_or_names_another_user(message: bytes) -> None:
    key_id_of(message)
    node = server()
    outcome = node.respond(message)
    if isinstance(outcome, Authenticated):
        # The last character of the signature has bits without a meaning, for example.
        assert outcome.name == "alice"
    else:
        assert isinstance(outcome, Challenge)
        assert isinstance(node.respond(b"\x01"), Refused)


def test_valid_token_after_a_refused_one_does_not_count() -> None:
    node = server()
    assert isinstance(node.respond(OAuthClient("a.b.c").first()), Challenge)
    assert isinstance(node.respond(OAuthClient(token()).first()), Refused)


def test_extensions_of_the_client_are_ignored() -> None:
    message = f"n,a=alice,\x01auth=Bearer {token()}\x01traceId=123\x01\x01".encode()
    assert isinstance(server().respond(message), Authenticated)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not JSON"),
        (b"[]", "no list of `keys`"),
        (b'{"keys": {}}', "no list of `keys`"),
        (b'{"keys": []}', "no public key"),
        (b'{"keys": [1, {}, {"kty": "oct", "k": "AAAA"}]}', "no public key"),
        (b'{"keys": [{"kty": "RSA", "n": "", "e": "AQAB"}]}', "no public key"),
        (b'{"keys": [{"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"}]}', "no public key"),
        (key_set(public_jwk("small-rsa")), "no public key"),
        (key_set(public_jwk("rsa", use="enc")), "no public key"),
        (key_set(public_jwk("rsa", alg="HS256")), "no public key"),
        (key_set(*([public_jwk("ec")] * 65)), "65 keys"),
    ],
)
def test_unusable_key_set_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(KeySetError, match=reason):
        KeySet.parse(data)


def test_key_with_an_algorithm_verifies_only_that() -> None:
    keys = KeySet.parse(key_set(public_jwk("rsa", "rsa", alg="RS512")))
    assert validate(token(algorithm="RS512"), keys, RULES, NOW_MS)
    with pytest.raises(SaslError, match="no key"):
        validate(token(algorithm="RS256"), keys, RULES, NOW_MS)


def test_empty_key_set_accepts_no_token() -> None:
    with pytest.raises(SaslError, match="no key"):
        validate(token(), KeySet(), RULES, NOW_MS)


def test_key_id_is_read_without_a_check() -> None:
    assert key_id_of(OAuthClient(token(key_id="next")).first()) == "next"
    assert key_id_of(OAuthClient(token(key_id=None)).first()) is None
    assert key_id_of(OAuthClient("abc").first()) is None
    assert key_id_of(b"\xff") is None
