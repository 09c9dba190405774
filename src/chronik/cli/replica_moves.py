"""Which replicas move when a node comes or goes: as few as give each node its share. Pure.

Replicas are in order of preference, the first being the preferred leader; a replacement takes the place of the one it
replaces, so leadership is shared out along with the data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

Partition = tuple[str, int]
Replicas = tuple[int, ...]


def moves_to(new: int, replicas: Mapping[Partition, Replicas], brokers: Sequence[int]) -> dict[Partition, Replicas]:
    """The partitions that get a replica on `new`, with all their replicas; `brokers` are all, the new one included."""
    current = dict(sorted(replicas.items()))
    load, leads = _count(current.values(), brokers)
    share = sum(load.values()) // len(brokers)
    leader_share = len(current) // len(brokers)
    while load[new] < share:
        wants_to_lead = leads[new] < leader_share
        found = _move_from_fullest(new, current, load, leads, wants_to_lead)
        if found is None:
            break
        partition, position = found
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
    """New replicas for every partition on `leaving`. One that finds no broker without a replica loses one replica.

    `brokers` are those that stay. A partition whose only replica was there and that finds no broker is left out.
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
    """How many replicas each broker has, and how many it is the preferred leader of."""
    load: Counter[int] = Counter(dict.fromkeys(brokers, 0))
    leads: Counter[int] = Counter(dict.fromkeys(brokers, 0))
    for replicas in all_replicas:
        load.update(replicas)
        leads.update(replicas[:1])
    return load, leads


def _move_from_fullest(
    new: int, current: Mapping[Partition, Replicas], load: Counter[int], leads: Counter[int], wants_to_lead: bool
) -> tuple[Partition, int] | None:
    """A partition without a replica on `new`, and the place in it of the broker that has the most to give."""
    best: tuple[tuple[int, int, int], Partition, int] | None = None
    for partition, replicas in current.items():
        if new in replicas:
            continue
        for position, broker in enumerate(replicas):
            # Moving between brokers that differ by one would only turn the difference round.
            if load[broker] <= load[new] + 1:
                continue
            fits = (position == 0) == wants_to_lead
            rank = (int(fits), leads[broker] if position == 0 and wants_to_lead else load[broker], load[broker])
            if best is None or rank > best[0]:
                best = (rank, partition, position)
    return None if best is None else (best[1], best[2])


def _replaced(replicas: Replicas, position: int, broker: int) -> Replicas:
    return (*replicas[:position], broker, *replicas[position + 1 :])
