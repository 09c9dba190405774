"""What a rule finds, and functions that the rules share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from chronik.doctor.diagnosis import Evidence, Verdict
from chronik.doctor.observations import PartitionSample

T = TypeVar("T")


class Finding(NamedTuple):
    verdict: Verdict
    summary: str
    next_step: str
    evidence: list[Evidence]


def last(samples: Sequence[T]) -> T:
    return samples[-1]


def standing_s(samples: Sequence[PartitionSample], is_so: Callable[[PartitionSample], bool]) -> float | None:
    """Return how long a condition has held without a break up to the last sample, or None if it does not hold now."""
    since: float | None = None
    for sample in reversed(samples):
        if not is_so(sample):
            break
        since = sample.at_s
    return None if since is None else samples[-1].at_s - since


def listed(numbers: Iterable[object]) -> str:
    """Format as `1, 2, 3`, or `none` if empty."""
    return ", ".join(map(str, numbers)) or "none"


def join(texts: Iterable[str]) -> str:
    return ", ".join(texts)
