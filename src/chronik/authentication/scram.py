"""SCRAM-SHA-256 and SCRAM-SHA-512 (RFC 5802, RFC 7677), with the details of Kafka.

    client-first   gs2-header "n=" user ",r=" client-nonce extensions     gs2-header is  n,,  or  n,a=user,
    server-first   "r=" client-nonce server-nonce ",s=" salt ",i=" iterations
    client-final   "c=" base64(gs2-header) ",r=" nonce extensions ",p=" proof
    server-final   "v=" signature

As in Kafka, names and passwords are UTF-8 without SASLprep: its clients do not apply it, and both sides must hash the
same bytes. Channel binding is not offered, so a client that requires it (p=) is refused, and one that only supports
it (y) is served. The header is repeated in the signed client-final: a changed one is refused.

librdkafka before 2.6.1 puts its own nonce before the server's `r`, which starts with it already. Kafka 3.9 accepts
that, Kafka 4 does not. It is accepted here: the server's own nonce is in it, so it cannot be replayed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Callable
from typing import Any

import msgspec

from chronik.authentication.sasl import (
    SCRAM_SHA_256,
    SCRAM_SHA_512,
    Authenticated,
    Challenge,
    Outcome,
    Refused,
    SaslError,
)

HASHES = {SCRAM_SHA_256: "sha256", SCRAM_SHA_512: "sha512"}
ITERATIONS_MIN = 4_096
ITERATIONS_MAX = 16_384
CLIENT_ITERATIONS_MAX = 1_000_000
"""What a client accepts: a server that asks for more wants to keep it busy."""
MESSAGE_BYTES_MAX = 8 * 1024
NONCE_CHARACTERS_MAX = 1024
SALT_BYTES = 24

_CLIENT_FIRST = re.compile(
    r"([ny]|p=[A-Za-z0-9.-]+),(?:a=([^,]*))?,((m=[^,]*,)?n=([^,]+),r=([!-+\--~]+)((?:,[A-Za-z]+=[^,]*)*))"
)
_SERVER_FIRST = re.compile(r"r=([!-+\--~]+),s=([A-Za-z0-9/+=]+),i=([0-9]{1,9})(?:,[A-Za-z]+=[^,]*)*")
_CLIENT_FINAL = re.compile(r"(c=([A-Za-z0-9/+=]+),r=([!-+\--~]+)(?:,[A-Za-z]+=[^,]*)*),p=([A-Za-z0-9/+=]+)")
_SERVER_FINAL = re.compile(r"(?:v=([A-Za-z0-9/+=]+)|e=([^,]+))(?:,[A-Za-z]+=[^,]*)*")


class ScramCredential(msgspec.Struct, frozen=True):
    """What a server stores of a password. The keys are secret: no representation contains them."""

    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int

    def __repr__(self) -> str:
        return f"ScramCredential(iterations={self.iterations})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("iterations", self.iterations)]


def salted_password(mechanism: str, password: bytes, salt: bytes, iterations: int) -> bytes:
    """Hash a password (RFC 5802's Hi). It takes milliseconds: run it in a thread."""
    return hashlib.pbkdf2_hmac(HASHES[mechanism], password, salt, iterations)


def credential_of_salted(mechanism: str, salted: bytes, salt: bytes, iterations: int) -> ScramCredential:
    digest = HASHES[mechanism]
    client_key = hmac.digest(salted, b"Client Key", digest)
    stored_key = hashlib.new(digest, client_key).digest()
    return ScramCredential(salt, stored_key, hmac.digest(salted, b"Server Key", digest), iterations)


def new_credential(mechanism: str, password: str, salt: bytes, iterations: int = ITERATIONS_MIN) -> ScramCredential:
    """Derive the credential of a password. It takes milliseconds: run it in a thread."""
    salted = salted_password(mechanism, password.encode(), salt, iterations)
    return credential_of_salted(mechanism, salted, salt, iterations)


def sasl_name(name: str) -> str:
    return name.replace("=", "=3D").replace(",", "=2C")


def name_of_sasl_name(escaped: str) -> str:
    """Decode =2C and =3D. Any other = is an error."""
    if "=" in escaped.replace("=2C", "").replace("=3D", ""):
        raise SaslError("the user name has an = that is neither =2C nor =3D")
    return escaped.replace("=2C", ",").replace("=3D", "=")


def _xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))


def _base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise SaslError("a value is not base64") from None


def _text(message: bytes) -> str:
    if len(message) > MESSAGE_BYTES_MAX:
        raise SaslError(f"a message of {len(message)} bytes; allowed are {MESSAGE_BYTES_MAX}")
    try:
        text = message.decode()
    except UnicodeDecodeError:
        raise SaslError("a message is not UTF-8") from None
    if "\0" in text:
        raise SaslError("a message contains NUL")
    return text


