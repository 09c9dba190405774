"""Online migration: members of the classic and of the new protocol in one group, in both directions."""

from __future__ import annotations

from typing import Any

import pytest
from tests.groups.consumer_play import ConsumerPlay
from tests.groups.play import GROUP, REBALANCE_MS, SESSION_MS

from chronik.groups.consumer_protocol import read_assignment, read_subscription, write_assignment
from chronik.groups.step import GroupSettings, MigrationPolicy
from chronik.wire.errors import ErrorCode


def subscription(*owned: int, topic: str = "t", rack: str | None = None) -> bytes:
    """The metadata of a cooperative consumer, in version 3."""

    def text(value: str) -> bytes:
        return len(value).to_bytes(2, "big") + value.encode()

    partitions = b"".join(index.to_bytes(4, "big") for index in owned)
    held = (1).to_bytes(4, "big") + text(topic) + len(owned).to_bytes(4, "big") + partitions if owned else bytes(4)
    end = b"\xff\xff" if rack is None else text(rack)
    return b"\x00\x03" + (1).to_bytes(4, "big") + text(topic) + bytes(4) + held + bytes(4) + end


class Mixed(ConsumerPlay):
    """A play with classic members too. They follow their assignment, as cooperative clients do."""

    def __init__(self, settings: GroupSettings | None = None) -> None:
        super().__init__(settings or GroupSettings(initial_rebalance_delay_ms=0))
        self.generations: dict[str, int] = {}
        self.held_by: dict[str, tuple[int, ...]] = {}

    def protocols(self, member: str) -> Any:
        return (("cooperative-sticky", subscription(*self.held_by.get(member, ()))),)

    def classic_group(self, count: int) -> list[str]:
        """Form a classic group whose leader has assigned the partitions of `t` in turn."""
        members = [self.joined(self.join(protocols=self.protocols("")))[0]]
        for _ in range(count - 1):
            newcomer = self.join(protocols=self.protocols(""))
            rejoins = [self.join(member, protocols=self.protocols(member)) for member in members]
            members = [self.joined(token)[0] for token in [*rejoins, newcomer]]
        shares = {member: list(range(index, 4, count)) for index, member in enumerate(members)}
        assignments = {member: write_assignment(3, {"t": share}) for member, share in shares.items()}
        for member in [*members[1:], members[0]]:
            self.sync(member, self.generation, assignments if member == members[0] else None)
        for member in members:
            self.generations[member] = self.generation
            self.held_by[member] = tuple(shares[member])
        assert self.state == "Stable"
        return members

    def reconciles(self, member: str) -> bool:
        """Send a classic heartbeat, and if needed join and sync; return whether it was needed."""
        error = self.heartbeat(member, self.generations[member])
        if error is ErrorCode.none:
            return False
        assert error is ErrorCode.rebalance_in_progress
        token = self.join(member, protocols=self.protocols(member))
        _, self.generations[member] = self.joined(token)
        self.syncs(member)
        return True

    def syncs(self, member: str) -> None:
        token = self.sync(member, self.generations[member])
        assert self.error(token) is ErrorCode.none
        partitions = read_assignment(self.answers[token]["assignment"])
        assert partitions is not None
        self.held_by[member] = tuple(sorted(index for _, index in partitions))

    def all_settle(self, classic: list[str], new: list[str]) -> None:
        for _ in range(6):
            for member in classic:
                self.reconciles(member)
                self.check_owners(classic, new)
            for member in new:
                self.beats(member)
                self.check_owners(classic, new)
        assert self.group_state == "Stable"
        assert sorted(self.all_held(classic, new)) == [0, 1, 2, 3]

    def all_held(self, classic: list[str], new: list[str]) -> list[int]:
        held = [index for member in classic for index in self.held_by[member]]
        return held + [index for member in new for _, index in self.owned[member]]

    def check_owners(self, classic: list[str], new: list[str]) -> None:
        held = self.all_held(classic, new)
        assert len(held) == len(set(held)), "a partition has two owners"


