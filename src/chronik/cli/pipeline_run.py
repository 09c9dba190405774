"""`chronik pipeline run FILE.toml`: landings, sinks and audits as a service; `chronik pipeline status`: how they do."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stderr
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from chronik import __version__
from chronik.cli.errors import CHECK_FAILED, CliError
from chronik.cli.options import DEFAULT_BOOTSTRAP, AsJson, Bootstrap, with_cluster
from chronik.cli.output import print_json, print_table
from chronik.cli.pipeline_spark import jvm_pid, one_line_errors, spark_for, with_connector
from chronik.client.errors import ClientError
from chronik.client.pipelines import LOST_AFTER_S, PipelineState, read_states
from chronik.client.properties import ClientSettings, load_settings
from chronik.observe.logging import LibraryLog, Logger, PrintedLog, make_logger
from chronik.wire.errors import KafkaError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from chronik.pipeline.land.topic_landing import TopicLanding
    from chronik.pipeline.service.audits import AuditedTopic
    from chronik.pipeline.service.job import Job, Work
    from chronik.pipeline.service.settings import LandingSettings, PipelineSettings, SinkSettings

OTHER_POLL_S = 2.0

File = Annotated[str, typer.Argument(metavar="FILE.toml", help="Landings, sinks and audits; see docs/pipeline.md.")]


class SystemClocks:
    """The clocks of this machine."""

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_s(self) -> float:
        return time.monotonic()


def run(
    file: File,
    check: Annotated[
        bool, typer.Option("--check", help="Check the file and its targets, and end. Exit 1 if not.")
    ] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Run the landings, sinks and audits of a file until SIGTERM. Each fails and recovers on its own."""
    with one_line_errors(with_java=not check):
        from chronik.pipeline.service.settings import parse

        settings = parse(_read(file), file)
        target = _target(settings, bootstrap)
        if check:
            _check(settings, target, file)
        else:
            _run(settings, target, SystemClocks())


def _read(file: str) -> str:
    try:
        with open(file, encoding="utf-8") as opened:
            return opened.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise CliError(f"cannot read {file}: {reason}") from None


def _target(settings: PipelineSettings, given: ClientSettings) -> ClientSettings:
    """Return the cluster: that of the command line if it names one, otherwise that of the file."""
    if given != DEFAULT_BOOTSTRAP:
        return given
    if settings.properties is not None:
        return load_settings(settings.properties, settings.bootstrap)
    return DEFAULT_BOOTSTRAP if settings.bootstrap is None else ClientSettings(settings.bootstrap)


def _run(settings: PipelineSettings, target: ClientSettings, clocks: SystemClocks) -> None:
    from chronik.pipeline.service.audits import Audits
    from chronik.pipeline.service.service import Service
    from chronik.pipeline.session import register

    log = make_logger(_line_writer(), clocks.wall_ms, component="pipeline", pipeline=settings.name)
    _log_libraries(log)
    stopping = Event()
    _end_on_signals(stopping)
    identity = PipelineState(
        settings.name or "", uuid.uuid4().hex, socket.gethostname(), os.getpid(), __version__, "running",
        clocks.wall_ms(), clocks.wall_ms(),
    )  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(redirect_stderr(PrintedLog(log)))  # pyspark prints when its JVM ends
        record_jvm = _claims(settings, stack)
        service = Service(identity, target, settings.listen, clocks, log)
        stack.callback(service.close)
        stack.callback(log.info, "pipeline_stopped")
        log.info("pipeline_starting", pid=os.getpid(), http_port=service.port, version=__version__)
        _wait_for_other(identity, target, clocks, stopping, log)
        conf = dict(settings.spark.conf)
        if any(landing.source == "kafka" for landing in settings.landing):
            import pyspark

            conf = with_connector(conf, pyspark.__version__)
        conf.setdefault("spark.ui.enabled", str(settings.spark.ui).lower())
        if stopping.is_set():
            return
        with spark_for(f"chronik-{settings.name}", settings.spark.master, conf) as spark:
            record_jvm(jvm_pid(spark))
            register(spark)  # jobs that start at the same time must not look for the format at the same time
            _end_on_signals(stopping)  # Spark has set its own handler
            jobs, audited = _jobs(settings, target, spark, clocks, log)
            background = [Audits(spark, target, audited, clocks, log)] if audited else []
            log.info("pipeline_started", jobs=len(jobs), audits=len(audited))
            service.run(jobs, background, lambda: _is_alive(spark), stopping)


