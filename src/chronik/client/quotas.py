"""Admin calls on client quotas: list and alter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chronik.client.cluster import Cluster
from chronik.client.errors import raise_for
from chronik.quotas.entities import QuotaEntity
from chronik.wire.api import ApiKey

EXACT, DEFAULT = 0, 1


@dataclass(frozen=True, slots=True)
class ListedQuotas:
    entity: QuotaEntity
    values: Mapping[str, float]


class Quotas:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def list(self, part_of: QuotaEntity | None = None) -> list[ListedQuotas]:
        """Return all quotas, or those of the entities that have all parts of `part_of`."""

        def read(response: Any) -> list[ListedQuotas]:
            raise_for(response, "client quotas")
            return [
                ListedQuotas(
                    QuotaEntity(tuple((part.entity_type, part.entity_name) for part in entry.entity)),
                    {value.key: value.value for value in entry.values},
                )
                for entry in response.entries or ()
            ]

        components = [
            {"entity_type": kind, "match_type": DEFAULT if name is None else EXACT, "match": name}
            for kind, name in (() if part_of is None else part_of.parts)
        ]
        values = {"components": components, "strict": False}
        return await self._cluster.call(ApiKey.DESCRIBE_CLIENT_QUOTAS, values, read)

    async def alter(self, entity: QuotaEntity, changes: Mapping[str, float | None]) -> None:
        """Set quotas of one entity; None removes one."""

        def check(response: Any) -> None:
            raise_for(response.entries[0], f"quotas of {entity}")

        entry = {
            "entity": [{"entity_type": kind, "entity_name": name} for kind, name in entity.parts],
            "ops": [
                {"key": key, "value": 0.0 if value is None else value, "remove": value is None}
                for key, value in changes.items()
            ],
        }
        values = {"entries": [entry], "validate_only": False}
        await self._cluster.call(ApiKey.ALTER_CLIENT_QUOTAS, values, check)
