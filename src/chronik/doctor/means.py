"""How the doctor reaches a cluster, and which names it may show to the user that it examines the cluster for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from chronik.client.connection import Connect, Connection
from chronik.client.connector import Connector
from chronik.client.node_http import Caller, caller_of
from chronik.client.security import ClientSecurity


async def _all(names: Sequence[str]) -> Sequence[str]:
    return names


@dataclass(frozen=True, slots=True)
class Means:
    """`caller` is called for each HTTP request, because its token may be short-lived."""

    connect: Connect = Connection.open
    caller: Callable[[], Caller] = Caller
    visible_groups: Callable[[Sequence[str]], Awaitable[Sequence[str]]] = _all
    visible_transactions: Callable[[Sequence[str]], Awaitable[Sequence[str]]] = _all
    who: str = "User:ANONYMOUS"
    """The identity of the doctor, which needs rights."""

    @classmethod
    def of(cls, security: ClientSecurity) -> Means:
        """Return the means of a user with these client settings. Reads the files of certificates."""
        caller = caller_of(security)
        return cls(Connector(security).open, lambda: caller, who=security.who)
