"""A Spark session for a command: the JVM's output goes to a file, and errors become one line."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chronik.cli.errors import CliError
from chronik.cli.pipeline_connector import connector_fault

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PY4J_MODULES = ("clientserver", "java_gateway")

Master = Annotated[
    str | None,
    typer.Option(
        "--master",
        metavar="M",
        help="Spark's master; default: this machine, or what spark-submit says.",
        show_default=False,
    ),
]
Conf = Annotated[list[str] | None, typer.Option("--conf", metavar="K=V", help="A setting of Spark; repeat it.")]


@contextmanager
def spark_for(name: str, master: str | None, conf: Mapping[str, str]) -> Iterator[SparkSession]:
    """Yield the session and stop it afterwards. On a PipelineError, keep Spark's own log and name it."""
    from chronik.pipeline.errors import PipelineError
    from chronik.pipeline.session import spark_session

    descriptor, log_path = tempfile.mkstemp(prefix="chronik-spark-", suffix=".log")
    try:
        with _stderr_into(descriptor):
            session = spark_session(name, master, conf)
        _take_interrupts_back()
        try:
            yield session
        finally:
            session.stop()
    except PipelineError as error:
        fault = _package_fault(log_path)
        if fault is not None:
            os.unlink(log_path)
            raise CliError(fault) from None
        if os.path.getsize(log_path):
            raise CliError(f"{error} (Spark's log: {log_path})") from None
        os.unlink(log_path)
        raise CliError(str(error)) from None
    except BaseException:
        os.unlink(log_path)
        raise
    else:
        os.unlink(log_path)
    finally:
        os.close(descriptor)


def _take_interrupts_back() -> None:
    """Make Ctrl-C raise KeyboardInterrupt again: Spark's own handler calls the JVM in the middle of another call to it.

    Ctrl-C also interrupts such a call. py4j then logs pages of frames to the root logger and raises, so hide its log.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
    root = logging.getLogger()
    if not root.handlers:
        shown = logging.StreamHandler()
        shown.addFilter(lambda record: record.module not in PY4J_MODULES)
        root.addHandler(shown)


def _package_fault(log_path: str) -> str | None:
    with open(log_path, encoding="utf-8", errors="replace") as log:
        return connector_fault(log.read())


@contextmanager
def _stderr_into(descriptor: int) -> Iterator[None]:
    """Redirect standard error for processes started inside, for their lifetime; restore our own afterwards."""
    own = os.dup(2)
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)


def jvm_pid(spark: SparkSession) -> int:
    """Return the id of the process that does the work; it outlives a driver that is killed."""
    jvm: Any = spark.sparkContext._jvm
    return int(jvm.java.lang.ProcessHandle.current().pid())


def parse_conf(texts: Sequence[str]) -> dict[str, str]:
    conf: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise CliError(f"--conf {text} is not NAME=VALUE: write it as in spark.executor.memory=2g")
        conf[name.strip()] = value.strip()
    return conf
