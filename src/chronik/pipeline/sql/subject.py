"""Whether a topic has schemas. Loading the decoder of typed values takes a third of a second, so others do not wait."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from chronik.client.schema_registry import RegistryClient, RegistryError

if TYPE_CHECKING:
    from chronik.pipeline.sql.registry_columns import RegistryColumns

NOT_FOUND = 404
VERSIONS_MAX = 100
"""Versions whose schemas give columns, the latest ones. Records of older ones are decoded if they fit."""


def registry_columns(topic: str, registry: RegistryClient) -> RegistryColumns | None:
    """Return None if the topic has no subject TOPIC-value. Raises RegistryError, PipelineError."""
    subject = f"/subjects/{quote(f'{topic}-value', safe='')}/versions"
    try:
        versions = registry.request("GET", subject)
    except RegistryError as error:
        if error.status == NOT_FOUND:
            return None
        raise
    ids = [registry.request("GET", f"{subject}/{version}")["id"] for version in versions[-VERSIONS_MAX:]]
    from chronik.pipeline.sql.registry_columns import RegistryColumns

    return RegistryColumns(topic, ids, registry)