def test_a_subscription_of_each_version_is_read() -> None:
    read = read_subscription(subscription(1, 2, rack="r"))
    assert read is not None
    assert (read.topics, read.owned, read.rack) == (("t",), (("t", 1), ("t", 2)), "r")
    older = read_subscription(b"\x00\x00\x00\x00\x00\x01\x00\x01t\xff\xff\xff\xff")
    assert older is not None
    assert (older.topics, older.owned) == (("t",), ())
    assert read_subscription(b"\x00\x01\x7f\xff\xff\xff") is None
    assert read_assignment(write_assignment(1, {"t": [3, 4]})) == (("t", 3), ("t", 4))


def test_a_classic_group_with_members_is_converted_and_keeps_its_members() -> None:
    play = Mixed()
    classic = play.classic_group(2)
    generation = play.generation
    answer = play.joins("new")
    assert answer["error_code"] is ErrorCode.none
    assert answer["member_epoch"] == generation + 1
    assert play.owned["new"] == frozenset(), "the classic members own everything"
    assert len(play.described_consumer()["members"]) == 3
    assert [member["member_type"] for member in play.described_consumer()["members"]] == [0, 0, 1]
    play.all_settle(classic, ["new"])
    assert sorted(len(play.held_by[member]) for member in classic) == [1, 1] or play.counts("new") == [1]
    play.restart()
    play.all_settle(classic, ["new"])


def test_the_group_becomes_classic_when_the_last_new_member_leaves() -> None:
    play = Mixed()
    classic = play.classic_group(2)
    play.commit(7, generation=play.generation, member_id=classic[0])
    play.joins("new")
    play.all_settle(classic, ["new"])
    assert play.leaves("new")["error_code"] is ErrorCode.none
    assert play.state == "PreparingRebalance"
    assert play.heartbeat(classic[0], play.generation) is ErrorCode.rebalance_in_progress
    tokens = [play.join(member, protocols=play.protocols(member)) for member in classic]
    assert {play.joined(token)[0] for token in tokens} == set(classic)
    play.settle(*sorted(classic, key=lambda member: member != play.answers[tokens[0]]["leader"]))
    assert play.offset() == 7
    play.restart()
    assert play.state == "Stable"
    assert play.coordinator.groups()[0]["group_type"] == "classic"


def test_an_expired_new_member_turns_the_group_back_too() -> None:
    play = Mixed(GroupSettings(initial_rebalance_delay_ms=0, consumer_session_timeout_ms=5_000))
    classic = play.classic_group(1)
    play.joins("new")
    play.all_settle(classic, ["new"])
    for _ in range(5):
        play.wait(1_000)
        play.heartbeat(classic[0], play.generations[classic[0]])
    assert play.state == "PreparingRebalance"


@pytest.mark.parametrize("restarts", [False, True])
def test_conversions_in_a_row_keep_what_a_classic_member_still_owns(restarts: bool) -> None:
    """The simulator's finding: the member had not heard of the target that the conversion took for its assignment."""
    play = Mixed()
    classic = play.classic_group(1)
    play.joins("new")
    assert play.leaves("new")["error_code"] is ErrorCode.none
    if restarts:
        play.restart()
    play.joins("newer")
    assert play.owned["newer"] == frozenset()
    assert play.heartbeat(classic[0], play.generations[classic[0]]) is ErrorCode.illegal_generation
    play.held_by[classic[0]] = ()  # After this error, a client drops its partitions.
    _, play.generations[classic[0]] = play.joined(play.join(classic[0], protocols=play.protocols(classic[0])))
    play.syncs(classic[0])
    play.all_settle(classic, ["newer"])


def test_conversions_in_a_row_keep_what_a_classic_member_revokes() -> None:
    play = Mixed()
    classic = play.classic_group(1)
    play.joins("new")
    play.join(classic[0], protocols=play.protocols(classic[0]))
    play.leaves("new")
    play.joins("newer")
    assert play.owned["newer"] == frozenset()


def test_rebalance_after_a_conversion_survives_a_change_of_the_coordinator() -> None:
    """Otherwise no member gets the partitions of the member that left."""
    play = Mixed()
    classic = play.classic_group(1)
    play.joins("new")
    play.all_settle(classic, ["new"])
    play.leaves("new")
    play.restart()
    assert play.heartbeat(classic[0], play.generations[classic[0]]) is ErrorCode.rebalance_in_progress
    play.settle(play.joined(play.join(classic[0], protocols=play.protocols(classic[0])))[0])


