"""/api/doctor/NAME: the doctor examines a topic from this node, one topic at a time.

The doctor runs on its own event loop in its own thread. It watches for seconds, and its work must not delay the node's
requests.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from chronik.client.errors import ClientError
from chronik.doctor import diagnose
from chronik.web.answers import Parameters, Refusal
from chronik.web.node_view import NodeView, require_image
from chronik.wire.errors import ErrorCode, KafkaError

PARAMETERS = ("group", "seconds")
SECONDS = 5
SECONDS_MAX = 60

T = TypeVar("T")


class Doctor:
    """Runs one examination at a time. Owned by the node's event loop."""

    def __init__(self, node: NodeView) -> None:
        self._node = node
        self._topic: str | None = None

    async def examine(self, topic: str, parameters: Parameters) -> dict[str, Any]:
        group = parameters.text("group")
        seconds = parameters.number("seconds", SECONDS, 1, SECONDS_MAX)
        image = require_image(self._node)
        if image.topic(topic) is None:
            raise Refusal(404, f"topic {topic[:260]} does not exist here: see /api/topics")
        if self._topic is not None:
            raise Refusal(503, f"the doctor examines {self._topic} now: ask again in some seconds")
        # Query this node first, because it may be the only one that answers.
        own, *others = sorted(image.brokers.values(), key=lambda broker: (broker.id != self._node.node_id, broker.id))
        addresses = [(broker.host, broker.port) for broker in (own, *others)]
        self._topic = topic
        try:
            diagnosis = await in_own_thread(lambda: diagnose(addresses, topic, group, seconds))
        except KafkaError as error:
            if error.code in (ErrorCode.unknown_topic_or_partition, ErrorCode.group_id_not_found):
                raise Refusal(404, f"{error.message or error}: see /api/topics and /api/groups") from None
            raise Refusal(503, f"the cluster could not be examined: {error}; ask again") from None
        except ClientError as error:
            raise Refusal(503, f"the cluster could not be examined: {error}; ask again") from None
        finally:
            self._topic = None
        return diagnosis.to_json()


async def in_own_thread(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `work` on its own event loop in a new thread. Cancelling the caller also cancels `work`."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()
    started: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = []

    async def run() -> T:
        task = asyncio.ensure_future(work())
        started.append((asyncio.get_running_loop(), task))
        return await task

    def tell(settle: Callable[[], None]) -> None:
        def settled() -> None:
            if not outcome.done():
                settle()

        if not loop.is_closed():
            loop.call_soon_threadsafe(settled)

    def thread() -> None:
        try:
            found = asyncio.run(run())
        except asyncio.CancelledError:
            tell(outcome.cancel)  # type: ignore[arg-type]
        except BaseException as error:
            failure = error
            tell(lambda: outcome.set_exception(failure))
        else:
            tell(lambda: outcome.set_result(found))

    threading.Thread(target=thread, name="doctor", daemon=True).start()
    try:
        return await outcome
    except asyncio.CancelledError:
        for other, task in started:
            other.call_soon_threadsafe(task.cancel)
        raise
