"""Detect stalled consumers: a member that makes no progress on any of its partitions, or a single stalled partition.

A group's progress is visible only in its commits, and most clients commit every 5 s. So a group is judged only after it
had time to commit twice. `needs_longer` tells the examination to keep watching a group that looks stalled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from chronik.doctor.diagnosis import Evidence, Finding, listed
from chronik.doctor.observations import GroupSample, Member, Observations, ShareSeen

SUSPECT_DELIVERIES = 3
"""Two releases happen when a consumer is restarted twice; a third one within a lock is suspicious."""

COMMITS_S = 11.0
"""Two commit intervals of 5 s, plus a margin."""


class Progress(NamedTuple):
    """A group's partitions: stalled with records left to read, or advancing; and the lag of each stalled one."""

    stalled: tuple[int, ...]
    advancing: tuple[int, ...]
    lag: dict[int, int]
    span_s: float


def progress_of(seen: Observations, samples: Sequence[GroupSample]) -> Progress:
    """Consider only records that existed at the first sample: newer ones may be consumed but not yet committed."""
    first, final = samples[0], samples[-1]
    stalled: list[int] = []
    advancing: list[int] = []
    lag: dict[int, int] = {}
    for partition, committed in sorted(final.committed.items()):
        before = first.committed.get(partition)
        positions = [s for s in seen.partitions.get(partition, ()) if s.high_watermark is not None]
        if before is None or committed != before:
            advancing.append(partition)
        elif positions and (positions[0].high_watermark or 0) > committed:
            stalled.append(partition)
            lag[partition] = (positions[-1].high_watermark or 0) - committed
    return Progress(tuple(stalled), tuple(advancing), lag, final.at_s - first.at_s)


def needs_longer(seen: Observations) -> bool:
    """Return whether a group looks stalled but has not been watched long enough to be sure."""
    is_stalled = any(progress.span_s < COMMITS_S for _, _, progress in _stalled_groups(seen))
    return is_stalled or any(span_s < COMMITS_S for _, _, span_s in _owing_members(seen))


def _owing_members(seen: Observations) -> Iterator[tuple[str, Member, float]]:
    """Yield the members of consumer groups that stay at an epoch before that of the target, and since when.

    A member reaches the epoch of the target once it has revoked what it must give up.
    """
    for group, samples in sorted(seen.groups.items()):
        final = samples[-1]
        for member in final.members:
            if member.epoch is None or final.assignment_epoch is None or not 0 <= member.epoch < final.assignment_epoch:
                continue
            since_s = final.at_s
            for sample in reversed(samples):
                before = next((each for each in sample.members if each.member_id == member.member_id), None)
                is_same = before is not None and before.epoch == member.epoch
                if not is_same or sample.assignment_epoch is None or sample.assignment_epoch <= member.epoch:
                    break
                since_s = sample.at_s
            yield group, member, final.at_s - since_s


def revocation_owed(seen: Observations) -> Finding:
    evidence = [
        Evidence(
            f"group {group}: member {member.client_id} at {member.host} owes a revocation for {span_s:.0f} s: it stays "
            f"at epoch {member.epoch}, so that other members wait for its partitions",
            group=group,
            client=member.client_id,
            since_s=round(span_s, 1),
            numbers={"epoch": float(member.epoch or 0)},
        )
        for group, member, span_s in _owing_members(seen)
        if span_s >= COMMITS_S
    ]
    clients = listed(dict.fromkeys(item.client for item in evidence))
    return Finding(
        "revocation-owed",
        f"a consumer of {seen.topic} does not give up partitions that the group has assigned to other members",
        f"Check {clients}: does its rebalance listener block, or does it not poll? After its rebalance timeout "
        "(max.poll.interval.ms) the coordinator removes it, and other members get its partitions.",
        evidence,
    )


def poison_pill(seen: Observations) -> Finding:
    evidence = [item for share in seen.shares for item in _poison(share)]
    return Finding(
        "poison-pill",
        f"records of {seen.topic} are delivered to a share group again and again, and never accepted",
        "Read the record: chronik consume, or the page of the topic. Have the consumer reject records that it cannot "
        "process. If processing takes long, raise share.record.lock.duration.ms of the group.",
        evidence,
    )


