"""`chronik pipeline`: Spark jobs over topics. `land` has its own module."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from chronik.cli.errors import CHECK_FAILED, CliError
from chronik.cli.options import DEFAULT_BOOTSTRAP, AsJson, Bootstrap, Topic, parse_time_option
from chronik.cli.output import note, print_json, print_table, write_report
from chronik.cli.pipeline_land import land
from chronik.cli.pipeline_spark import Conf, Master, Report, one_line_errors, spark_job

if TYPE_CHECKING:
    from chronik.pipeline.audit.result import AuditResult

LOG_WAYS = ("auto", "headers", "fetch", "records")
RANGES_SHOWN = 20

app = typer.Typer(
    no_args_is_help=True, help="Spark jobs over topics: land them in tables, audit them, and explain stalls."
)
app.command("land")(land)


@app.command()
def audit(
    topic: Topic,
    ledger: Annotated[str | None, typer.Option("--ledger", metavar="FILE", help="The acknowledged records.")] = None,
    receipts: Annotated[str | None, typer.Option("--receipts", metavar="FILE", help="The delivered records.")] = None,
    table: Annotated[
        str | None, typer.Option("--table", metavar="DIR", help="The table, or the folder of tables.")
    ] = None,
    group: Annotated[
        str | None, typer.Option("--group", metavar="G", help="Take this group's committed offsets as delivered.")
    ] = None,
    since: Annotated[
        str | None, typer.Option("--from", metavar="TIME", help="Ignore records before this time.")
    ] = None,
    log: Annotated[
        str,
        typer.Option("--log", metavar="|".join(LOG_WAYS), help="How to read the log; auto: headers if they suffice."),
    ] = "auto",
    report: Report = None,
    master: Master = None,
    conf: Conf = None,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Compare acknowledged, readable, delivered and landed records. Exit 1 if they differ."""
    if log not in LOG_WAYS:
        raise CliError(f"--log {log} is unknown: use {', '.join(LOG_WAYS)}")
    with one_line_errors():
        from chronik.pipeline.audit.job import AuditRequest, prepare, run

        start_ms = parse_time_option("--from", since)
        request = AuditRequest(bootstrap, topic, ledger, receipts, table, group, start_ms, log)
        plan = prepare(request)
        with spark_job("chronik-audit", master, conf) as spark:
            note(f"auditing {plan.records:,} offsets of {topic} in {len(plan.bounds)} partitions, log by {plan.how}")
            result = run(spark, plan)
    if report is not None:
        from chronik.pipeline.report.audit import audit_html

        write_report(report, audit_html(result, f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC, {bootstrap}"))
    if as_json:
        print_json(result.to_json())
    else:
        _show(result)
        if report is not None:
            print(f"report: {report}")
    if result.verdict != "complete":
        raise typer.Exit(CHECK_FAILED)


def _show(result: AuditResult) -> None:
    """Print the original experiment's breakdown, all sides next to each other, the faults, and the verdict last."""
    from chronik.pipeline.audit.blocks import SIDES
    from chronik.pipeline.report.audit import faults, sentence

    print(_breakdown(result))
    columns = ("partition", *(SIDES[side] for side in result.given), "expired", "log start", "end", "lag")
    rows = [
        (
            partition.partition,
            *(partition.counts.get(side, 0) for side in result.given),
            partition.expired,
            partition.bounds.log_start,
            partition.bounds.end,
            max((partition.lag(side) for side in result.given), default=0),
        )
        for partition in result.partitions
    ]
    print_table("", columns, rows, columns)
    faults_found = faults(result)
    for partition, what, side, first, last, count, detail in faults_found[:RANGES_SHOWN]:
        offsets = f"offset {first}" if first == last else f"offsets {first}-{last}"
        more = f" ({detail})" if detail else f" ({count} records)" if count > 1 else ""
        print(f"partition {partition}: {what} at the side {side}, {offsets}{more}")
    if len(faults_found) > RANGES_SHOWN:
        print(f"... and {len(faults_found) - RANGES_SHOWN} more: see --json or --report")
    for text in result.notes:
        print(f"note: {text}")
    print(sentence(result))


def _breakdown(result: AuditResult) -> str:
    """Return the table in the format of the experiment that this system comes from."""
    lines = ["Per-Partition Breakdown", "=" * 80]
    expected = round(result.expected / max(1, len(result.partitions)))
    for partition in result.partitions:
        messages, percent, deviation = result.share(partition)
        first, last = partition.first.get(result.last_side), partition.last.get(result.last_side)
        missing = partition.missing()
        lines += [
            f"Partition {partition.partition}:",
            f"  Messages:   {messages}/{result.expected} ({percent:.1f}%)",
            f"  Deviation:  {deviation:+d} messages from expected {expected}",
            f"  Offsets:    {'none' if first is None else f'{first}-{last}'}",
            f"  Gaps:       {missing} (offsets missing in range){'  GAPS!' if missing else ''}",
            "",
        ]
    counts = [result.share(partition)[0] for partition in result.partitions]
    top, bottom = max(counts, default=0), min(counts, default=0)
    return "\n".join([*lines, f"Partition Imbalance: {result.imbalance} messages (max={top}, min={bottom})"])


@app.command()
def traces(
    since: Annotated[str | None, typer.Option("--from", metavar="TIME", help="Ignore events before this time.")] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, help="A period without a delivery of at least this long is a stall.")
    ] = 5.0,
    topic: Annotated[str | None, typer.Option("--topic", metavar="TOPIC", help="Only this topic.")] = None,
    report: Report = None,
    master: Master = None,
    conf: Conf = None,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """List the periods in which a traced partition had records but delivered none, each with its cause."""
    with one_line_errors():
        from chronik.pipeline.report.stalls import stall_line, stalls_html, stalls_sentence
        from chronik.pipeline.stalls.job import check_traces, stalls_of

        start_ms = parse_time_option("--from", since)
        check_traces(bootstrap)
        with spark_job("chronik-traces", master, conf) as spark:
            note("reading the traces")
            result = stalls_of(spark, bootstrap, start_ms, seconds * 1000, topic)
    if report is not None:
        write_report(report, stalls_html(result, f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC, {bootstrap}"))
    if as_json:
        print_json(result.to_json())
        return
    for stall in result.stalls:
        print(stall_line(stall))
    print(stalls_sentence(result))
    if report is not None:
        print(f"report: {report}")
