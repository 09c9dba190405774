"""The inputs and outputs of the group state machine.

The node passes a `Moment` with each event, carries out the `Action`s in order, and reports each `Append` to
`GroupCoordinator.appended`, in append order for each partition.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

Record: TypeAlias = tuple[bytes, bytes | None]
"""Key and value of an offsets topic record; a null value is a tombstone."""


class Moment(NamedTuple):
    """The time of an event, by both clocks.

    `now_ms` is monotonic and measures timeouts; `wall_ms` is the time in records, which offset retention uses.
    """

    now_ms: int
    wall_ms: int


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer the request that came with `token`. Every token is answered exactly once.

    The values use the field names of the newest response version; the API module reduces them to the requested one.
    """

    token: int
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Append:
    """Append the records to this partition of the offsets topic, then report `appended(token, ...)`."""

    partition: int
    records: tuple[Record, ...]
    token: int


@dataclass(frozen=True, slots=True)
class Rebalanced:
    """A group has formed a new generation with at least one member; for logs and metrics."""

    group_id: str
    generation: int
    member_count: int


Action: TypeAlias = Reply | Append | Rebalanced
