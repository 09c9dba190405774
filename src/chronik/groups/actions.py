"""What goes into the group state machine with every event, and what comes out of it.

The node hands in a `Moment` with each event, carries out the `Action`s in the order given, and reports each `Append`
back with `GroupCoordinator.appended`, in the order of the appends of one partition.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

Record: TypeAlias = tuple[bytes, bytes | None]
"""Key and value of a record of the offsets topic; a null value is a tombstone."""


class Moment(NamedTuple):
    """When an event happened, by both clocks.

    `now_ms` never goes back and measures timeouts; `wall_ms` is what records carry and offset retention counts by.
    """

    now_ms: int
    wall_ms: int


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer the request that came with `token`. Every token is answered exactly once.

    The values have the names of the newest version of the response; the API module cuts them to the version asked.
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
