"""Topic creation through the controller, for a client's request or for a service of this node."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from chronik.metadata.image import TopicImage
from chronik.node.membership.controller_client import ControllerClient
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.membership.topic_plans import NewTopic


@dataclass(frozen=True, slots=True, eq=False)
class Topics:
    """Any node may request a topic; the controller creates it. Owned by the loop."""

    _metadata: MetadataLog
    _client: ControllerClient
    _applied: Callable[[], Awaitable[None]]
    """Returns when the partitions hosted here match the current image."""

    async def create(self, topic: NewTopic | str, *, by_broker: bool = False) -> TopicImage:
        """Create a topic and wait until the live brokers serve it. A plain name uses the node's defaults.

        TOPIC_ALREADY_EXISTS if it exists. `by_broker` allows internal topics.
        """
        new = NewTopic(topic) if isinstance(topic, str) else topic
        await self._client.call(msgspec.structs.replace(new, by_broker=by_broker))
        await self._applied()
        return self._metadata.image.require_topic(new.name)
