"""A Spark session for a command: quiet on the terminal, and its failures in one line."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from chronik.cli.errors import CliError
from chronik.cli.output import note

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Master = Annotated[str, typer.Option("--master", metavar="M", help="Where Spark runs.")]
Conf = Annotated[list[str] | None, typer.Option("--conf", metavar="K=V", help="A setting of Spark.")]

DEFAULT_MASTER = "local[*]"
INSTALL = "Spark is not installed: pip install 'chronik[spark]'"
QUIET = "rootLogger.level = off\n"
JAVA_OPTIONS = "spark.driver.extraJavaOptions"


@contextmanager
def one_line() -> Iterator[None]:
    """What a pipeline tells its user, without the page of frames that Spark wraps it in."""
    if any(find_spec(name) is None for name in ("pyspark", "pyarrow", "deltalake")):
        raise CliError(INSTALL)
    from chronik.pipeline.errors import failure_line

    try:
        yield
    except CliError:
        raise
    except Exception as error:
        line = failure_line(error)
        if line is None:
            raise
        raise CliError(line) from None


@contextmanager
def quiet_session(name: str, master: str, conf: Sequence[str] | None) -> Iterator[SparkSession]:
    """Says nothing of its own: a broken job is told by whoever runs it. Stopped at the end."""
    from chronik.pipeline.session import LOCAL, spark_session

    settings = dict(_pair(text) for text in conf or ())
    with tempfile.TemporaryDirectory(prefix="chronik-spark-") as folder:
        logging = os.path.join(folder, "log4j2.properties")
        with open(logging, "w", encoding="utf-8") as file:
            file.write(QUIET)
        given = settings.get(JAVA_OPTIONS, LOCAL.get(JAVA_OPTIONS, "") if master.startswith("local") else "")
        settings[JAVA_OPTIONS] = f"{given} -Dlog4j2.configurationFile=file:{logging}".strip()
        note(f"starting Spark at {master}")
        with _launcher_silent():
            session = spark_session(name, master, settings)
        session.sparkContext.setLogLevel("OFF")
        try:
            yield session
        finally:
            session.stop()


@contextmanager
def _launcher_silent() -> Iterator[None]:
    """The JVM inherits standard error, and warns there before any setting is read. PySpark's own errors are raised."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise CliError(f"--conf {text} is not NAME=VALUE: write it as in spark.executor.memory=2g")
    return name.strip(), value.strip()
