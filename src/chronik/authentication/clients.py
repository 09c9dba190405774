"""The client side of every mechanism, by its name."""

from __future__ import annotations

from chronik.authentication.oauth import OAuthClient
from chronik.authentication.plain import PlainClient
from chronik.authentication.sasl import OAUTHBEARER, PLAIN, ClientExchange
from chronik.authentication.scram import HASHES, ScramClient

MECHANISMS = (PLAIN, *HASHES, OAUTHBEARER)


def client_exchange(
    mechanism: str, *, username: str = "", password: str = "", token: str = "", nonce: str = ""
) -> ClientExchange:
    """Return the client's side of `mechanism`. OAUTHBEARER needs a token, SCRAM a fresh random nonce.

    The nonce has printable ASCII characters without a comma, at least 24 random ones: `secrets.token_urlsafe(24)`.
    """
    if mechanism == OAUTHBEARER:
        return OAuthClient(token)
    if mechanism == PLAIN:
        return PlainClient(username, password)
    if mechanism in HASHES:
        if not nonce:
            raise ValueError("SCRAM needs a nonce")
        return ScramClient(mechanism, username, password, nonce)
    raise ValueError(f"{mechanism} is not a SASL mechanism of this client; known are {', '.join(MECHANISMS)}")
