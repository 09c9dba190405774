"""The settings of one log."""

from dataclasses import dataclass

DAY_MS = 24 * 60 * 60 * 1000


@dataclass(frozen=True, slots=True)
class LogConfig:
    """One log's settings; a limit of -1 means none. The node, not the log, decides whether appends wait for a sync."""

    segment_bytes: int = 1 << 30
    segment_ms: int = 7 * DAY_MS
    retention_ms: int = 7 * DAY_MS
    retention_bytes: int = -1
    max_batch_bytes: int = 1048588
    index_interval_bytes: int = 4096
    cleanup_delete: bool = True
    cleanup_compact: bool = False
    delete_retention_ms: int = DAY_MS
    min_compaction_lag_ms: int = 0
    min_cleanable_ratio: float = 0.5
    log_append_time: bool = False
    producer_expiration_ms: int = DAY_MS
    compaction_keys_max: int = 100_000
    """Distinct keys held in memory during one compaction pass (about 200 bytes each)."""
    preallocate_bytes_min: int = 64 * 1024
    preallocate_bytes_max: int = 16 * 1024 * 1024
    """Preallocate the active segment ahead by its current size, within these bounds: small logs stay small."""
    checkpoint_bytes: int = 16 * 1024 * 1024
    """After this many appended bytes the next sync writes a snapshot; recovery scans from the latest one."""
