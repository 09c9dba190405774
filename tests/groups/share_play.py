"""A share group (KIP-932) with a log, a clock, topics, clients and share coordinators, all controlled by the test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import UUID

from tests.groups.consumer_play import Topics
from tests.groups.play import GROUP, Play

from chronik.groups.coordinator import GroupCoordinator
from chronik.groups.share_group import ShareGroup
from chronik.groups.share_member import ShareHeartbeat
from chronik.groups.step import GroupSettings, InitializeShares
from chronik.wire.errors import ErrorCode


class SharePlay(Play):
    """Members are named by the test. Share coordinators answer at once unless `holds_shares` is set."""

    def __init__(self, settings: GroupSettings | None = None) -> None:
        self.topics = Topics()
        self.topics.put("t", 4)
        self.holds_shares = False
        self.share_error = ErrorCode.none
        self.initialized: dict[tuple[UUID, int], tuple[int, int]] = {}
        """By partition: state epoch and start offset, at the share coordinators."""
        self.epochs: dict[str, int] = {}
        self.owned: dict[str, frozenset[tuple[str, int]]] = {}
        super().__init__(settings)

    def _new_coordinator(self) -> GroupCoordinator:
        coordinator = super()._new_coordinator()
        coordinator.catalog = self.topics
        return coordinator

    def write(self, count: int | None = None) -> None:
        super().write(count)
        if not self.holds_shares:
            self.answer_shares()

    def answer_shares(self) -> None:
        """Have the share coordinators answer what they were asked."""
        while self.share_requests:
            request = self.share_requests.pop(0)
            partitions = list(request.offsets if isinstance(request, InitializeShares) else request.partitions)
            if self.share_error is ErrorCode.none:
                for partition in partitions:
                    if isinstance(request, InitializeShares):
                        self.initialized[partition] = (request.state_epoch, request.offsets[partition])
                    else:
                        self.initialized.pop(partition, None)
            errors = dict.fromkeys(partitions, self.share_error)
            self.run(self.coordinator.shares_done(request.token, errors, self.at))

    def change_topic(self, name: str, partitions: int | None) -> None:
        if partitions is None:
            self.topics.delete(name)
        else:
            self.topics.put(name, partitions)
        self.coordinator.topics_changed([name])

    # Requests

    def send(self, member: str, epoch: int, **changes: Any) -> int:
        token = self.token()
        request = ShareHeartbeat(GROUP, member, epoch, "app", "/127.0.0.1")
        self.run(self.coordinator.share_heartbeat(replace(request, **changes), token, self.at))
        return token

    def joins(self, member: str, *topics: str, **changes: Any) -> dict[str, Any]:
        """Join, and heartbeat again for the partitions whose state had to be initialized first."""
        self.took(member, self.send(member, 0, **{"topics": topics or ("t",), **changes}))
        return self.beats(member) if member in self.epochs else self.answers[self.asked]

    def beats(self, member: str, **changes: Any) -> dict[str, Any]:
        return self.took(member, self.send(member, self.epochs[member], **changes))

    def took(self, member: str, token: int) -> dict[str, Any]:
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

    def leaves(self, member: str) -> dict[str, Any]:
        self.owned.pop(member, None)
        return self.answers[self.send(member, -1)]

    def alters(self, offsets: dict[tuple[UUID, int], int]) -> int:
        token = self.token()
        self.run(self.coordinator.alter_share_offsets(GROUP, offsets, token, self.at))
        return token

    def deletes_offsets(self, *topics: str) -> int:
        token = self.token()
        self.run(self.coordinator.delete_share_offsets(GROUP, topics, token, self.at))
        return token

    def deletes_group(self) -> int:
        token = self.token()
        self.run(self.coordinator.delete_group(GROUP, token, self.at))
        return token

    # Queries

    @property
    def topic_id(self) -> UUID:
        return self.topics.topics["t"].id

    def described_share(self) -> dict[str, Any]:
        return self.coordinator.describe_share_group(GROUP)

    @property
    def group(self) -> ShareGroup:
        group = self.coordinator._groups[GROUP]
        assert isinstance(group, ShareGroup)
        return group

    def sizes(self, *members: str) -> list[int]:
        return [len(self.owned[member]) for member in members]
