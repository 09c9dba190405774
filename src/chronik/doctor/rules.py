"""Derive one verdict from the observations. Pure: no clock, no network.

Each rule returns a finding, and matches if the finding has evidence. If several rules match, the first in the order of
precedence is the verdict. It is usually closest to the cause, because a condition often causes those after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from functools import partial

from chronik.doctor.access import expired_certificate, not_authorized, throttled, wrong_listener
from chronik.doctor.consumption import consumer_stopped, partition_imbalance, poison_pill, revocation_owed
from chronik.doctor.diagnosis import Diagnosis, Evidence, ExaminedPartition, Finding, listed, nodes_of
from chronik.doctor.fetch_path import UNNAMED_CLIENT, fetch_hang
from chronik.doctor.observations import DOCTOR_CLIENT_ID, Observations, PartitionSample, RejectionSample, lasting_s
from chronik.doctor.transactions import open_transaction
from chronik.observe.traces import FetchServed, IsrChanged, ProduceRejected, WatermarkUpdated

LEADERLESS_S = 2.0
"""An election takes less, so a node that has not answered for the partition for this long is not its leader."""
WATERMARK_STUCK_S = 3.0
REJECTIONS_MIN = 5
"""Clients refresh their metadata after one rejection, so a leader change costs each client one or two."""
DAMAGES_NAMED_MAX = 10
REJECTION_ERRORS = ("NOT_LEADER_OR_FOLLOWER", "FENCED_LEADER_EPOCH", "UNKNOWN_LEADER_EPOCH")


def _plural(noun: str, items: Sized) -> str:
    return noun if len(items) == 1 else f"{noun}s"


def no_leader(seen: Observations) -> Finding:
    evidence: list[Evidence] = []
    for partition, samples in seen.partitions.items():
        since_s = lasting_s(samples, lambda sample: not sample.has_leader)
        # Two samples without a leader in the metadata suffice. Otherwise wait for longer than an election takes.
        at_once = len(samples) > 1 and samples[-1].leader < 0 and samples[-2].leader < 0
        if since_s is not None and (at_once or since_s >= LEADERLESS_S):
            evidence.append(_leaderless(seen, partition, samples[-1], since_s))
    named = listed(item.partition for item in evidence)
    missing = sorted(seen.silent_nodes)
    start = f"Start {_plural('node', missing)} {listed(missing)}" if missing else "Start the missing nodes"
    have = "has" if len(evidence) == 1 else "have"
    return Finding(
        "no-leader",
        f"{_plural('partition', evidence)} {named} of {seen.topic} {have} no leader: nothing can be produced or "
        "consumed there",
        f"{start}; chronik cluster status shows which nodes are down. A leader is elected only while a majority of the "
        "nodes runs.",
        evidence,
    )


def _leaderless(seen: Observations, partition: int, sample: PartitionSample, since_s: float) -> Evidence:
    silent = [node for node in sample.replicas if node in seen.silent_nodes]
    if sample.leader < 0:
        text = f"the metadata names no leader of partition {partition} (in sync: {listed(sample.isr)})"
    elif sample.leader in seen.silent_nodes:
        reason = seen.silent_nodes[sample.leader]
        text = f"node {sample.leader} leads partition {partition} in the metadata, but does not answer: {reason}"
    else:
        error = sample.error
        text = f"node {sample.leader} leads partition {partition} in the metadata, but rejects requests for it: {error}"
    if silent:
        text += f"; of its replicas {listed(sample.replicas)}, {listed(silent)} did not answer"
    node = sample.leader if sample.leader >= 0 else None
    return Evidence(text, partition, node, since_s=round(since_s, 1))


def watermark_not_advancing(seen: Observations) -> Finding:
    evidence: list[Evidence] = []
    for partition, samples in seen.partitions.items():
        current = samples[-1]
        stuck_s = lasting_s(samples, partial(_is_stuck_at, current.high_watermark))
        if stuck_s is not None and stuck_s >= WATERMARK_STUCK_S:
            since_s = max(stuck_s, _watermark_age_s(seen, partition))
            evidence.append(_stuck_watermark(seen, partition, current, since_s))
    lagging = nodes_of(evidence)
    step = (
        f"Check {_plural('node', lagging)} {listed(lagging)}, and start or resume what is down or paused"
        if lagging
        else "Check the leader's disk (chronik_fsync_seconds) and the logs of its followers"
    )
    return Finding(
        "watermark-not-advancing",
        f"the high watermark of {_plural('partition', evidence)} {listed(e.partition for e in evidence)} of "
        f"{seen.topic} does not advance although the log has records beyond it: consumers cannot see them",
        f"{step}; or, if fewer replicas are acceptable, lower min.insync.replicas of the topic.",
        evidence,
    )


def _is_stuck_at(watermark: int | None, sample: PartitionSample) -> bool:
    """Return whether records were beyond this watermark, or beyond one that the leader does not know yet."""
    end = sample.log_end_offset
    return end is not None and sample.high_watermark == watermark and (watermark is None or end > watermark)


def _stuck_watermark(seen: Observations, partition: int, sample: PartitionSample, since_s: float) -> Evidence:
    end, watermark = sample.log_end_offset or 0, sample.high_watermark
    needed = seen.min_insync_replicas
    missing = [node for node in sample.replicas if node not in sample.isr]
    ends = seen.replica_ends.get(partition, {})
    late = [node for node in sample.isr if node != sample.leader and ends.get(node, end) < end]
    silent = [node for node in sample.isr if node in seen.silent_nodes]
    parts = [
        f"partition {partition}: watermark {'unknown' if watermark is None else watermark}, log end {end} on node "
        f"{sample.leader}, in sync {listed(sample.isr)} of {listed(sample.replicas)}"
    ]
    if needed is not None and len(sample.isr) < needed:
        parts.append(f"min.insync.replicas={needed} requires {needed - len(sample.isr)} more")
    if missing:
        parts.append(f"node {listed(missing)} left the in-sync replicas")
    if silent:
        parts.append(f"node {listed(silent)} is in sync in the metadata, but does not answer")
    elif late:
        parts.append(f"node {listed(late)} is in sync, but its log ends at {listed(ends[node] for node in late)}")
    culprits = missing or silent or late
    numbers: dict[str, float] = {"log_end_offset": end}
    if watermark is not None:
        numbers |= {"high_watermark": watermark, "lag": end - watermark}
    return Evidence(
        "; ".join(parts), partition, culprits[0] if culprits else None, since_s=round(since_s, 1), numbers=numbers
    )


def _watermark_age_s(seen: Observations, partition: int) -> float:
    """Return how long the watermark has lagged by the leader's metric, or since its last traced rise, if longer."""
    rises = [e for e in seen.traces if isinstance(e, WatermarkUpdated) and e.partition == partition]
    traced_s = seen.ago_s(rises[-1]) if rises else 0.0
    return max(seen.watermark_age_s.get(partition, 0.0), traced_s)


