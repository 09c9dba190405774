"""One partition as a follower sees it: how to handle the leader's response, and where its log diverges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

NO_EPOCH: Final = -1
NO_LEADER: Final = -1
UNDEFINED: Final = -1
PAUSE_MS_MAX: Final = 60_000
"""A follower that takes longer from one append to the next one may have missed what compaction removed since."""


class EpochEnd(NamedTuple):
    """An epoch and its end offset: the offset after the last record written in it."""

    epoch: int
    end_offset: int


# Constructors by hand, because mypyc compiles neither those of dataclasses nor of tuples, and each response for each
# partition has these objects.
@dataclass(slots=True, init=False)
class LocalLog:
    """The follower's log when a response arrives."""

    log_start_offset: int
    log_end_offset: int
    last_epoch: int
    """The epoch of its last record; -1 if it has none."""
    end_offset_for_epoch: Callable[[int], tuple[int, int]]
    undecided_from: int | None
    """The first offset of the earliest transaction without a marker."""
    is_dispensable: bool
    """Whether the replica is neither in sync nor eligible: no record depends on it."""

    def __init__(
        self,
        log_start_offset: int,
        log_end_offset: int,
        last_epoch: int,
        end_offset_for_epoch: Callable[[int], tuple[int, int]],
        undecided_from: int | None = None,
        is_dispensable: bool = True,
    ) -> None:
        self.log_start_offset = log_start_offset
        self.log_end_offset = log_end_offset
        self.last_epoch = last_epoch
        self.end_offset_for_epoch = end_offset_for_epoch
        self.undecided_from = undecided_from
        self.is_dispensable = is_dispensable


class FetchedBatch(NamedTuple):
    base_offset: int
    next_offset: int
    leader_epoch: int


@dataclass(slots=True, init=False)
class LeaderAnswer:
    """The leader's response for one partition. The follower sent `fetch_offset` and `last_fetched_epoch`."""

    fetch_offset: int
    last_fetched_epoch: int
    high_watermark: int
    log_start_offset: int
    batches: Sequence[FetchedBatch]
    diverging_epoch: EpochEnd | None
    is_out_of_range: bool
    received_ms: int

    def __init__(
        self,
        fetch_offset: int,
        last_fetched_epoch: int,
        high_watermark: int,
        log_start_offset: int,
        batches: Sequence[FetchedBatch] = (),
        diverging_epoch: EpochEnd | None = None,
        is_out_of_range: bool = False,
        received_ms: int = 0,
    ) -> None:
        self.fetch_offset = fetch_offset
        self.last_fetched_epoch = last_fetched_epoch
        self.high_watermark = high_watermark
        self.log_start_offset = log_start_offset
        self.batches = batches
        self.diverging_epoch = diverging_epoch
        self.is_out_of_range = is_out_of_range
        self.received_ms = received_ms


# -- decisions ---------------------------------------------------------------------------------------------------------


class Append(NamedTuple):
    """Append the batches: they continue the log."""


class NoData(NamedTuple):
    """There was no data; fetch again."""


class Truncate(NamedTuple):
    """Drop everything from `offset` on: the leader's log does not have it.

    `below_watermark` means that committed records are lost, which an unclean election has accepted. `fetches_again`
    means that the leader has everything that is committed, and only compaction made the logs differ.
    """

    offset: int
    below_watermark: bool
    fetches_again: bool = False


class Refuse(NamedTuple):
    """The leader lacks committed records from `offset` on: this replica keeps them, and does not follow."""

    offset: int


class StartOver(NamedTuple):
    """The leader has none of this log: restart empty at `offset`, with the response's batches up to `end_offset`."""

    offset: int
    end_offset: int
    below_watermark: bool = False


class FetchAgain(NamedTuple):
    """The response does not fit the log; discard it and fetch again."""

    reason: str


Decision: TypeAlias = Append | NoData | Truncate | Refuse | StartOver | FetchAgain


_APPEND: Final = Append()
_NO_DATA: Final = NoData()