def _line_writer() -> Callable[[str], None]:
    stream = sys.stderr

    def write(line: str) -> None:
        stream.write(line)
        stream.flush()

    return write


def _log_libraries(log: Logger) -> None:
    """Write what libraries log as JSON lines too."""
    import logging

    handler = LibraryLog(log)
    handler.addFilter(lambda record: record.module not in ("clientserver", "java_gateway"))
    logging.getLogger().addHandler(handler)


def _end_on_signals(stopping: Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())


def _is_alive(spark: SparkSession) -> bool:
    context: Any = spark.sparkContext
    try:
        return not context._jsc.sc().isStopped()
    except Exception:
        return False


def _claims(settings: PipelineSettings, stack: ExitStack) -> Callable[[int], None]:
    """Claim each checkpoint folder, so that no other service or landing uses it. Return what records the JVM."""
    from chronik.pipeline.land.claim import claim

    folders = [landing.checkpoint for landing in settings.landing] + [sink.checkpoint for sink in settings.sink]
    records = [stack.enter_context(claim(folder)) for folder in dict.fromkeys(folders) if folder is not None]

    def record_jvm(pid: int) -> None:
        for record in records:
            record(pid)

    return record_jvm


def _wait_for_other(
    identity: PipelineState, target: ClientSettings, clocks: SystemClocks, stopping: Event, log: Logger
) -> None:
    """Raise CliError if another service has this name. One that was killed is lost after a while: wait for that."""
    from chronik.pipeline.errors import PipelineError
    from chronik.pipeline.service.publisher import other_service

    seen: PipelineState | None = None
    while not stopping.is_set():
        try:
            other = other_service(target, identity.name, clocks.wall_ms())
        except PipelineError as error:
            log.warning("other_services_unknown", reason=str(error))
            return
        if other is None or _is_over(other, identity):
            return
        if other.host == identity.host or (seen is not None and other.heartbeat_ms > seen.heartbeat_ms):
            raise CliError(
                f"the pipeline {other.name} runs already, on {other.host} as process {other.pid}: stop it, or choose "
                "another name"
            )
        if seen is None:
            log.info("waiting_for_other", host=other.host, other_pid=other.pid, at_most_s=LOST_AFTER_S)
        seen = other
        stopping.wait(OTHER_POLL_S)


