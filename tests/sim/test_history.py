"""The oracle reports every violation, and nothing else."""

from __future__ import annotations

import pytest

from chronik.testing.sim.history import History, PartitionHistory, RecordName
from chronik.testing.sim.share_group_clients import SETTLED_S_MAX, ShareHistory
from chronik.testing.sim.world import World


class Responses:
    """A history of one partition, and helpers to add records."""

    def __init__(self) -> None:
        self.world = World(0)
        self.history = History(self.world)
        self.partition: PartitionHistory = self.history.partition("t", 0)

    def name(self, number: int, stream: str = "p") -> RecordName:
        name = RecordName(stream, number)
        self.partition.sending(name)
        return name

    def read(self, offset: int, number: int, stream: str = "p") -> None:
        self.partition.read(offset, self.name(number, stream).value(40), "reader")


@pytest.fixture
def responses() -> Responses:
    return Responses()


def test_a_record_at_its_acknowledged_offset_is_no_violation(responses: Responses) -> None:
    responses.partition.acknowledged([responses.name(0), responses.name(1)], 10)
    responses.read(10, 0)
    responses.read(11, 1)
    responses.read(11, 1)
    assert responses.world.violation is None


def test_another_record_at_an_acknowledged_offset_is_a_violation(responses: Responses) -> None:
    responses.partition.acknowledged([responses.name(0)], 10)
    responses.read(10, 1)
    assert "held" in (responses.world.violation or "")


def test_another_record_at_an_already_read_offset_is_a_violation(responses: Responses) -> None:
    responses.read(10, 0)
    responses.read(10, 0, "q")
    assert "held" in (responses.world.violation or "")


def test_one_record_at_two_offsets_is_a_violation(responses: Responses) -> None:
    responses.read(10, 0)
    responses.read(11, 0)
    assert "now also" in (responses.world.violation or "")


def test_a_record_that_no_producer_sent_is_a_violation(responses: Responses) -> None:
    responses.partition.read(0, b"x", "reader")
    assert "no producer sent" in (responses.world.violation or "")


@pytest.mark.parametrize("offsets", [(5, 4), (9, 10, 8), (1, 3, 2)])
def test_a_stream_out_of_order_is_a_violation(responses: Responses, offsets: tuple[int, ...]) -> None:
    for number, offset in enumerate(offsets):
        responses.read(offset, number)
    assert "neighbours" in (responses.world.violation or "")


def test_streams_may_mix_and_have_gaps(responses: Responses) -> None:
    responses.read(7, 9)
    responses.read(3, 2)
    responses.read(5, 0, "q")
    responses.read(4, 5)
    assert responses.world.violation is None


def test_an_end_offset_that_goes_back_is_a_violation(responses: Responses) -> None:
    responses.partition.end_received(10, 0, "reader")
    responses.partition.end_received(9, 10, "reader")
    assert "received end offset 9" in (responses.world.violation or "")


def test_a_lower_end_offset_requested_before_a_higher_one_is_no_violation(responses: Responses) -> None:
    asked_at = responses.partition.end_seen
    responses.partition.end_received(10, 0, "reader")
    responses.partition.end_received(9, asked_at, "slow reader")
    assert responses.world.violation is None and responses.partition.end_seen == 10


def test_a_lost_commit_is_a_violation(responses: Responses) -> None:
    group = responses.history.group("g", "t", 0)
    group.trying(5)
    group.commit_acknowledged(5)
    group.fetched(3, group.committed, "member")
    assert "after 5 was known" in (responses.world.violation or "")


def test_a_committed_offset_that_no_member_committed_is_a_violation(responses: Responses) -> None:
    group = responses.history.group("g", "t", 0)
    group.trying(5)
    group.fetched(6, group.committed, "member")
    assert "no client committed" in (responses.world.violation or "")


def test_a_commit_without_a_response_may_or_may_not_take_effect(responses: Responses) -> None:
    group = responses.history.group("g", "t", 0)
    group.trying(5)
    group.fetched(-1, group.committed, "member")
    group.fetched(5, group.committed, "member")
    assert responses.world.violation is None


def test_a_group_that_skips_records_is_a_violation(responses: Responses) -> None:
    group = responses.history.group("g", "t", 0)
    group.processed(0, 5, "member")
    group.processed(3, 8, "other")
    assert responses.world.violation is None
    group.processed(9, 10, "member")
    assert "processed up to 8" in (responses.world.violation or "")