class PartitionFollower:
    """One partition during one leader epoch, on a replica that does not lead it.

    Invariant: `high_watermark` is at most the leader's, and at most this node's durable end (see `PartitionLeader`). It
    falls only if an unclean election has accepted the loss. Owned by the node's event loop; nothing here waits, reads a
    clock or touches a file.
    """

    __slots__ = (
        "_end",
        "_end_ms",
        "_fetched_from",
        "_leaders_watermark",
        "_unclean_epoch",
        "high_watermark",
        "leader_epoch",
        "leader_id",
    )

    def __init__(self, leader_id: int, leader_epoch: int, high_watermark: int, unclean_epoch: int = NO_EPOCH) -> None:
        """`unclean_epoch` is the leader epoch of the last election that accepted the loss of committed records."""
        self.leader_id = leader_id
        self.leader_epoch = leader_epoch
        self.high_watermark = high_watermark
        self._unclean_epoch = unclean_epoch
        self._leaders_watermark = high_watermark
        self._end = UNDEFINED
        self._end_ms = -PAUSE_MS_MAX - 1
        """The log's end, and when a response first found it there."""
        self._fetched_from = 0
        """Everything from here on was fetched from this leader without a long pause."""

    def acknowledge_durable(self, end: int) -> bool:
        """Note that this node's durable end is now `end`; return whether the watermark rose."""
        known = min(self._leaders_watermark, end)
        if known <= self.high_watermark:
            return False
        self.high_watermark = known
        return True

    def leader_watermark_received(self, leaders_watermark: int, durable_end: int) -> bool:
        """Note the leader's watermark from a valid response; return whether this replica's watermark rose."""
        if leaders_watermark > self._leaders_watermark:
            self._leaders_watermark = leaders_watermark
        return self.acknowledge_durable(durable_end)

    def truncated(self, log_end_offset: int) -> None:
        self.high_watermark = min(self.high_watermark, log_end_offset)
        self._leaders_watermark = min(self._leaders_watermark, self.high_watermark)
        self._fetched_from = min(self._fetched_from, log_end_offset)

    def started_over(self, decision: StartOver) -> None:
        """Note that the log restarted at the leader's log start: everything below was committed."""
        self.high_watermark = max(min(self.high_watermark, decision.end_offset), decision.offset)

    def decide(self, answer: LeaderAnswer, own: LocalLog) -> Decision:
        """Decide how to handle a response that has no error except OFFSET_OUT_OF_RANGE."""
        if (answer.fetch_offset, answer.last_fetched_epoch) != (own.log_end_offset, own.last_epoch):
            # The two together identify the log: a late response is useless, and must do no harm.
            return FetchAgain(f"the fetch was from {answer.fetch_offset}, the log ends at {own.log_end_offset}")
        self._note_progress(own.log_end_offset, answer.received_ms)
        if answer.is_out_of_range:
            return self._out_of_range(answer, own)
        if answer.diverging_epoch is not None:
            reported = EpochEnd(*answer.diverging_epoch)
            offset = truncation_offset(reported, EpochEnd(*own.end_offset_for_epoch(reported.epoch)))
            if offset >= own.log_end_offset:
                return FetchAgain(f"the logs diverge at {offset}, this log ends at {own.log_end_offset}")
            is_below = offset < self.high_watermark
            if is_below and own.last_epoch >= self._unclean_epoch:
                return Refuse(offset)
            return Truncate(offset, is_below)
        if not answer.batches:
            return _NO_DATA
        return self._records(answer.batches, own)

    def _note_progress(self, end: int, now_ms: int) -> None:
        if now_ms - self._end_ms > PAUSE_MS_MAX:
            self._fetched_from = end
        if end != self._end:
            self._end, self._end_ms = end, now_ms

    def _out_of_range(self, answer: LeaderAnswer, own: LocalLog) -> Decision:
        start = answer.log_start_offset
        is_empty = own.log_start_offset == own.log_end_offset
        if start > own.log_end_offset or (is_empty and 0 <= start != own.log_end_offset):
            return StartOver(start, start, start < self.high_watermark)
        return FetchAgain(f"offset {answer.fetch_offset} is out of a range that starts at {start}")

    def _records(self, batches: Sequence[FetchedBatch], own: LocalLog) -> Decision:
        first = batches[0]
        if first.base_offset < own.log_end_offset:
            if own.log_start_offset == own.log_end_offset and first.next_offset > own.log_end_offset:
                # The leader's log starts inside this batch, but the leader sends whole batches.
                start_over = StartOver(first.base_offset, batches[-1].next_offset)
                return self._continues(batches, first.base_offset, NO_EPOCH) or start_over
            return FetchAgain(f"a batch at {first.base_offset} does not continue a log to {own.log_end_offset}")
        refusal = self._continues(batches, own.log_end_offset, own.last_epoch)
        return refusal or self._missed_markers(batches, own) or _APPEND

    def _missed_markers(self, batches: Sequence[FetchedBatch], own: LocalLog) -> Decision | None:
        """Return how to find out about undecided transactions whose markers may be missing in these batches.

        Compaction leaves a gap where it removes a marker. The leader keeps a marker as long as a batch of its
        transaction remains, and some time after that (delete.retention.ms). So only transactions that began before a
        pause are in doubt: if a batch of one is fetched again, its marker follows.
        """
        undecided = own.undecided_from
        if undecided is None or undecided >= self._fetched_from or not _has_gap(batches, own.log_end_offset):
            return None
        if own.is_dispensable:
            return Truncate(undecided, below_watermark=False, fetches_again=True)
        # The watermark is not above this log's end, and compaction ends below it: this node's metadata are old.
        return FetchAgain(f"the leader lacks offsets after {own.log_end_offset}, and a transaction is undecided here")

    def _continues(self, batches: Sequence[FetchedBatch], offset: int, epoch: int) -> FetchAgain | None:
        """Check that offsets and epochs increase, and that no epoch is newer than the leader's."""
        for batch in batches:
            if batch.base_offset < offset or batch.next_offset <= batch.base_offset:
                return FetchAgain(f"a batch from {batch.base_offset} follows one to {offset}")
            if not epoch <= batch.leader_epoch <= self.leader_epoch:
                return FetchAgain(
                    f"a batch of epoch {batch.leader_epoch} follows epoch {epoch} from a leader of "
                    f"epoch {self.leader_epoch}"
                )
            offset, epoch = batch.next_offset, batch.leader_epoch
        return None


