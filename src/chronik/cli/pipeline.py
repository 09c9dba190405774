"""`chronik pipeline`: Spark jobs over topics. `land` and `audit` have their own modules."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from chronik.cli.options import DEFAULT_BOOTSTRAP, AsJson, Bootstrap, parse_time_option
from chronik.cli.output import note, print_json, write_report
from chronik.cli.pipeline_audit import audit
from chronik.cli.pipeline_land import land
from chronik.cli.pipeline_spark import Conf, Master, Report, one_line_errors, spark_job

app = typer.Typer(
    no_args_is_help=True, help="Spark jobs over topics: land them in tables, audit them, and explain stalls."
)
app.command("land")(land)
app.command("audit")(audit)

STALL_S = 5.0


@app.command()
def traces(
    since: Annotated[str | None, typer.Option("--from", metavar="TIME", help="Ignore events before this time.")] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, help="A period without a delivery of at least this long is a stall.")
    ] = STALL_S,
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
