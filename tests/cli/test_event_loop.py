"""A node's event loop counts the time during which the machine was suspended."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from chronik.cli.start import new_event_loop
from chronik.metadata.calls import HeartbeatResult, RegisterBrokerCall
from chronik.node.membership.broker_session import BrokerSession

LEASE_MS = 60_000
KINDS = pytest.mark.parametrize("kind", ["asyncio", "uvloop"])


class Suspension:
    """Shifts the machine's clock as if it had been suspended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slept_s = 0.0
        clock_gettime = time.clock_gettime
        monkeypatch.setattr(time, "clock_gettime", lambda clock: clock_gettime(clock) + self.slept_s)


@KINDS
def test_the_event_loop_uses_a_clock_that_includes_suspended_time(kind: str) -> None:
    def boot_time() -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    async def run() -> tuple[float, float, float]:
        return boot_time(), asyncio.get_running_loop().time(), boot_time()

    with asyncio.Runner(loop_factory=lambda: new_event_loop(kind)) as runner:
        before, measured, after = runner.run(run())
    assert before <= measured <= after


@KINDS
def test_timers_and_timeouts_use_the_clock_of_the_event_loop(kind: str) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        called_s: dict[str, float] = {}
        loop.call_at(begun_s + 0.02, lambda: called_s.update(at=loop.time()))
        loop.call_later(0.01, lambda: called_s.update(later=loop.time()))
        async with asyncio.timeout(10):
            while len(called_s) < 2:
                await asyncio.sleep(0.001)
        # A loop may call up to a millisecond early: uvloop counts whole ones.
        assert called_s["at"] >= begun_s + 0.019
        assert called_s["later"] >= begun_s + 0.009
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)

    with asyncio.Runner(loop_factory=lambda: new_event_loop(kind)) as runner:
        runner.run(run())


@KINDS
def test_a_lease_expires_while_the_machine_is_suspended(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    suspension = Suspension(monkeypatch)

    class Controller:
        async def call(self, call: object, timeout_s: float, **more: Any) -> HeartbeatResult:
            return HeartbeatResult(LEASE_MS, False, False, ())

    async def run() -> None:
        nothing = cast(Any, None)
        session = BrokerSession(
            cast(Any, SimpleNamespace(loop=asyncio.get_running_loop(), log=Log())),
            cast(Any, Controller()),
            nothing,
            cast(RegisterBrokerCall, Registration()),
            nothing,
            nothing,
            lambda: False,
        )
        await session._heartbeat()
        assert session.lease_is_valid
        suspension.slept_s = LEASE_MS / 1000
        assert not session.lease_is_valid

    with asyncio.Runner(loop_factory=lambda: new_event_loop(kind)) as runner:
        runner.run(run())


class Registration:
    broker_id = 1
    incarnation = None


class Log:
    def info(self, event: str, **more: Any) -> None:
        return