@pytest.mark.parametrize(
    ("policy", "may_upgrade", "may_downgrade"),
    [
        (MigrationPolicy.BIDIRECTIONAL, True, True),
        (MigrationPolicy.UPGRADE, True, False),
        (MigrationPolicy.DOWNGRADE, False, True),
        (MigrationPolicy.DISABLED, False, False),
    ],
)
def test_the_policy_decides_which_conversions_happen(
    policy: MigrationPolicy, may_upgrade: bool, may_downgrade: bool
) -> None:
    play = Mixed(GroupSettings(initial_rebalance_delay_ms=0, migration=policy))
    play.classic_group(1)
    answer = play.joins("new")
    assert answer["error_code"] is (ErrorCode.none if may_upgrade else ErrorCode.group_id_not_found)
    assert (play.coordinator.groups()[0]["group_type"] == "consumer") is may_upgrade
    other = Mixed(GroupSettings(initial_rebalance_delay_ms=0, migration=policy))
    other.joins("new")
    token = other.join("classic", protocols=other.protocols("classic"))
    other.generations["classic"] = other.joined(token)[1]
    other.syncs("classic")
    other.all_settle(["classic"], ["new"])
    other.leaves("new")
    assert (other.coordinator.groups()[0]["group_type"] == "classic") is may_downgrade


def test_an_empty_group_of_either_kind_is_converted_by_the_first_member() -> None:
    play = Mixed(GroupSettings(initial_rebalance_delay_ms=0, migration=MigrationPolicy.DISABLED))
    play.commit(3)
    assert play.joins("new")["error_code"] is ErrorCode.none
    play.leaves("new")
    token = play.join(protocols=play.protocols(""))
    member, _ = play.joined(token)
    assert play.coordinator.groups()[0]["group_type"] == "classic"
    play.settle(member)
    play.leave((member, None))
    assert play.joins("new")["error_code"] is ErrorCode.none
    assert play.offset() == 3
    play.restart()
    assert play.group_state == "Stable"


@pytest.mark.parametrize("error", [ErrorCode.not_enough_replicas, ErrorCode.not_leader_or_follower])
def test_a_failed_conversion_leaves_the_group_as_it_was(error: ErrorCode) -> None:
    play = Mixed()
    classic = play.classic_group(2)
    play.append_error = error
    assert play.joins("new")["error_code"] is not ErrorCode.none
    play.append_error = ErrorCode.none
    assert play.state == "Stable"
    assert play.heartbeat(classic[0], play.generation) is ErrorCode.none
    play.joins("new")
    play.all_settle(classic, ["new"])
    play.append_error = error
    assert play.leaves("new")["error_code"] is not ErrorCode.none
    play.append_error = ErrorCode.none
    play.owned["new"] = frozenset()
    play.beats("new", topics=("t",), rebalance_timeout_ms=1_000)
    play.all_settle(classic, ["new"])


def test_a_refused_member_converts_nothing() -> None:
    play = Mixed(GroupSettings(initial_rebalance_delay_ms=0, consumer_members_max=1))
    play.classic_group(1)
    assert play.joins("new")["error_code"] is ErrorCode.group_max_size_reached
    assert play.state == "Stable"


def test_a_rebalancing_classic_group_is_converted() -> None:
    play = Mixed()
    classic = play.classic_group(2)
    waiting = play.join(protocols=play.protocols(""))
    play.joins("new")
    assert play.error(waiting) is ErrorCode.rebalance_in_progress
    latecomer = play.answers[waiting]["member_id"]
    play.held_by[latecomer] = ()
    _, play.generations[latecomer] = play.joined(play.join(latecomer, protocols=play.protocols(latecomer)))
    play.syncs(latecomer)
    play.all_settle([*classic, latecomer], ["new"])


def test_a_group_of_another_protocol_type_is_not_converted() -> None:
    play = Mixed()
    play.join(protocol_type="connect", protocols=(("p", b""),))
    answer = play.joins("new")
    assert answer["error_code"] is ErrorCode.group_id_not_found


