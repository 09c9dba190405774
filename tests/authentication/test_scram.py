"""SCRAM: the RFC's example, both sides of each mechanism against each other, and messages of attackers."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Callable

import pytest

from chronik.authentication import scram
from chronik.authentication.credentials import Credentials
from chronik.authentication.sasl import SCRAM_SHA_256, SCRAM_SHA_512, Authenticated, Challenge, Refused, SaslError
from chronik.authentication.scram import ScramClient, ScramCredential, ScramServer, new_credential

SECRET = b"the secret of these tests"
CLIENT_NONCE = "rOprNGfwEbeRWgbNEkqO"
SERVER_NONCE = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
RFC_SALT = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
BOTH = (SCRAM_SHA_256, SCRAM_SHA_512)


def server(
    mechanism: str = SCRAM_SHA_256, user: str = "user", password: str = "pencil", nonce: str = SERVER_NONCE
) -> ScramServer:
    credential = new_credential(mechanism, password, RFC_SALT)
    return ScramServer(mechanism, Credentials(SECRET, {user: {mechanism: credential}}, {}).lookup, nonce)


def challenge(of: ScramServer, message: bytes) -> bytes:
    outcome = of.respond(message)
    assert isinstance(outcome, Challenge), outcome
    return outcome.data


def refused(of: ScramServer, message: bytes) -> str:
    outcome = of.respond(message)
    assert isinstance(outcome, Refused), outcome
    return outcome.reason


def test_messages_are_those_of_the_example_in_rfc_7677() -> None:
    client, node = ScramClient(SCRAM_SHA_256, "user", "pencil", CLIENT_NONCE), server()
    assert client.first() == b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
    first = challenge(node, client.first())
    assert first == b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
    final = client.next(first)
    assert final == (
        b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    )
    outcome = node.respond(final)
    assert outcome == Authenticated("user", b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=")
    assert client.next(outcome.data) is None
    client.verify()


@pytest.mark.parametrize("mechanism", BOTH)
def test_keys_are_those_of_the_formulas_in_rfc_5802(mechanism: str) -> None:
    name = scram.HASHES[mechanism]
    block = hmac.digest(b"pencil", RFC_SALT + b"\0\0\0\1", name)
    salted = bytearray(block)
    for _ in range(scram.ITERATIONS_MIN - 1):
        block = hmac.digest(b"pencil", block, name)
        salted = bytearray(a ^ b for a, b in zip(salted, block, strict=True))
    client_key = hmac.digest(bytes(salted), b"Client Key", name)
    stored_key = hashlib.new(name, client_key).digest()
    server_key = hmac.digest(bytes(salted), b"Server Key", name)
    expected = ScramCredential(RFC_SALT, stored_key, server_key, scram.ITERATIONS_MIN)
    assert new_credential(mechanism, "pencil", RFC_SALT) == expected


@pytest.mark.parametrize("mechanism", BOTH)
@pytest.mark.parametrize("user", ["user", "a,b=c", "Jürgen", "=2C"])
def test_both_sides_agree_whatever_the_name_contains(mechanism: str, user: str) -> None:
    client = ScramClient(mechanism, user, "pass,word=ü", CLIENT_NONCE)
    node = server(mechanism, user, "pass,word=ü")
    final = client.next(challenge(node, client.first()))
    assert final is not None
    outcome = node.respond(final)
    assert isinstance(outcome, Authenticated)
    assert outcome.name == user
    assert client.next(outcome.data) is None
    client.verify()


@pytest.mark.parametrize("mechanism", BOTH)
def test_wrong_password_is_refused_after_the_whole_exchange(mechanism: str) -> None:
    client, node = ScramClient(mechanism, "user", "pencil2", CLIENT_NONCE), server(mechanism)
    final = client.next(challenge(node, client.first()))
    assert final is not None
    assert refused(node, final) == "wrong password"


FIRST = [
    (b"", "malformed"),
    (b"n,,n=,r=abc", "malformed"),
    (b"n,,r=abc,n=user", "malformed"),
    (b"n,,n=user", "malformed"),
    (b"n,,n=user,r=", "malformed"),
    (b"n,,n=user,r=ab\x01c", "malformed"),
    (b"n=user,r=abc", "malformed"),
    (b"x,,n=user,r=abc", "malformed"),
    (b"\xff\xfe,,n=user,r=abc", "not UTF-8"),
    (b"n,,n=us\0er,r=abc", "NUL"),
    (b"p=tls-unique,,n=user,r=abc", "requires channel binding"),
    (b"p=tls-exporter,,n=user,r=abc", "requires channel binding"),
    (b"n,,m=later,n=user,r=abc", "unknown extension"),
    (b"n,,n=us=er,r=abc", "neither =2C nor =3D"),
    (b"n,,n=us=2cer,r=abc", "neither =2C nor =3D"),
    (b"n,a=root,n=user,r=abc", "authorization id differs"),
    (b"n,,n=user,r=abc,tokenauth=true", "delegation tokens"),
    (b"n,,n=user,r=" + b"x" * 1025, "nonce is too long"),
    (b"n,,n=" + b"x" * 9000 + b",r=abc", "bytes; allowed are"),
]


@pytest.mark.parametrize(("message", "reason"), FIRST)
def test_client_first_is_refused_with_a_reason(message: bytes, reason: str) -> None:
    node = server()
    assert reason in refused(node, message)
    assert "after the end" in refused(node, b"n,,n=user,r=abc")


@pytest.mark.parametrize("header", [b"n,,", b"y,,", b"n,a=user,"])
def test_gs2_headers_without_channel_binding_are_accepted(header: bytes) -> None:
    assert challenge(server(), header + b"n=user,r=abc,x=unknown").startswith(b"r=abc")


class Replaced:
    """A man in the middle: it changes the client's last message."""

    def __init__(self, change: Callable[[bytes], bytes], header: bytes = b"n,,") -> None:
        self.node = server()
        client = ScramClient(SCRAM_SHA_256, "user", "pencil", CLIENT_NONCE)
        bare = client.first().removeprefix(b"n,,")
        final = client.next(challenge(self.node, header + bare))
        assert final is not None
        self.reason = refused(self.node, change(final))


