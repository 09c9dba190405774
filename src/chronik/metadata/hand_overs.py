"""Requested hand-overs: which leader should transfer which partition, and by when."""

from __future__ import annotations

from chronik.metadata.calls import HandOver
from chronik.metadata.image import ClusterImage
from chronik.metadata.index import Key


class HandOvers:
    """Owned by the controller. A new controller starts empty and requests again. One request for each partition."""

    def __init__(self, patience_ms: int) -> None:
        self._patience_ms = patience_ms
        self._asked: dict[Key, tuple[HandOver, int]] = {}

    def ask(self, key: Key, hand_over: HandOver, now_ms: int) -> None:
        known = self._asked.get(key)
        if known is None or known[0] != hand_over:
            self._asked[key] = (hand_over, now_ms + self._patience_ms)

    def of(self, image: ClusterImage, leader: int) -> tuple[HandOver, ...]:
        """Return the hand-overs that the leader should carry out now."""
        if not self._asked:
            return ()
        return tuple(asked for key, (asked, _) in self._asked.items() if _leader(image, key, asked) == leader)

    def take_late(self, image: ClusterImage, now_ms: int) -> list[tuple[Key, HandOver]]:
        """Remove and return the hand-overs past their deadline; also forget completed ones."""
        late = []
        for key, (asked, until_ms) in list(self._asked.items()):
            if _leader(image, key, asked) is None:
                del self._asked[key]
            elif now_ms >= until_ms:
                del self._asked[key]
                late.append((key, asked))
        return late


def _leader(image: ClusterImage, key: Key, asked: HandOver) -> int | None:
    """Return the partition's leader if the requested epoch is current, else None."""
    topic = image.topics.get(key[0])
    partition = None if topic is None else topic.partition(key[1])
    if topic is None or partition is None or topic.id != asked.topic_id:
        return None
    return partition.leader if partition.leader_epoch == asked.leader_epoch else None
