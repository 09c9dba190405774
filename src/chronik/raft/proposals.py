"""This node's proposals whose outcome is still unknown."""

from __future__ import annotations

from collections import deque

from chronik.raft.ready import ProposalId


class Proposals:
    """Pending proposals by increasing index. Invariant: each one's entry is in this node's log as proposed."""

    __slots__ = ("_open", "dropped", "in_doubt")

    def __init__(self) -> None:
        self._open: deque[ProposalId] = deque()
        self.in_doubt: list[ProposalId] = []
        """Reported with the next Ready, like `dropped`."""
        self.dropped: list[ProposalId] = []

    def __len__(self) -> int:
        return len(self._open)

    def add(self, proposal: ProposalId) -> None:
        self._open.append(proposal)

    def committed(self, index: int) -> None:
        """Note that entries up to `index` are committed as in the log; proposers see them in `Ready.committed`."""
        while self._open and self._open[0].index <= index:
            self._open.popleft()

    def doubt(self, term: int) -> None:
        """Note that this node no longer leads in `term`: the next leader may commit or overwrite its proposals."""
        self.in_doubt.extend(proposal for proposal in self._open if proposal.term == term)

    def cut_from(self, index: int) -> None:
        """Note that the next leader's entries replaced those from `index` on."""
        dropped: list[ProposalId] = []
        while self._open and self._open[-1].index >= index:
            dropped.append(self._open.pop())
        self.dropped.extend(reversed(dropped))