def _is_over(other: PipelineState, identity: PipelineState) -> bool:
    """Return whether that service ran on this machine and its process has ended."""
    if other.host != identity.host:
        return False
    if other.pid == identity.pid:
        return True
    try:
        os.kill(other.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


# -- jobs --------------------------------------------------------------------------------------------------------------


def _jobs(
    settings: PipelineSettings, target: ClientSettings, spark: SparkSession, clocks: SystemClocks, log: Logger
) -> tuple[list[Job], list[AuditedTopic]]:
    from chronik.pipeline.land.retry import Retries
    from chronik.pipeline.service.audits import STATE_FOLDER, AuditedTopic
    from chronik.pipeline.service.job import Job
    from chronik.pipeline.service.starts import Starts

    starts = Starts(max(1, (os.cpu_count() or 1) // 2))
    jobs: list[Job] = []
    audited: list[AuditedTopic] = []

    def retries() -> Retries:
        return Retries(float("inf"), settings.retry_longest, random.random)

    names: set[str] = {sink.name for sink in settings.sink}
    for landing in settings.landing:
        for topic in landing.topics:
            table = f"{landing.to.rstrip('/')}/{topic}"
            name = topic if topic not in names else f"{topic}@{landing.to}"
            names.add(name)
            opened = _landing_opener(settings, landing, topic, target, spark, clocks)
            job = Job(name, "landing", topic, table, opened, retries(), starts, clocks, log)
            jobs.append(job)
            # A table with one row per key lacks superseded records on purpose.
            is_audited = not landing.options.is_upsert
            every_s = _audit_interval(settings, topic) if is_audited else None
            if every_s is not None:
                folder = f"{landing.checkpoint}/{STATE_FOLDER}"
                is_whole = landing.starting == "earliest"
                catalog = landing.options.catalog
                audited.append(
                    AuditedTopic(job, topic, table, folder, every_s, landing.deleted, is_whole, catalog=catalog)
                )
    for sink in settings.sink:
        opened = _sink_opener(sink, target, spark, clocks)
        jobs.append(Job(sink.name, "sink", sink.topic, sink.to, opened, retries(), starts, clocks, log))
    return jobs, audited


def _audit_interval(settings: PipelineSettings, topic: str) -> float | None:
    return next((audit.every for audit in settings.audit if not audit.topics or topic in audit.topics), None)


def _landing_opener(
    settings: PipelineSettings,
    landing: LandingSettings,
    topic: str,
    target: ClientSettings,
    spark: SparkSession,
    clocks: SystemClocks,
) -> Callable[[], Work]:
    def opened() -> TopicLanding:
        from chronik.cli.pipeline import open_landing
        from chronik.pipeline.errors import PipelineError, Unavailable

        try:
            return open_landing(spark, landing, topic, target, landing.registry or settings.registry)
        except CliError as error:
            raise PipelineError(str(error)) from None
        except (ClientError, KafkaError) as error:
            raise Unavailable(str(error)) from None

    return opened


def _sink_opener(
    sink: SinkSettings, target: ClientSettings, spark: SparkSession, clocks: SystemClocks
) -> Callable[[], Work]:
    def opened() -> Work:
        from chronik.cli.pipeline import starting_options
        from chronik.pipeline.service.sinks import TopicSink

        return TopicSink(spark, sink, target, starting_options(sink.starting), clocks.wall_ms)

    return opened


# -- --check -----------------------------------------------------------------------------------------------------------


def _check(settings: PipelineSettings, target: ClientSettings, file: str) -> None:
    faults = list(_faults(settings, target))
    for fault in faults:
        print(f"fault: {fault}")
    if faults:
        raise typer.Exit(CHECK_FAILED)
    topics = sum(len(landing.topics) for landing in settings.landing)
    print(f"{file} is correct: {topics} topics to land, {len(settings.sink)} sinks")


def _faults(settings: PipelineSettings, target: ClientSettings) -> Iterator[str]:
    """Yield what would keep a job from running now. Creates nothing."""
    from chronik.cli.pipeline import check_landing, starting_options
    from chronik.pipeline.errors import PipelineError
    from chronik.pipeline.source.blocking import BlockingCluster, topic_id

    named = {topic for landing in settings.landing for topic in landing.topics}
    named |= {topic for sink in settings.sink for topic in (sink.topic, sink.to)}
    ids: dict[str, str] | None = None
    try:
        with BlockingCluster(target) as cluster:
            ids = {name: topic_id(topic) for name, topic in cluster.topics(sorted(named)).items()}
    except PipelineError as error:
        yield str(error)
    for name in sorted(named - ids.keys()) if ids is not None else ():
        yield f"topic {name} does not exist at {target.bootstrap}: its job waits until it is created"
    for landing in settings.landing:
        for topic in landing.topics:
            try:
                registry = landing.registry or settings.registry
                check_landing(landing, topic, (ids or {}).get(topic, ""), target, registry)
            except (CliError, PipelineError, ClientError, KafkaError) as error:
                yield str(error)
    for sink in settings.sink:
        try:
            starting_options(sink.starting)
        except CliError as error:
            yield f"sink {sink.name}: {error}"


# -- status ------------------------------------------------------------------------------------------------------------


def status(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Only this pipeline.")] = None,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Show the pipelines that report to the cluster, and each of their jobs."""
    now_ms = time.time_ns() // 1_000_000
    states = with_cluster(bootstrap, lambda cluster: read_states(cluster, now_ms))
    if name is not None:
        states = [state for state in states if state.name == name]
        if not states:
            raise CliError(f"no pipeline {name} has reported to {bootstrap}: see chronik pipeline status")
    if as_json:
        print_json({"pipelines": msgspec.to_builtins(states)})
        return
    if not states:
        print(f"no pipeline has reported to {bootstrap}: start one with chronik pipeline run FILE.toml")
    for state in states:
        seen_s = (now_ms - state.heartbeat_ms) / 1000
        print(f"{state.name}: {state.state}, on {state.host} as process {state.pid}, reported {seen_s:.0f} s ago")
        columns = ("job", "from", "to", "state", "rows", "rows/s", "lag", "dead letters", "restarts", "audit", "reason")
        rows = [
            (
                job.name,
                job.source,
                job.target,
                job.state,
                f"{job.rows:,}",
                None if job.rows_per_s is None else f"{job.rows_per_s:,.0f}",
                None if job.lag is None else f"{job.lag:,}",
                f"{job.dead_letters:,}",
                job.restarts,
                None if job.audit is None else job.audit.verdict,
                job.reason or (job.audit.reason if job.audit is not None else ""),
            )
            for job in state.jobs
        ]
        print_table("", columns, rows, columns[4:9])
