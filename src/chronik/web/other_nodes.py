"""Asking the leader's own HTTP API the same question, so that every node's answer is the leader's."""

from __future__ import annotations

from typing import Any

import msgspec

from chronik.doctor.node_http import HttpError, get
from chronik.metadata.image import BrokerImage
from chronik.web.answers import Parameters


async def ask_leader(leader: BrokerImage, parameters: Parameters, path: str) -> bytes | None:
    """The leader's own answer, encoded; None where it has no HTTP that can be reached from here."""
    if not leader.http:
        return None
    try:
        question: dict[str, Any] = {**parameters.given(), "own": 1}
        answer = (await get(leader.http, path, **question)).body
        # Another node may listen at an address that is the leader's only on its own machine.
        told = msgspec.json.decode(answer, type=_ToldBy)
    except (HttpError, msgspec.DecodeError):
        return None
    return answer if leader.id in (told.leader, told.node) else None


class _ToldBy(msgspec.Struct):
    leader: int | None = None
    node: int | None = None
