"""Coordinator guarantees under any order of joins, syncs, leaves, commits, failed writes, restarts and elapsed time.

- Every request is answered exactly once, at the latest when its partition is unloaded.
- A generation has one leader and one protocol, and the generation only increases while the group exists.
- The committed offsets are those in the log, by Kafka's rule for offsets in transactions.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.groups.kafka_offsets import KafkaOffsets
from tests.groups.play import GROUP, PARTITION, Play, load, subscription

from chronik.groups.any_group import GroupState
from chronik.groups.group import Group
from chronik.groups.offsets import Producer
from chronik.groups.records import OffsetKey, read_key
from chronik.groups.step import GroupSettings
from chronik.wire.errors import ErrorCode

INSTANCES = (None, None, "a", "b")
PROTOCOLS = (
    (("range", subscription("t")),),
    (("range", subscription("t")), ("sticky", subscription("t"))),
    (("sticky", subscription("u")), ("range", subscription("u"))),
)
WRITE_ERRORS = (ErrorCode.not_leader_or_follower, ErrorCode.not_enough_replicas, ErrorCode.request_timed_out)

GROUPS = (GROUP, "simple")

indexes = st.integers(0, 5)
producers = st.sampled_from((7, 8))
joins = st.fixed_dictionaries(
    {
        "protocols": st.sampled_from(PROTOCOLS),
        "member_id_required": st.booleans(),
        "can_skip_assignment": st.booleans(),
        "session_timeout_ms": st.sampled_from((6_000, 10_000, 60_000)),
        "rebalance_timeout_ms": st.sampled_from((0, 5_000, 60_000)),
    }
)


class GroupMachine(RuleBasedStateMachine):
    """Clients that remember the answers they received, and may use them late, twice, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.play = Play(is_loaded=False)
        # What clients have learned: member id, instance id, generation.
        self.known: list[tuple[str, str | None, int]] = []
        self.joining: dict[int, str | None] = {}
        self.leaders: dict[int, str] = {}
        self.generation = 0
        self.group: object = None
        self.epochs = {7: 0, 8: 0}

    @initialize(delay_ms=st.sampled_from((0, 100)), members_max=st.sampled_from((2, 100)))
    def start(self, delay_ms: int, members_max: int) -> None:
        self.play = Play(
            GroupSettings(initial_rebalance_delay_ms=delay_ms, members_max=members_max, offsets_retention_ms=100_000)
        )
        self.play.holds_appends = True

    def _learn(self) -> None:
        """Let clients read the answers to their joins."""
        for token in [each for each in self.joining if each in self.play.answers]:
            answer = self.play.answers[token]
            instance_id = self.joining.pop(token)
            if answer["error_code"] is ErrorCode.none:
                generation = answer["generation_id"]
                assert answer["protocol_name"] in {"range", "sticky"}
                if answer["members"]:
                    # Only the group leader receives the member list, and a generation has only one leader.
                    assert answer["leader"] == answer["member_id"]
                    ids = [each["member_id"] for each in answer["members"]]
                    assert answer["member_id"] in ids
                    assert len(ids) == len(set(ids))
                    if not answer["skip_assignment"]:
                        assert self.leaders.setdefault(generation, answer["leader"]) == answer["leader"]
                self.known.append((answer["member_id"], instance_id, generation))
            elif answer["error_code"] is ErrorCode.member_id_required:
                self.known.append((answer["member_id"], None, -1))

    def _pick(self, index: int) -> tuple[str, str | None, int]:
        return self.known[-1 - index] if index < len(self.known) else ("ghost", None, 1)

    @rule(changes=joins, instance_id=st.sampled_from(INSTANCES))
    def newcomer_joins(self, changes: dict[str, Any], instance_id: str | None) -> None:
        if instance_id is not None:
            changes = {**changes, "member_id_required": False}
        self.joining[self.play.join(instance_id=instance_id, **changes)] = instance_id

    @rule(index=indexes, changes=joins)
    def member_joins_again(self, index: int, changes: dict[str, Any]) -> None:
        member_id, instance_id, _ = self._pick(index)
        self.joining[self.play.join(member_id, instance_id=instance_id, **changes)] = instance_id

    @rule(index=indexes)
    def member_syncs(self, index: int) -> None:
        member_id, instance_id, generation = self._pick(index)
        assignments = {each: each.encode() for each, _, _ in self.known}
        self.play.sync(member_id, generation, assignments, instance_id=instance_id)

    @rule(index=indexes)
    def member_sends_a_heartbeat(self, index: int) -> None:
        member_id, instance_id, generation = self._pick(index)
        self.play.heartbeat(member_id, generation, instance_id)

    @rule(index=indexes)
    def member_leaves(self, index: int) -> None:
        member_id, instance_id, _ = self._pick(index)
        self.play.leave((member_id, instance_id))

    @rule(index=indexes, offset=st.integers(0, 100), topic=st.sampled_from("tu"))
    def member_commits(self, index: int, offset: int, topic: str) -> None:
        member_id, instance_id, generation = self._pick(index)
        self.play.commit(
            offset, generation=generation, member_id=member_id, instance_id=instance_id, partition=(topic, 0)
        )

    @rule(offset=st.integers(0, 100), group_id=st.sampled_from(GROUPS))
    def simple_consumer_commits(self, offset: int, group_id: str) -> None:
        self.play.commit(offset, group_id=group_id)

    @rule(index=indexes, offset=st.integers(0, 100), topic=st.sampled_from("tu"), producer_id=producers)
    def member_commits_in_a_transaction(self, index: int, offset: int, topic: str, producer_id: int) -> None:
        member_id, instance_id, generation = self._pick(index)
        self.play.commit(
            offset,
            generation=generation,
            member_id=member_id,
            instance_id=instance_id,
            partition=(topic, 0),
            producer=self._producer(producer_id),
        )

    @rule(
        offset=st.integers(0, 100),
        group_id=st.sampled_from(GROUPS),
        topic=st.sampled_from("tu"),
        producer_id=producers,
    )
    def producer_commits(self, offset: int, group_id: str, topic: str, producer_id: int) -> None:
        self.play.commit(offset, group_id=group_id, partition=(topic, 0), producer=self._producer(producer_id))

    def _producer(self, producer_id: int) -> Producer:
        return Producer(producer_id, self.epochs[producer_id])

    @rule(producer_id=producers, is_commit=st.booleans(), bumps=st.booleans(), is_early=st.booleans())
    def transaction_ends(self, producer_id: int, is_commit: bool, bumps: bool, is_early: bool) -> None:
        """Write a marker after the pending appends, and report it before their results if it `is_early`."""
        play = self.play
        self.epochs[producer_id] += bumps
        if not is_early:
            play.write()
            play.end_transaction(self._producer(producer_id), is_commit=is_commit)
            return
        written, play.held = play.held, []
        for append in written:
            play.put_in_log(append)
        play.end_transaction(self._producer(producer_id), is_commit=is_commit)
        for append in written:
            play.run(play.coordinator.appended(append.token, ErrorCode.none, play.at))

    @rule(producer_id=producers, is_commit=st.booleans())
    def marker_overtakes_pending_appends(self, producer_id: int, is_commit: bool) -> None:
        """Write a marker before the pending appends; the log refuses those of the same transaction."""
        play = self.play
        play.end_transaction(self._producer(producer_id), is_commit=is_commit)
        held, play.held = play.held, []
        for append in held:
            is_refused = append.producer is not None and append.producer.producer_id == producer_id
            if not is_refused:
                play.put_in_log(append)
            error = ErrorCode.invalid_txn_state if is_refused else ErrorCode.none
            play.run(play.coordinator.appended(append.token, error, play.at))

    @rule(group_id=st.sampled_from(GROUPS))
    def group_is_deleted(self, group_id: str) -> None:
        self.play.delete_group(group_id)

    @rule()
    def offsets_are_deleted(self) -> None:
        token = self.play.token()
        self.play.run(self.play.coordinator.delete_offsets(GROUP, [("t", 0), ("u", 0)], token, self.play.at))

    @rule()
    def topic_is_deleted(self) -> None:
        self.play.run(self.play.coordinator.topics_deleted(["u"], self.play.at))

    @rule()
    def old_offsets_expire(self) -> None:
        self.play.run(self.play.coordinator.expire_offsets(self.play.at))

    @rule(count=st.integers(1, 3))
    def log_takes_what_waits(self, count: int) -> None:
        self.play.write(count)

    @rule(error=st.sampled_from(WRITE_ERRORS))
    def log_refuses_a_write(self, error: ErrorCode) -> None:
        self.play.append_error = error
        self.play.write(1)
        self.play.append_error = ErrorCode.none

    @rule(ms=st.sampled_from((1, 100, 5_000, 30_000, 200_000)))
    def time_passes(self, ms: int) -> None:
        self.play.wait(ms)

    @rule()
    def coordinator_moves_away_and_back(self) -> None:
        play = self.play
        play.run(play.coordinator.unload(PARTITION, play.at))
        assert len(play.answers) == play.asked, "somebody still waits"
        self._learn()
        late, play.held = play.held, []
        load(play.coordinator, PARTITION, play.log, play.at)
        for append in late:
            assert play.coordinator.appended(append.token, ErrorCode.none, play.at) == []
        # Other members may form a generation again if it was not written.
        self.leaders.clear()

    @invariant()
    def generation_only_rises(self) -> None:
        self._learn()
        group = self.play.coordinator._groups.get(GROUP)
        assert group is None or isinstance(group, Group)
        if group is not self.group:
            self.group = group
            self.generation = 0
            self.leaders.clear()
        if group is not None:
            assert group.generation >= self.generation
            self.generation = group.generation

    @invariant()
    def group_is_consistent(self) -> None:
        for group in self.play.coordinator._groups.values():
            assert isinstance(group, Group)
            members = group.members
            assert group.awaiting_join_count == sum(each.join_token is not None for each in members.values())
            assert list(members) == [each.member_id for each in members.values()]
            assert group.static_members == {
                each.instance_id: each.member_id for each in members.values() if each.instance_id is not None
            }
            assert all(member_id in members for member_id in group.pending_sync)
            if group.state is GroupState.EMPTY:
                assert not members
                assert group.rebalance_deadline_ms is None
            if group.state in (GroupState.COMPLETING_REBALANCE, GroupState.STABLE):
                assert group.leader_id in members
                assert group.protocol_name is not None
                assert group.rebalance_deadline_ms is None
            if group.state is not GroupState.COMPLETING_REBALANCE:
                assert all(each.sync_token is None for each in members.values())
            if group.state is GroupState.PREPARING_REBALANCE:
                assert group.rebalance_deadline_ms is not None

    @invariant()
    def nobody_waits_without_a_deadline(self) -> None:
        play = self.play
        if len(play.answers) < play.asked:
            assert play.held or play.coordinator.next_deadline_ms() is not None

    @invariant()
    def log_gives_the_same_offsets(self) -> None:
        play = self.play
        reloaded = Play(play.settings, is_loaded=False).coordinator
        load(reloaded, PARTITION, play.log, play.at)
        expected = KafkaOffsets(play.log)
        for group_id in GROUPS:
            assert reloaded.committed(group_id, None) == play.coordinator.committed(group_id, None)
            offsets = {partition: each and each.offset for partition, each in play.offsets(group_id).items()}
            assert offsets == expected.of(group_id)
            assert reloaded.unstable_partitions(group_id) == expected.unstable(group_id)
            writing = {
                (about.topic, about.partition)
                for append in play.held
                for about in [read_key(key) for key, _ in append.records]
                if append.producer is not None and isinstance(about, OffsetKey) and about.group_id == group_id
            }
            assert play.coordinator.unstable_partitions(group_id) == expected.unstable(group_id) | writing

    @invariant()
    def only_open_transactions_are_remembered(self) -> None:
        coordinator = self.play.coordinator
        for (_, producer_id), transaction in coordinator._transactions.items():
            assert transaction.group_ids
            assert not transaction.markers
            in_groups = [
                group_id for group_id, group in coordinator._groups.items() if producer_id in group.offsets.producers()
            ]
            assert set(in_groups) <= set(transaction.group_ids)

    def teardown(self) -> None:
        """Let time pass until every pending request is answered, once appends succeed."""
        play = self.play
        play.holds_appends = False
        play.write()
        for _ in range(40):
            if len(play.answers) == play.asked:
                break
            play.wait(300_000)
        assert len(play.answers) == play.asked, "somebody waits forever"


GroupMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60)
TestGroupMachine = GroupMachine.TestCase
