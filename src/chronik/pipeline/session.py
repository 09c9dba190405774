"""Spark sessions: start one for our jobs, and register the format `chronik` in any session.

A session for our jobs is quick to start on one machine, and has no overrides on a cluster.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from chronik.pipeline.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HERE = "local[*]"
SUBMITTED = "PYSPARK_GATEWAY_PORT"
"""Set in a Python process that spark-submit has started, which already has its master and its JVM."""

JAVA_MIN = 17
JAVA_TIMEOUT_S = 30

LOCAL = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -Xss4m",
    "spark.driver.memory": "1g",
}
HIDDEN = "(?i)secret|password|passphrase|token|access[.]?key|credential|jaas"
"""Spark's own pattern of what to hide in its UI and its event log, and JAAS configurations, which have passwords."""
ALWAYS = {
    "spark.redaction.regex": HIDDEN,
    "spark.sql.redaction.options.regex": f"{HIDDEN}|url",
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
}


def java_fault() -> str | None:
    """Return why Spark cannot start for lack of Java, or None if it can."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    remedy = f"install Java {JAVA_MIN} or later (Debian: apt-get install default-jre-headless), or set JAVA_HOME"
    if java is None or not os.access(java, os.X_OK):
        return f"Spark needs Java, and there is none: {remedy}"
    try:
        printed = subprocess.run(  # noqa: S603 - the user's own Java, without a shell
            [java, "-version"], capture_output=True, text=True, timeout=JAVA_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{java} does not run ({error}): {remedy}"
    version = printed.stderr.partition('"')[2].partition('"')[0]
    major = version.split(".")[0]
    if not major.isdigit() or int(major) < JAVA_MIN:
        return f"Spark needs Java {JAVA_MIN}, and {java} is {version or 'of an unknown version'}: {remedy}"
    return None


def spark_session(name: str, master: str | None = None, conf: Mapping[str, str] | None = None) -> SparkSession:
    """Return the session of this process, or create it. Raises PipelineError if Spark cannot start.

    Without a master, use that of spark-submit if it started this process, otherwise all cores of this machine.
    """
    if master is None and SUBMITTED not in os.environ:
        master = HERE
    fault = java_fault()
    if fault is not None:
        raise PipelineError(fault)
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise PipelineError("Spark is not installed: pip install 'chronik[spark]'") from None
    settings = dict(ALWAYS)
    if master is not None and master.startswith("local"):
        # Workers use this Python, and Spark does not look up this machine's host name.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        settings |= LOCAL
    builder = SparkSession.builder.appName(name)
    if master is not None:
        builder = builder.master(master)
    for key, value in {**settings, **(conf or {})}.items():
        builder = builder.config(key, value)
    try:
        session = builder.getOrCreate()
    except Exception as error:
        first = str(error).strip().splitlines()[:1] or [type(error).__name__]
        where = f" at {master}" if master else ""
        raise PipelineError(f"Spark does not start{where}: {first[0]}") from None
    session.sparkContext.setLogLevel("ERROR")
    return session


_registered: WeakSet[SparkSession] = WeakSet()


def register(spark: SparkSession) -> None:
    """Register the format, and commit its queries' offsets to their groups at once. Repeated calls do nothing."""
    from chronik.pipeline.sink.spark_sink import ChronikFormat
    from chronik.pipeline.source.spark_source import GroupCommitter

    if spark not in _registered:

        class ListenedFormat(ChronikFormat):
            listener_commits = True

        spark.dataSource.register(ListenedFormat)
        spark.streams.addListener(GroupCommitter())
        _registered.add(spark)


def activate(spark: SparkSession) -> None:
    """Make the session that of this thread: in another thread than the one that made it, Spark finds no formats."""
    session: Any = spark
    session._get_j_spark_session_class(session._jvm).setActiveSession(session._jsparkSession)


def register_active() -> None:
    """Register in this process's active session, if any. Spark's workers import this package too, and have none."""
    sql, core = sys.modules.get("pyspark.sql"), sys.modules.get("pyspark.core.context")
    if sql is None or core is None or core.SparkContext._active_spark_context is None:
        return
    session = sql.SparkSession.getActiveSession()
    if session is not None:
        register(session)
