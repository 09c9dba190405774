"""The users that may log in: those of Kafka's SASL."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from chronik.authentication.credentials import Credentials
from chronik.authentication.principals import USER

PASSWORD_CHARACTERS_MAX = 1_024
NAME_CHARACTERS_MAX = 256


class Users(Protocol):
    """What the log-in needs of the users."""

    async def check_password(self, user: str, password: str) -> str | None:
        """Return the user's principal, or None if the password is wrong. Unknown users cost the same time."""

    def fingerprint(self, user: str) -> bytes | None:
        """Return a value that changes whenever the user's credentials do; None if there is no such user."""


class SaslUsers:
    """The users of the metadata and of the users file, as the SASL listeners know them now."""

    def __init__(
        self, credentials: Callable[[], Credentials], check_password: Callable[[str, str], Awaitable[bool]]
    ) -> None:
        self._credentials = credentials
        self._check_password = check_password

    async def check_password(self, user: str, password: str) -> str | None:
        return USER + user if await self._check_password(user, password) else None

    def fingerprint(self, user: str) -> bytes | None:
        return self._credentials().fingerprint(user)
