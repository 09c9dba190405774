"""OAUTHBEARER (RFC 7628) with JSON Web Tokens, as in KIP-255 and KIP-768.

    client   gs2-header ^A "auth=Bearer " token ^A [key "=" value ^A]... ^A       gs2-header is  n,,  or  n,a=user,
    server   an empty message, or {"status":"invalid_token"}, which the client answers with ^A before it is refused

A token is a JWT that a key of the key set has signed. Only asymmetric algorithms are accepted, and only those of the
key's own type: so neither `none` nor an HMAC with a public key as its secret verifies.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from chronik.authentication.sasl import Authenticated, Challenge, Outcome, Refused, SaslError
from chronik.authentication.scram import name_of_sasl_name

SEPARATOR = "\x01"
TOKEN_CHARACTERS_MAX = 32 * 1024
KEYS_MAX = 64
"""Of a key set. A token without a key id is tried with each key of its algorithm."""

ALGORITHMS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("RSA", ""): ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("EC", "P-521"): ("ES512",),
    ("OKP", "Ed25519"): ("EdDSA",),
    ("OKP", "Ed448"): ("EdDSA",),
}
"""The signature algorithms of each type of key, by `kty` and `crv`. Symmetric keys (`oct`) are not among them."""

RSA_BITS_MIN = 2048

_CLIENT_MESSAGE = re.compile(r"[ny],(?:a=([^,\x01]*))?,\x01((?:[A-Za-z]+=[\x21-\x7e \t\r\n]*\x01)*)\x01")
_BEARER = re.compile(r"bearer +([-_.a-zA-Z0-9]+) *", re.IGNORECASE)


class KeySetError(ValueError):
    """The key set cannot be used. The text says why."""


@dataclass(frozen=True, slots=True)
class VerificationKey:
    """A public key of the issuer, and the algorithms that it may verify."""

    key_id: str | None
    algorithms: tuple[str, ...]
    key: Any


class KeySet:
    """The issuer's public keys. Immutable, so that threads may use it."""

    def __init__(self, keys: tuple[VerificationKey, ...] = ()) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def has(self, key_id: str) -> bool:
        return any(key.key_id == key_id for key in self._keys)

    def candidates(self, key_id: str | None, algorithm: str) -> list[Any]:
        """Return the keys that may have signed a token: those of its key id, or all if it names none."""
        return [
            each.key
            for each in self._keys
            if algorithm in each.algorithms and (key_id is None or each.key_id in (key_id, None))
        ]

    @classmethod
    def parse(cls, data: bytes) -> KeySet:
        """Read a JSON Web Key Set (RFC 7517). Keys for encryption, symmetric keys and unknown types are skipped.

        Raise KeySetError if no usable key is left. It loads the cryptography library: run it in a thread.
        """
        try:
            document = json.loads(data)
        except ValueError:
            raise KeySetError("it is not JSON") from None
        entries = document.get("keys") if isinstance(document, dict) else None
        if not isinstance(entries, list):
            raise KeySetError("it has no list of `keys`")
        if len(entries) > KEYS_MAX:
            raise KeySetError(f"it has {len(entries)} keys; at most {KEYS_MAX} are allowed")
        keys = tuple(key for key in map(_verification_key, entries) if key is not None)
        if not keys:
            raise KeySetError("it has no public key for signatures (RSA of 2048 bits or more, EC, or Ed25519)")
        return cls(keys)


