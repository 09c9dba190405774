"""Detect stalled consumers: a member that makes no progress on any of its partitions, or a single stalled partition.

A group's progress is visible only in its commits, and most clients commit every 5 s. So a group is judged only after it
had time to commit twice. `needs_longer` tells the examination to keep watching a group that looks stalled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from chronik.doctor.diagnosis import Evidence
from chronik.doctor.findings import Finding, listed
from chronik.doctor.observations import GroupSample, Member, Observations

COMMITS_S = 11.0
"""Two commit intervals of 5 s, plus a margin."""


class Progress(NamedTuple):
    """A group's partitions: stalled with records left to read, or advancing; and the lag of each stalled one."""

    standing: tuple[int, ...]
    moving: tuple[int, ...]
    lag: dict[int, int]
    span_s: float


def progress(seen: Observations, samples: Sequence[GroupSample]) -> Progress:
    """Consider only records that existed at the first sample: newer ones may be consumed but not yet committed."""
    first, final = samples[0], samples[-1]
    standing: list[int] = []
    moving: list[int] = []
    lag: dict[int, int] = {}
    for partition, committed in sorted(final.committed.items()):
        before = first.committed.get(partition)
        positions = [s for s in seen.partitions.get(partition, ()) if s.high_watermark is not None]
        if before is None or committed != before:
            moving.append(partition)
        elif positions and (positions[0].high_watermark or 0) > committed:
            standing.append(partition)
            lag[partition] = (positions[-1].high_watermark or 0) - committed
    return Progress(tuple(standing), tuple(moving), lag, final.at_s - first.at_s)


def needs_longer(seen: Observations) -> bool:
    """Return whether a group looks stalled but has not been watched long enough to be sure."""
    for group, samples in seen.groups.items():
        found = progress(seen, samples)
        if found.standing and found.span_s < COMMITS_S and _is_judged(seen, group, samples):
            return True
    return False


def _is_judged(seen: Observations, group: str, samples: Sequence[GroupSample]) -> bool:
    """Decide whether to judge a group. Without members it has ended, unless it was requested or still commits."""
    is_empty = not samples[-1].members
    return group == seen.asked_group or not is_empty or bool(progress(seen, samples).moving)


def consumer_stopped(seen: Observations) -> Finding | None:
    evidence: list[Evidence] = []
    for group, samples in sorted(seen.groups.items()):
        found = progress(seen, samples)
        if not found.standing or found.span_s < COMMITS_S or not _is_judged(seen, group, samples):
            continue
        members = samples[-1].members
        stopped = [member for member in members if _has_stopped(member, found)]
        evidence += [_stopped_member(group, member, found) for member in stopped]
        if not stopped and not found.moving:
            evidence.append(_stopped_group(group, samples[-1], found))
    if not evidence:
        return None
    clients = [item.client for item in evidence if item.client is not None]
    step = (
        f"Look at {listed(dict.fromkeys(clients))}: is it busy with a record, blocked, or over max.poll.interval.ms? "
        "Restart it, and its partitions go to others"
        if clients
        else "Start its consumers"
    )
    return Finding(
        "consumer-stopped",
        f"a consumer of {seen.topic} has stopped: it holds partitions with records to read, and does not read them",
        f"{step}. The broker has the records ready.",
        evidence,
    )


def _has_stopped(member: Member, found: Progress) -> bool:
    """Return whether the member has records to read and none of its partitions advanced."""
    held = set(member.partitions)
    return bool(held & set(found.standing)) and not held & set(found.moving)


def _stopped_member(group: str, member: Member, found: Progress) -> Evidence:
    held = [partition for partition in found.standing if partition in member.partitions]
    lag = sum(found.lag[partition] for partition in held)
    return Evidence(
        f"group {group}: member {member.client_id} at {member.host} holds partition {listed(held)} and has committed "
        f"nothing for {found.span_s:.0f} s, with {lag} records to read",
        held[0],
        group=group,
        client=member.client_id,
        since_s=round(found.span_s, 1),
        numbers={"lag": lag},
    )


def _stopped_group(group: str, sample: GroupSample, found: Progress) -> Evidence:
    lag = sum(found.lag.values())
    return Evidence(
        f"group {group} is {sample.state} with {len(sample.members)} members, and committed nothing for "
        f"{found.span_s:.0f} s: {lag} records of partition {listed(found.standing)} are left",
        found.standing[0],
        group=group,
        since_s=round(found.span_s, 1),
        numbers={"lag": lag},
    )


def partition_imbalance(seen: Observations) -> Finding | None:
    evidence: list[Evidence] = []
    for group, samples in sorted(seen.groups.items()):
        found = progress(seen, samples)
        if not found.standing or not found.moving or found.span_s < COMMITS_S:
            continue
        owners = {partition: member for member in samples[-1].members for partition in member.partitions}
        for partition in found.standing:
            owner = owners.get(partition)
            if owner is not None and _has_stopped(owner, found):
                continue
            evidence.append(_unbalanced(seen, group, partition, owner, found))
    if not evidence:
        return None
    return Finding(
        "partition-imbalance",
        f"consumption of partition {listed(e.partition for e in evidence)} of {seen.topic} stands while other "
        "partitions move",
        "Look whether the consumer paused the partition, whether a record in it fails again and again, or whether its "
        "share of the work is too large; the broker has its records ready.",
        evidence,
    )


def _unbalanced(seen: Observations, group: str, partition: int, owner: Member | None, found: Progress) -> Evidence:
    committed = seen.groups[group][-1].committed[partition]
    held = "no member holds it" if owner is None else f"{owner.client_id} at {owner.host} holds it"
    return Evidence(
        f"group {group}: partition {partition} stands at {committed} with {found.lag[partition]} records to read for "
        f"{found.span_s:.0f} s, {held}; partition {listed(found.moving)} moved meanwhile",
        partition,
        group=group,
        client=None if owner is None else owner.client_id,
        since_s=round(found.span_s, 1),
        numbers={"committed": committed, "lag": found.lag[partition]},
    )
