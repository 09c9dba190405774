"""Members of consumer groups: real clients that record what they receive, and one that sends each request itself."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Self

from confluent_kafka import Consumer, KafkaException, Message, TopicPartition
from tests.cluster.support_logins import Login
from tests.cluster.support_recorder import RecordedConsumer, Recorder, named
from tests.node.support_wire import WireClient

from chronik.testing.operations import Assigned, Committed
from chronik.wire import messages
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode

SESSION_MS = 6_000
JOIN_VERSION = 7
GROUP = {"session.timeout.ms": SESSION_MS, "heartbeat.interval.ms": 500, "auto.offset.reset": "earliest"}


class Commits:
    """The offsets of a group: acknowledged commits, and attempted ones."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self._asked: dict[str, int] = {}
        self._acknowledged: dict[str, int] = {}
        self._lock = threading.Lock()

    def asked(self, offsets: Mapping[str, int]) -> None:
        with self._lock:
            for where, offset in offsets.items():
                self._asked[where] = max(offset, self._asked.get(where, 0))

    def acknowledged(self, offsets: Mapping[str, int]) -> None:
        with self._lock:
            for where, offset in offsets.items():
                self._acknowledged[where] = max(offset, self._acknowledged.get(where, 0))

    def committed(self) -> dict[str, int]:
        """Return the acknowledged commits."""
        with self._lock:
            return dict(self._acknowledged)

    def given(self, where: str, position: int, member: str) -> None:
        """Check a member's start offset: neither below the committed offset nor above the highest attempted commit."""
        with self._lock:
            lowest, highest = self._acknowledged.get(where, 0), self._asked.get(where, 0)
            if not lowest <= position <= highest:
                self.violations.append(f"{member} starts {where} at {position}; committed: {lowest} to {highest}")


class GroupConsumer(RecordedConsumer):
    """A group member that commits after each poll, and checks the group's start offsets against its commits.

    If a commit was not acknowledged, the member commits again after the next poll, even an empty one: the last records
    may arrive while the coordinator still loads.

    The members share `commits`: the offsets of acknowledged and of attempted commits.
    """

    def __init__(
        self,
        recorder: Recorder,
        name: str,
        login: str | Login,
        topic: str,
        group: str,
        commits: Commits,
        *,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._group = group
        self._commits = commits
        self._is_owing = False
        self.assignments = 0
        super().__init__(recorder, name, login, topic, (), options={**GROUP, "group.id": group, **(options or {})})

    def _begin(self) -> None:
        self._consumer.subscribe(
            [self._topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked
        )

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self.assignments += 1
        starts = [
            TopicPartition(self._topic, found.partition, max(found.offset, 0))
            for found in self._committed(consumer, partitions)
        ]
        self.next_offsets = {named(self._topic, start.partition): start.offset for start in starts}
        for where, offset in self.next_offsets.items():
            self._commits.given(where, offset, self.name)
        self._recorder.record(Assigned(self._recorder.now_s(), self.name, dict(self.next_offsets), self._group))
        consumer.assign(starts)

    def _committed(self, consumer: Consumer, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """Return the group's committed offsets; retry until the coordinator, which may be changing, answers."""
        while True:
            self._login.refresh()
            try:
                found: list[TopicPartition] = consumer.committed(partitions, timeout=2.0)
            except KafkaException:
                if self._stop.is_set():
                    return []  # the consumer is being closed
                continue
            if all(part.error is None for part in found):
                return found

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self.next_offsets.clear()
        self._is_owing = False  # the next owner of the partitions reads and commits these records
        self._recorder.record(Assigned(self._recorder.now_s(), self.name, {}, self._group))
        consumer.unassign()

    def _poll(self) -> list[Message]:
        given = super()._poll()
        self._is_owing = self._is_owing or bool(given)
        if self._is_owing:
            self._commit()
        return given

    def _commit(self) -> None:
        wanted = dict(self.next_offsets)
        if not wanted:
            return
        self._commits.asked(wanted)
        offsets = [TopicPartition(self._topic, int(where.rpartition("-")[2]), at) for where, at in wanted.items()]
        invoked_s = self._recorder.now_s()
        try:
            done = self._consumer.commit(offsets=offsets, asynchronous=False)
        except KafkaException:
            return  # the outcome is unknown; the next commit settles it
        good = {named(self._topic, part.partition): part.offset for part in done if part.error is None}
        self._commits.acknowledged(good)
        if good:
            self._recorder.record(Committed(self._recorder.now_s(), invoked_s, self.name, self._group, good))
        self._is_owing = len(good) < len(wanted)


class WireMember:
    """A member with its own connection to one node: it does not look for another coordinator."""

    def __init__(
        self, client: WireClient, group: str, *, session_timeout_ms: int = 60_000, rebalance_timeout_ms: int = 2_000
    ) -> None:
        self.client = client
        self.group = group
        self.member_id = ""
        self.generation = -1
        self.members: list[str] = []
        """All members, if this one leads its group."""
        self.assignment = b""
        self._session_timeout_ms = session_timeout_ms
        self._rebalance_timeout_ms = rebalance_timeout_ms

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.socket.close()

    def send_join(self) -> int:
        values = {
            "group_id": self.group,
            "session_timeout": self._session_timeout_ms,
            "rebalance_timeout": self._rebalance_timeout_ms,
            "member_id": self.member_id,
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": b"\x00\x00"}],
        }
        body = messages.write_request(ApiKey.JOIN_GROUP, JOIN_VERSION, values)
        return self.client.send(ApiKey.JOIN_GROUP, JOIN_VERSION, body)

    def joined(self, correlation_id: int) -> ErrorCode:
        body = self.client.answer(ApiKey.JOIN_GROUP, JOIN_VERSION, correlation_id)
        answer = messages.read_response(ApiKey.JOIN_GROUP, JOIN_VERSION, body)
        if answer.member_id:
            self.member_id = answer.member_id
        if answer.error_code is ErrorCode.none:
            self.generation = answer.generation_id
            self.members = [member.member_id for member in answer.members]
        return ErrorCode(answer.error_code)

    def sync(self, assignments: Mapping[str, bytes]) -> ErrorCode:
        shares = [{"member_id": member, "assignment": assignment} for member, assignment in assignments.items()]
        values = {**self._identity, "protocol_type": "consumer", "protocol_name": "range", "assignments": shares}
        answer = self.client.call(ApiKey.SYNC_GROUP, 5, values)
        self.assignment = bytes(answer.assignment)
        return ErrorCode(answer.error_code)

    def heartbeat(self) -> ErrorCode:
        return ErrorCode(self.client.call(ApiKey.HEARTBEAT, 4, self._identity).error_code)

    def leave(self) -> ErrorCode:
        values = {"group_id": self.group, "members": [{"member_id": self.member_id}]}
        return ErrorCode(self.client.call(ApiKey.LEAVE_GROUP, 5, values).error_code)

    @property
    def _identity(self) -> dict[str, Any]:
        return {"group_id": self.group, "generation_id": self.generation, "member_id": self.member_id}