class ScramServer:
    """The server's side.

    An unknown user gets the challenge of a credential that nobody can match, and is refused where a wrong password is:
    after the same messages and the same number of hashes.
    """

    is_blocking = False

    def __init__(
        self, mechanism: str, lookup: Callable[[str, str], tuple[ScramCredential, bool]], server_nonce: str
    ) -> None:
        """`lookup(mechanism, name)` returns the user's credential, or a decoy, and whether the user is known."""
        self._mechanism = mechanism
        self._digest = HASHES[mechanism]
        self._lookup = lookup
        self._server_nonce = server_nonce
        self._credential: ScramCredential | None = None
        self._is_known = False
        self._name = ""
        self._gs2_header = b""
        self._client_nonce = ""
        self._nonce = ""
        self._signed = ""
        self._is_over = False

    def respond(self, message: bytes) -> Outcome:
        if self._is_over:
            return Refused("a message after the end of the exchange", self._name)
        try:
            text = _text(message)
            if self._credential is None:
                return self._first(text)
            self._is_over = True
            return self._final(text, self._credential)
        except SaslError as error:
            self._is_over = True
            return Refused(str(error), self._name)
        except Exception:
            self._is_over = True
            raise

    def _first(self, text: str) -> Outcome:
        match = _CLIENT_FIRST.fullmatch(text)
        if match is None:
            raise SaslError("client-first is malformed")
        binding, authzid, bare, mandatory, escaped, nonce, extensions = match.groups()
        if binding.startswith("p="):
            raise SaslError("the client requires channel binding, which is not offered")
        if mandatory:
            raise SaslError("the client requires an unknown extension (m=)")
        if "tokenauth=true" in extensions.split(","):
            raise SaslError("delegation tokens (tokenauth) are not supported")
        if len(nonce) > NONCE_CHARACTERS_MAX:
            raise SaslError("the client's nonce is too long")
        self._name = name_of_sasl_name(escaped)
        if authzid and name_of_sasl_name(authzid) != self._name:
            raise SaslError("the authorization id differs from the user name")
        credential, self._is_known = self._lookup(self._mechanism, self._name)
        self._credential = credential
        self._gs2_header = text[: -len(bare)].encode()
        self._client_nonce = nonce
        self._nonce = nonce + self._server_nonce
        salt = base64.b64encode(credential.salt).decode()
        server_first = f"r={self._nonce},s={salt},i={credential.iterations}"
        self._signed = f"{bare},{server_first}"
        return Challenge(server_first.encode())

    def _final(self, text: str, credential: ScramCredential) -> Outcome:
        match = _CLIENT_FINAL.fullmatch(text)
        if match is None:
            raise SaslError("client-final is malformed")
        without_proof, binding, nonce, proof_text = match.groups()
        if nonce not in (self._nonce, self._client_nonce + self._nonce):
            raise SaslError("client-final has another nonce: it belongs to another exchange")
        if not hmac.compare_digest(_base64(binding), self._gs2_header):
            raise SaslError("client-final has another channel binding than client-first")
        proof = _base64(proof_text)
        if len(proof) != len(credential.stored_key):
            raise SaslError("the proof has a wrong length")
        signed = f"{self._signed},{without_proof}".encode()
        client_key = _xor(proof, hmac.digest(credential.stored_key, signed, self._digest))
        is_proven = hmac.compare_digest(hashlib.new(self._digest, client_key).digest(), credential.stored_key)
        signature = hmac.digest(credential.server_key, signed, self._digest)
        if not (is_proven and self._is_known):
            return Refused("wrong password" if self._is_known else "unknown user", self._name)
        return Authenticated(self._name, b"v=" + base64.b64encode(signature))


class ScramClient:
    """The client's side. `next` hashes the password, which takes milliseconds: run it in a thread."""

    is_blocking = True

    def __init__(self, mechanism: str, username: str, password: str, nonce: str) -> None:
        self._mechanism = mechanism
        self._digest = HASHES[mechanism]
        self._password = password
        self._nonce = nonce
        self._bare = f"n={sasl_name(username)},r={nonce}"
        self._signature: bytes | None = None
        self._is_verified = False

    def first(self) -> bytes:
        return f"n,,{self._bare}".encode()

    def next(self, challenge: bytes) -> bytes | None:
        text = _text(challenge)
        if self._signature is None:
            return self._final(text)
        self._verify_server(text, self._signature)
        return None

    def _final(self, text: str) -> bytes:
        match = _SERVER_FIRST.fullmatch(text)
        if match is None:
            raise SaslError("server-first is malformed")
        nonce, salt, iterations = match[1], _base64(match[2]), int(match[3])
        if not nonce.startswith(self._nonce) or len(nonce) == len(self._nonce):
            raise SaslError("the server's nonce does not extend the client's")
        if not ITERATIONS_MIN <= iterations <= CLIENT_ITERATIONS_MAX:
            raise SaslError(
                f"the server asks for {iterations} iterations; allowed are {ITERATIONS_MIN} to {CLIENT_ITERATIONS_MAX}"
            )
        salted = salted_password(self._mechanism, self._password.encode(), salt, iterations)
        credential = credential_of_salted(self._mechanism, salted, salt, iterations)
        client_key = hmac.digest(salted, b"Client Key", self._digest)
        without_proof = f"c=biws,r={nonce}"
        signed = f"{self._bare},{text},{without_proof}".encode()
        proof = _xor(client_key, hmac.digest(credential.stored_key, signed, self._digest))
        self._signature = hmac.digest(credential.server_key, signed, self._digest)
        return f"{without_proof},p={base64.b64encode(proof).decode()}".encode()

    def _verify_server(self, text: str, expected: bytes) -> None:
        match = _SERVER_FINAL.fullmatch(text)
        if match is None:
            raise SaslError("server-final is malformed")
        if match[2] is not None:
            raise SaslError(f"the server reports {match[2]}")
        if not hmac.compare_digest(_base64(match[1]), expected):
            raise SaslError("the server's signature is wrong: it does not know the credentials")
        self._is_verified = True

    def verify(self) -> None:
        if not self._is_verified:
            raise SaslError("the server reports success without a proof that it knows the credentials")
