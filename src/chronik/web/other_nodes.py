"""Forward a request to the leader's HTTP API, so that every node returns the leader's answer."""

from __future__ import annotations

from typing import Any

import msgspec

from chronik.client.node_http import HttpError, get
from chronik.metadata.image import BrokerImage
from chronik.web.answers import Parameters

ASK_TIMEOUT_S = 1.0
"""After this, the leader is queried over the Kafka protocol."""


async def ask_leader(leader: BrokerImage, parameters: Parameters, path: str) -> bytes | None:
    """Return the leader's response, encoded, or None if its HTTP port cannot be reached from here."""
    if not leader.http:
        return None
    try:
        question: dict[str, Any] = {**parameters.given(), "own": 1}
        answer = (await get(leader.http, path, ASK_TIMEOUT_S, **question)).body
        # The leader's address may be valid on its own machine only; here, another node may listen there.
        told = msgspec.json.decode(answer, type=_ToldBy)
    except (HttpError, msgspec.DecodeError):
        return None
    return answer if leader.id in (told.leader, told.node) else None


class _ToldBy(msgspec.Struct):
    leader: int | None = None
    node: int | None = None