def _verification_key(entry: Any) -> VerificationKey | None:
    if not isinstance(entry, dict) or entry.get("use", "sig") != "sig":
        return None
    curve = entry.get("crv", "") if entry.get("kty") in ("EC", "OKP") else ""
    algorithms = ALGORITHMS.get((str(entry.get("kty")), str(curve)), ())
    if "alg" in entry:
        algorithms = tuple(each for each in algorithms if each == entry["alg"])
    if not algorithms:
        return None
    from jwt import PyJWK
    from jwt.exceptions import PyJWTError

    # The private part, if the file has it by mistake, is not loaded.
    public = {name: value for name, value in entry.items() if name in ("kty", "crv", "x", "y", "n", "e", "kid")}
    try:
        key = PyJWK.from_dict(public, algorithm=algorithms[0]).key
    except (PyJWTError, ValueError, TypeError, KeyError):
        return None
    if entry["kty"] == "RSA" and key.key_size < RSA_BITS_MIN:
        return None
    key_id = entry.get("kid")
    return VerificationKey(key_id if isinstance(key_id, str) else None, algorithms, key)


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What a token has to state. Empty rules are not checked, except the signature and the expiry."""

    issuer: str = ""
    audience: tuple[str, ...] = ()
    """The token has to name one of them."""
    scope: tuple[str, ...] = ()
    """The token has to have all of them."""
    principal_claim: str = "sub"
    clock_skew_s: int = 30


def validate(token: str, keys: KeySet, rules: TokenRules, now_ms: int) -> tuple[str, int]:
    """Return the principal's name and the token's expiry in ms since the epoch. Raise SaslError with the reason."""
    import jwt
    from jwt.exceptions import PyJWTError

    if len(token) > TOKEN_CHARACTERS_MAX:
        raise SaslError(f"a token of {len(token)} characters; allowed are {TOKEN_CHARACTERS_MAX}")
    try:
        header = jwt.get_unverified_header(token)
    except (PyJWTError, ValueError):
        raise SaslError("the token is not a JWT") from None
    algorithm, key_id = header.get("alg"), header.get("kid")
    if not any(algorithm in each for each in ALGORITHMS.values()):
        raise SaslError(f"the token's algorithm {_shown(algorithm)} is not accepted")
    if "crit" in header or header.get("b64") is False:
        raise SaslError("the token's header requires an extension (crit)")
    assert isinstance(algorithm, str)
    jws = jwt.PyJWS(algorithms=[algorithm])
    for key in keys.candidates(key_id if isinstance(key_id, str) else None, algorithm):
        try:
            payload = jws.decode(token, key, algorithms=[algorithm])
        except (PyJWTError, ValueError, TypeError):
            continue
        return _check_claims(payload, rules, now_ms)
    raise SaslError(f"no key of the key set has signed the token (key id {_shown(key_id)}, {algorithm})")


def _check_claims(payload: bytes, rules: TokenRules, now_ms: int) -> tuple[str, int]:
    try:
        claims = json.loads(payload)
    except (ValueError, RecursionError):
        raise SaslError("the token's payload is not JSON") from None
    if not isinstance(claims, dict):
        raise SaslError("the token's payload is not an object")
    skew_ms = rules.clock_skew_s * 1000
    expires_ms = _time_ms(claims, "exp")
    if expires_ms is None:
        raise SaslError("the token has no expiry (exp)")
    if now_ms >= expires_ms + skew_ms:
        raise SaslError(f"the token expired {(now_ms - expires_ms) // 1000} s ago")
    for claim in ("nbf", "iat"):
        from_ms = _time_ms(claims, claim)
        if from_ms is not None and from_ms > now_ms + skew_ms:
            raise SaslError(f"the token is valid only in {(from_ms - now_ms) // 1000} s ({claim})")
    if rules.issuer and claims.get("iss") != rules.issuer:
        raise SaslError(f"the token's issuer {_shown(claims.get('iss'))} is not {rules.issuer}")
    if rules.audience and not set(rules.audience) & _words(claims.get("aud"), "aud", splits=False):
        raise SaslError(f"the token's audience is not {' or '.join(rules.audience)}")
    missing = set(rules.scope) - _words(claims.get("scope", claims.get("scp")), "scope", splits=True)
    if missing:
        raise SaslError(f"the token lacks the scope {' '.join(sorted(missing))}")
    name = claims.get(rules.principal_claim)
    if not isinstance(name, str) or not name.strip():
        raise SaslError(f"the token has no principal (claim {rules.principal_claim})")
    return name, expires_ms


def _time_ms(claims: Mapping[str, Any], claim: str) -> int | None:
    value = claims.get(claim)
    if value is None:
        return None
    # bool is an int, and JSON allows Infinity and NaN here.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53:
        raise SaslError(f"the token's {claim} is not a time")
    return int(value * 1000)


def _words(value: Any, claim: str, *, splits: bool) -> set[str]:
    if value is None:
        return set()
    if isinstance(value, str):
        return set(value.split()) if splits else {value}
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return set(value)
    raise SaslError(f"the token's {claim} is not text")


def _shown(value: object) -> str:
    return repr(value)[:64]


def _parse_client_message(message: bytes) -> tuple[str, str]:
    """Return the authorization id, which may be empty, and the token."""
    try:
        text = message.decode()
    except UnicodeDecodeError:
        raise SaslError("the message is not UTF-8") from None
    match = _CLIENT_MESSAGE.fullmatch(text)
    if match is None:
        raise SaslError("the message is malformed")
    pairs = [pair.partition("=") for pair in match[2].split(SEPARATOR) if pair]
    values = [value for key, _, value in pairs if key == "auth"]
    if len(values) != 1:
        raise SaslError(f"the message has {len(values)} `auth` values, not 1")
    bearer = _BEARER.fullmatch(values[0])
    if bearer is None:
        raise SaslError("the `auth` value is not a bearer token")
    return name_of_sasl_name(match[1] or ""), bearer[1]


def key_id_of(message: bytes) -> str | None:
    """Return the key id that the token of a client's message claims. Unverified: it only says which key to load."""
    from jwt import get_unverified_header
    from jwt.exceptions import PyJWTError

    try:
        key_id = get_unverified_header(_parse_client_message(message)[1]).get("kid")
    except (SaslError, PyJWTError, ValueError):
        return None
    return key_id if isinstance(key_id, str) else None


