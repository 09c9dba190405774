"""How the clients of a workload connect: in plaintext, or as users whose passwords may change while they run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from chronik.cli.client_properties import librdkafka_settings
from chronik.client.properties import ClientSettings, java_properties


class Login:
    """The addresses of a cluster and a user. Any thread may read it.

    Clients of librdkafka get a new password while they run (`FollowedLogin`). A Java client cannot: its next producer
    gets it.
    """

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings

    @classmethod
    def of(cls, given: str | Login) -> Login:
        """Return the login itself, or that of a cluster without security, given by its addresses."""
        return given if isinstance(given, Login) else cls(ClientSettings(given))

    @property
    def options(self) -> dict[str, Any]:
        """Settings of librdkafka."""
        return librdkafka_settings(self.settings)

    @property
    def java_options(self) -> dict[str, str]:
        return {"bootstrap.servers": self.settings.bootstrap, **java_properties(self.settings.security)}

    def change_password(self, password: str) -> None:
        """Let clients use another password when they connect or authenticate again."""
        self.settings = replace(self.settings, security=replace(self.settings.security, password=password))


@dataclass(frozen=True)
class Logins:
    """One user for each part of a workload, so that each can have exactly the rights that it needs."""

    producer: Login
    consumer: Login
    transactions: Login

    @classmethod
    def plaintext(cls, bootstrap: str) -> Logins:
        login = Login(ClientSettings(bootstrap))
        return cls(login, login, login)


class ConfluentClient(Protocol):
    def set_sasl_credentials(self, username: str, password: str) -> None: ...


class FollowedLogin:
    """Gives one client of librdkafka the current password.

    Owned by the client's thread: confluent-kafka serializes the calls of a consumer, and a call of another thread waits
    for as long as the consumer polls in a loop.
    """

    def __init__(self, login: Login, client: ConfluentClient) -> None:
        self._login = login
        self._client = client
        self._password = ""

    def refresh(self) -> None:
        security = self._login.settings.security
        if security.password != self._password:
            self._client.set_sasl_credentials(security.username, security.password)
            self._password = security.password
