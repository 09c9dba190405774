"""One peer as the leader sees it: what it has, what is in flight to it, and what may be sent to it.

PROBE      one append at a time, until a reply shows where the logs agree
REPLICATE  a stream of appends, bounded in number and bytes
SNAPSHOT   the entries it needs are compacted away: send the snapshot first, in chunks
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from uuid import UUID

from chronik.raft.state import RaftSettings
from chronik.raft.store import Snapshot


class Mode(Enum):
    PROBE = "probe"
    REPLICATE = "replicate"
    SNAPSHOT = "snapshot"


@dataclass(slots=True)
class Progress:
    """Invariant: match_index < next_index; everything up to `match_index` is durable on the peer and equal to ours.

    Only a peer that runs on an older copy of its store breaks it; its reply to a probe lowers `match_index`.
    """

    store: UUID
    next_index: int
    mode: Mode = Mode.PROBE
    match_index: int = 0
    sent_commit: int = 0
    acked_round: int = 0
    """The latest heartbeat round that it has answered."""
    acked_ms: int | None = None
    """When the peer last replied; None before the first reply."""
    caught_up_ms: int | None = None
    """When the peer last had every entry of the leader; None if it never had."""
    is_probe_sent: bool = False
    must_probe: bool = True
    """An append is due even if it is empty, since a message may have been lost."""
    snapshot: Snapshot | None = None
    chunk_offset: int = 0
    chunk_sent_ms: int | None = None
    _in_flight: deque[tuple[int, int]] = field(default_factory=deque)
    _in_flight_bytes: int = 0

    def is_active(self, now_ms: int, within_ms: int) -> bool:
        return self.acked_ms is not None and now_ms - self.acked_ms < within_ms

    def may_append(self, settings: RaftSettings) -> bool:
        if self.mode is Mode.PROBE:
            return not self.is_probe_sent
        return (
            self.mode is Mode.REPLICATE
            and len(self._in_flight) < settings.in_flight_appends_max
            and self._in_flight_bytes < settings.in_flight_bytes_max
        )

    def appended(self, last_index: int, size_bytes: int, commit: int) -> None:
        """Note that an append up to `last_index` was sent; `size_bytes` is 0 for an empty one."""
        self.must_probe = False
        self.sent_commit = commit
        if self.mode is Mode.PROBE:
            self.is_probe_sent = True
        elif size_bytes:
            self._in_flight.append((last_index, size_bytes))
            self._in_flight_bytes += size_bytes
            self.next_index = last_index + 1

    def acked(self, index: int) -> bool:
        """Note that the peer has everything up to `index`; return whether that is new."""
        is_news = index > self.match_index
        self.match_index = max(self.match_index, index)
        self.next_index = max(self.next_index, self.match_index + 1)
        if self.mode is Mode.PROBE or (self.snapshot is not None and self.match_index >= self.snapshot.index):
            self.start(Mode.REPLICATE)
        while self._in_flight and self._in_flight[0][0] <= self.match_index:
            self._in_flight_bytes -= self._in_flight.popleft()[1]
        return is_news

    def rejected(self, index: int, agreed_index: int) -> None:
        """Note that the peer's log differs at `index`; it may agree up to `agreed_index`."""
        if self.mode is Mode.REPLICATE:
            # If later acknowledgements have overtaken this append, the rejection is outdated.
            if index > self.match_index:
                self.start(Mode.PROBE)
        elif self.mode is Mode.PROBE and index == self.next_index - 1:
            self.next_index = max(1, min(index, agreed_index + 1))
            self.match_index = min(self.match_index, self.next_index - 1)
            self.is_probe_sent = False

    def chunk_taken(self, index: int, next_offset: int) -> None:
        if self.snapshot is not None and self.snapshot.index == index:
            self.chunk_offset = min(next_offset, len(self.snapshot.data))
            self.chunk_sent_ms = None

    def chunk_overdue(self, now_ms: int, timeout_ms: int) -> None:
        """Allow a resend: the peer responds, so a chunk without a reply for this long was lost."""
        if self.chunk_sent_ms is not None and now_ms - self.chunk_sent_ms >= timeout_ms:
            self.chunk_sent_ms = None

    def start(self, mode: Mode, snapshot: Snapshot | None = None) -> None:
        self.mode = mode
        self.snapshot = snapshot
        self.chunk_offset = 0
        self.chunk_sent_ms = None
        self.is_probe_sent = self.must_probe = False
        self._in_flight.clear()
        self._in_flight_bytes = 0
        self.next_index = self.match_index + 1 if mode is not Mode.SNAPSHOT else self.next_index
