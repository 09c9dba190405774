"""Spark for a command: its session, its own Kafka connector, and errors as one line.

The JVM's output goes to a file, which is kept if the command fails.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chronik.cli.errors import CliError
from chronik.cli.options import parse_configs
from chronik.cli.output import note

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CONF_EXAMPLE = "spark.executor.memory=2g"
CATALOG_EXAMPLE = "uri=http://127.0.0.1:8181"
CONNECTOR = "org.apache.spark:spark-sql-kafka-0-10_2.13"
CONNECTOR_NEWEST = "4.2.0"
"""The newest version when this was written (4.3.0 was unpublished). A test checks that it works with Spark 4.3."""
LOG_BYTES_MAX = 64 * 1024 * 1024
LOG_CHECK_S = 10.0
_UNRESOLVED = re.compile(r"unresolved dependency: (\S+?)#(\S+?);([^:\s]+)")

logger = logging.getLogger(__name__)

Master = Annotated[
    str | None,
    typer.Option(
        "--master",
        metavar="M",
        help="Spark's master; default: this machine, or that of spark-submit.",
        show_default=False,
    ),
]
Report = Annotated[str | None, typer.Option("--report", metavar="FILE.html", help="Write a report with charts.")]
Conf = Annotated[list[str] | None, typer.Option("--conf", metavar="K=V", help="A Spark setting; repeatable.")]
Catalog = Annotated[
    list[str] | None,
    typer.Option("--catalog", metavar="K=V", help="A setting of pyiceberg's catalog; repeatable. Default: a file."),
]


@contextmanager
def one_line_errors(*, with_java: bool = True) -> Iterator[None]:
    """Report as one line a missing Spark or Java before Spark starts, or a PipelineError from the block."""
    missing = next((name for name in ("pyspark", "pyarrow", "deltalake") if find_spec(name) is None), None)
    if missing is not None:
        raise CliError(f"{missing} is not installed: pip install 'chronik[spark]'")
    from chronik.pipeline.errors import PipelineError
    from chronik.pipeline.session import java_fault

    fault = java_fault() if with_java else None
    if fault is not None:
        raise CliError(fault)
    try:
        yield
    except PipelineError as error:
        raise CliError(str(error)) from None


@contextmanager
def spark_for(name: str, master: str | None, conf: Mapping[str, str]) -> Iterator[SparkSession]:
    """Yield the session and stop it afterwards. On a PipelineError, keep Spark's own log and name it."""
    from chronik.pipeline.errors import PipelineError
    from chronik.pipeline.session import spark_session

    descriptor, log_path = tempfile.mkstemp(prefix="chronik-spark-", suffix=".log")
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)  # so that the JVM writes at the new end of a cut log
    is_log_kept, has_ended = False, threading.Event()
    own = os.dup(descriptor), has_ended
    threading.Thread(target=bound_log, args=own, name="chronik-spark-log", daemon=True).start()
    try:
        with _stderr_into(descriptor):
            session = spark_session(name, master, conf)
        _restore_interrupts()
        try:
            yield session
        finally:
            _stop(session)
    except PipelineError as error:
        with open(log_path, encoding="utf-8", errors="replace") as log:
            fault = connector_fault(log.read())
        is_log_kept = fault is None and os.path.getsize(log_path) > 0
        where = f" (Spark's log: {log_path})" if is_log_kept else ""
        raise CliError(fault or f"{error}{where}") from None
    finally:
        has_ended.set()
        os.close(descriptor)
        if not is_log_kept:
            os.unlink(log_path)


def bound_log(descriptor: int, has_ended: threading.Event, bytes_max: int = LOG_BYTES_MAX) -> None:
    """Keep Spark's log below a size: a landing runs for months, and Spark logs a page for each failure. Closes it."""
    while not has_ended.wait(LOG_CHECK_S):
        with suppress(OSError):
            if os.fstat(descriptor).st_size > bytes_max:
                os.ftruncate(descriptor, 0)
    os.close(descriptor)


def _stop(session: SparkSession) -> None:
    try:
        session.stop()
    except Exception as error:  # the JVM has been killed; the command ends with that failure
        logger.warning("Spark did not stop cleanly: %s", error)


@contextmanager
def spark_job(name: str, master: str | None, conf: Sequence[str] | None) -> Iterator[SparkSession]:
    """Run a Spark session for the block; report a failed job without the page of frames that Spark adds."""
    from chronik.pipeline.errors import PipelineError, failure_line, reason_of

    settings = parse_configs("--conf", conf, CONF_EXAMPLE)
    note(f"starting Spark at {master}" if master else "starting Spark")
    with spark_for(name, master, settings) as spark:
        try:
            yield spark
        except Exception as error:
            line = failure_line(error)
            if line is not None:
                raise CliError(line) from None
            raise PipelineError(f"the Spark job failed: {reason_of(error)}") from error


def _restore_interrupts() -> None:
    """Make Ctrl-C raise KeyboardInterrupt again: Spark's own handler calls the JVM in the middle of another call to it.

    Ctrl-C also interrupts such a call. py4j then logs pages of frames to the root logger and raises, so hide its log.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)
    root = logging.getLogger()
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.addFilter(lambda record: record.module not in ("clientserver", "java_gateway"))
        root.addHandler(handler)


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


def with_connector(conf: Mapping[str, str], spark_version: str) -> dict[str, str]:
    """Return settings that make Spark get its connector from Maven, unless the jars are given."""
    if any(name in conf for name in ("spark.jars", "spark.jars.packages")):
        return dict(conf)
    version = min(spark_version, CONNECTOR_NEWEST, key=_version_key)
    return {**conf, "spark.jars.packages": f"{CONNECTOR}:{version}"}


def connector_fault(log: str) -> str | None:
    """Return an error for packages that Maven did not supply according to Spark's log; None if it supplied all."""
    missing = dict.fromkeys(":".join(names) for names in _UNRESOLVED.findall(log))
    if not missing:
        return None
    return (
        f"Spark cannot get {', '.join(missing)} from Maven: pass --conf spark.jars=FILE.jar,... with the connector, "
        "its token provider, kafka-clients and commons-pool2, or another version with --conf spark.jars.packages="
        f"{CONNECTOR}:VERSION"
    )


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
