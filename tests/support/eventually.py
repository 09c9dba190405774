"""Wait for a condition with a deadline; tests wait in no other way."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_INTERVAL_S = 0.02
POLL_INTERVAL_S_MAX = 0.25
ON_LOOP_INTERVAL_S = 0.005
LATE_SHARE = 0.05
"""How late a result may be seen, as a share of the time that the test has waited for it."""


def eventually(condition: Callable[[], T], timeout_s: float = 10.0, what: str = "") -> T:
    """Return the first truthy value of `condition`; at the deadline, raise AssertionError with its last value or error.

    An AssertionError in `condition` means "not yet", so a condition may consist of asserts (and return True).
    The longer it takes, the rarer are the checks: they compete for the CPU with the processes that they wait for.
    """
    started = time.monotonic()
    deadline = started + timeout_s
    while True:
        failure: AssertionError | None = None
        value: T | None = None
        try:
            value = condition()
        except AssertionError as error:
            failure = error
        if value and failure is None:
            return value
        now = time.monotonic()
        if now >= deadline:
            seen = f"last seen: {value!r}" if failure is None else str(failure)
            raise AssertionError(f"not within {timeout_s} s: {what or 'the condition'}; {seen}") from failure
        time.sleep(min(max(POLL_INTERVAL_S, (now - started) * LATE_SHARE), POLL_INTERVAL_S_MAX))


async def until(condition: Callable[[], T | None], what: str = "", timeout_s: float = 15.0) -> T:
    """Return the first truthy value of `condition`, while the event loop runs; at the deadline, raise AssertionError.

    For conditions within the process of the test, which cost nothing to check.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while not (value := condition()):
        if loop.time() >= deadline_s:
            raise AssertionError(f"not within {timeout_s} s: {what or 'the condition'}")
        await asyncio.sleep(ON_LOOP_INTERVAL_S)
    return value
