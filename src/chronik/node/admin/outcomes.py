"""What the admin APIs share: many outcomes in one answer, each with its own error, all within the request's timeout."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Hashable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from chronik.node.runtime import Runtime
from chronik.node.serving.api import Values
from chronik.node.serving.deadlines import bounded_wait_s
from chronik.observe.logging import Logger
from chronik.wire.errors import ErrorCode, KafkaError

H = TypeVar("H", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One entry of an answer: how it is named there, and the work that fills it."""

    name: Values
    work: Coroutine[Any, Any, Values]


async def within(runtime: Runtime, wait: timedelta, outcomes: Sequence[Outcome]) -> list[Values]:
    """Runs the work of all entries side by side, so that they share commits; one answer each, in order.

    What is not done within the timeout is answered with REQUEST_TIMED_OUT and goes on all the same.
    """
    tasks = [runtime.loop.create_task(_filled(runtime.log, outcome)) for outcome in outcomes]
    if not tasks:
        return []
    wait_s = bounded_wait_s(wait)
    await asyncio.wait(tasks, timeout=wait_s)
    late = KafkaError(ErrorCode.request_timed_out, f"Not done within {int(wait_s * 1000)} ms; it may still be done.")
    return [
        task.result() if task.done() else refusal(late, **outcome.name)
        for task, outcome in zip(tasks, outcomes, strict=True)
    ]


async def _filled(log: Logger, outcome: Outcome) -> Values:
    try:
        return {**outcome.name, "error_code": ErrorCode.none, "error_message": None, **await outcome.work}
    except KafkaError as error:
        return refusal(error, **outcome.name)
    except TimeoutError:
        return refusal(KafkaError(ErrorCode.request_timed_out, "Done, but not yet in effect here."), **outcome.name)
    except Exception:
        log.exception("admin_request_failed", **{key: str(value) for key, value in outcome.name.items()})
        return refusal(
            KafkaError(ErrorCode.unknown_server_error, "unexpected error; the node's log has it"), **outcome.name
        )


def refusal(error: KafkaError, **name: Any) -> Values:
    """An entry that failed."""
    return {**name, "error_code": error.code, "error_message": error.message or None}


def duplicates(items: Iterable[H]) -> list[H]:
    """What occurs more than once, each named once, in the order of its first occurrence."""
    counts: dict[H, int] = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    return [item for item, count in counts.items() if count > 1]
