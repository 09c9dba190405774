"""In which order acts are played: every one alone, in an order of its own each time, and a mix after every second."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence

OPERATION_SHARE = 0.25
"""Of the mixes: an operation or a damage on a cluster that is slow, instead of several faults."""


SLOW_DISK = "slow-disk"
"""Not beside operations and damage, which wait for all replicas to be in sync: one on a slow disk may be behind for as
long as that is slow."""


def programme(
    chance: random.Random, hard: Sequence[str], soft: Sequence[str], alone: Sequence[str], only: Collection[str] = ()
) -> Iterator[tuple[str, ...]]:
    """Without end. With `only`, these acts and no mixes."""
    acts = sorted(name for name in (*hard, *soft, *alone) if not only or name in only)
    while True:
        for number, name in enumerate(chance.sample(acts, len(acts))):
            yield (name,)
            if number % 2 and not only:
                yield mix(chance, hard, soft, alone)


def mix(chance: random.Random, hard: Sequence[str], soft: Sequence[str], alone: Sequence[str]) -> tuple[str, ...]:
    if chance.random() < OPERATION_SHARE:
        return chance.choice([name for name in soft if name != SLOW_DISK]), chance.choice(alone)
    return tuple(chance.sample([*hard, *soft], chance.randint(2, 3)))
