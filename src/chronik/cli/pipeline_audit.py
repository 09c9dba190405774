"""`chronik pipeline audit`: acknowledged, readable, delivered and landed, reconciled by a Spark job."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from chronik.cli.errors import CHECK_FAILED, CliError
from chronik.cli.options import DEFAULT_BOOTSTRAP, AsJson, Bootstrap
from chronik.cli.output import note, print_json, print_table
from chronik.cli.pipeline_audit_job import Report, one_line, spark_job, time_option, write_report
from chronik.cli.pipeline_spark import Conf, Master

if TYPE_CHECKING:
    from chronik.pipeline.audit.result import AuditResult

LOG_WAYS = ("auto", "headers", "fetch", "records")
RANGES_SHOWN = 20


def audit(
    topic: Annotated[str, typer.Argument(metavar="TOPIC")],
    ledger: Annotated[str | None, typer.Option("--ledger", metavar="FILE", help="What was acknowledged.")] = None,
    receipts: Annotated[str | None, typer.Option("--receipts", metavar="FILE", help="What was delivered.")] = None,
    table: Annotated[
        str | None, typer.Option("--table", metavar="DIR", help="Where it landed: the table, or the folder of tables.")
    ] = None,
    group: Annotated[
        str | None, typer.Option("--group", metavar="G", help="Delivered is what this group has committed.")
    ] = None,
    since: Annotated[
        str | None, typer.Option("--from", metavar="TIME", help="Leave out what was produced before.")
    ] = None,
    log: Annotated[
        str,
        typer.Option("--log", metavar="|".join(LOG_WAYS), help="How the log is read: batch headers where they do."),
    ] = "auto",
    report: Report = None,
    master: Master = None,
    conf: Conf = None,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Reconcile what was acknowledged, readable, delivered and landed. Exit 1 when they differ."""
    if log not in LOG_WAYS:
        raise CliError(f"--log {log} is unknown: use {', '.join(LOG_WAYS)}")
    with one_line():
        from chronik.pipeline.audit.job import AuditRequest, prepare, run

        asked = AuditRequest(bootstrap, topic, ledger, receipts, table, group, time_option("--from", since), log)
        plan = prepare(asked)
        with spark_job("chronik-audit", master, conf) as spark:
            note(f"auditing {plan.records:,} offsets of {topic} in {len(plan.bounds)} partitions, log by {plan.how}")
            result = run(spark, plan)
    if report is not None:
        from chronik.pipeline.report.audit import audit_html

        write_report(report, audit_html(result, f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC, {bootstrap}"))
    if as_json:
        print_json(result.to_json())
    else:
        show(result)
        if report is not None:
            print(f"report: {report}")
    if result.verdict != "complete":
        raise typer.Exit(CHECK_FAILED)


def show(result: AuditResult) -> None:
    """Print the original experiment's breakdown, all sides next to each other, the faults, and the verdict last."""
    from chronik.pipeline.audit.blocks import SIDES
    from chronik.pipeline.report.audit import faults, sentence

    print(breakdown(result))
    columns = ("partition", *(SIDES[side] for side in result.given), "expired", "log start", "end", "lag")
    rows = [
        (
            found.partition,
            *(found.counts.get(side, 0) for side in result.given),
            found.expired,
            found.bounds.log_start,
            found.bounds.end,
            max((found.lag(side) for side in result.given), default=0),
        )
        for found in result.partitions
    ]
    print_table("", columns, rows, columns)
    found_faults = faults(result)
    for partition, what, side, first, last, count, detail in found_faults[:RANGES_SHOWN]:
        offsets = f"offset {first}" if first == last else f"offsets {first}-{last}"
        more = f" ({detail})" if detail else f" ({count} records)" if count > 1 else ""
        print(f"partition {partition}: {what} at the side {side}, {offsets}{more}")
    if len(found_faults) > RANGES_SHOWN:
        print(f"... and {len(found_faults) - RANGES_SHOWN} more: see --json or --report")
    for text in result.notes:
        print(f"note: {text}")
    print(sentence(result))


def breakdown(result: AuditResult) -> str:
    """Return the table in the format of the experiment that this system comes from."""
    lines = ["Per-Partition Breakdown", "=" * 80]
    expected = round(result.expected / max(1, len(result.partitions)))
    for found in result.partitions:
        messages, percent, deviation = result.share(found)
        first, last = found.first.get(result.last_side), found.last.get(result.last_side)
        missing = found.missing()
        lines += [
            f"Partition {found.partition}:",
            f"  Messages:   {messages}/{result.expected} ({percent:.1f}%)",
            f"  Deviation:  {deviation:+d} messages from expected {expected}",
            f"  Offsets:    {'none' if first is None else f'{first}-{last}'}",
            f"  Gaps:       {missing} (offsets missing in range){'  GAPS!' if missing else ''}",
            "",
        ]
    counts = [result.share(found)[0] for found in result.partitions]
    top, bottom = max(counts, default=0), min(counts, default=0)
    return "\n".join([*lines, f"Partition Imbalance: {result.imbalance} messages (max={top}, min={bottom})"])
