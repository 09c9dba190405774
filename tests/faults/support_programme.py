"""The order of the acts: each one alone, in a new random order each time, and a mix after every second act."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence

OPERATION_SHARE = 0.25
"""The share of mixes that run an operation or damage on a slow cluster, instead of several faults."""


SLOW_DISK = "slow-disk"
"""Not mixed with operations and damage, which wait until all replicas are in sync: a replica on a slow disk may lag for
as long as its disk is slow.
"""


def programme(
    chance: random.Random, hard: Sequence[str], soft: Sequence[str], alone: Sequence[str], only: Collection[str] = ()
) -> Iterator[tuple[str, ...]]:
    """Yield acts and mixes forever. With `only`, yield these acts and no mixes."""
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
