"""Admin calls on users with SCRAM credentials (KIP-554): create, list and delete.

The password stays here: a broker receives the salted hash, as from Kafka's own tools.
"""

from __future__ import annotations

import asyncio
import secrets  # noqa: TID251  # salts have to be unpredictable; the simulator creates no users
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chronik.authentication.sasl import SCRAM_SHA_256, SCRAM_SHA_512
from chronik.authentication.scram import SALT_BYTES, salted_password
from chronik.client.cluster import Cluster
from chronik.client.errors import raise_for
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

MECHANISM_NUMBERS = {SCRAM_SHA_256: 1, SCRAM_SHA_512: 2}
_NAMES = {number: name for name, number in MECHANISM_NUMBERS.items()}


@dataclass(frozen=True, slots=True)
class ScramUser:
    """A user, and the number of iterations of its credential of each mechanism."""

    name: str
    iterations: Mapping[str, int]


class Users:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def list(self, name: str | None = None) -> Sequence[ScramUser]:
        """Return all users, or the named one; nobody if it does not exist."""

        def read(response: Any) -> list[ScramUser]:
            raise_for(response, "listing users")
            users: list[ScramUser] = []
            for result in response.results:
                if result.error_code == ErrorCode.resource_not_found:
                    continue
                raise_for(result, f"user {result.user}")
                infos = {_NAMES.get(info.mechanism, str(info.mechanism)): info for info in result.credential_infos}
                users.append(ScramUser(result.user, {key: info.iterations for key, info in sorted(infos.items())}))
            return sorted(users, key=lambda user: user.name)

        values = {"users": None if name is None else [{"name": name}]}
        return await self._cluster.call(ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS, values, read)

    async def upsert(self, name: str, mechanism: str, password: str, iterations: int) -> None:
        """Create a credential, or replace the user's credential of the same mechanism."""
        salt = secrets.token_bytes(SALT_BYTES)
        salted = await asyncio.get_running_loop().run_in_executor(
            None, salted_password, mechanism, password.encode(), salt, iterations
        )
        upsertion = {
            "name": name,
            "mechanism": MECHANISM_NUMBERS[mechanism],
            "iterations": iterations,
            "salt": salt,
            "salted_password": salted,
        }
        await self._alter({"deletions": [], "upsertions": [upsertion]})

    async def delete(self, name: str, mechanisms: Sequence[str]) -> None:
        deletions = [{"name": name, "mechanism": MECHANISM_NUMBERS[mechanism]} for mechanism in mechanisms]
        await self._alter({"deletions": deletions, "upsertions": []})

    async def _alter(self, values: Mapping[str, Any]) -> None:
        def check(response: Any) -> None:
            for result in response.results:
                raise_for(result, f"user {result.user}")

        await self._cluster.call(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, values, check)
