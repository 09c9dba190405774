"""The seam of SASL mechanisms: one exchange authenticates one client once.

A server-side exchange takes the client's messages and returns an outcome: a challenge, the client's identity, or a
refusal. A client-side exchange produces the messages: see `chronik.authentication.clients`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

PLAIN = "PLAIN"
SCRAM_SHA_256 = "SCRAM-SHA-256"
SCRAM_SHA_512 = "SCRAM-SHA-512"
OAUTHBEARER = "OAUTHBEARER"


class SaslError(Exception):
    """The other side sent a message that the mechanism refuses. The text never contains a secret."""


@dataclass(frozen=True, slots=True)
class Challenge:
    """The exchange continues: the client has to answer `data`."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Authenticated:
    """The client is `name`. `data` is the last message to it. Its session ends at `expires_ms` (since the epoch)."""

    name: str
    data: bytes = b""
    expires_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The client did not prove its identity. `reason` is for the log; clients see one message for all reasons."""

    reason: str
    name: str = ""
    """The user that the client named, as far as it got."""


Outcome: TypeAlias = Challenge | Authenticated | Refused


class ServerExchange(Protocol):
    """The server's side of one authentication.

    After `Authenticated` or `Refused`, and after an exception, the exchange accepts no further message.
    """

    is_blocking: bool
    """Whether `respond` hashes a password or verifies a signature, and so has to run in a thread."""

    def respond(self, message: bytes) -> Outcome: ...


class ClientExchange(Protocol):
    """The client's side of one authentication."""

    is_blocking: bool
    """Whether `next` hashes a password, and so has to run in a thread."""

    def first(self) -> bytes:
        """Return the first message. Call it once."""

    def next(self, challenge: bytes) -> bytes | None:
        """Return the answer to a challenge, or None if the client has nothing more to send.

        Raise SaslError if the server's message is wrong.
        """

    def verify(self) -> None:
        """Raise SaslError unless the mechanism completed. Call it when the server reports success.

        With SCRAM the server has then proven that it knows the credentials: one that skips the proof is an impostor.
        """
