"""`chronik demo`: on one machine, three nodes, an account of every record, a killed leader, and an audited table."""

from __future__ import annotations

import datetime
import os
import platform
import time
from typing import Annotated

import typer

from chronik.cli.demo_pipeline import landed_and_audited
from chronik.cli.demo_report import GOOD, Chapter, Chart, chart_lines, print_facts, report_html
from chronik.cli.errors import CHECK_FAILED, CliError
from chronik.cli.failover_stream import CHART_SLICE_S, FailoverStream
from chronik.cli.options import with_cluster
from chronik.cli.output import print_table, write_report
from chronik.cli.verify_report import print_run
from chronik.cli.verify_run import Experiment, run
from chronik.client.cluster import Cluster
from chronik.client.topics import Topics
from chronik.local.errors import LocalClusterError
from chronik.local.temporary_cluster import TemporaryCluster

NODES = 3
PARTITIONS = 3
TOPIC = "records"
STREAM_TOPIC = "stream"
STREAM_RECORDS = 20_000
STREAM_RATE = 4000.0
ONE_ADDRESS_COLUMNS = {
    "partition": "partition",
    "leader": "leader",
    "acknowledged": "acked",
    "read": "messages",
    "missing": "missing",
    "duplicated": "duplicates",
    "out of order": "out_of_order",
    "share in %": "percent",
    "first offset": "first_offset",
    "last offset": "last_offset",
}
STREAM_COLUMNS = ("partition", "leader", "acknowledged", "read", "missing", "duplicated", "out of order", "longest gap")


def demo(
    report: Annotated[
        str | None,
        typer.Option(metavar="FILE.html", help="Write the results as a page, the audit's as FILE-audit.html."),
    ] = None,
) -> None:
    """Show on a temporary cluster that no record is lost. Takes about a minute, mostly to start Spark."""
    # Before anything runs, since the report comes last.
    if report is not None and (os.path.isdir(report) or not os.access(os.path.dirname(report) or ".", os.W_OK)):
        raise CliError(f"cannot write {report}: choose another --report")
    chapters: list[Chapter] = []
    began = datetime.datetime.now().astimezone()
    cluster = _start()
    try:
        made = f"{began:%Y-%m-%d %H:%M} on {platform.node()}: {len(cluster.nodes)} nodes on one machine."
        ledger = f"{cluster.folder}/ledger.jsonl"
        chapters.append(_one_address(cluster, ledger))
        if len(cluster.nodes) > 1:
            chapters.append(_leader_dies(cluster))
        audit_report = None if report is None else f"{os.path.splitext(report)[0]}-audit.html"
        audited = landed_and_audited(cluster.bootstrap, TOPIC, ledger, f"{cluster.folder}/tables", audit_report)
        if audited is not None:
            chapters.append(audited)
    finally:
        cluster.remove()
    if report is not None:
        write_report(report, report_html(chapters, made))
        print(f"report: {report}")
    complaints = [f"{chapter.title}: {chapter.complaint}" for chapter in chapters if chapter.complaint]
    if complaints:
        raise CliError("; ".join(complaints), CHECK_FAILED)
    print(f"{GOOD} All nodes are stopped and their folder is removed.")
    if len(chapters) > 1:
        print("Try it yourself: chronik cluster up, chronik verify, chronik cluster kill 1, chronik verify, ...")


def _start() -> TemporaryCluster:
    """Start three nodes; if that fails, start one and print why."""
    print(f"Starting {NODES} nodes ...", flush=True)
    started_s = time.monotonic()
    cluster = TemporaryCluster(NODES)
    try:
        cluster.__enter__()
    except LocalClusterError as error:
        print(f"THREE NODES COULD NOT BE STARTED ({error}): continuing with one, without killing a leader.", flush=True)
        cluster = TemporaryCluster(1)
        cluster.__enter__()
    seconds = time.monotonic() - started_s
    print(f"{len(cluster.nodes)} nodes ready in {seconds:.1f} s at {cluster.bootstrap}", flush=True)
    return cluster


