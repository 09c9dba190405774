"""The proposals of this node whose outcome is open."""

from __future__ import annotations

from collections import deque

from chronik.raft.ready import ProposalId


class Proposals:
    """Open proposals by rising index. Invariant: each one's entry is in this node's log as it was proposed."""

    __slots__ = ("_open", "dropped", "in_doubt")

    def __init__(self) -> None:
        self._open: deque[ProposalId] = deque()
        self.in_doubt: list[ProposalId] = []
        """To be reported with the next Ready, as is `dropped`."""
        self.dropped: list[ProposalId] = []

    def __len__(self) -> int:
        return len(self._open)

    def add(self, proposal: ProposalId) -> None:
        self._open.append(proposal)

    def committed(self, index: int) -> None:
        """Entries up to `index` are committed as they stand in the log; those who proposed them see it there."""
        while self._open and self._open[0].index <= index:
            self._open.popleft()

    def doubt(self, term: int) -> None:
        """This node leads no more in `term`: whoever leads next may commit what it proposed then, or overwrite it."""
        self.in_doubt.extend(proposal for proposal in self._open if proposal.term == term)

    def cut_from(self, index: int) -> None:
        """The next leader's entries took the place of those from `index` on."""
        dropped: list[ProposalId] = []
        while self._open and self._open[-1].index >= index:
            dropped.append(self._open.pop())
        self.dropped.extend(reversed(dropped))
