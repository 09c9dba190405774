"""One partition as a follower sees it: where to fetch from, and what to do with the leader's answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

from chronik.replication.divergence import EpochEnd, truncation_offset

NO_EPOCH: Final = -1
NO_LEADER: Final = -1


class OwnLog(NamedTuple):
    """The follower's log at the moment of an answer."""

    log_start_offset: int
    log_end_offset: int
    last_epoch: int
    """That of its last record; -1 without any."""
    end_offset_for_epoch: Callable[[int], tuple[int, int]]


class FetchedBatch(NamedTuple):
    base_offset: int
    next_offset: int
    leader_epoch: int


class Answer(NamedTuple):
    """What the leader said of one partition, asked from `fetch_offset`, behind a record of `last_fetched_epoch`."""

    fetch_offset: int
    last_fetched_epoch: int
    high_watermark: int
    log_start_offset: int
    batches: Sequence[FetchedBatch] = ()
    diverging_epoch: EpochEnd | None = None
    is_out_of_range: bool = False


# -- what to do --------------------------------------------------------------------------------------------------------


class Append(NamedTuple):
    """The batches continue the log."""


class Nothing(NamedTuple):
    """There was no data; ask on."""


class Truncate(NamedTuple):
    """Drop everything from `offset` on: the leader's log does not have it.

    `below_watermark` means that committed records go, as an unclean election has accepted.
    """

    offset: int
    below_watermark: bool


class Refuse(NamedTuple):
    """The leader lacks committed records from `offset` on: this replica keeps them, and does not follow."""

    offset: int


class StartOver(NamedTuple):
    """Nothing here is left at the leader: go on, empty, at `offset`, with the answer's batches up to `end_offset`."""

    offset: int
    end_offset: int
    below_watermark: bool = False


class AskAgain(NamedTuple):
    """The answer does not fit the log; nothing of it is used."""

    reason: str


Decision: TypeAlias = Append | Nothing | Truncate | Refuse | StartOver | AskAgain


class PartitionFollower:
    """One partition during one leader epoch, at a replica that does not lead it.

    Invariant: `high_watermark` is at most the leader's and at most what this node's copy counts as written; it falls
    only where an unclean election has accepted the loss. Owned by the node's loop; nothing here waits, reads a clock or
    touches a file.
    """

    __slots__ = ("_leaders_watermark", "_unclean_epoch", "high_watermark", "leader_epoch", "leader_id")

    def __init__(self, leader_id: int, leader_epoch: int, high_watermark: int, unclean_epoch: int = NO_EPOCH) -> None:
        """`unclean_epoch` is the leader epoch of the last election that accepted the loss of committed records."""
        self.leader_id = leader_id
        self.leader_epoch = leader_epoch
        self.high_watermark = high_watermark
        self._unclean_epoch = unclean_epoch
        self._leaders_watermark = high_watermark

    def counted(self, end: int) -> bool:
        """This node's own copy counts as written below `end`; tells whether the watermark rose."""
        known = min(self._leaders_watermark, end)
        if known <= self.high_watermark:
            return False
        self.high_watermark = known
        return True

    def told(self, leaders_watermark: int, counted_end: int) -> bool:
        """The leader's watermark, from an answer that was of use; tells whether ours rose."""
        if leaders_watermark > self._leaders_watermark:
            self._leaders_watermark = leaders_watermark
        return self.counted(counted_end)

    def truncated(self, log_end_offset: int) -> None:
        self.high_watermark = min(self.high_watermark, log_end_offset)
        self._leaders_watermark = min(self._leaders_watermark, self.high_watermark)

    def started_over(self, decision: StartOver) -> None:
        """The log begins anew where the leader's starts: what lies below was committed."""
        self.high_watermark = max(min(self.high_watermark, decision.end_offset), decision.offset)

    def answered(self, answer: Answer, own: OwnLog) -> Decision:
        """What to do with an answer that has no error but that of its range."""
        if (answer.fetch_offset, answer.last_fetched_epoch) != (own.log_end_offset, own.last_epoch):
            # Both together name one log: a late answer is of no use, and must not do harm.
            return AskAgain(f"it was asked from {answer.fetch_offset}, the log ends at {own.log_end_offset}")
        if answer.is_out_of_range:
            return self._out_of_range(answer, own)
        if answer.diverging_epoch is not None:
            told = EpochEnd(*answer.diverging_epoch)
            offset = truncation_offset(told, EpochEnd(*own.end_offset_for_epoch(told.epoch)))
            if offset >= own.log_end_offset:
                return AskAgain(f"told to go back to {offset}, the log ends at {own.log_end_offset}")
            is_below = offset < self.high_watermark
            if is_below and own.last_epoch >= self._unclean_epoch:
                return Refuse(offset)
            return Truncate(offset, is_below)
        if not answer.batches:
            return Nothing()
        return self._records(answer.batches, own)

    def _out_of_range(self, answer: Answer, own: OwnLog) -> Decision:
        start = answer.log_start_offset
        is_empty = own.log_start_offset == own.log_end_offset
        if start > own.log_end_offset or (is_empty and 0 <= start != own.log_end_offset):
            return StartOver(start, start, start < self.high_watermark)
        return AskAgain(f"offset {answer.fetch_offset} is out of a range that starts at {start}")

    def _records(self, batches: Sequence[FetchedBatch], own: OwnLog) -> Decision:
        first = batches[0]
        if first.base_offset < own.log_end_offset:
            if own.log_start_offset == own.log_end_offset and first.next_offset > own.log_end_offset:
                # The leader's log starts inside this batch, which comes whole.
                start_over = StartOver(first.base_offset, batches[-1].next_offset)
                return self._continues(batches, first.base_offset, NO_EPOCH) or start_over
            return AskAgain(f"a batch at {first.base_offset} does not continue a log to {own.log_end_offset}")
        return self._continues(batches, own.log_end_offset, own.last_epoch) or Append()

    def _continues(self, batches: Sequence[FetchedBatch], offset: int, epoch: int) -> AskAgain | None:
        """Offsets and epochs grow, and no epoch is newer than the leader that was asked."""
        for batch in batches:
            if batch.base_offset < offset or batch.next_offset <= batch.base_offset:
                return AskAgain(f"a batch from {batch.base_offset} follows one to {offset}")
            if not epoch <= batch.leader_epoch <= self.leader_epoch:
                return AskAgain(
                    f"a batch of epoch {batch.leader_epoch} comes behind epoch {epoch} from a leader of "
                    f"epoch {self.leader_epoch}"
                )
            offset, epoch = batch.next_offset, batch.leader_epoch
        return None
