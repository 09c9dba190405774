"""A coordinator with a log, a clock and clients, all controlled by the test."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

from chronik.groups.commits import CommitRequest
from chronik.groups.coordinator import GroupCoordinator
from chronik.groups.member import JoinRequest, SyncRequest
from chronik.groups.offsets import Producer
from chronik.groups.records import CommittedOffset, Record, TopicPartition
from chronik.groups.step import (
    Action,
    Append,
    DeleteShares,
    GroupSettings,
    InitializeShares,
    Moment,
    Rebalanced,
    Reply,
)
from chronik.wire.errors import ErrorCode

PARTITION = 0
WALL_MS = 1_700_000_000_000
SESSION_MS = 10_000
REBALANCE_MS = 60_000

GROUP = "orders"
PRODUCER = Producer(7, 0)


class Held(NamedTuple):
    """A record in a transactional batch."""

    record: Record
    producer: Producer


class Marker(NamedTuple):
    producer: Producer
    is_commit: bool


LogEntry: TypeAlias = tuple[bytes | None, bytes | None] | Held | Marker


def subscription(*topics: str, user_data: bytes = b"") -> bytes:
    """The metadata that a consumer of these topics sends."""
    parts = [b"\x00\x01", len(topics).to_bytes(4, "big")]
    for topic in topics:
        parts += [len(topic).to_bytes(2, "big"), topic.encode()]
    return b"".join([*parts, len(user_data).to_bytes(4, "big"), user_data])


RANGE = (("range", subscription("t")),)


def join_request(member_id: str = "", **changes: Any) -> JoinRequest:
    request = JoinRequest(
        group_id=GROUP,
        member_id=member_id,
        instance_id=None,
        client_id="app",
        client_host="/127.0.0.1",
        session_timeout_ms=SESSION_MS,
        rebalance_timeout_ms=REBALANCE_MS,
        protocol_type="consumer",
        protocols=RANGE,
        member_id_required=False,
        can_skip_assignment=False,
    )
    return replace(request, **changes)


def uuids() -> Iterator[UUID]:
    count = 0
    while True:
        count += 1
        yield UUID(int=count)


def load(coordinator: GroupCoordinator, partition: int, log: Iterable[LogEntry], at: Moment) -> int:
    """Load a whole partition at once; return the number of unreadable records."""
    coordinator.start_loading(partition)
    replay(coordinator, partition, log)
    return coordinator.finish_loading(partition, at)


def replay(coordinator: GroupCoordinator, partition: int, log: Iterable[LogEntry]) -> None:
    for entry in log:
        match entry:
            case Marker():
                coordinator.replay_marker(partition, *entry)
            case Held():
                coordinator.replay(partition, [entry.record], entry.producer)
            case _:
                coordinator.replay(partition, [entry])


class Play:
    """Methods take events; answers are stored by token. Appends succeed immediately unless `holds_appends` is set."""

    def __init__(self, settings: GroupSettings | None = None, *, is_loaded: bool = True) -> None:
        self.settings = settings or GroupSettings(initial_rebalance_delay_ms=0)
        self.log: list[LogEntry] = []
        self.now_ms = 1_000_000
        self.wall_ms = WALL_MS
        self.holds_appends = False
        self.append_error = ErrorCode.none
        self.held: list[Append] = []
        self.answers: dict[int, dict[str, Any]] = {}
        self.asked = 0
        self.rebalances: list[Rebalanced] = []
        self.share_requests: list[InitializeShares | DeleteShares] = []
        """Those that the share coordinators have not answered."""
        self._uuids = uuids()
        self.coordinator = self._new_coordinator()
        if is_loaded:
            load(self.coordinator, PARTITION, [], self.at)

    def _new_coordinator(self) -> GroupCoordinator:
        coordinator = GroupCoordinator(self.settings, lambda: next(self._uuids))
        coordinator.partition_count = 1
        return coordinator

    @property
    def records(self) -> list[tuple[bytes | None, bytes | None]]:
        """The records of the log that are not in transactions."""
        return [entry for entry in self.log if not isinstance(entry, Held | Marker)]

    @property
    def at(self) -> Moment:
        return Moment(self.now_ms, self.wall_ms)

    # Events

    def token(self) -> int:
        self.asked += 1
        return self.asked

    def run(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Reply():
                    assert action.token not in self.answers, "answered twice"
                    self.answers[action.token] = action.values
                case Append():
                    assert action.records
                    self.held.append(action)
                case Rebalanced():
                    self.rebalances.append(action)
                case InitializeShares() | DeleteShares():
                    self.share_requests.append(action)
        if not self.holds_appends:
            self.write()

    def write(self, count: int | None = None) -> None:
        """Complete the oldest pending appends."""
        left = len(self.held) if count is None else count
        while self.held and left:
            left -= 1
            append = self.held.pop(0)
            # After a timeout the records are in the log; only the offsets of a transaction count then.
            timed_out = self.append_error is ErrorCode.request_timed_out and append.producer is not None
            if self.append_error is ErrorCode.none or timed_out:
                self.put_in_log(append)
            self.run(self.coordinator.appended(append.token, self.append_error, self.at))

    def put_in_log(self, append: Append) -> None:
        producer = append.producer
        self.log += append.records if producer is None else [Held(record, producer) for record in append.records]

    def end_transaction(self, producer: Producer = PRODUCER, *, is_commit: bool = True) -> None:
        """Write a marker, and report it."""
        self.log.append(Marker(producer, is_commit))
        self.coordinator.transaction_ended(PARTITION, producer, is_commit)

    def wait(self, ms: int) -> None:
        """Advance the clock, running each timer when it is due."""
        end_ms = self.now_ms + ms
        while (deadline_ms := self.coordinator.next_deadline_ms()) is not None and deadline_ms <= end_ms:
            self._move_to(max(deadline_ms, self.now_ms))
            self.run(self.coordinator.tick(self.at))
        self._move_to(end_ms)

    def _move_to(self, now_ms: int) -> None:
        self.wall_ms += now_ms - self.now_ms
        self.now_ms = now_ms

    def restart(self) -> None:
        """Restart the node: it reloads its state from the log."""
        self.held.clear()
        self.coordinator = self._new_coordinator()
        load(self.coordinator, PARTITION, self.log, self.at)

    # Client requests

    def join(self, member_id: str = "", **changes: Any) -> int:
        token = self.token()
        self.run(self.coordinator.join(join_request(member_id, **changes), token, self.at))
        return token

    def sync(self, member_id: str, generation: int, assignments: dict[str, bytes] | None = None, **changes: Any) -> int:
        token = self.token()
        request = SyncRequest(GROUP, generation, member_id, None, None, None, assignments or {})
        self.run(self.coordinator.sync(replace(request, **changes), token, self.at))
        return token

    def heartbeat(self, member_id: str, generation: int, instance_id: str | None = None) -> ErrorCode:
        return self.coordinator.heartbeat(GROUP, member_id, generation, instance_id, self.at)

    def leave(self, *members: tuple[str, str | None]) -> list[ErrorCode]:
        token = self.token()
        self.run(self.coordinator.leave(GROUP, members, token, self.at))
        return [member["error_code"] for member in self.answers[token]["members"]]

    def commit(
        self,
        offset: int = 5,
        *,
        group_id: str = GROUP,
        generation: int = -1,
        member_id: str = "",
        instance_id: str | None = None,
        partition: TopicPartition = ("t", 0),
        metadata: str = "",
        producer: Producer | None = None,
    ) -> int:
        """Commit an offset, in the producer's transaction if there is one."""
        token = self.token()
        request = CommitRequest(group_id, generation, member_id, instance_id, ((partition, offset, 1, metadata),))
        if producer is None:
            self.run(self.coordinator.commit(request, token, self.at))
        else:
            self.run(self.coordinator.commit_transactional(request, producer, 0, token, self.at))
        return token

    def commit_error(self, token: int) -> ErrorCode:
        (error,) = self.answers[token]["errors"].values()
        assert isinstance(error, ErrorCode)
        return error

    def delete_group(self, group_id: str = GROUP) -> int:
        token = self.token()
        self.run(self.coordinator.delete_group(group_id, token, self.at))
        return token

    def delete_offsets(self, *partitions: TopicPartition) -> dict[str, Any]:
        token = self.token()
        self.run(self.coordinator.delete_offsets(GROUP, partitions, token, self.at))
        return self.answers[token]

    # Queries

    def error(self, token: int) -> ErrorCode:
        error = self.answers[token]["error_code"]
        assert isinstance(error, ErrorCode)
        return error

    def offsets(self, group_id: str = GROUP) -> dict[TopicPartition, CommittedOffset | None]:
        error, committed = self.coordinator.committed(group_id, None)
        assert error is ErrorCode.none
        return committed

    def offset(self, partition: TopicPartition = ("t", 0), group_id: str = GROUP) -> int | None:
        committed = self.offsets(group_id).get(partition)
        return None if committed is None else committed.offset

    def is_stable(self, partition: TopicPartition = ("t", 0), group_id: str = GROUP) -> bool:
        return partition not in self.coordinator.unstable_partitions(group_id)

    def described(self, group_id: str = GROUP) -> dict[str, Any]:
        return self.coordinator.describe(group_id)

    @property
    def state(self) -> str:
        return str(self.described()["group_state"])

    # Scenarios

    def joined(self, token: int) -> tuple[str, int]:
        """Return the member id and the generation of a successful JoinGroup."""
        answer = self.answers[token]
        assert answer["error_code"] is ErrorCode.none, answer
        return answer["member_id"], answer["generation_id"]

    def stable_group(self, count: int, **changes: Any) -> list[str]:
        """Join and sync members. The first one leads, and each member's assignment is its own id."""
        tokens = [self.join(**changes)]
        members = [self.joined(tokens[0])[0]]
        for _ in range(count - 1):
            newcomer = self.join(**changes)
            rejoins = [self.join(member, **changes) for member in members]
            members = [self.joined(token)[0] for token in [*rejoins, newcomer]]
        self.settle(*members)
        return members

    @property
    def generation(self) -> int:
        return self.rebalances[-1].generation

    def settle(self, *members: str, **changes: Any) -> None:
        """Sync all members, with the first one as the leader."""
        assignments = {member: member.encode() for member in members}
        tokens = [self.sync(member, self.generation, None, **changes) for member in members[1:]]
        tokens.append(self.sync(members[0], self.generation, assignments, **changes))
        for token in tokens:
            assert self.error(token) is ErrorCode.none
        assert self.state == "Stable"