class OAuthServer:
    """The server's side."""

    is_blocking = True

    def __init__(self, keys: Callable[[], KeySet], rules: TokenRules, wall_ms: Callable[[], int]) -> None:
        """`keys` returns the newest key set, and `wall_ms` the time: the exchange waits for the client."""
        self._keys = keys
        self._rules = rules
        self._wall_ms = wall_ms
        self._refusal: Refused | None = None
        self._is_over = False

    def respond(self, message: bytes) -> Outcome:
        if self._is_over:
            return Refused("a message after the end of the exchange")
        if self._refusal is not None:
            # The RFC's answer is one separator. Whatever it is, the client is refused.
            self._is_over = True
            return self._refusal
        name = ""
        try:
            authzid, token = _parse_client_message(message)
            name, expires_ms = validate(token, self._keys(), self._rules, self._wall_ms())
            if authzid not in ("", name):
                raise SaslError("the authorization id differs from the token's principal")
        except SaslError as error:
            self._refusal = Refused(str(error), name)
            return Challenge(self._error_answer())
        except Exception:
            self._is_over = True
            raise
        self._is_over = True
        return Authenticated(name, expires_ms=expires_ms)

    def _error_answer(self) -> bytes:
        answer = {"status": "invalid_token"}
        if self._rules.scope:
            answer["scope"] = " ".join(self._rules.scope)
        return json.dumps(answer, separators=(",", ":")).encode()


class OAuthClient:
    """The client's side. The mechanism does not prove the server's identity: TLS has to."""

    is_blocking = False

    def __init__(self, token: str) -> None:
        self._token = token

    def first(self) -> bytes:
        return f"n,,{SEPARATOR}auth=Bearer {self._token}{SEPARATOR}{SEPARATOR}".encode()

    def next(self, challenge: bytes) -> bytes | None:
        """Answer the server's error with the separator, as the RFC demands; then the server refuses."""
        return SEPARATOR.encode() if challenge else None

    def verify(self) -> None:
        """Nothing to verify."""
