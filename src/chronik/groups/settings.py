"""The group coordinator's limits and timeouts, named after Kafka's broker settings."""

from dataclasses import dataclass

INITIAL_DELAYS_MAX = 30
"""A first rebalance waits for late joiners for at most this many initial delays, however many keep coming."""

NEW_MEMBER_JOIN_TIMEOUT_MS = 300_000
"""Replaces a new member's session timeout: it cannot send heartbeats before its first JoinGroup response."""


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The settings of one coordinator.

    `initial_rebalance_delay_ms` is how long the first rebalance of an empty group waits for more members. It is 100 ms,
    not 3 s as in Kafka: a single consumer starts almost at once, and members started together still join together.
    """

    session_timeout_ms_min: int = 6_000
    session_timeout_ms_max: int = 1_800_000
    initial_rebalance_delay_ms: int = 100
    members_max: int = 10_000
    offset_metadata_bytes_max: int = 4_096
    offsets_retention_ms: int = 7 * 24 * 3_600_000
