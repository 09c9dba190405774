"""Requests that a node forwards to the controller."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from chronik.client.errors import Unreachable
from chronik.node.membership.controller_client import ControllerClient
from chronik.node.membership.envelopes import Envelopes
from chronik.node.serving.access import OPEN_ACCESS
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

ATTEMPT_S = 0.4


class UnreachableController:
    """The controller's peer, and the clock: each attempt takes a while and fails."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.sent_s: list[float] = []

    def time(self) -> float:
        return self.now_s

    async def call(self, target: int, key: int, body: bytes, timeout_s: float) -> memoryview:
        self.sent_s.append(self.now_s)
        self.now_s += ATTEMPT_S
        raise Unreachable("no route")


@pytest.mark.parametrize("timeout_s", [1.0, 2.0])
def test_node_forwards_nothing_after_the_requests_own_timeout(timeout_s: float) -> None:
    """The simulator's finding: a reassignment that had timed out was sent again, and replaced a later one."""
    controller = UnreachableController()
    runtime = SimpleNamespace(
        loop=controller, node_id=3, log=SimpleNamespace(bind=lambda **_: SimpleNamespace(error=print))
    )
    metadata = SimpleNamespace(controller_id=1)
    client = cast(Any, ControllerClient)(runtime, metadata, controller, None)
    sender: Envelopes = cast(Any, Envelopes)(runtime, metadata, client, None)
    request = cast(
        Any,
        SimpleNamespace(
            api_key=ApiKey.ALTER_PARTITION_REASSIGNMENTS,
            api_version=1,
            client_id="c",
            access=OPEN_ACCESS,
            message=SimpleNamespace(timeout=timedelta(seconds=timeout_s)),
        ),
    )
    began_s = controller.now_s
    with pytest.raises(KafkaError) as raised:
        asyncio.run(sender.send(request, b""))
    assert raised.value.code is ErrorCode.request_timed_out
    assert len(controller.sent_s) > 1
    assert controller.sent_s[-1] < began_s + timeout_s
