"""Shared by the admin APIs: many outcomes in one response, each with its own error, within the request timeout."""

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
    """One entry of a response: the fields that identify it, and the work that fills it."""

    name: Values
    work: Coroutine[Any, Any, Values]


async def within(runtime: Runtime, wait: timedelta, outcomes: Sequence[Outcome]) -> list[Values]:
    """Run the work of all entries concurrently, so that they share commits; return their results in order.

    Work that exceeds the timeout is answered with REQUEST_TIMED_OUT and continues.
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
    """Return the entry for a failure."""
    return {**name, "error_code": error.code, "error_message": error.message or None}


def duplicates(items: Iterable[H]) -> list[H]:
    """Return the items that occur more than once, each once, in the order of first occurrence."""
    counts: dict[H, int] = {}
    for item in items:
        counts[item] = counts.get(item, 0) + 1
    return [item for item, count in counts.items() if count > 1]
