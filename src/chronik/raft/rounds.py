"""Heartbeat rounds: how a leader knows that it still led at some moment. Its lease and its reads depend on them.

Each broadcast of heartbeats is a numbered round. When a majority has answered a round, no other node was leader when
the round started. The lease counts from that moment, not from the replies: from then on a majority refuses votes for an
election timeout.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from chronik.raft.ready import ReadAnswer, Reason, Refused
from chronik.raft.state import RaftState


@dataclass(frozen=True, slots=True)
class WaitingRead:
    """A read that arrived at commit index `index` and needs a majority's reply to `round` or a later one."""

    token: int
    index: int
    round: int


class Rounds:
    """Invariant: `contact_ms` is the start of the latest round that a majority has answered."""

    def __init__(self, state: RaftState) -> None:
        self._state = state
        self.number = 0
        self.contact_ms = state.now_ms
        self.lease_from_ms: int | None = None
        """None until a majority has answered this leader; being elected alone does not make voters refuse votes."""
        self._begun: deque[tuple[int, int]] = deque()
        self._reads: deque[WaitingRead] = deque()

    def begin(self) -> int:
        """Start a new round now and return its number."""
        self.number += 1
        self._begun.append((self.number, self._state.now_ms))
        return self.number

    def answered(self, number: int) -> None:
        """Note that a majority has answered round `number`, and so all rounds before it."""
        while self._begun and self._begun[0][0] <= number:
            _, self.contact_ms = self._begun.popleft()
            self.lease_from_ms = self.contact_ms

    @property
    def wants_round(self) -> bool:
        """Whether reads wait for a round that has not started, and no earlier round for reads is pending."""
        return bool(self._reads) and self._reads[0].round > self.number

    def add_read(self, token: int, index: int) -> Refused | None:
        """Queue a read. Reads that arrive while a round for earlier reads is pending share the next one."""
        if len(self._reads) >= self._state.settings.reads_waiting_max:
            return Refused(Reason.BUSY, self._state.node_id)
        self._reads.append(WaitingRead(token, index, self.number + 1))
        return None

    def confirm_reads(self, number: int, established_index: int) -> None:
        """Answer the reads that a majority's reply to round `number` confirms.

        A new leader learns what earlier leaders committed when its own first entry (`established_index`) is committed.
        """
        state = self._state
        if state.commit_index < established_index:
            return
        while self._reads and self._reads[0].round <= number:
            read = self._reads.popleft()
            state.confirmed_reads.append(ReadAnswer(read.token, max(read.index, established_index)))

    def refuse_reads(self) -> None:
        self._state.reads_refused.extend(read.token for read in self._reads)
        self._reads.clear()
