"""Finds cycles of committed transactions: G0 and G1c, after Adya and Jepsen.

An edge leads from a transaction to one that must come after it:

    write-write   in some partition, the next record of a committed transaction belongs to the other transaction
    write-read    the other transaction consumed a record of the first one with a read_committed consumer

Jepsen's read-write edges are left out: a consumer reads up to some offset, so it misses later records by design.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from chronik.testing.anomalies import Anomaly, AnomalyKind
from chronik.testing.partition_history import PartitionHistory
from chronik.testing.transactions import Outcome, TransactionHistory

Edges = dict[str, dict[str, str]]
"""By transaction: the transactions after it, each with the reason in words."""
CYCLE_SHOWN_MAX = 8


class CycleCheck:
    """Yields one anomaly for each group of transactions in which each one precedes all others."""

    def __init__(self, history: TransactionHistory, partitions: PartitionHistory) -> None:
        self._history = history
        self._partitions = partitions

    def anomalies(self) -> Iterator[Anomaly]:
        writes, reads = self._write_edges(), self._read_edges()
        yield from self._cycles(AnomalyKind.G0, writes, writes)
        yield from self._cycles(AnomalyKind.G1C, reads, reads)
        both = {name: {**writes.get(name, {}), **reads.get(name, {})} for name in {**writes, **reads}}
        circular = component_of(reads)
        mixed = {
            before: {name: why for name, why in after.items() if not _is_inside(circular, before, name)}
            for before, after in reads.items()
        }
        yield from self._cycles(AnomalyKind.G1C_WRITE_ORDER, both, mixed)

    def _write_edges(self) -> Edges:
        logs: dict[str, list[tuple[int, str]]] = {}
        for transaction in self._history.committed():
            for value in transaction.values:
                place = self._partitions.place_of(value)
                if place is not None:
                    logs.setdefault(place.partition, []).append((place.offset, transaction.name))
        edges: Edges = {}
        for partition, log in logs.items():
            log.sort()
            for (offset, before), (next_offset, after) in pairwise(log):
                if before != after:
                    why = f"wrote {partition}@{offset} before {next_offset} of"
                    edges.setdefault(before, {}).setdefault(after, why)
        return edges

    def _read_edges(self) -> Edges:
        edges: Edges = {}
        for reader in self._history.committed():
            for _, polled in reader.inputs:
                if polled.consumer not in self._history.read_committed:
                    continue
                for partition, offset, value in polled.records:
                    writer = self._history.of(value)
                    if writer is not None and writer is not reader and writer.outcome is Outcome.COMMIT:
                        why = f"wrote {partition}@{offset}, which was read by"
                        edges.setdefault(writer.name, {}).setdefault(reader.name, why)
        return edges

    def _cycles(self, kind: AnomalyKind, edges: Edges, closing: Edges) -> Iterator[Anomaly]:
        """For each strongly connected component, show a cycle through one of the `closing` edges."""
        inside = component_of(edges)
        shown: set[int] = set()
        for before, afters in closing.items():
            for after in afters:
                if _is_inside(inside, before, after) and inside[before] not in shown:
                    shown.add(inside[before])
                    yield self._anomaly(kind, [before, *_path(edges, after, before)], edges, closing)

    def _anomaly(self, kind: AnomalyKind, cycle: list[str], edges: Edges, closing: Edges) -> Anomaly:
        steps = [
            f"{before} {closing.get(before, {}).get(after) or edges[before][after]} {after}"
            for before, after in pairwise(cycle)
        ]
        first = self._history.transactions[cycle[0]]
        invoked = sorted(
            self._partitions.sends[transaction.values[0]].invoked
            for name in cycle[1:]
            if (transaction := self._history.transactions[name]).values
        )
        place = self._partitions.place_of(first.values[0])
        more = f"; and {len(steps) - CYCLE_SHOWN_MAX} more steps" if len(steps) > CYCLE_SHOWN_MAX else ""
        evidence = "; ".join(steps[:CYCLE_SHOWN_MAX]) + more
        partition = "" if place is None else place.partition
        return Anomaly(kind, partition, evidence, tuple(invoked[:CYCLE_SHOWN_MAX]), first.producer)


def component_of(edges: Mapping[str, Iterable[str]]) -> dict[str, int]:
    """Return the strongly connected component of each node (Tarjan's algorithm, without recursion)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    component: dict[str, int] = {}
    stack: list[str] = []
    components = 0
    for root in edges:
        if root in index:
            continue
        work = [(root, iter(edges.get(root, ())))]
        index[root] = low[root] = len(index)
        stack.append(root)
        while work:
            node, rest = work[-1]
            for after in rest:
                if after not in index:
                    index[after] = low[after] = len(index)
                    stack.append(after)
                    work.append((after, iter(edges.get(after, ()))))
                    break
                if after not in component:
                    low[node] = min(low[node], index[after])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    while True:
                        member = stack.pop()
                        component[member] = components
                        if member == node:
                            break
                    components += 1
    return component


def _is_inside(component: Mapping[str, int], before: str, after: str) -> bool:
    """Return whether an edge is inside a component, and so part of a cycle."""
    return before in component and component[before] == component.get(after)


def _path(edges: Mapping[str, Iterable[str]], start: str, goal: str) -> list[str]:
    """Return the nodes of a shortest path; there is one."""
    came_from = {start: start}
    waiting = deque([start])
    while goal not in came_from:
        node = waiting.popleft()
        for after in edges.get(node, ()):
            if after not in came_from:
                came_from[after] = node
                waiting.append(after)
    path = [goal]
    while path[-1] != start:
        path.append(came_from[path[-1]])
    return path[::-1]
