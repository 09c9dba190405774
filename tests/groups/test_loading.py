"""Loading and unloading a partition of the offsets topic."""

from __future__ import annotations

from tests.groups.play import GROUP, PARTITION, SESSION_MS, Play, load

from chronik.groups.records import group_partition, write_group_key
from chronik.wire.errors import ErrorCode


def test_group_continues_after_its_coordinator_restarts() -> None:
    play = Play()
    leader, follower = play.stable_group(2)
    play.commit(7, generation=2, member_id=leader)
    play.restart()
    assert play.state == "Stable"
    assert play.offset() == 7
    assert play.heartbeat(follower, 2) is ErrorCode.none
    assert play.answers[play.sync(follower, 2)]["assignment"] == follower.encode()
    assert play.joined(play.join(follower)) == (follower, 2)
    assert play.commit_error(play.commit(8, generation=2, member_id=leader)) is ErrorCode.none


def test_coordinator_restart_renews_member_sessions() -> None:
    play = Play()
    (member,) = play.stable_group(1)
    play.wait(SESSION_MS - 1)
    play.restart()
    play.wait(SESSION_MS - 1)
    assert play.heartbeat(member, 1) is ErrorCode.none
    play.wait(SESSION_MS)
    assert play.heartbeat(member, 1) is ErrorCode.unknown_member_id
    assert play.state == "Empty"


def test_generation_increases_across_a_restart() -> None:
    play = Play()
    (member,) = play.stable_group(1)
    play.leave((member, None))
    play.restart()
    assert play.state == "Empty"
    assert play.joined(play.join())[1] == 3


def test_requests_return_coordinator_load_in_progress_while_groups_load() -> None:
    play = Play(is_loaded=False)
    play.coordinator.start_loading(PARTITION)
    loading = ErrorCode.coordinator_load_in_progress
    assert play.coordinator.is_loading
    assert play.error(play.join()) is loading
    assert play.commit_error(play.commit()) is loading
    assert play.error(play.delete_group()) is loading
    assert play.coordinator.committed(GROUP, None) == (loading, {})
    assert play.described()["error_code"] is loading
    # A heartbeat succeeds, because the member's session restarts after loading; a sync has no generation to match.
    assert play.heartbeat("m", 1) is ErrorCode.none
    assert play.error(play.sync("m", 1)) is ErrorCode.rebalance_in_progress
    play.coordinator.finish_loading(PARTITION, play.at)
    assert play.joined(play.join())[1] == 1


def test_requests_return_not_coordinator_if_another_node_leads_the_partition() -> None:
    play = Play(is_loaded=False)
    elsewhere = ErrorCode.not_coordinator
    assert play.error(play.join()) is elsewhere
    assert play.error(play.sync("m", 1)) is elsewhere
    assert play.heartbeat("m", 1) is elsewhere
    assert play.commit_error(play.commit()) is elsewhere
    assert play.coordinator.committed(GROUP, None) == (elsewhere, {})
    assert play.described()["error_code"] is elsewhere
    token = play.token()
    play.run(play.coordinator.leave(GROUP, [("m", None)], token, play.at))
    assert play.error(token) is elsewhere


def test_join_returns_coordinator_not_available_without_an_offsets_topic() -> None:
    play = Play(is_loaded=False)
    play.coordinator.partition_count = 0
    assert play.error(play.join()) is ErrorCode.coordinator_not_available


def test_unloading_a_partition_answers_waiting_joins_with_not_coordinator() -> None:
    play = Play()
    (member,) = play.stable_group(1)
    joining = play.join()
    play.run(play.coordinator.unload(PARTITION, play.at))
    elsewhere = ErrorCode.not_coordinator
    assert play.error(joining) is elsewhere
    assert play.heartbeat(member, 1) is elsewhere
    assert play.coordinator.groups() == []
    assert play.coordinator.next_deadline_ms() is None


def test_unloading_a_partition_answers_pending_writes_with_not_coordinator() -> None:
    play = Play()
    play.commit(1, group_id="gone")
    member, _ = play.joined(play.join())
    play.holds_appends = True
    syncing = play.sync(member, 1, {member: b"A"})
    committing = play.commit(7, group_id="simple")
    deleting = play.delete_group("gone")
    play.run(play.coordinator.unload(PARTITION, play.at))
    elsewhere = ErrorCode.not_coordinator
    assert play.error(syncing) is elsewhere
    assert play.commit_error(committing) is elsewhere
    assert play.error(deleting) is elsewhere
    # The result of the append arrives too late and changes nothing.
    load(play.coordinator, PARTITION, play.log, play.at)
    play.write()
    assert play.offset(group_id="simple") is None


def test_unloading_a_partition_keeps_the_groups_of_other_partitions() -> None:
    play = Play()
    play.coordinator.partition_count = 2
    load(play.coordinator, 1, [], play.at)
    names = [f"group-{number}" for number in range(10)]
    for name in names:
        play.holds_appends = True
        play.commit(1, group_id=name)
        append = play.held.pop()
        assert append.partition == group_partition(name, 2)
        play.run(play.coordinator.appended(append.token, ErrorCode.none, play.at))
    play.run(play.coordinator.unload(1, play.at))
    left = [group["group_id"] for group in play.coordinator.groups()]
    assert left == [name for name in names if group_partition(name, 2) == 0]


def test_loading_skips_unreadable_records() -> None:
    play = Play()
    play.commit(7)
    strange = [(b"\x00\x09other kinds of state", b"x"), (b"\x00\x01", b"cut"), (None, b"no key")]
    unreadable = [*strange, (write_group_key("cut"), b"\x00\x03\x00")]
    play.coordinator = Play(is_loaded=False).coordinator
    assert load(play.coordinator, PARTITION, [*unreadable, *play.log], play.at) == 3
    assert play.offset() == 7


def test_partition_can_be_loaded_in_pieces() -> None:
    play = Play()
    play.commit(7)
    play.commit(8, partition=("t", 1))
    play.commit(9)
    coordinator = Play(is_loaded=False).coordinator
    coordinator.start_loading(PARTITION)
    for record in play.records:
        coordinator.replay(PARTITION, [record])
    coordinator.finish_loading(PARTITION, play.at)
    assert coordinator.committed(GROUP, None) == play.coordinator.committed(GROUP, None)