def _one_address(cluster: TemporaryCluster, ledger: str) -> Chapter:
    """Run the experiment in which an earlier system lost 12 to 24 % of the records."""
    experiment = Experiment(partitions=PARTITIONS)
    print(
        f"\n1. {experiment.messages:,} records with {experiment.client}, acks={experiment.acks}, through one address "
        f"({cluster.nodes[0].bootstrap}):",
        flush=True,
    )
    result = run(experiment, cluster.nodes[0].bootstrap, topic=TOPIC, ledger=ledger)
    print_run(result)
    facts = {
        "records": f"{result['messages']:,}, {result['client']}, acks={result['acks']}, one bootstrap address",
        "produced in": f"{result['produce_s']:.2f} s",
        "consumed in": f"{result['consume_s']:.2f} s, {result['burst_rate']:,.0f}/s",
        "success": f"{result['success_rate']:g} % (the earlier system: 87.8, 78.8, 76.3 and 88.2 %)",
    }
    rows = [[partition[name] for name in ONE_ADDRESS_COLUMNS.values()] for partition in result["partitions"]]
    return Chapter(
        "5,000 records through one bootstrap address", list(ONE_ADDRESS_COLUMNS), rows, result["complaint"], facts
    )


def _leader_dies(cluster: TemporaryCluster) -> Chapter:
    """Kill a leader with kill -9 while records flow, and restart it."""
    before = with_cluster(cluster.bootstrap, _make_stream_topic)
    victim = before[0]
    print(
        f"\n2. {STREAM_RECORDS:,} records at {STREAM_RATE:,.0f}/s with librdkafka, acks=all, idempotent; "
        f"node {victim}, which leads partition 0, is killed in the middle:",
        flush=True,
    )
    view = cluster.view()
    was_controller = view is not None and view["controller"] == victim
    stream = FailoverStream(cluster.bootstrap, STREAM_TOPIC, PARTITIONS, STREAM_RECORDS, STREAM_RATE)
    result = stream.run(lambda: cluster.kill(victim))
    account = result.account
    after = with_cluster(cluster.bootstrap, lambda online: online.leaders(STREAM_TOPIC))
    started_s = time.monotonic()
    cluster.start(victim)
    in_sync = cluster.wait_until_in_sync(60.0)
    back_s = time.monotonic() - started_s
    counts = ("acked", "messages", "missing", "duplicates", "out_of_order")
    rows: list[list[object]] = []
    for figures, pause_s in zip(account.partition_figures(after), result.pauses_s, strict=True):
        partition, leader = figures["partition"], figures["leader"]
        leaders = str(leader) if before[partition] == leader else f"{before[partition]}, then {leader}"
        rows.append([partition, leaders, *(figures[name] for name in counts), f"{pause_s:.2f} s"])
    print_table("", STREAM_COLUMNS, rows, STREAM_COLUMNS)
    mark = int(result.event_s / CHART_SLICE_S)
    chart = Chart(result.acks, CHART_SLICE_S, mark, f"node {victim} killed at {result.event_s:.1f} s")
    for line in chart_lines(chart):
        print(line)
    role = f"{'the controller, and ' if was_controller else ''}the leader of partition 0"
    facts = {
        "produced, acknowledged, read": f"{account.produced:,}, {account.acked:,}, {account.consumed:,}",
        "missing, duplicated, out of order": f"{account.missing}, {account.duplicates}, {account.out_of_order}",
        "killed": f"node {victim} ({role}) with SIGKILL, {result.event_s:.1f} s after the start",
        "longest gap without an acknowledgement": f"{result.longest_pause_s:.2f} s",
        f"node {victim} started again": f"all replicas in sync after {back_s:.1f} s"
        if in_sync
        else f"replicas not in sync after {back_s:.0f} s",
    }
    print()
    print_facts(facts)
    complaint = account.complaint() or (None if in_sync else f"node {victim} did not catch up after its start")
    return Chapter("A leader killed in the middle of a stream", STREAM_COLUMNS, rows, complaint, facts, chart)


async def _make_stream_topic(online: Cluster) -> dict[int, int]:
    await Topics(online).create(STREAM_TOPIC, PARTITIONS, None, {})
    return await online.leaders(STREAM_TOPIC)
