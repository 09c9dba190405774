"""Plan which replicas move when a node joins or leaves: as few as give each node its share. Pure functions.

Replicas are in order of preference, and the first is the preferred leader. A new replica takes the position of the one
that it replaces, so leadership is balanced along with the data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

Partition = tuple[str, int]
Replicas = tuple[int, ...]


def moves_to(new: int, replicas: Mapping[Partition, Replicas], brokers: Sequence[int]) -> dict[Partition, Replicas]:
    """Return the new replicas of each partition that gets one on `new`; `brokers` are all brokers, including `new`."""
    current = dict(sorted(replicas.items()))
    load, leads = _count(current.values(), brokers)
    share = sum(load.values()) // len(brokers)
    leader_share = len(current) // len(brokers)
    while load[new] < share:
        wants_to_lead = leads[new] < leader_share
        move = _move_from_fullest(new, current, load, leads, wants_to_lead)
        if move is None:
            break
        partition, position = move
        old = current[partition][position]
        current[partition] = _replaced(current[partition], position, new)
        load[old] -= 1
        load[new] += 1
        if position == 0:
            leads[old] -= 1
            leads[new] += 1
    return {partition: after for partition, after in current.items() if after != replicas[partition]}


def moves_from(
    leaving: int, replicas: Mapping[Partition, Replicas], brokers: Sequence[int]
) -> dict[Partition, Replicas]:
    """Return new replicas for every partition on `leaving`; a partition loses a replica if no broker can take it.

    `brokers` are the brokers that stay. A partition is left out if its only replica is on `leaving` and no broker can
    take it.
    """
    staying = [broker for broker in brokers if broker != leaving]
    load, leads = _count(replicas.values(), staying)
    moves: dict[Partition, Replicas] = {}
    for partition, before in sorted(replicas.items()):
        if leaving not in before:
            continue
        position = before.index(leaving)
        free = [broker for broker in staying if broker not in before]
        if free:
            chosen = min(free, key=lambda broker: (leads[broker] if position == 0 else 0, load[broker], broker))
            moves[partition] = _replaced(before, position, chosen)
            load[chosen] += 1
        elif len(before) > 1:
            moves[partition] = tuple(broker for broker in before if broker != leaving)
        else:
            continue
        if position == 0:
            leads[moves[partition][0]] += 1
    return moves


def _count(all_replicas: Iterable[Replicas], brokers: Sequence[int]) -> tuple[Counter[int], Counter[int]]:
    """Return each broker's replica count, and the number of partitions that it is the preferred leader of."""
    load: Counter[int] = Counter(dict.fromkeys(brokers, 0))
    leads: Counter[int] = Counter(dict.fromkeys(brokers, 0))
    for replicas in all_replicas:
        load.update(replicas)
        leads.update(replicas[:1])
    return load, leads


def _move_from_fullest(
    new: int, current: Mapping[Partition, Replicas], load: Counter[int], leads: Counter[int], wants_to_lead: bool
) -> tuple[Partition, int] | None:
    """Return a partition without a replica on `new`, and the position in it of the most loaded broker."""

    def rank(move: tuple[Partition, int]) -> tuple[bool, int, int]:
        partition, position = move
        broker = current[partition][position]
        fits = (position == 0) == wants_to_lead
        return fits, leads[broker] if position == 0 and wants_to_lead else load[broker], load[broker]

    moves = (
        (partition, position)
        for partition, replicas in current.items()
        if new not in replicas
        for position, broker in enumerate(replicas)
        # Moving between brokers that differ by one would only reverse the difference.
        if load[broker] > load[new] + 1
    )
    return max(moves, key=rank, default=None)


def _replaced(replicas: Replicas, position: int, broker: int) -> Replicas:
    return (*replicas[:position], broker, *replicas[position + 1 :])
