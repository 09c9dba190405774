"""`chronik pipeline traces`: when partitions stalled although they had records to read, and why."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from chronik.cli.options import DEFAULT_BOOTSTRAP, AsJson, Bootstrap
from chronik.cli.output import note, print_json
from chronik.cli.pipeline_audit_job import Report, one_line, spark_job, time_option, write_report
from chronik.cli.pipeline_spark import Conf, Master

SECONDS = 5.0


def traces(
    since: Annotated[str | None, typer.Option("--from", metavar="TIME", help="Leave out what came before.")] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, help="How long without a delivery is a stall.")
    ] = SECONDS,
    topic: Annotated[str | None, typer.Option("--topic", metavar="TOPIC", help="This topic only.")] = None,
    report: Report = None,
    master: Master = None,
    conf: Conf = None,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """List the times in which a traced partition had records and nobody was handed any, each with its cause."""
    with one_line():
        from chronik.pipeline.report.stalls import stall_line, stalls_html, stalls_sentence
        from chronik.pipeline.stalls.job import check_traces, stalls_of

        start_ms = time_option("--from", since)
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
