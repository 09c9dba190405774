"""Bugs to plant, one at a time, which prove that the random runs can fail. None of this is in the core.

Each bug is a function that breaks something for the duration of a test and returns a factory for clusters with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from pytest import MonkeyPatch
from tests.raft.harness import Cluster
from tests.raft.memory_store import MemoryRaftStore

from chronik.raft.follower import Follower
from chronik.raft.leader import Leader
from chronik.raft.log import RaftLog
from chronik.raft.state import RaftState, ToCandidate, Transition
from chronik.raft.store import Entry, Persist, StoredState

Maker = Callable[..., Cluster]


class ForgetfulStore(MemoryRaftStore):
    """Persists everything except the vote."""

    def persist(self, persist: Persist) -> None:
        state = msgspec.structs.replace(persist.hard_state, vote=None)
        super().persist(Persist(state, persist.snapshot, persist.drop_before, persist.cut_from, persist.entries))


class SameIdCluster(Cluster):
    """A host that lost its disk restarts with its old store id."""

    def wipe(self, node_id: int) -> None:
        store_id = self.hosts[node_id].store.stored.store_id
        self.new_store_id, original = lambda: store_id, self.new_store_id  # type: ignore[method-assign]
        super().wipe(node_id)
        self.new_store_id = original  # type: ignore[method-assign]


def vote_is_not_durable(patch: MonkeyPatch) -> Maker:
    def new_store(stored: StoredState) -> MemoryRaftStore:
        store = ForgetfulStore(stored.store_id)
        store.stored = stored
        return store

    return _with(new_store=new_store)


def messages_go_before_the_write(patch: MonkeyPatch) -> Maker:
    return _with(sends_before_write=True)


def own_entries_count_before_the_write(patch: MonkeyPatch) -> Maker:
    def match_index(self: Leader, node_id: int) -> int:
        own = node_id == self._state.node_id
        return self._state.log.last_index if own else self.progress[node_id].match_index

    patch.setattr(Leader, "_match_index", match_index)
    return Cluster


def entries_of_old_terms_are_committed_by_counting(patch: MonkeyPatch) -> Maker:
    original = Leader._commit

    def commit(self: Leader) -> Transition | None:
        state = self._state
        index = state.membership.majority_value(self._match_index)
        if index > state.commit_index:
            state.commit_to(index)
        return original(self)

    patch.setattr(Leader, "_commit", commit)
    return Cluster


def votes_go_to_shorter_logs(patch: MonkeyPatch) -> Maker:
    patch.setattr(RaftLog, "is_up_to_date", lambda self, last_index, last_term: True)
    return Cluster


def appends_cut_what_is_known(patch: MonkeyPatch) -> Maker:
    """As in a package that was evaluated and rejected: every append truncates the log, even if the entries match."""

    def merge(self: RaftState, entries: tuple[Entry, ...]) -> None:
        if entries:
            if entries[0].index <= self.log.last_index:
                self.cut_from(entries[0].index)
            self.append(entries)

    patch.setattr(RaftState, "merge", merge)
    return Cluster


def votes_are_given_while_a_leader_is_heard(patch: MonkeyPatch) -> Maker:
    patch.setattr(RaftState, "hears_leader", property(lambda self: False))
    return Cluster


def restarted_nodes_vote_at_once(patch: MonkeyPatch) -> Maker:
    original = RaftState.__init__

    def init(self: RaftState, *arguments: Any) -> None:
        original(self, *arguments)
        self.stop_hearing()

    patch.setattr(RaftState, "__init__", init)
    return Cluster


def lease_outlives_the_hand_over(patch: MonkeyPatch) -> Maker:
    def lease_until_ms(self: Leader) -> int | None:
        lease_from_ms = self._lease_from_ms
        if lease_from_ms is None or not self.is_established:
            return None
        return lease_from_ms + self._state.settings.lease_ms

    patch.setattr(Leader, "lease_until_ms", property(lease_until_ms))
    return Cluster


def lost_disks_go_unnoticed(patch: MonkeyPatch) -> Maker:
    return SameIdCluster


def there_is_no_pre_vote(patch: MonkeyPatch) -> Maker:
    def tick(self: Follower) -> Transition | None:
        deadline_ms = self.deadline_ms
        is_due = deadline_ms is not None and self._state.now_ms >= deadline_ms
        return ToCandidate(is_pre_vote=False) if is_due else None

    patch.setattr(Follower, "tick", tick)
    return Cluster


def _with(**options: Any) -> Maker:
    def make(*arguments: Any, **more: Any) -> Cluster:
        return Cluster(*arguments, **(options | more))

    return make
