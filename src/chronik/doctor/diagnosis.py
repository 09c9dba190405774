"""The doctor's result: one verdict, its evidence, and the next step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

Verdict: TypeAlias = Literal[
    "healthy",
    "no-leader",
    "under-replicated",
    "watermark-not-advancing",
    "fetch-hang",
    "leadership-rejections",
    "open-transaction",
    "revocation-owed",
    "poison-pill",
    "consumer-stopped",
    "partition-imbalance",
    "expired-certificate",
    "wrong-listener",
    "not-authorized",
    "throttled",
]


class Evidence(msgspec.Struct, frozen=True, omit_defaults=True):
    """One fact. `text` is complete by itself. The other fields are for programs, and are absent if not applicable."""

    text: str
    partition: int | None = None
    node: int | None = None
    group: str | None = None
    client: str | None = None
    transactional_id: str | None = None
    since_s: float | None = None
    """How long the condition has lasted, as far as is known."""
    numbers: dict[str, float] = {}


class ExaminedPartition(msgspec.Struct, frozen=True):
    """One partition at the end of the examination. Unknown values are null."""

    partition: int
    leader: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    log_start_offset: int | None
    last_stable_offset: int | None
    high_watermark: int | None
    log_end_offset: int | None
    watermark_lag: int | None
    fetch_ms: float | None
    """The duration of the doctor's slowest fetch."""
    groups: dict[str, dict[str, int | None]]
    """By group: `committed` and `lag`."""


class Diagnosis(msgspec.Struct, frozen=True):
    """The verdict. `also` lists the other verdicts that apply, which come later in the order of precedence."""

    topic: str
    verdict: Verdict
    summary: str
    next_step: str
    evidence: tuple[Evidence, ...]
    partitions: tuple[ExaminedPartition, ...]
    also: tuple[Verdict, ...]
    group: str | None
    seconds: float
    """How long the examination watched the topic."""
    notes: tuple[str, ...]
    """What could not be queried, so that missing data is not mistaken for health."""

    def to_json(self) -> dict[str, Any]:
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built


class Finding(NamedTuple):
    """The result of a rule, which matches if there is evidence."""

    verdict: Verdict
    summary: str
    next_step: str
    evidence: list[Evidence]


def nodes_of(evidence: Iterable[Evidence]) -> list[int]:
    return sorted({item.node for item in evidence if item.node is not None})


def listed(items: Iterable[object]) -> str:
    """Format as `1, 2, 3`, or `none` if empty."""
    return ", ".join(map(str, items)) or "none"
