"""Leaders that are asked to give a partition to another: what was asked of whom, and until when they have time."""

from __future__ import annotations

from chronik.metadata.calls import HandOver
from chronik.metadata.image import ClusterImage
from chronik.metadata.index import Key


class HandOvers:
    """Owned by the controller; lost with it, and then asked anew. One ask for each partition."""

    def __init__(self, patience_ms: int) -> None:
        self._patience_ms = patience_ms
        self._asked: dict[Key, tuple[HandOver, int]] = {}

    def ask(self, key: Key, hand_over: HandOver, now_ms: int) -> None:
        known = self._asked.get(key)
        if known is None or known[0] != hand_over:
            self._asked[key] = (hand_over, now_ms + self._patience_ms)

    def of(self, image: ClusterImage, leader: int) -> tuple[HandOver, ...]:
        """What the leader should hand over now."""
        if not self._asked:
            return ()
        return tuple(asked for key, (asked, _) in self._asked.items() if _leader(image, key, asked) == leader)

    def take_late(self, image: ClusterImage, now_ms: int) -> list[tuple[Key, HandOver]]:
        """Those that had their time; what was done is forgotten, and so are these."""
        late = []
        for key, (asked, until_ms) in list(self._asked.items()):
            if _leader(image, key, asked) is None:
                del self._asked[key]
            elif now_ms >= until_ms:
                del self._asked[key]
                late.append((key, asked))
        return late


def _leader(image: ClusterImage, key: Key, asked: HandOver) -> int | None:
    """Who leads the partition under the epoch of the ask; None where that is over."""
    topic = image.topics.get(key[0])
    partition = None if topic is None else topic.partition(key[1])
    if topic is None or partition is None or topic.id != asked.topic_id:
        return None
    return partition.leader if partition.leader_epoch == asked.leader_epoch else None
