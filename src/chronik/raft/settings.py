"""The timeouts and limits of one Raft node; every member of a cluster uses the same values."""

from __future__ import annotations

from dataclasses import dataclass

ROUNDING_MS = 2
"""Two clocks that count whole milliseconds may each be off by one."""


@dataclass(frozen=True, slots=True)
class RaftSettings:
    """Times are by the node's monotonic clock. A follower gets several heartbeats per timeout: this is checked."""

    heartbeat_interval_ms: int = 100
    election_timeout_ms: int = 600
    """How long a node refuses votes after hearing from a leader. It campaigns after one to two times this long."""
    clock_drift_percent: int = 5
    """How much a member's clock rate may differ from true time: the lease assumes this bound."""
    hello_interval_ms: int = 200
    transfer_timeout_ms: int = 600

    entry_bytes_max: int = 8 * 1024 * 1024
    append_bytes_max: int = 512 * 1024
    """The maximum size of one append, unless it is a single larger entry."""
    append_entries_max: int = 1_000
    in_flight_appends_max: int = 32
    in_flight_bytes_max: int = 4 * 1024 * 1024
    uncommitted_entries_max: int = 20_000
    uncommitted_bytes_max: int = 64 * 1024 * 1024
    committed_bytes_max: int = 1024 * 1024
    """The maximum size of the entries to apply in one Ready, unless it is a single larger entry."""
    snapshot_chunk_bytes: int = 512 * 1024
    snapshot_bytes_max: int = 256 * 1024 * 1024
    trailing_entries: int = 1_000
    """How many entries before a snapshot are kept for followers that lag a little."""
    reads_waiting_max: int = 10_000
    promotion_lag_entries_max: int = 100

    def __post_init__(self) -> None:
        if self.election_timeout_ms < 3 * self.heartbeat_interval_ms:
            raise ValueError("election_timeout_ms must be at least three heartbeat_interval_ms")
        if self.lease_ms <= self.heartbeat_interval_ms:
            raise ValueError("with this clock_drift_percent a lease would end before the next heartbeat")

    @property
    def lease_ms(self) -> int:
        """How long no other leader can be elected, counted from sending a heartbeat that a majority answers.

        Voters refuse votes for the election timeout by their clocks, which may run fast while the leader's runs slow.
        """
        drift = self.clock_drift_percent
        return self.election_timeout_ms * (100 - drift) // (100 + drift) - ROUNDING_MS