def test_a_producer_id_of_two_producers_is_a_violation(responses: Responses) -> None:
    responses.history.producer_id_assigned(7, 0, "a")
    responses.history.producer_id_assigned(7, 0, "a")
    assert responses.world.violation is None
    responses.history.producer_id_assigned(7, 0, "b")
    assert "producer id 7" in (responses.world.violation or "")


def test_a_committed_offset_that_is_lost_after_it_was_read_is_a_violation(responses: Responses) -> None:
    group = responses.history.group("g", "t", 0)
    group.trying(5)
    group.fetched(5, group.committed, "outsider")
    group.fetched(-1, group.committed, "outsider")
    assert "received committed offset -1 after 5" in (responses.world.violation or "")


class GroupResponses:
    """A group of two, and the answers to its members at given world times."""

    SESSION_S = 1.0

    def __init__(self) -> None:
        self.world = World(0)
        self.ownership = History(self.world).ownership("g")

    def at(self, now_s: float) -> None:
        self.world.now = now_s

    def synced(self, member: str, generation: int, *partitions: int) -> None:
        self.ownership.synced(member, generation, list(partitions), self.world.now, self.SESSION_S)

    def heartbeat(self, member: str, generation: int, sent_s: float) -> None:
        self.ownership.heartbeat_succeeded(member, generation, sent_s, self.SESSION_S)

    @property
    def violation(self) -> str:
        return self.world.violation or ""


@pytest.fixture
def group() -> GroupResponses:
    return GroupResponses()


def test_members_of_one_generation_share_the_partitions(group: GroupResponses) -> None:
    group.synced("m", 1, 0, 2)
    group.synced("n", 1, 1)
    group.at(0.5)
    group.heartbeat("m", 1, 0.4)
    group.heartbeat("n", 1, 0.4)
    assert group.violation == ""


def test_a_successful_heartbeat_of_an_older_generation_is_a_violation(group: GroupResponses) -> None:
    group.synced("m", 1, 0)
    group.at(3.0)
    group.synced("n", 2, 0)
    group.at(3.2)
    group.heartbeat("m", 1, 2.9)  # sent before any member knew of the next generation
    assert group.violation == ""
    group.heartbeat("m", 1, 3.1)
    assert "a heartbeat of m in generation 1 succeeded, sent 0.100 s after generation 2" in group.violation


def test_a_successful_commit_of_an_older_generation_is_a_violation(group: GroupResponses) -> None:
    group.synced("m", 1, 0)
    group.at(3.0)
    group.synced("n", 2, 0)
    group.at(3.2)
    group.ownership.answered("m", 1, 3.1, "a commit")
    assert "a commit of m in generation 1" in group.violation


def test_a_partition_that_is_reassigned_within_its_owners_session_is_a_violation(group: GroupResponses) -> None:
    group.synced("m", 1, 0)
    group.at(0.7)
    group.heartbeat("m", 1, 0.6)
    group.at(1.4)
    group.synced("n", 2, 0)
    assert "m owns them in generation 1 for another 0.100 s" in group.violation


@pytest.mark.parametrize("how", ["session", "lost", "rejoined", "another"])
def test_a_partition_may_be_reassigned_after_its_owner_lost_it(group: GroupResponses, how: str) -> None:
    group.synced("m", 1, 0)
    if how == "session":
        group.at(0.95)
    elif how == "lost":
        group.ownership.lost("m")
    elif how == "rejoined":
        group.synced("m", 2, 1)
    group.synced("n", 2, 1 if how == "another" else 0)
    assert group.violation == ""


def test_a_share_group_that_settles_slowly_is_no_violation() -> None:
    world = World(0)
    shares = ShareHistory(world, 1)
    for start in range(10):
        shares.check_drained({0: start}, {0: 10})
        world.run(world.now + SETTLED_S_MAX - 1)
    assert world.violation is None


def test_a_share_group_whose_start_offset_is_stuck_is_a_violation() -> None:
    world = World(0)
    shares = ShareHistory(world, 1)
    for _ in range(3):
        shares.check_drained({0: 4}, {0: 10})
        world.run(world.now + SETTLED_S_MAX - 1)
    assert "not settled" in (world.violation or "")