def _poison(share: ShareSeen) -> Iterator[Evidence]:
    limit = share.delivery_limit
    if share.suspect_deliveries >= min(SUSPECT_DELIVERIES, limit):
        yield Evidence(
            f"records of share group {share.group} are released again and again: poison pill at offset "
            f"{share.suspect_offset} of partition {share.partition}, delivered {share.suspect_deliveries} of {limit} "
            "times",
            partition=share.partition,
            node=share.node,
            group=share.group,
            numbers={"offset": float(share.suspect_offset), "deliveries": float(share.suspect_deliveries)},
        )
    if share.exhausted:
        yield Evidence(
            f"records of share group {share.group} are released again and again: poison pill at offset "
            f"{share.exhausted_offset} of partition {share.partition}, archived after {limit} deliveries; records that "
            f"were archived so, since node {share.node} serves the group: {share.exhausted}",
            partition=share.partition,
            node=share.node,
            group=share.group,
            numbers={"offset": float(share.exhausted_offset), "records": float(share.exhausted)},
        )


def _stalled_groups(seen: Observations) -> Iterator[tuple[str, GroupSample, Progress]]:
    """Yield groups with stalled partitions. Without members a group has ended, unless requested or still committing."""
    for group, samples in sorted(seen.groups.items()):
        progress = progress_of(seen, samples)
        if progress.stalled and (group == seen.requested_group or samples[-1].members or progress.advancing):
            yield group, samples[-1], progress


def consumer_stopped(seen: Observations) -> Finding:
    evidence: list[Evidence] = []
    for group, sample, progress in _stalled_groups(seen):
        if progress.span_s < COMMITS_S:
            continue
        stopped = [member for member in sample.members if _has_stopped(member, progress)]
        evidence += [_stopped_member(group, member, progress) for member in stopped]
        if not stopped and not progress.advancing:
            evidence.append(_stopped_group(group, sample, progress))
    clients = [item.client for item in evidence if item.client is not None]
    step = (
        f"Check {listed(dict.fromkeys(clients))}: is it busy with a record, blocked, or over max.poll.interval.ms? "
        "After a restart, its partitions are assigned to other members"
        if clients
        else "Start its consumers"
    )
    return Finding(
        "consumer-stopped",
        f"a consumer of {seen.topic} has stopped: its assigned partitions have records to read, but it does not read",
        f"{step}. The broker has the records ready.",
        evidence,
    )


def _has_stopped(member: Member, progress: Progress) -> bool:
    """Return whether the member has records to read and none of its partitions advanced."""
    held = set(member.partitions)
    return bool(held & set(progress.stalled)) and not held & set(progress.advancing)


def _stopped_member(group: str, member: Member, progress: Progress) -> Evidence:
    held = [partition for partition in progress.stalled if partition in member.partitions]
    lag = sum(progress.lag[partition] for partition in held)
    return Evidence(
        f"group {group}: member {member.client_id} at {member.host} has partition {listed(held)} assigned and has "
        f"committed nothing for {progress.span_s:.0f} s, with {lag} records to read",
        held[0],
        group=group,
        client=member.client_id,
        since_s=round(progress.span_s, 1),
        numbers={"lag": lag},
    )


def _stopped_group(group: str, sample: GroupSample, progress: Progress) -> Evidence:
    lag = sum(progress.lag.values())
    return Evidence(
        f"group {group} is {sample.state} with {len(sample.members)} members, and has committed nothing for "
        f"{progress.span_s:.0f} s, with {lag} records of partition {listed(progress.stalled)} to read",
        progress.stalled[0],
        group=group,
        since_s=round(progress.span_s, 1),
        numbers={"lag": lag},
    )


def partition_imbalance(seen: Observations) -> Finding:
    evidence: list[Evidence] = []
    for group, sample, progress in _stalled_groups(seen):
        if not progress.advancing or progress.span_s < COMMITS_S:
            continue
        owners = {partition: member for member in sample.members for partition in member.partitions}
        for partition in progress.stalled:
            owner = owners.get(partition)
            if owner is None or not _has_stopped(owner, progress):
                evidence.append(_unbalanced(group, partition, sample.committed[partition], owner, progress))
    return Finding(
        "partition-imbalance",
        f"consumption of partition {listed(e.partition for e in evidence)} of {seen.topic} is stalled while other "
        "partitions advance",
        "Check whether the consumer paused the partition, whether one of its records fails repeatedly, or whether the "
        "consumer has too much work. The broker has the records ready.",
        evidence,
    )


def _unbalanced(group: str, partition: int, committed: int, owner: Member | None, progress: Progress) -> Evidence:
    member = "no member" if owner is None else f"{owner.client_id} at {owner.host}"
    return Evidence(
        f"group {group}: partition {partition} has been at offset {committed} for {progress.span_s:.0f} s, with "
        f"{progress.lag[partition]} records to read; it is assigned to {member}; partition "
        f"{listed(progress.advancing)} advanced",
        partition,
        group=group,
        client=None if owner is None else owner.client_id,
        since_s=round(progress.span_s, 1),
        numbers={"committed": committed, "lag": progress.lag[partition]},
    )