def leadership_rejections(seen: Observations) -> Finding:
    """Detect nodes that keep rejecting requests for partitions they do not lead: a client has stale metadata."""
    # A count must rise from the first sample to the middle one and to the last, so fewer than three never match.
    samples = seen.rejections or [RejectionSample(0.0, {})]
    first, middle, final = samples[0], samples[len(samples) // 2], samples[-1]
    evidence: list[Evidence] = []
    for key, count in sorted(final.counts.items()):
        node, partition = key
        before, halfway = first.counts.get(key, 0), middle.counts.get(key, 0)
        if count - before < REJECTIONS_MIN or not before < halfway < count:
            continue
        leader = seen.partitions[partition][-1].leader if partition in seen.partitions else -1
        clients = _rejected_clients(seen, node, partition)
        senders = f" of {listed(clients)}" if clients else ""
        evidence.append(
            Evidence(
                f"node {node} rejected {count - before} requests{senders} for partition {partition} within "
                f"{final.at_s - first.at_s:.0f} s, because node {leader} leads it",
                partition,
                node,
                client=clients[0] if clients else None,
                since_s=round(final.at_s - first.at_s, 1),
                numbers={"rejections": count - before},
            )
        )
    known = sorted({item.client for item in evidence if item.client})
    step = (
        f"Make {listed(known)} refresh the metadata"
        if known
        else f"Find the client (chronik trace on {seen.topic} shows it) and make it refresh its metadata"
    )
    return Finding(
        "leadership-rejections",
        f"clients keep sending requests for {seen.topic} to nodes that do not lead it, which reject them",
        f"{step} (a shorter metadata.max.age.ms, or a restart), and set forwarding = true on the nodes, so that they "
        "forward produce requests to the leader.",
        evidence,
    )


def _rejected_clients(seen: Observations, node: int, partition: int) -> list[str]:
    return sorted(
        {
            event.client_id or UNNAMED_CLIENT
            for event in seen.traces
            if isinstance(event, ProduceRejected | FetchServed)
            and (event.node, event.partition) == (node, partition)
            and event.error in REJECTION_ERRORS
            and event.client_id != DOCTOR_CLIENT_ID
        }
    )


def under_replicated(seen: Observations) -> Finding:
    evidence: list[Evidence] = []
    for partition, samples in seen.partitions.items():
        since_s = lasting_s(samples, lambda sample: len(sample.isr) < len(sample.replicas))
        if since_s is None or (len(samples) > 1 and since_s == 0):
            continue
        sample = samples[-1]
        missing = [node for node in sample.replicas if node not in sample.isr]
        changes = [e for e in seen.traces if isinstance(e, IsrChanged) and e.partition == partition]
        if changes:
            since_s = max(since_s, seen.ago_s(changes[-1]))
        reasons = [f"node {node}: {seen.silent_nodes[node]}" for node in missing if node in seen.silent_nodes]
        why = f" ({listed(reasons)})" if reasons else ""
        evidence.append(
            Evidence(
                f"partition {partition}: in sync {listed(sample.isr)} of {listed(sample.replicas)}, missing "
                f"{listed(missing)}{why}",
                partition,
                missing[0],
                since_s=round(since_s, 1),
            )
        )
    return Finding(
        "under-replicated",
        f"{len(evidence)} of {len(seen.partitions)} partitions of {seen.topic} have replicas that are not in sync: no "
        "record is lost, but the topic tolerates fewer failures",
        f"Start node {listed(nodes_of(evidence))}, or wait while it catches up; chronik cluster status shows all "
        "nodes.",
        evidence,
    )


PRECEDENCE: tuple[Callable[[Observations], Finding], ...] = (
    expired_certificate,
    wrong_listener,
    not_authorized,
    no_leader,
    watermark_not_advancing,
    throttled,
    fetch_hang,
    leadership_rejections,
    open_transaction,
    revocation_owed,
    poison_pill,
    consumer_stopped,
    partition_imbalance,
    under_replicated,
)


def judge(seen: Observations) -> Diagnosis:
    """Return the verdict for the observations."""
    findings = [finding for rule in PRECEDENCE if (finding := rule(seen)).evidence]
    partitions = tuple(_examined(seen, partition, samples) for partition, samples in sorted(seen.partitions.items()))
    finding = findings[0] if findings else _healthy(seen)
    return Diagnosis(
        seen.topic,
        finding.verdict,
        finding.summary,
        finding.next_step,
        (*finding.evidence, *_damages(seen)),
        partitions,
        also=tuple(other.verdict for other in findings[1:]),
        group=seen.requested_group,
        seconds=round(seen.seconds, 1),
        notes=tuple(seen.notes),
    )


def _healthy(seen: Observations) -> Finding:
    slowest_ms = max((probe.elapsed_ms for probe in seen.fetches), default=None)
    fetches = "" if slowest_ms is None else f"; fetches were answered within {slowest_ms:.0f} ms"
    evidence = [Evidence(f"all {len(seen.partitions)} partitions have a leader and all replicas in sync{fetches}")]
    for group, samples in sorted(seen.groups.items()):
        lag = sum(view["lag"] or 0 for view in _lags(seen, group).values())
        text = f"group {group} is {samples[-1].state} with {len(samples[-1].members)} members, lag {lag}"
        evidence.append(Evidence(text, group=group, numbers={"lag": lag}))
    return Finding(
        "healthy", f"{seen.topic} is healthy: consumers can read what is produced", "Nothing to do.", evidence
    )


def _damages(seen: Observations) -> list[Evidence]:
    """List damaged replicas, unhealed ones first. They yield no verdict; the rules judge their consequences."""
    evidence: list[Evidence] = []
    for damage in sorted(seen.damages, key=lambda damage: damage.state == "healed")[:DAMAGES_NAMED_MAX]:
        outcome = "it is fetching these records again" if damage.state == "fetching" else "it is healed"
        if damage.state == "waiting":
            outcome = f"it is not healed yet: {damage.waits_for or 'it was found just now'}"
        evidence.append(
            Evidence(
                f"node {damage.node} found damage in its replica of partition {damage.partition} by {damage.how}, "
                f"starting at offset {damage.offset} ({damage.reason}); {outcome}",
                damage.partition,
                damage.node,
                numbers={"offset": damage.offset},
            )
        )
    return evidence


def _examined(seen: Observations, partition: int, samples: list[PartitionSample]) -> ExaminedPartition:
    sample = samples[-1]
    end, watermark = sample.log_end_offset, sample.high_watermark
    times = [probe.elapsed_ms for probe in seen.fetches if probe.partition == partition]
    return ExaminedPartition(
        partition,
        sample.leader,
        sample.replicas,
        sample.isr,
        sample.log_start_offset,
        sample.last_stable_offset,
        watermark,
        end,
        None if end is None or watermark is None else max(0, end - watermark),
        round(max(times), 1) if times else None,
        {group: lags[partition] for group in seen.groups if partition in (lags := _lags(seen, group))},
    )


def _lags(seen: Observations, group: str) -> Mapping[int, dict[str, int | None]]:
    watermarks = {partition: samples[-1].high_watermark for partition, samples in seen.partitions.items()}
    return {
        partition: {
            "committed": committed,
            "lag": None if (watermark := watermarks.get(partition)) is None else max(0, watermark - committed),
        }
        for partition, committed in seen.groups[group][-1].committed.items()
    }
