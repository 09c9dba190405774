"""Finds where a follower's log diverges from its leader's, by leader epoch (KIP-101, 279, 320), never by watermark.

A single leader writes each epoch. So two logs that agree on the epoch of the record before an offset agree on
everything below that offset. Both functions work on results of `end_offset_for_epoch`: the largest epoch that is not
newer than the requested one, and its end offset.
"""

from __future__ import annotations

from typing import NamedTuple

UNDEFINED = -1


class EpochEnd(NamedTuple):
    """An epoch and its end offset: the offset after the last record written in it."""

    epoch: int
    end_offset: int


def diverging_epoch(leaders: EpochEnd, last_fetched_epoch: int, fetch_offset: int) -> EpochEnd | None:
    """Return what the leader reports to a follower whose log is not a prefix of its own; None if it is.

    `leaders` is the end offset of the follower's last epoch in the leader's log.
    """
    if leaders.epoch < last_fetched_epoch or leaders.end_offset < fetch_offset:
        return leaders
    return None


def truncation_offset(told: EpochEnd, own: EpochEnd) -> int:
    """Return the offset to which a diverging follower truncates: always below its fetch offset.

    `own` is the end of the reported epoch in the follower's log. If the follower lacks that epoch, `own` is the end of
    an older one, and the leader has nothing that follows it. The next fetch shows whether the truncation sufficed.
    """
    if own.end_offset == UNDEFINED:
        return told.end_offset
    return min(told.end_offset, own.end_offset)
