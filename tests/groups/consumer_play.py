"""A consumer group (KIP-848) with a log, a clock, topics and clients, all controlled by the test."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from uuid import UUID

from tests.groups.play import GROUP, Play

from chronik.groups.consumer_group import ConsumerGroup
from chronik.groups.consumer_member import ConsumerHeartbeat
from chronik.groups.coordinator import GroupCoordinator
from chronik.groups.step import GroupSettings
from chronik.groups.topics import Topic, by_topic
from chronik.wire.errors import ErrorCode

REBALANCE_MS = 30_000


class Topics:
    """A catalog that the test changes. The id of a topic is its number; a new topic of the same name has a new id."""

    def __init__(self) -> None:
        self.version = 0
        self.topics: dict[str, Topic] = {}
        self._created = 0

    def put(self, name: str, partitions: int, racks: Iterable[tuple[str, ...]] = ()) -> Topic:
        known = self.topics.get(name)
        self._created += known is None
        topic_id = UUID(int=self._created) if known is None else known.id
        self.topics[name] = Topic(name, topic_id, tuple(racks) or ((),) * partitions)
        self.version += 1
        return self.topics[name]

    def delete(self, name: str) -> None:
        del self.topics[name]
        self.version += 1

    def topic(self, name: str) -> Topic | None:
        return self.topics.get(name)

    def name_of(self, topic_id: UUID) -> str | None:
        return next((topic.name for topic in self.topics.values() if topic.id == topic_id), None)

    def names(self) -> Iterable[str]:
        return self.topics


class ConsumerPlay(Play):
    """Members are named by the test. `owned` follows what each member was assigned, as real clients do."""

    def __init__(self, settings: GroupSettings | None = None) -> None:
        self.topics = Topics()
        self.topics.put("t", 4)
        self.epochs: dict[str, int] = {}
        self.owned: dict[str, frozenset[tuple[str, int]]] = {}
        super().__init__(settings)

    def _new_coordinator(self) -> GroupCoordinator:
        coordinator = super()._new_coordinator()
        coordinator.catalog = self.topics
        return coordinator

    def change_topic(self, name: str, partitions: int | None, racks: Iterable[tuple[str, ...]] = ()) -> None:
        if partitions is None:
            self.topics.delete(name)
        else:
            self.topics.put(name, partitions, racks)
        self.coordinator.topics_changed([name])

    # Requests

    def send(self, member: str, epoch: int, **changes: Any) -> int:
        token = self.token()
        request = ConsumerHeartbeat(GROUP, member, epoch, "app", "/127.0.0.1")
        self.run(self.coordinator.consumer_heartbeat(replace(request, **changes), token, self.at))
        return token

    def joins(self, member: str, *topics: str, **changes: Any) -> dict[str, Any]:
        first = {"rebalance_timeout_ms": REBALANCE_MS, "topics": topics or ("t",), "owned": frozenset()}
        self.owned[member] = frozenset()
        return self.took(member, self.send(member, 0, **{**first, **changes}))

    def beats(self, member: str, **changes: Any) -> dict[str, Any]:
        """Send a heartbeat with the partitions that the member owns."""
        return self.took(member, self.send(member, self.epochs[member], **{"owned": self.ids(member), **changes}))

    def took(self, member: str, token: int) -> dict[str, Any]:
        """Have the member follow its answer: it revokes and takes partitions at once."""
        answer = self.answers[token]
        if answer["error_code"] is ErrorCode.none:
            self.epochs[member] = answer["member_epoch"]
            if answer.get("assignment") is not None:
                self.owned[member] = frozenset(
                    (self.topics.name_of(topic["topic_id"]) or "", index)
                    for topic in answer["assignment"]["topic_partitions"]
                    for index in topic["partitions"]
                )
        return answer

    def ids(self, member: str) -> frozenset[tuple[UUID, int]]:
        known = ((self.topics.topic(name), index) for name, index in self.owned[member])
        return frozenset((topic.id, index) for topic, index in known if topic is not None)

    def leaves(self, member: str, epoch: int = -1, **changes: Any) -> dict[str, Any]:
        self.owned.pop(member, None)
        return self.answers[self.send(member, epoch, **changes)]

    def settles(self, *members: str) -> None:
        """Send heartbeats of all members until none changes."""
        for _ in range(4):
            for member in members:
                answer = self.beats(member)
                assert answer["error_code"] is ErrorCode.none, answer
        assert self.group_state == "Stable"

    # Queries

    def counts(self, *members: str) -> list[int]:
        return [len(self.owned[member]) for member in members]

    def owns_all_once(self, *members: str, topics: Iterable[str] = ("t",)) -> bool:
        owned = [partition for member in members for partition in self.owned[member]]
        wanted = [(name, index) for name in topics for index in range(self.topics.topics[name].partition_count)]
        return sorted(owned) == sorted(wanted)

    def described_consumer(self) -> dict[str, Any]:
        return self.coordinator.describe_consumer_group(GROUP)

    @property
    def group_state(self) -> str:
        return str(self.described_consumer()["group_state"])

    @property
    def group(self) -> ConsumerGroup:
        group = self.coordinator._groups[GROUP]
        assert isinstance(group, ConsumerGroup)
        return group

    def target(self, member: str) -> dict[str, list[int]]:
        image = self.group.durable
        return {self.topics.name_of(each) or "": parts for each, parts in by_topic(image.target[member]).items()}
