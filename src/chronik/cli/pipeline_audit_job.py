"""What `audit` and `traces` share: a Spark session for one batch job, and failures as one line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from chronik.cli.errors import CliError
from chronik.cli.options import parse_time_ms
from chronik.cli.output import note
from chronik.cli.pipeline_spark import parse_conf, spark_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NEEDED = ("pyspark", "pyarrow", "deltalake")

Report = Annotated[str | None, typer.Option("--report", metavar="FILE.html", help="Write a report with plots.")]


@contextmanager
def one_line() -> Iterator[None]:
    """Report as one line a missing Spark or Java before Spark starts, or a PipelineError from the block."""
    missing = next((name for name in NEEDED if find_spec(name) is None), None)
    if missing is not None:
        raise CliError(f"{missing} is not installed: pip install 'chronik[spark]'")
    from chronik.pipeline.errors import PipelineError
    from chronik.pipeline.session import java_fault

    fault = java_fault()
    if fault is not None:
        raise CliError(fault)
    try:
        yield
    except PipelineError as error:
        raise CliError(str(error)) from None


@contextmanager
def spark_job(name: str, master: str | None, conf: Sequence[str] | None) -> Iterator[SparkSession]:
    """Run a Spark session for the block; report a failed job without the page of frames that Spark adds."""
    from chronik.pipeline.errors import PipelineError, failure_line

    settings = parse_conf(conf or [])
    note(f"starting Spark at {master}" if master else "starting Spark")
    with spark_for(name, master, settings) as spark:
        try:
            yield spark
        except Exception as error:
            line = failure_line(error)
            if line is not None:
                raise CliError(line) from None
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise PipelineError(f"the Spark job failed: {first}") from error


def time_option(flag: str, text: str | None) -> int | None:
    if text is None:
        return None
    time_ms = parse_time_ms(text)
    if time_ms is None:
        raise CliError(f"{flag} {text} is no time: write it as in 2026-01-31T12:00:00Z, or in milliseconds since 1970")
    return time_ms


def write_report(path: str, page: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(page)
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}; choose another --report") from None
