"""Follows the members of groups through a history: a partition never has two owners at the same time.

A member owns a partition from its assignment until an assignment without it. Recorded terms may overlap in a healthy
cluster: a member that was cut off learns late that its group continued without it. Two cases prove an overlap:

- A commit of a later generation was acknowledged, and after that a commit of the earlier owner. An acknowledgement
  shows that the member's generation was the current one between request and response, so the order is certain.
- The earlier owner receives records more than a session after such a commit. A member whose heartbeats fail or get no
  response gives up within its session, so some coordinator still answers its heartbeats.
"""

from __future__ import annotations

from dataclasses import dataclass

from chronik.testing.anomalies import Anomaly, AnomalyKind
from chronik.testing.operations import Assigned, Committed, Operation, Polled


@dataclass(slots=True)
class Term:
    """A member's ownership of one partition, and the first proof that another member owned it later."""

    since_s: float
    assigned: int
    ended_s: float | None = None
    ended_by: str = ""
    ended: int = -1
    is_reported: bool = False


class OwnershipCheck:
    """Takes the operations in order. `session_s` is how long a member may continue without a response, plus slack."""

    def __init__(self, session_s: float | None) -> None:
        self._session_s = session_s
        self._groups: dict[str, str] = {}
        self._terms: dict[tuple[str, str], dict[str, Term]] = {}
        """By group and partition: the open term of each member."""
        self.anomalies: list[Anomaly] = []

    def take(self, number: int, operation: Operation) -> None:
        match operation:
            case Assigned(at_s=at_s, consumer=consumer, positions=positions, group=str(group)):
                self._groups[consumer] = group
                for (name, partition), terms in self._terms.items():
                    if name == group and partition not in positions:
                        terms.pop(consumer, None)
                for partition in positions:
                    self._terms.setdefault((group, partition), {})[consumer] = Term(at_s, number)
            case Committed(invoked_s=invoked_s, consumer=consumer, group=group, offsets=offsets):
                for partition in offsets:
                    self._claim(number, group, partition, consumer, invoked_s, "committed it")
                    self._supersede(number, operation, partition)
            case Polled(invoked_s=invoked_s, consumer=consumer, records=records) if self._session_s is not None:
                group = self._groups.get(consumer, "")
                how = f"received records of it at {invoked_s:.1f} s"
                for partition in dict.fromkeys(partition for partition, _, _ in records):
                    self._claim(number, group, partition, consumer, invoked_s - self._session_s, how)

    def _claim(self, number: int, group: str, partition: str, consumer: str, at_s: float, how: str) -> None:
        """Report an overlap if the member acts as the owner although its term ended before `at_s`."""
        term = self._terms.get((group, partition), {}).get(consumer)
        if term is None or term.ended_s is None or term.is_reported or at_s <= term.ended_s:
            return
        term.is_reported = True
        evidence = (
            f"{consumer} owned {partition} in group {group} since {term.since_s:.1f} s and {how}, "
            f"after {term.ended_by} had committed it at {term.ended_s:.1f} s"
        )
        operations = (term.assigned, term.ended, number)
        self.anomalies.append(Anomaly(AnomalyKind.OWNERSHIP_OVERLAP, partition, evidence, operations))

    def _supersede(self, number: int, commit: Committed, partition: str) -> None:
        """End, at this commit's response, the terms of other members that were assigned before its request."""
        terms = self._terms.get((commit.group, partition), {})
        if commit.consumer not in terms:
            return
        for consumer, term in terms.items():
            if consumer != commit.consumer and term.ended_s is None and term.since_s <= commit.invoked_s:
                term.ended_s, term.ended_by, term.ended = commit.at_s, commit.consumer, number
