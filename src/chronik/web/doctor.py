"""/api/doctor/NAME: the doctor examines a topic from this node, one topic at a time.

The doctor runs on its own event loop in its own thread. It watches for seconds, and its work must not delay the node's
requests.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from chronik.authorization.acls import ResourceType
from chronik.client.errors import ClientError
from chronik.doctor import Diagnosis, Means, diagnose
from chronik.node.serving.access import Access
from chronik.web.answers import Number, Parameters, Refusal, Text
from chronik.web.node_view import NodeView, require_image
from chronik.web.rights import require_readable, require_visible_group
from chronik.wire.errors import ErrorCode, KafkaError

GROUP = Text("group")
SECONDS = Number("seconds", 1, 60, default=5)
PARAMETERS = (GROUP, SECONDS)

UNKNOWN = (ErrorCode.unknown_topic_or_partition, ErrorCode.group_id_not_found)

T = TypeVar("T")


class Doctor:
    """Runs one examination at a time. Owned by the node's event loop."""

    def __init__(self, node: NodeView) -> None:
        self._node = node
        self._topic: str | None = None

    async def examine(self, parameters: Parameters) -> Diagnosis:
        topic = parameters.name
        group = parameters.text(GROUP)
        seconds = parameters.number(SECONDS)
        require_readable(parameters.access, topic, "the state")
        if group is not None:
            require_visible_group(parameters.access, group)
        image = require_image(self._node)
        if image.topic(topic) is None:
            raise Refusal(404, f"topic {topic[:260]} does not exist: see /api/topics")
        if self._topic is not None:
            raise Refusal(503, f"the doctor is examining {self._topic}: retry in a few seconds")
        # Query this node first, because it may be the only one that answers.
        brokers = sorted(image.brokers.values(), key=lambda broker: (broker.id != self._node.node_id, broker.id))
        addresses = [(broker.host, broker.port) for broker in brokers]
        wall_ms, means = self._node.wall_ms, self._means(parameters.access)
        self._topic = topic
        try:
            return await in_own_thread(lambda: diagnose(addresses, topic, group, seconds, wall_ms=wall_ms, means=means))
        except (KafkaError, ClientError) as error:
            if isinstance(error, KafkaError) and error.code in UNKNOWN:
                raise Refusal(404, f"{error.message or error}: see /api/topics and /api/groups") from None
            raise Refusal(503, f"the cluster could not be examined: {error}; retry") from None
        finally:
            self._topic = None

    def _means(self, access: Access) -> Means:
        """Return how the doctor examines for a visitor whose right to read the topic was checked.

        Its requests to other nodes are this node's own. What it would name of other resources is filtered: on this
        event loop, which owns the authorizer, while the doctor runs on its own.
        """
        node, loop = self._node, asyncio.get_running_loop()

        async def visible(resource_type: ResourceType, names: Sequence[str]) -> Sequence[str]:
            if access.is_open:
                return names

            async def filtered() -> list[str]:
                return [name for name in names if access.sees(resource_type, name)]

            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(filtered(), loop))

        return Means(
            node.connect,
            node.caller,
            partial(visible, ResourceType.GROUP),
            partial(visible, ResourceType.TRANSACTIONAL_ID),
        )


async def in_own_thread(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `work` on its own event loop in a new thread. Cancelling the caller also cancels `work`."""
    outcome: Future[T] = Future()
    # The thread reports its result even if the caller no longer waits for it.
    outcome.set_running_or_notify_cancel()
    started: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = []

    async def run() -> T:
        task = asyncio.ensure_future(work())
        started.append((asyncio.get_running_loop(), task))
        return await task

    def thread() -> None:
        try:
            outcome.set_result(asyncio.run(run()))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=thread, name="doctor", daemon=True).start()
    try:
        return await asyncio.wrap_future(outcome)
    except asyncio.CancelledError:
        for loop, task in started:
            loop.call_soon_threadsafe(task.cancel)
        raise
