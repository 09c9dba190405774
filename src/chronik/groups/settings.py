"""The limits and times that the group coordinator works with; named after Kafka's broker settings."""

from dataclasses import dataclass

INITIAL_DELAYS_MAX = 30
"""A first rebalance waits for late joiners at most this many initial delays, however many keep coming."""

NEW_MEMBER_JOIN_TIMEOUT_MS = 300_000
"""A member that has not yet had an answer to its first JoinGroup cannot send heartbeats, so that its session
timeout does not count; it may wait this long."""


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """How one coordinator treats its groups.

    `initial_rebalance_delay_ms` is how long the first rebalance of an empty group waits for more members. Kafka waits
    3 s; here 100 ms, so that one consumer starts almost at once while members started together still join together.
    """

    session_timeout_ms_min: int = 6_000
    session_timeout_ms_max: int = 1_800_000
    initial_rebalance_delay_ms: int = 100
    members_max: int = 10_000
    offset_metadata_bytes_max: int = 4_096
    offsets_retention_ms: int = 7 * 24 * 3_600_000
