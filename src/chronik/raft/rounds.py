"""Heartbeat rounds: how a leader knows that it still led at some moment. Its lease and its reads rest on them.

Each broadcast of heartbeats is a round with a number. When a majority has answered a round, nobody else was leader when
the round began. For the lease that moment counts, not the one of the answer: from there on a majority refuses votes
for an election timeout.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from chronik.raft.ready import ReadAnswer, Reason, Refused
from chronik.raft.state import RaftState


@dataclass(frozen=True, slots=True)
class WaitingRead:
    """A read that came at the commit index `index` and needs a majority's answer to `round` or a later one."""

    token: int
    index: int
    round: int


class Rounds:
    """Invariant: `contact_ms` is when the latest round that a majority has answered began."""

    def __init__(self, state: RaftState) -> None:
        self._state = state
        self.number = 0
        self.contact_ms = state.now_ms
        self.lease_from_ms: int | None = None
        """None until a majority has answered this leader; its election alone promises no patience."""
        self._begun: deque[tuple[int, int]] = deque()
        self._reads: deque[WaitingRead] = deque()

    def begin(self) -> int:
        """The number of a new round, which begins now."""
        self.number += 1
        self._begun.append((self.number, self._state.now_ms))
        return self.number

    def answered(self, number: int) -> None:
        """A majority has answered round `number`, and all before it for that matter."""
        while self._begun and self._begun[0][0] <= number:
            _, self.contact_ms = self._begun.popleft()
            self.lease_from_ms = self.contact_ms

    @property
    def wants_round(self) -> bool:
        """Whether reads wait for a round that has not begun, while no earlier one is on its way for reads."""
        return bool(self._reads) and self._reads[0].round > self.number

    def add_read(self, token: int, index: int) -> Refused | None:
        """Reads that come while a round is on its way for others share the one after it."""
        if len(self._reads) >= self._state.settings.reads_waiting_max:
            return Refused(Reason.BUSY, self._state.node_id)
        self._reads.append(WaitingRead(token, index, self.number + 1))
        return None

    def confirm_reads(self, number: int, established_index: int) -> None:
        """Answers the reads that a majority's answer to round `number` confirms.

        A new leader does not know how far earlier ones committed until `established_index`, its own first entry, is.
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