def test_a_classic_member_that_does_not_sync_or_rejoin_is_removed() -> None:
    play = Mixed()
    play.joins("new")
    token = play.join("classic", protocols=play.protocols("classic"))
    generation = play.joined(token)[1]
    for _ in range(REBALANCE_MS // 5_000):
        play.wait(5_000)
        play.heartbeat("classic", generation)
        play.beats("new")
    assert play.heartbeat("classic", generation) is ErrorCode.unknown_member_id
    assert GROUP in [group["group_id"] for group in play.coordinator.groups()]


def test_a_classic_member_does_not_rejoin_before_a_delayed_assignment() -> None:
    play = Mixed(GroupSettings(initial_rebalance_delay_ms=0, consumer_assignment_interval_ms=1_000))
    classic = play.classic_group(1)
    play.joins("new")
    play.all_settle(classic, ["new"])
    play.joins("newer")
    assert not play.reconciles(classic[0]), "it would rejoin again and again"
    play.wait(1_000)
    play.all_settle(classic, ["new", "newer"])
    assert min(play.counts("new", "newer")) == 1


def test_a_classic_member_leaves_a_consumer_group() -> None:
    play = Mixed()
    classic = play.classic_group(2)
    play.joins("new")
    play.all_settle(classic, ["new"])
    assert play.leave((classic[0], None), ("x", None)) == [ErrorCode.none, ErrorCode.unknown_member_id]
    play.all_settle(classic[1:], ["new"])
    assert play.sync(classic[0], 3) in play.answers
    assert play.heartbeat(classic[0], 3) is ErrorCode.unknown_member_id


def test_a_classic_member_whose_removal_is_being_written_does_not_renew_its_session() -> None:
    """Its partitions are granted to another member when the removal is durable."""
    play = Mixed()
    classic = play.classic_group(2)
    play.joins("new")
    play.all_settle(classic, ["new"])
    late, generation = classic[0], play.generations[classic[0]]
    play.wait(SESSION_MS // 2)
    play.reconciles(classic[1])
    play.beats("new")
    play.holds_appends = True
    play.wait(SESSION_MS // 2)
    assert len(play.held) == 1, "the removal"
    assert play.heartbeat(late, generation) is ErrorCode.rebalance_in_progress
    assert play.error(play.sync(late, generation)) is ErrorCode.rebalance_in_progress
    play.holds_appends = False
    play.write()
    assert play.heartbeat(late, generation) is ErrorCode.unknown_member_id
    play.held_by[late] = ()
    play.all_settle(classic[1:], ["new"])


def test_a_static_member_changes_its_protocol_in_both_directions() -> None:
    play = Mixed()
    token = play.join(instance_id="i", protocols=play.protocols(""))
    member, _ = play.joined(token)
    play.sync(member, play.generation, {member: write_assignment(3, {"t": [0, 1, 2, 3]})})
    play.joins("new", instance_id="i")
    assert play.owns_all_once("new")
    token = play.join(instance_id="i", protocols=play.protocols(""))
    assert play.error(token) is ErrorCode.none
    assert play.coordinator.groups()[0]["group_type"] == "classic"
    answer = play.send("new", play.epochs["new"], instance_id="i")
    assert play.error(answer) is ErrorCode.group_id_not_found


def test_a_classic_join_needs_a_member_id_and_a_shared_protocol() -> None:
    play = Mixed()
    play.joins("new")
    token = play.join(member_id_required=True, protocols=play.protocols(""))
    assert play.error(token) is ErrorCode.member_id_required
    known = play.answers[token]["member_id"]
    token = play.join(known, member_id_required=True, protocols=play.protocols(""))
    play.generations[known] = play.joined(token)[1]
    play.syncs(known)
    play.all_settle([known], ["new"])
    assert play.error(play.join("m" * 40_000, protocols=play.protocols(""))) is ErrorCode.invalid_request
    other = play.join("other", protocols=(("roundrobin", subscription()),))
    assert play.error(other) is ErrorCode.inconsistent_group_protocol