def _has_gap(batches: Sequence[FetchedBatch], offset: int) -> bool:
    """Return whether the batches leave out an offset from `offset` on."""
    for batch in batches:
        if batch.base_offset > offset:
            return True
        offset = batch.next_offset
    return False


# -- divergence --------------------------------------------------------------------------------------------------------

# A single leader writes each epoch. So two logs that agree on the epoch of the record before an offset agree on
# everything below that offset (KIP-101, 279, 320). Both functions work on results of `end_offset_for_epoch`: the
# largest epoch that is not newer than the requested one, and its end offset.


def diverging_epoch(leaders: EpochEnd, last_fetched_epoch: int, fetch_offset: int) -> EpochEnd | None:
    """Return what the leader reports to a follower whose log is not a prefix of its own; None if it is.

    `leaders` is the end offset of the follower's last epoch in the leader's log.
    """
    if leaders.epoch < last_fetched_epoch or leaders.end_offset < fetch_offset:
        return leaders
    return None


def truncation_offset(reported: EpochEnd, own: EpochEnd) -> int:
    """Return the offset to which a diverging follower truncates: always below its fetch offset.

    `own` is the end of the reported epoch in the follower's log. If the follower lacks that epoch, `own` is the end of
    an older one, and the leader has nothing that follows it. The next fetch shows whether the truncation sufficed.
    """
    if own.end_offset == UNDEFINED:
        return reported.end_offset
    return min(reported.end_offset, own.end_offset)
