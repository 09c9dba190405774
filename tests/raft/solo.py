"""One node in isolation: the test acts for all its peers and completes its writes."""

from __future__ import annotations

from random import Random

from tests.raft.harness import SETTINGS, founded, store_id, stored_log
from tests.raft.memory_store import MemoryRaftStore

from chronik.raft.messages import Append, AppendReply, Body, Heartbeat, HeartbeatReply, Message, VoteReply
from chronik.raft.node import RaftNode
from chronik.raft.ready import Event, ProposalId, Ready, RoleKind
from chronik.raft.state import RaftSettings
from chronik.raft.store import Entry, Persist, Snapshot, StoredState

THREE = founded((1, 2, 3))


class Solo:
    """Node 1 by default. `sent` holds the messages that were sent, oldest first."""

    def __init__(
        self,
        stored: StoredState | None = None,
        *,
        node_id: int = 1,
        settings: RaftSettings = SETTINGS,
        now_ms: int = 1_000,
        writes: bool = True,
        founders: tuple[int, ...] = (),
    ) -> None:
        self.now_ms = now_ms
        self.writes = writes
        """Whether writes complete immediately; otherwise `write` completes them."""
        stored = stored or stored_log(node_id, [1], THREE)
        self.store = MemoryRaftStore(stored.store_id)
        self.store.stored = stored
        self.node = RaftNode(
            node_id, stored, settings, Random(1), now_ms, seeds=founders, founders=founders, address=f"host-{node_id}"
        )
        self.sent: list[Message] = []
        self.committed: list[Entry] = []
        self.restored: Snapshot | None = None
        self.events: list[Event] = []
        self.dropped: list[ProposalId] = []
        self.writing: Ready | None = None
        self.settle()

    # Actions

    def hear(self, source: int, term: int, body: Body, *, store: int | None = None) -> list[Message]:
        """Deliver a message and return the messages that the node sends in response."""
        count = len(self.sent)
        source_store = store_id(source if store is None else store)
        message = Message(source, source_store, self.node.node_id, self.store.stored.store_id, term, body)
        self.node.step(message, self.now_ms)
        self.settle()
        return self.sent[count:]

    def wait(self, duration_ms: int) -> list[Message]:
        """Advance the clock, firing timers when they are due."""
        count = len(self.sent)
        end_ms = self.now_ms + duration_ms
        while (deadline_ms := self.node.next_deadline_ms()) is not None and deadline_ms <= end_ms:
            self.now_ms = max(self.now_ms, deadline_ms)
            self.node.tick(self.now_ms)
            self.settle()
        self.now_ms = end_ms
        return self.sent[count:]

    def write(self) -> list[Message]:
        """Complete the pending write and return the messages that the node sends after it."""
        count = len(self.sent)
        ready = self.writing
        assert ready is not None and ready.persist is not None
        self.writing = None
        self.store.persist(ready.persist)
        self.sent += ready.messages_after
        self.node.persisted(ready, self.now_ms)
        self.settle()
        return self.sent[count:]

    def propose(self, data: bytes = b"x") -> ProposalId:
        proposal = self.node.propose(data, self.now_ms)
        assert isinstance(proposal, ProposalId)
        self.settle()
        return proposal

    def settle(self) -> None:
        while (ready := self.node.ready()) is not None:
            self._carry_out(ready)

    def restarted(self, now_ms: int | None = None) -> Solo:
        """Return the same node after a crash, with what was written."""
        return Solo(self.store.stored, node_id=self.node.node_id, now_ms=self.now_ms if now_ms is None else now_ms)

    # Shortcuts

    def stand(self) -> list[Message]:
        """Advance the clock until the node requests pre-votes; return what it sent."""
        count = len(self.sent)
        while self.node.role is RoleKind.FOLLOWER:
            deadline_ms = self.node.next_deadline_ms()
            assert deadline_ms is not None
            self.wait(deadline_ms - self.now_ms)
        return self.sent[count:]

    def lead(self, *, establish: bool = True) -> None:
        """Make the node leader with the vote of node 2, which also acknowledges its first entry if requested."""
        self.stand()
        self.hear(2, self.node.term + 1, VoteReply(True, is_pre_vote=True))
        self.hear(2, self.node.term, VoteReply(True))
        assert self.node.is_leader
        if establish:
            self.acknowledge(2)
            self.beat(2)

    def acknowledge(self, source: int, index: int | None = None) -> list[Message]:
        return self.hear(source, self.node.term, AppendReply(self.node.last_index if index is None else index))

    def beat(self, source: int) -> list[Message]:
        """Let a peer answer the latest round of heartbeats."""
        rounds = [message.body.round for message in self.sent if isinstance(message.body, Heartbeat)]
        return self.hear(source, self.node.term, HeartbeatReply(rounds[-1]))

    def append(self, term: int, prev: tuple[int, int], entries: tuple[Entry, ...], commit: int = 0) -> list[Message]:
        """Send entries from node 2, as leader of `term`."""
        return self.hear(2, term, Append(prev[0], prev[1], entries, commit))

    @property
    def persisting(self) -> Persist | None:
        return None if self.writing is None else self.writing.persist

    def _carry_out(self, ready: Ready) -> None:
        self.sent += ready.messages
        self.restored = ready.restore or self.restored
        self.committed += ready.committed
        self.events += ready.events
        self.dropped += ready.proposals_dropped
        if ready.persist is not None:
            assert self.writing is None
            self.writing = ready
            if self.writes:
                self.write()


def bodies(messages: list[Message], target: int | None = None) -> list[Body]:
    return [message.body for message in messages if target in (None, message.target)]