def flip_last_proof_bit(final: bytes) -> bytes:
    before, _, proof = final.rpartition(b",p=")
    raw = bytearray(base64.b64decode(proof))
    raw[-1] ^= 1
    return before + b",p=" + base64.b64encode(raw)


FINAL: list[tuple[Callable[[bytes], bytes], str]] = [
    (flip_last_proof_bit, "wrong password"),
    (lambda final: final.replace(b",r=r", b",r=s"), "another nonce"),
    (lambda final: final.replace(b",p=", b"x,p="), "another nonce"),
    (lambda final: final.replace(b"c=biws", b"c=eSws"), "another channel binding"),
    (lambda final: final.replace(b"c=biws", b"c=" + base64.b64encode(b"n,a=root,")), "another channel binding"),
    (lambda final: final.replace(b"c=biws", b"c=biw"), "not base64"),
    (lambda final: final.partition(b",p=")[0], "malformed"),
    (lambda final: final.partition(b",p=")[0] + b",p=", "malformed"),
    (lambda final: final.partition(b",p=")[0] + b",p=AAAA", "wrong length"),
    (lambda final: final + b",x=1", "malformed"),
    (lambda final: b"n,,n=user,r=abc", "malformed"),
    (lambda final: b"", "malformed"),
]


@pytest.mark.parametrize(("change", "reason"), FINAL)
def test_changed_client_final_is_refused(change: Callable[[bytes], bytes], reason: str) -> None:
    attack = Replaced(change)
    assert reason in attack.reason
    assert "after the end" in refused(attack.node, b"anything")


def test_removed_support_of_channel_binding_is_noticed() -> None:
    """The attacker turns the client's `n` into `y`. The client signs the header that it sent."""
    assert "another channel binding" in Replaced(lambda final: final, header=b"y,,").reason


