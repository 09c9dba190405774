"""The doctor's rules: the symptoms of each verdict, the order of verdicts, and what is not a reason for alarm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from chronik.client.transactions import OpenTransaction, TransactionDescription
from chronik.doctor.consumption import COMMITS_S, needs_longer
from chronik.doctor.diagnosis import Verdict
from chronik.doctor.observations import (
    DOCTOR_CLIENT_ID,
    BlockingTransaction,
    ConnectionFault,
    DamageSeen,
    Fetch,
    GroupSample,
    Member,
    Observations,
    PartitionSample,
    Refusal,
    RejectionSample,
    ShareSeen,
    Throttle,
)
from chronik.doctor.rules import PRECEDENCE, judge
from chronik.observe.traces import PartitionTrace, TraceRing

TIMES_S = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
LONG_S = (0.0, 3.0, 6.0, 9.0, 12.0)
REPLICAS = (1, 2, 3)


def healthy(times_s: Sequence[float] = TIMES_S, partitions: int = 3) -> Observations:
    """Return a topic under load: ends and watermarks rise, and the watermark always lags a little."""
    seen = Observations("orders", min_insync_replicas=2, seconds=times_s[-1])
    for partition in range(partitions):
        seen.partitions[partition] = [
            PartitionSample(at_s, partition % 3 + 1, REPLICAS, REPLICAS, 0, int(at_s * 100) + 95, int(at_s * 100) + 100)
            for at_s in times_s
        ]
        seen.fetches += [Fetch(at_s, partition, partition % 3 + 1, 0, 3.0) for at_s in times_s]
    seen.rejections = [RejectionSample(at_s, {}) for at_s in (times_s[0], times_s[-1] / 2, times_s[-1])]
    return seen


def change(seen: Observations, partition: int, **fields: object) -> None:
    """Set these fields in each sample of a partition."""
    seen.partitions[partition] = [replace(sample, **fields) for sample in seen.partitions[partition]]  # type: ignore[arg-type]


def consumed(seen: Observations, times_s: Sequence[float], positions: Callable[[int, float], int]) -> None:
    """Add a group `g` with one member that owns every partition."""
    held = tuple(seen.partitions)
    member = Member("m-1", "reader", "10.0.0.9", held)
    seen.groups["g"] = [
        GroupSample(at_s, "Stable", (member,), {partition: positions(partition, at_s) for partition in held})
        for at_s in times_s
    ]


# -- healthy -----------------------------------------------------------------------------------------------------------


def test_a_topic_under_load_with_a_group_that_keeps_up_is_healthy() -> None:
    seen = healthy()
    consumed(seen, TIMES_S, lambda partition, at_s: int(at_s * 100))
    diagnosis = judge(seen)
    assert (diagnosis.verdict, diagnosis.also) == ("healthy", ())
    assert "within 3 ms" in diagnosis.evidence[0].text
    assert diagnosis.partitions[0].groups["g"] == {"committed": 500, "lag": 95}


def test_an_idle_topic_is_healthy() -> None:
    seen = healthy()
    for partition in seen.partitions:
        change(seen, partition, high_watermark=10, log_end_offset=10)
    consumed(seen, TIMES_S, lambda partition, at_s: 10)
    assert judge(seen).verdict == "healthy"
    assert not needs_longer(seen)


# -- damage ------------------------------------------------------------------------------------------------------------


def test_damaged_replicas_add_evidence_but_do_not_change_the_verdict() -> None:
    seen = healthy()
    seen.damages = [
        DamageSeen(2, 0, 50, "scrub", "segment 50: its file is missing", "healed"),
        DamageSeen(3, 1, 7, "read", "a batch is not what was written", "waiting", "1 other replicas are in sync"),
        DamageSeen(1, 2, 0, "recovery", "batches are missing", "fetching"),
    ]
    diagnosis = judge(seen)
    assert (diagnosis.verdict, diagnosis.also) == ("healthy", ())
    waiting, fetching, healed = diagnosis.evidence[-3:]
    assert (waiting.node, waiting.partition) == (3, 1)
    assert waiting.text.endswith("it is not healed yet: 1 other replicas are in sync")
    assert fetching.text.endswith("it is fetching these records again")
    assert "partition 0 by scrub, starting at offset 50 (segment 50: its file is missing); it is healed" in healed.text
    change(seen, 2, isr=(2, 3))
    diagnosis = judge(seen)
    assert diagnosis.verdict == "under-replicated" and len(diagnosis.evidence) == 4


# -- no leader ---------------------------------------------------------------------------------------------------------


def test_a_partition_without_a_leader_in_the_metadata_is_reported() -> None:
    seen = healthy()
    change(seen, 1, leader=-1, high_watermark=None, log_end_offset=None, error="the metadata names no leader", isr=(2,))
    seen.silent_nodes = {2: "refused"}
    diagnosis = judge(seen)
    assert diagnosis.verdict == "no-leader"
    assert [item.partition for item in diagnosis.evidence] == [1]
    assert "node 2" in diagnosis.next_step


def test_a_leader_that_is_silent_or_denies_leadership_is_a_missing_leader() -> None:
    seen = healthy()
    for partition in seen.partitions:
        unknown = {"log_start_offset": None, "high_watermark": None, "log_end_offset": None}
        change(seen, partition, **unknown, error="NOT_LEADER_OR_FOLLOWER")
    change(seen, 1, error="cannot connect")
    seen.silent_nodes = {2: "cannot connect", 3: "cannot connect"}
    diagnosis = judge(seen)
    assert diagnosis.verdict == "no-leader"
    assert [(item.partition, item.node) for item in diagnosis.evidence] == [(0, 1), (1, 2), (2, 3)]
    assert "rejects requests" in diagnosis.evidence[0].text
    assert "does not answer" in diagnosis.evidence[1].text


def test_a_short_leader_failover_is_not_reported() -> None:
    seen = healthy()
    samples = seen.partitions[0]
    for at in (2, 3):
        samples[at] = replace(samples[at], log_end_offset=None, high_watermark=None, error="cannot connect")
    assert judge(seen).verdict == "healthy"
    samples[-1] = replace(samples[-1], log_end_offset=None, high_watermark=None, error="cannot connect")
    assert judge(seen).verdict == "healthy", "one sample is not enough"


# -- watermarks --------------------------------------------------------------------------------------------------------


def test_a_stalled_watermark_is_reported_with_the_replica_that_blocks_it() -> None:
    seen = healthy()
    seen.min_insync_replicas = 3
    seen.watermark_age_s = {0: 42.0}
    change(seen, 0, high_watermark=50, isr=(1, 3))
    diagnosis = judge(seen)
    assert (diagnosis.verdict, diagnosis.also) == ("watermark-not-advancing", ("under-replicated",))
    (item,) = diagnosis.evidence
    assert (item.partition, item.node, item.since_s) == (0, 2, 42.0)
    assert item.numbers == {"high_watermark": 50, "log_end_offset": 600, "lag": 550}
    assert "min.insync.replicas=3 requires 1 more" in item.text


def test_the_duration_of_a_stall_starts_at_the_watermarks_last_progress() -> None:
    seen = healthy()
    samples = seen.partitions[0]
    for at in range(2, 6):
        samples[at] = replace(samples[at], high_watermark=250)
    assert judge(seen).evidence[0].since_s == 3.0
    samples[2] = replace(samples[2], high_watermark=249)
    assert judge(seen).verdict == "healthy", "two seconds are too short"


def test_a_lagging_or_silent_in_sync_follower_is_reported() -> None:
    seen = healthy()
    change(seen, 0, high_watermark=50)
    seen.replica_ends = {0: {1: 600, 2: 600, 3: 50}}
    item = judge(seen).evidence[0]
    assert item.node == 3
    assert "its log ends at 50" in item.text
    seen.silent_nodes = {2: "did not answer"}
    assert judge(seen).evidence[0].node == 2


def test_a_watermark_that_the_leader_does_not_report_is_not_advancing() -> None:
    seen = healthy()
    change(seen, 0, high_watermark=None, error="OFFSET_NOT_AVAILABLE")
    diagnosis = judge(seen)
    assert diagnosis.verdict == "watermark-not-advancing"
    assert "watermark unknown" in diagnosis.evidence[0].text


def test_records_appended_just_before_the_last_sample_are_no_stalled_watermark() -> None:
    seen = healthy()
    change(seen, 0, high_watermark=100, log_end_offset=100)
    seen.partitions[0][-1] = replace(seen.partitions[0][-1], log_end_offset=150)
    assert judge(seen).verdict == "healthy"


# -- fetches -----------------------------------------------------------------------------------------------------------


def test_fetches_that_take_seconds_with_records_available_hang() -> None:
    seen = healthy()
    seen.fetches = [
        Fetch(0, 2, 3, 17, 2_500.0),
        Fetch(3, 2, 3, 17, 1_900.0, is_over=False),
        Fetch(0, 0, 1, 0, 4.0),
    ]
    diagnosis = judge(seen)
    assert diagnosis.verdict == "fetch-hang"
    (item,) = diagnosis.evidence
    assert (item.partition, item.node, item.numbers["longest_ms"]) == (2, 3, 2500.0)
    assert "1 of them still unanswered" in item.text
    assert diagnosis.partitions[2].fetch_ms == 2500.0


def test_a_single_slow_fetch_or_a_slow_machine_is_no_hang() -> None:
    seen = healthy()
    seen.fetches = [Fetch(0, 2, 3, 17, 2_500.0), Fetch(1, 2, 3, 17, 90.0)]
    assert judge(seen).verdict == "healthy"
    seen.fetches = [Fetch(0, 2, 3, 17, 2_500.0), Fetch(1, 2, 3, 17, 2_500.0)]
    change(seen, 2, answer_ms=900.0)
    assert judge(seen).verdict == "healthy"


def traced(node: int = 3) -> tuple[TraceRing, list[float]]:
    clock_ms = [0.0]
    return TraceRing(node, 1000, lambda: clock_ms[0], SimpleNamespace(traces_dropped=0)), clock_ms


def test_traces_show_hanging_consumer_fetches_but_not_long_polls() -> None:
    ring, clock_ms = traced()
    trace = PartitionTrace(ring, "orders", 2)
    for fetch in (1, 2):
        trace.fetch_started(fetch, "reader", 10, 500, 1)
        trace.watermark_seen(fetch, 20, 20)
    trace.fetch_started(3, "waiter", 20, 60_000, 1)
    trace.watermark_seen(3, 20, 20)
    trace.no_data(3)
    trace.fetch_started(4, DOCTOR_CLIENT_ID, 10, 0, 1)
    trace.watermark_seen(4, 20, 20)
    clock_ms[0] = 2_000.0
    trace.fetch_served(1, "reader", 10, 100, 20, None, 2.0)
    seen = healthy()
    seen.traces, seen.node_clocks_ms = ring.read(0, 100)[0], {3: 5_000.0}
    diagnosis = judge(seen)
    assert diagnosis.verdict == "fetch-hang"
    (item,) = diagnosis.evidence
    assert (item.client, item.node, item.partition) == ("reader", 3, 2)
    assert item.numbers == {"fetches": 2, "longest_ms": 5_000.0}
    assert "waiter" not in item.text


# -- leadership --------------------------------------------------------------------------------------------------------


def rejected(seen: Observations, *counts: int) -> None:
    seen.rejections = [
        RejectionSample(at_s, {(2, 0): count, (1, 0): 7}) for at_s, count in zip((0, 2.5, 5), counts, strict=True)
    ]


def test_continuing_rejections_are_reported_with_node_client_and_current_leader() -> None:
    seen = healthy()
    rejected(seen, 3, 9, 15)
    ring, _ = traced(node=2)
    PartitionTrace(ring, "orders", 0).rejected("stale", "NOT_LEADER_OR_FOLLOWER", "node 1 leads")
    seen.traces = ring.read(0, 10)[0]
    diagnosis = judge(seen)
    assert diagnosis.verdict == "leadership-rejections"
    (item,) = diagnosis.evidence
    assert (item.node, item.partition, item.client, item.numbers) == (2, 0, "stale", {"rejections": 12})
    assert "because node 1 leads it" in item.text
    assert "stale" in diagnosis.next_step


@pytest.mark.parametrize("counts", [(3, 3, 3), (3, 20, 20), (3, 3, 20), (3, 4, 5)])
def test_few_or_past_rejections_are_not_reported(counts: tuple[int, int, int]) -> None:
    seen = healthy()
    rejected(seen, *counts)
    assert judge(seen).verdict == "healthy"


# -- transactions ------------------------------------------------------------------------------------------------------

WALL_MS = 1_800_000_000_000
PAYMENTS = TransactionDescription("payments", 2, 1000, 3, "Ongoing", 60_000, WALL_MS - 35_000, (("orders", 0),))


def block(seen: Observations, partition: int, state: TransactionDescription | None) -> None:
    """Stall the last stable offset of a partition at 40, where the transaction of producer 1000 begins."""
    change(seen, partition, last_stable_offset=40)
    seen.wall_ms = WALL_MS
    opened = OpenTransaction("orders", partition, 1000, 3, 0, 40, WALL_MS - 20_000)
    seen.transactions = [*seen.transactions, BlockingTransaction(opened, state)]


def test_an_open_transaction_is_reported_with_its_producer_its_timeout_and_the_cure() -> None:
    seen = healthy()
    block(seen, 0, PAYMENTS)
    block(seen, 2, PAYMENTS)
    diagnosis = judge(seen)
    assert (diagnosis.verdict, diagnosis.also) == ("open-transaction", ())
    assert "partition 0, 2 of orders" in diagnosis.summary
    (item,) = diagnosis.evidence
    assert (item.partition, item.node, item.transactional_id, item.since_s) == (0, 2, "payments", 35.0)
    assert "(producer 1000, epoch 3)" in item.text
    assert "since 2027-01-15T07:59:25+00:00" in item.text and "aborts it at 2027-01-15T08:00:25+00:00" in item.text
    assert item.numbers["timeout_ms"] == 60_000 and item.numbers["lag"] == 2 * (595 - 40)
    assert "chronik transaction abort payments." in diagnosis.next_step
    assert diagnosis.partitions[0].last_stable_offset == 40


def test_a_transaction_with_a_decided_outcome_is_not_to_be_aborted() -> None:
    seen = healthy()
    block(seen, 1, replace(PAYMENTS, state="PrepareCommit"))
    diagnosis = judge(seen)
    assert diagnosis.verdict == "open-transaction"
    assert "decided its outcome (PrepareCommit)" in diagnosis.evidence[0].text
    assert "abort" not in diagnosis.next_step


def test_a_hanging_transaction_is_reported_with_the_command_that_ends_it() -> None:
    seen = healthy()
    block(seen, 1, None)
    diagnosis = judge(seen)
    assert diagnosis.verdict == "open-transaction"
    (item,) = diagnosis.evidence
    assert (item.partition, item.node, item.transactional_id, item.since_s) == (1, 2, None, 20.0)
    assert "no coordinator knows it" in item.text
    command = "chronik transaction abort --topic orders --partition 1 --start-offset 40"
    assert command in diagnosis.next_step


def test_a_short_transaction_and_a_last_stable_offset_that_advances_are_healthy() -> None:
    seen = healthy()
    block(seen, 0, replace(PAYMENTS, start_ms=WALL_MS - 5_000))
    assert judge(seen).verdict == "healthy", "it has been open for a normal time"
    seen = healthy()
    block(seen, 0, PAYMENTS)
    seen.partitions[0][-2] = replace(seen.partitions[0][-2], last_stable_offset=39)
    assert judge(seen).verdict == "healthy", "the last stable offset advanced"
    change(seen, 0, last_stable_offset=95, high_watermark=95, log_end_offset=95)
    assert judge(seen).verdict == "healthy", "no record waits"


# -- consumers ---------------------------------------------------------------------------------------------------------


def test_a_member_that_owns_partitions_and_commits_nothing_has_stopped() -> None:
    seen = healthy(LONG_S)
    consumed(seen, LONG_S, lambda partition, at_s: 40)
    diagnosis = judge(seen)
    assert diagnosis.verdict == "consumer-stopped"
    (item,) = diagnosis.evidence
    assert (item.client, item.group, item.since_s) == ("reader", "g", 12.0)
    assert item.numbers["lag"] == 3 * (1295 - 40)
    assert "reader" in diagnosis.next_step


def test_a_group_is_not_reported_before_it_has_time_to_commit_twice() -> None:
    seen = healthy()
    consumed(seen, TIMES_S, lambda partition, at_s: 40)
    assert judge(seen).verdict == "healthy"
    assert needs_longer(seen)
    seen = healthy(LONG_S)
    consumed(seen, LONG_S, lambda partition, at_s: 40 if at_s < 6 else 600)
    assert judge(seen).verdict == "healthy"
    assert LONG_S[-1] > COMMITS_S


def test_a_stuck_member_has_stopped_even_if_another_member_makes_progress() -> None:
    seen = healthy(LONG_S)
    members = (Member("m-1", "stuck", "h", (0, 1)), Member("m-2", "fine", "h", (2,)))
    seen.groups["g"] = [GroupSample(at_s, "Stable", members, {0: 40, 1: 40, 2: int(at_s * 100)}) for at_s in LONG_S]
    diagnosis = judge(seen)
    assert diagnosis.verdict == "consumer-stopped"
    assert [item.client for item in diagnosis.evidence] == ["stuck"]


def test_a_member_that_does_not_revoke_is_named_with_its_time() -> None:
    def at(at_s: float, epoch: int, target: int) -> GroupSample:
        members = (Member("m-1", "slow", "h", (0,), epoch), Member("m-2", "fine", "h", (), target))
        return GroupSample(at_s, "Reconciling", members, {0: int(at_s * 100)}, target)

    seen = healthy(LONG_S)
    seen.groups["g"] = [at(at_s, 3, 3 if at_s == 0 else 4) for at_s in LONG_S]
    assert judge(seen).verdict == "healthy"
    assert needs_longer(seen)
    seen.groups["g"] = [at(at_s, 3, 5) for at_s in LONG_S]
    diagnosis = judge(seen)
    assert diagnosis.verdict == "revocation-owed"
    (item,) = diagnosis.evidence
    assert (item.client, item.since_s, item.group) == ("slow", 12.0, "g")
    assert "owes a revocation for 12 s" in item.text
    seen.groups["g"] = [at(at_s, int(at_s), int(at_s) + 1) for at_s in LONG_S]
    assert judge(seen).verdict == "healthy", "it makes progress"


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (
            ShareSeen("s", 1, 1, 4, 0, -1, 17, 3, 5, 2),
            "poison pill at offset 17 of partition 1, delivered 3 of 5 times",
        ),
        (ShareSeen("s", 1, 0, 10, 2, 8, -1, 0, 5, 2), "poison pill at offset 8 of partition 1, archived after 5"),
        (
            ShareSeen("s", 1, 1, 4, 0, -1, 17, 2, 2, 2),
            "poison pill at offset 17 of partition 1, delivered 2 of 2 times",
        ),
        (ShareSeen("s", 1, 1, 4, 0, -1, 17, 2, 5, 2), None),
    ],
)
def test_a_record_that_is_released_again_and_again_is_named(share: ShareSeen, text: str | None) -> None:
    seen = healthy(LONG_S)
    seen.shares = [share]
    diagnosis = judge(seen)
    assert diagnosis.verdict == ("healthy" if text is None else "poison-pill")
    if text is not None:
        (item,) = diagnosis.evidence
        assert (item.group, item.partition, item.node) == ("s", 1, 2)
        assert text in item.text


def test_an_empty_group_is_reported_only_if_it_is_requested() -> None:
    seen = healthy(LONG_S)
    seen.groups["g"] = [GroupSample(at_s, "Empty", (), {0: 40}) for at_s in LONG_S]
    assert judge(seen).verdict == "healthy"
    assert not needs_longer(seen)
    seen.requested_group = "g"
    diagnosis = judge(seen)
    assert diagnosis.verdict == "consumer-stopped"
    assert "Start its consumers" in diagnosis.next_step


def test_a_single_stuck_partition_is_an_imbalance() -> None:
    seen = healthy(LONG_S)
    consumed(seen, LONG_S, lambda partition, at_s: 40 if partition == 1 else int(at_s * 100))
    diagnosis = judge(seen)
    assert diagnosis.verdict == "partition-imbalance"
    (item,) = diagnosis.evidence
    assert (item.partition, item.client, item.numbers) == (1, "reader", {"committed": 40, "lag": 1255})
    assert "partition 0, 2 advanced" in item.text


def test_a_partition_that_no_member_owns_is_an_imbalance() -> None:
    seen = healthy(LONG_S)
    consumed(seen, LONG_S, lambda partition, at_s: 40 if partition == 1 else int(at_s * 100))
    seen.groups["g"] = [replace(sample, members=(Member("m", "reader", "h", (0, 2)),)) for sample in seen.groups["g"]]
    diagnosis = judge(seen)
    assert diagnosis.verdict == "partition-imbalance"
    assert "assigned to no member" in diagnosis.evidence[0].text


# -- replicas, and the order of verdicts -------------------------------------------------------------------------------


def test_an_out_of_sync_replica_is_reported_with_its_connection_error() -> None:
    seen = healthy()
    change(seen, 0, isr=(1, 2))
    seen.silent_nodes = {3: "Connection refused"}
    diagnosis = judge(seen)
    assert diagnosis.verdict == "under-replicated"
    (item,) = diagnosis.evidence
    assert (item.partition, item.node, item.since_s) == (0, 3, 5.0)
    assert "Connection refused" in item.text
    seen.partitions[0][-1] = replace(seen.partitions[0][-1], isr=REPLICAS)
    assert judge(seen).verdict == "healthy"


def everything() -> Observations:
    """Return all causes at once, each on its own partition."""
    seen = healthy(LONG_S, partitions=8)
    change(seen, 0, leader=-1, log_end_offset=None, high_watermark=None, error="the metadata names no leader")
    change(seen, 1, high_watermark=10)
    seen.fetches = [Fetch(0, 2, 3, 0, 5_000.0), Fetch(6, 2, 3, 0, 5_000.0)]
    seen.rejections = [RejectionSample(at_s, {(1, 3): int(at_s) * 10}) for at_s in (0, 6, 12)]
    block(seen, 3, PAYMENTS)
    members = (Member("a", "stuck", "h", (4,)), Member("b", "uneven", "h", (5, 6)))
    seen.groups["g"] = [GroupSample(at_s, "Stable", members, {4: 1, 5: 1, 6: int(at_s) * 10}) for at_s in LONG_S]
    owing = (Member("c", "owing", "h", (), 1),)
    seen.groups["k"] = [GroupSample(at_s, "Reconciling", owing, {}, 2) for at_s in LONG_S]
    seen.shares = [ShareSeen("s", 0, 1, 4, 0, -1, 17, 4, 5, 2)]
    change(seen, 7, isr=(1, 2))
    seen.connection_faults = (
        ConnectionFault("expired-certificate", "the certificate is expired", 1),
        ConnectionFault("wrong-listener", "the listener speaks TLS", 2),
    )
    seen.refusals = [Refusal("READ", "topic orders", "TOPIC_AUTHORIZATION_FAILED")]
    seen.throttles = [Throttle(1.0, 1, 50.0), Throttle(2.0, 1, 50.0)]
    return seen


CURES: dict[Verdict, Callable[[Observations], object]] = {
    "expired-certificate": lambda seen: setattr(seen, "connection_faults", seen.connection_faults[1:]),
    "wrong-listener": lambda seen: setattr(seen, "connection_faults", ()),
    "not-authorized": lambda seen: seen.refusals.clear(),
    "no-leader": lambda seen: seen.partitions.pop(0),
    "watermark-not-advancing": lambda seen: seen.partitions.pop(1),
    "throttled": lambda seen: seen.throttles.clear(),
    "fetch-hang": lambda seen: seen.fetches.clear(),
    "leadership-rejections": lambda seen: seen.rejections.clear(),
    "open-transaction": lambda seen: seen.partitions.pop(3),
    "revocation-owed": lambda seen: seen.groups.pop("k"),
    "poison-pill": lambda seen: setattr(seen, "shares", []),
    "consumer-stopped": lambda seen: seen.partitions.pop(4),
    "partition-imbalance": lambda seen: seen.partitions.pop(5),
    "under-replicated": lambda seen: seen.partitions.pop(7),
}


def test_verdicts_follow_the_documented_order_of_precedence() -> None:
    seen = everything()
    assert [rule(seen).verdict for rule in PRECEDENCE] == list(CURES)
    for verdict, cure in CURES.items():
        assert judge(seen).verdict == verdict
        cure(seen)
    assert judge(seen).verdict == "healthy"


def test_the_json_contains_the_documented_fields() -> None:
    diagnosis = judge(everything()).to_json()
    assert diagnosis["verdict"] == "expired-certificate"
    assert diagnosis["also"][0] == "wrong-listener"
    assert {"verdict", "summary", "evidence", "partitions", "next_step"} <= diagnosis.keys()
    assert diagnosis["partitions"][2]["fetch_ms"] == 5000.0
    assert isinstance(diagnosis["evidence"][0]["text"], str)
