"""Where a follower's log parts from its leader's, found by leader epochs (KIP-101, 279, 320) and never by watermark.

Within one epoch a single leader wrote, so two logs that agree on the epoch of the record before an offset agree on
everything below it. Both functions work on answers of `end_offset_for_epoch`: the largest epoch that is not newer than
the one asked for, and the offset behind its last record.
"""

from __future__ import annotations

from typing import NamedTuple

UNDEFINED = -1


class EpochEnd(NamedTuple):
    """An epoch, and the offset behind the last record that was written in it."""

    epoch: int
    end_offset: int


def diverging_epoch(leaders: EpochEnd, last_fetched_epoch: int, fetch_offset: int) -> EpochEnd | None:
    """What a leader tells a follower whose log is not a prefix of its own; None where it is.

    `leaders` is where the leader's log leaves the follower's last epoch.
    """
    if leaders.epoch < last_fetched_epoch or leaders.end_offset < fetch_offset:
        return leaders
    return None


def truncation_offset(told: EpochEnd, own: EpochEnd) -> int:
    """How far a follower goes back when it was told that it diverges: always below what it fetched from.

    `own` is where the follower's log leaves the epoch that it was told. Where it does not know that epoch, all that it
    wrote behind the older one is foreign to the leader; the next fetch finds out whether that was enough.
    """
    if own.end_offset == UNDEFINED:
        return told.end_offset
    return min(told.end_offset, own.end_offset)
