"""In which order acts are played: every one alone, in an order of its own each time, and a mix after every second."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence

OPERATION_SHARE = 0.25
"""Of the mixes: an operation or a damage on a cluster that is slow, instead of several faults."""


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
        return chance.choice(soft), chance.choice(alone)
    return tuple(chance.sample([*hard, *soft], chance.randint(2, 3)))
