"""The times and bounds of one Raft node; every member of a cluster runs with the same ones."""

from __future__ import annotations

from dataclasses import dataclass

ROUNDING_MS = 2
"""Two clocks that count whole milliseconds may each be off by one."""


@dataclass(frozen=True, slots=True)
class RaftSettings:
    """Times are by the node's own monotonic clock. A follower hears several heartbeats per timeout: that is checked."""

    heartbeat_interval_ms: int = 100
    election_timeout_ms: int = 600
    """For so long after hearing a leader a node refuses votes; it asks for votes after this to twice this."""
    clock_drift_percent: int = 5
    """Clocks of two members run at rates that differ from true time by at most this much: the lease's assumption."""
    hello_interval_ms: int = 200
    transfer_timeout_ms: int = 600

    entry_bytes_max: int = 8 * 1024 * 1024
    append_bytes_max: int = 512 * 1024
    """One append carries at most this much, or a single larger entry."""
    append_entries_max: int = 1_000
    in_flight_appends_max: int = 32
    in_flight_bytes_max: int = 4 * 1024 * 1024
    uncommitted_entries_max: int = 20_000
    uncommitted_bytes_max: int = 64 * 1024 * 1024
    committed_bytes_max: int = 1024 * 1024
    """One Ready hands out at most this much to apply, or a single larger entry."""
    snapshot_chunk_bytes: int = 512 * 1024
    snapshot_bytes_max: int = 256 * 1024 * 1024
    trailing_entries: int = 1_000
    """So many entries before a snapshot are kept for followers that lag a little."""
    reads_waiting_max: int = 10_000
    promotion_lag_entries_max: int = 100

    def __post_init__(self) -> None:
        if self.election_timeout_ms < 3 * self.heartbeat_interval_ms:
            raise ValueError("election_timeout_ms must be at least three heartbeat_interval_ms")
        if self.lease_ms <= self.heartbeat_interval_ms:
            raise ValueError("with this clock_drift_percent a lease would end before the next heartbeat")

    @property
    def lease_ms(self) -> int:
        """How long after sending a heartbeat that a majority answered no other leader can have been elected.

        Voters refuse votes for the election timeout by their clocks, which may run fast while the leader's runs slow.
        """
        drift = self.clock_drift_percent
        return self.election_timeout_ms * (100 - drift) // (100 + drift) - ROUNDING_MS