def test_client_final_of_another_exchange_is_refused() -> None:
    client, recorded = ScramClient(SCRAM_SHA_256, "user", "pencil", CLIENT_NONCE), server()
    final = client.next(challenge(recorded, client.first()))
    assert final is not None
    assert isinstance(recorded.respond(final), Authenticated)
    replayed = server(nonce="another-nonce")
    challenge(replayed, client.first())
    assert "another nonce" in refused(replayed, final)


def test_nonce_of_older_librdkafka_is_accepted_if_it_ends_with_the_servers() -> None:
    """librdkafka before 2.6.1 repeats its own nonce, and signs that."""

    def outcome(nonce_of: Callable[[str], str]) -> object:
        node, credential = server(), new_credential(SCRAM_SHA_256, "pencil", RFC_SALT)
        bare = f"n=user,r={CLIENT_NONCE}"
        first = challenge(node, f"n,,{bare}".encode()).decode()
        without_proof = f"c=biws,r={nonce_of(CLIENT_NONCE + SERVER_NONCE)}"
        salted = scram.salted_password(SCRAM_SHA_256, b"pencil", RFC_SALT, 4096)
        signature = hmac.digest(credential.stored_key, f"{bare},{first},{without_proof}".encode(), "sha256")
        key = hmac.digest(salted, b"Client Key", "sha256")
        proof = base64.b64encode(bytes(a ^ b for a, b in zip(key, signature, strict=True))).decode()
        return type(node.respond(f"{without_proof},p={proof}".encode()))

    assert outcome(lambda nonce: nonce) is Authenticated
    assert outcome(lambda nonce: CLIENT_NONCE + nonce) is Authenticated
    assert outcome(lambda nonce: "x" + nonce) is Refused
    assert outcome(lambda nonce: nonce + "x") is Refused
    assert outcome(lambda nonce: CLIENT_NONCE) is Refused
    assert outcome(lambda nonce: SERVER_NONCE) is Refused


def test_client_final_first_is_refused() -> None:
    assert "client-first is malformed" in refused(server(), b"c=biws,r=abc,p=AAAA")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"r=other,s=W22Z,i=4096", "does not extend"),
        (f"r={CLIENT_NONCE},s=W22Z,i=4096".encode(), "does not extend"),
        (f"r={CLIENT_NONCE}x,s=W22Z,i=1".encode(), "1 iterations"),
        (f"r={CLIENT_NONCE}x,s=W22Z,i=999999999".encode(), "999999999 iterations"),
        (f"r={CLIENT_NONCE}x,s=W22Z".encode(), "malformed"),
        (f"m=x,r={CLIENT_NONCE}x,s=W22Z,i=4096".encode(), "malformed"),
    ],
)
def test_client_refuses_a_server_first_message(message: bytes, reason: str) -> None:
    with pytest.raises(SaslError, match=reason):
        ScramClient(SCRAM_SHA_256, "user", "pencil", CLIENT_NONCE).next(message)


def test_client_refuses_a_server_that_does_not_know_the_password() -> None:
    client, node = ScramClient(SCRAM_SHA_256, "user", "pencil", CLIENT_NONCE), server()
    client.next(challenge(node, client.first()))
    with pytest.raises(SaslError, match="without a proof"):
        client.verify()
    with pytest.raises(SaslError, match="signature is wrong"):
        client.next(b"v=" + base64.b64encode(bytes(32)))
    with pytest.raises(SaslError, match="other-error"):
        client.next(b"e=other-error")
    with pytest.raises(SaslError, match="without a proof"):
        client.verify()


def test_keys_are_in_no_representation() -> None:
    credential = new_credential(SCRAM_SHA_256, "pencil", RFC_SALT)
    assert repr(credential) == str(credential) == f"{credential}" == "ScramCredential(iterations=4096)"
    assert credential.__rich_repr__() == [("iterations", 4096)]
