"""`chronik pipeline`: Spark jobs over topics: `land` them in Delta tables exactly once, `audit` them, `traces`.

`maintain` merges a table's small files. `run`, a service, and `status` are in `pipeline_run`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from chronik.cli import pipeline_replay, pipeline_run
from chronik.cli.errors import CHECK_FAILED, CliError, say
from chronik.cli.options import (
    DEFAULT_BOOTSTRAP,
    AsJson,
    Bootstrap,
    Topic,
    parse_configs,
    parse_time_ms,
    parse_time_option,
)
from chronik.cli.output import note, print_json, print_table, table_of, write_report
from chronik.cli.pipeline_spark import (
    CATALOG_EXAMPLE,
    CONF_EXAMPLE,
    Catalog,
    Conf,
    Master,
    Report,
    jvm_pid,
    one_line_errors,
    spark_for,
    spark_job,
    with_connector,
)
from chronik.cli.registry import RegistryUrl, registry_client
from chronik.pipeline.land.options import (
    ENVELOPES,
    FORMATS,
    MODES,
    ON_CHANGE,
    REGISTRY_FORMATS,
    TABLE_FORMATS,
    TableOptions,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from rich.table import Table

    from chronik.client.properties import ClientSettings
    from chronik.client.schema_registry import RegistryClient
    from chronik.pipeline.audit.result import AuditResult
    from chronik.pipeline.land.backfill import Bound, Range
    from chronik.pipeline.land.topic_landing import LandSettings, TopicLanding
    from chronik.pipeline.service.settings import LandingSettings
    from chronik.pipeline.typed.topic_schemas import TopicSchemas

LOG_WAYS = ("auto", "headers", "fetch", "records")
RANGES_SHOWN = 20
CHECKPOINTS = ".checkpoints"
SOURCES = ("chronik", "kafka")

KeepFiles = Annotated[
    int | None,
    typer.Option("--vacuum-after", min=1, metavar="HOURS", help="Keep replaced files this long; default a week."),
]
KeepLog = Annotated[
    int | None,
    typer.Option("--log-retention", min=1, metavar="DAYS", help="Keep the table's log this long; default 30 days."),
]

Deleted = Annotated[
    str | None,
    typer.Option("--deleted", metavar="FILE|TABLE", help="Keys that were deleted on purpose: see docs/pipeline.md."),
]

app = typer.Typer(
    no_args_is_help=True, help="Spark jobs over topics: land them in tables, audit them, and explain stalls."
)


app.command(name="run")(pipeline_run.run)
app.command(name="status")(pipeline_run.status)
app.command(name="replay")(pipeline_replay.replay)


@app.command()
def land(
    topics: Annotated[list[str], typer.Argument(metavar="TOPIC...")],
    to: Annotated[str, typer.Option(metavar="DIR", help="Folder or object-store address of the tables.")],
    once: Annotated[bool, typer.Option("--once", help="Stop when caught up.")] = False,
    group: Annotated[str, typer.Option(metavar="G", help="Commit landed offsets to this group.")] = "",
    checkpoint: Annotated[
        str | None, typer.Option(metavar="DIR", help=f"Default: {CHECKPOINTS} in --to.", show_default=False)
    ] = None,
    starting: Annotated[
        str, typer.Option(metavar="earliest|latest|TIME", help="Where to start without a checkpoint.")
    ] = "earliest",
    begin: Annotated[
        str | None,
        typer.Option("--from", metavar="OFFSETS|TIME", help="Land only a range, from here to --until, and end."),
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="OFFSETS|TIME", help="The end of the range, exclusive; default: latest.")
    ] = None,
    trigger: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Interval between micro-batches.")] = 10.0,
    retry_for: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long to try again if brokers or workers fail.")
    ] = 600.0,
    keep_files: KeepFiles = None,
    keep_log: KeepLog = None,
    deleted: Deleted = None,
    schema: Annotated[
        str | None, typer.Option(metavar="FILE", help="Land JSON values as columns: id BIGINT NOT NULL, name STRING.")
    ] = None,
    infer: Annotated[
        bool, typer.Option("--infer", help="Propose the columns of JSON values from a sample, and keep them in a file.")
    ] = False,
    value_format: Annotated[
        str | None,
        typer.Option("--format", metavar="|".join(FORMATS), help="Land values as columns; json needs --schema."),
    ] = None,
    key_format: Annotated[
        str | None, typer.Option("--key-format", metavar="|".join(REGISTRY_FORMATS), help="Land keys as columns.")
    ] = None,
    mode: Annotated[
        str, typer.Option("--mode", metavar="|".join(MODES), help="upsert: one row per key, its current state.")
    ] = "append",
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="COLUMN[,...]", help="What identifies a row; default: the record key."),
    ] = None,
    envelope: Annotated[
        str | None, typer.Option("--envelope", metavar="|".join(ENVELOPES), help="Values are events of Debezium.")
    ] = None,
    buckets: Annotated[
        int | None, typer.Option("--buckets", min=1, max=4096, help="Parts of a new table with one row per key.")
    ] = None,
    table_format: Annotated[
        str, typer.Option("--table-format", metavar="|".join(TABLE_FORMATS), help="What the tables are.")
    ] = "delta",
    catalog: Catalog = None,
    registry: RegistryUrl = None,
    on_change: Annotated[
        str, typer.Option("--on-change", metavar="|".join(ON_CHANGE), help="What a change of the schema does.")
    ] = "evolve",
    master: Master = None,
    conf: Conf = None,
    source: Annotated[str, typer.Option(metavar="|".join(SOURCES), help="kafka: Spark's own connector.")] = "chronik",
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Land topics in tables DIR/TOPIC, exactly once."""
    bootstrap.endpoints  # noqa: B018 - a wrong address fails before Spark starts
    names = list(dict.fromkeys(topics))
    settings_of_spark = parse_configs("--conf", conf, CONF_EXAMPLE)
    if source not in SOURCES:
        raise CliError(f"--source {source} is unknown: use {' or '.join(SOURCES)}")
    checkpoint, start = _checkpoint(to, checkpoint), starting_options(starting)
    bounds = None if begin is None and until is None else (_bound("--from", begin), _bound("--until", until))
    if bounds is not None and group:
        raise CliError("--group is for a landing that continues: a range of --from and --until commits no offsets")
    with one_line_errors():
        from chronik.cli.pipeline_infer import inferred_schema
        from chronik.pipeline.land.topic_landing import LandSettings

        if infer:
            schema = inferred_schema(bootstrap, names, absolute(to), schema)
        key_columns = tuple(name.strip() for name in (key or "").split(",") if name.strip())
        options = TableOptions(
            schema,
            value_format,
            key_format,
            on_change,
            mode,
            key_columns,
            envelope,
            buckets,
            table_format,
            parse_configs("--catalog", catalog, CATALOG_EXAMPLE),
        )
        if options.is_upsert and bounds is not None:
            raise CliError("--from and --until are for --mode append: a table with one row per key lands in order")
        if options.is_upsert and source != "chronik":
            raise CliError("--mode upsert needs --source chronik, which works with every Kafka cluster")
        settings = LandSettings(
            bootstrap=bootstrap,
            to=absolute(to),
            checkpoint=checkpoint,
            token=uuid.uuid4().hex,
            starting=start,
            group=group,
            once=once,
            trigger_s=trigger,
            retry_for_s=retry_for,
            keep_files_h=keep_files,
            keep_log_d=keep_log,
            wall_ms=_wall_ms,
            source=source,
            deleted=None if deleted is None else absolute(deleted),
            options=options,
        )
        _check_names(names, options.has_dead_letters)
        is_typed = bool(options.registry_formats)
        schemas = _schemas_of(names, options, registry_client(registry, bootstrap)) if is_typed else {}
        if source == "kafka":
            import pyspark

            settings_of_spark = with_connector(settings_of_spark, pyspark.__version__)
        _land(settings, names, schemas, bounds, master, settings_of_spark)


@app.command(name="maintain")
def maintain_command(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="Folder or object-store address of a table.")],
    keep_files: KeepFiles = None,
    keep_log: KeepLog = None,
    table_format: Annotated[
        str, typer.Option("--table-format", metavar="|".join(TABLE_FORMATS), help="What the table is.")
    ] = "delta",
    catalog: Catalog = None,
    as_json: AsJson = False,
) -> None:
    """Merge a table's small files, and remove files and log entries that are no longer needed. Needs no Spark."""
    with one_line_errors(with_java=False):
        from chronik.pipeline.land.maintenance import maintain

        token = uuid.uuid4().hex
        options = TableOptions(table_format=table_format, catalog=parse_configs("--catalog", catalog, CATALOG_EXAMPLE))
        if options.is_iceberg:
            from chronik.pipeline.land.iceberg_maintenance import maintain_at

            done = maintain_at(absolute(table), options.catalog, token, _wall_ms(), keep_log, keep_files)
        else:
            done = maintain(absolute(table), token, _wall_ms(), keep_files_h=keep_files, keep_log_d=keep_log)
    if as_json:
        print_json(dataclasses.asdict(done))
        return
    print(f"{done.merged_files:,} files merged into {done.new_files:,} ({done.rewritten_bytes:,} bytes)")
    print(f"{done.removed_files:,} files removed")
    if done.write_amplification is not None:
        print(f"write amplification: {done.write_amplification:.2f}")


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


def _land(
    settings: LandSettings,
    topics: list[str],
    schemas: Mapping[str, TopicSchemas],
    bounds: tuple[Bound, Bound] | None,
    master: str | None,
    conf: dict[str, str],
) -> None:
    from chronik.pipeline.land.claim import claim
    from chronik.pipeline.land.schema import parse_schema
    from chronik.pipeline.land.topic_landing import TopicLanding, topic_ids

    schema_path = settings.options.schema
    schema = read_schema(schema_path)
    ids = topic_ids(settings.bootstrap, topics)
    ranges = {} if bounds is None else _ranges(settings, topics, bounds)
    if bounds is not None and not any(ranges.values()):
        return
    # A range needs no checkpoint, so it may land while another job lands the same topic.
    claimed = claim(settings.checkpoint) if bounds is None else nullcontext(lambda _: None)
    with claimed as record_jvm, spark_for("chronik-land", master, conf) as spark:
        record_jvm(jvm_pid(spark))
        fields = None if schema is None else parse_schema(schema, schema_path or "")
        landings = [
            TopicLanding(spark, topic, ids[topic], settings, fields, time.monotonic, schemas.get(topic))
            for topic in topics
        ]
        started_s = time.monotonic()
        try:
            for landing in landings:
                if bounds is None:
                    landing.start()
                elif ranges[landing.topic]:
                    landing.backfill(ranges[landing.topic])
            if bounds is None:
                _watch(landings)
        except KeyboardInterrupt:
            _summarise(landings, time.monotonic() - started_s)
            raise
        finally:
            for landing in landings:
                landing.stop()
            for landing in landings:
                landing.commit_last()
        _summarise(landings, time.monotonic() - started_s)


def open_landing(
    spark: SparkSession, given: LandingSettings, topic: str, bootstrap: ClientSettings, registry: str | None
) -> TopicLanding:
    """Open one landing of a service, which opens it again after each failure."""
    from chronik.pipeline.land.schema import parse_schema
    from chronik.pipeline.land.topic_landing import TopicLanding, topic_ids

    settings = _service_landing(given, [topic], bootstrap)
    options = settings.options
    is_typed = bool(options.registry_formats)
    schemas = _schemas_of([topic], options, registry_client(registry, bootstrap)) if is_typed else {}
    schema = read_schema(options.schema)
    fields = None if schema is None else parse_schema(schema, options.schema or "")
    topic_id = topic_ids(bootstrap, [topic])[topic]
    return TopicLanding(spark, topic, topic_id, settings, fields, time.monotonic, schemas.get(topic))


def check_landing(
    given: LandingSettings, topic: str, topic_id: str, bootstrap: ClientSettings, registry: str | None
) -> None:
    """Raise CliError or PipelineError if the landing could not be opened now. Creates nothing."""
    from chronik.client.schema_registry import RegistryError
    from chronik.pipeline.deleted import DeletedList
    from chronik.pipeline.land.delta import LandingTable

    settings = _service_landing(given, [topic], bootstrap)
    read_schema(settings.options.schema)
    if given.deleted is not None:
        DeletedList(given.deleted).current()
    if settings.options.is_iceberg:
        from chronik.pipeline.land.iceberg import IcebergTable

        IcebergTable.check(settings.table(topic), settings.options.catalog, topic, topic_id)
    else:
        LandingTable.check(settings.table(topic), topic, topic_id)
    for folder in (settings.to, settings.checkpoint):
        fault = _folder_fault(folder)
        if fault is not None:
            raise CliError(fault)
    if settings.options.registry_formats:
        try:
            registry_client(registry, bootstrap).request("GET", "/subjects")
        except RegistryError as error:
            raise CliError(str(error)) from None


def _folder_fault(folder: str) -> str | None:
    if "://" in folder:
        return None
    existing = folder
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    is_usable = os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK)
    return None if is_usable else f"cannot write to {folder}: {existing} is no folder that this user may write to"


def _service_landing(given: LandingSettings, topics: list[str], bootstrap: ClientSettings) -> LandSettings:
    """Return the settings of `land` for a landing of a service."""
    from chronik.pipeline.land.topic_landing import LandSettings

    _check_names(topics, given.options.has_dead_letters)
    return LandSettings(
        bootstrap=bootstrap,
        to=given.to,
        checkpoint=given.checkpoint or "",
        token=uuid.uuid4().hex,
        starting=starting_options(given.starting),
        group=given.group,
        trigger_s=given.trigger,
        retry_for_s=None,
        keep_files_h=given.vacuum_after,
        keep_log_d=given.log_retention,
        wall_ms=_wall_ms,
        source=given.source,
        options=given.options,
        deleted=given.deleted,
    )


def _bound(option: str, text: str | None) -> Bound:
    """Parse an end of a range: earliest, latest, a time, an offset of all partitions, or {"PARTITION": OFFSET}."""
    from chronik.pipeline.land.backfill import TimeMs

    if text is None:
        return "earliest" if option == "--from" else "latest"
    if text in ("earliest", "latest"):
        return text
    time_ms = parse_time_ms(text)
    if time_ms is not None:
        return TimeMs(time_ms)
    if text.isascii() and text.isdecimal():
        return int(text)
    try:
        given = {int(partition): offset for partition, offset in json.loads(text).items()}
    except (ValueError, AttributeError):
        given = {}
    if not given or not all(isinstance(offset, int) and offset >= 0 for offset in given.values()):
        raise CliError(
            f"{option} {text} is unknown: use earliest, latest, an offset of all partitions, "
            '{"0": 17, "1": 4} for some of them, or a time as in 2026-01-31T12:00:00'
        )
    return given


def _ranges(settings: LandSettings, topics: list[str], bounds: tuple[Bound, Bound]) -> dict[str, Range]:
    """Choose the offsets to land before Spark starts, so that a wrong range fails at once."""
    from chronik.pipeline.land.backfill import backfill_range
    from chronik.pipeline.source.blocking import BlockingCluster

    with BlockingCluster(settings.bootstrap) as cluster:
        ranges = {topic: backfill_range(cluster, topic, *bounds) for topic in topics}
    for topic, chosen in ranges.items():
        texts = [f"{partition}: {start} to {stop - 1}" for partition, (start, stop) in chosen.items()]
        more = f" and {len(texts) - RANGES_SHOWN} more" if len(texts) > RANGES_SHOWN else ""
        say(
            f"landing {topic}, offsets of partition {', '.join(texts[:RANGES_SHOWN])}{more}"
            if texts
            else f"{topic} has no records in this range"
        )
    return ranges


def _schemas_of(topics: list[str], options: TableOptions, registry: RegistryClient) -> dict[str, TopicSchemas]:
    from chronik.pipeline.typed.topic_schemas import TopicSchemas

    formats, on_change = options.registry_formats, options.on_change
    envelope_key = options.key if options.envelope else None
    return {topic: TopicSchemas(topic, formats, on_change, registry.schema, envelope_key) for topic in topics}


def _watch(landings: list[TopicLanding]) -> None:
    """Wait until all have ended; without --once they never end. A topic that fails for good stops no other topic."""
    from chronik.pipeline.errors import PipelineError

    running, failures = landings, list[PipelineError]()
    with _display() as show:
        while running:
            for landing in list(running):
                try:
                    has_ended = landing.wait(0.25)
                except PipelineError as error:
                    failures.append(error)
                    has_ended = True
                    if len(running) > 1:
                        say(f"{landing.topic} is not landed any more, other topics are: {error}")
                running = [other for other in running if other is not landing] if has_ended else running
            show(landings)
    if failures:
        more = f" ({len(failures)} of {len(landings)} topics have failed)" if len(landings) > 1 else ""
        raise PipelineError(f"{failures[0]}{more}")


def _summarise(landings: list[TopicLanding], seconds: float) -> None:
    for landing in landings:
        pace = f"in {seconds:.1f} s ({landing.rows / seconds if seconds > 0 else 0:,.0f}/s)"
        dead = f", {landing.dead_letters:,} dead letters" if landing.dead_letters else ""
        say(f"{landing.rows:,} rows of {landing.topic} landed in {landing.table} {pace}{dead}")


@contextmanager
def _display() -> Iterator[Callable[[list[TopicLanding]], None]]:
    """Show a live table on standard error if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), transient=True, auto_refresh=False) as live:
        yield lambda landings: live.update(_progress_table(landings), refresh=True)


def _progress_table(landings: list[TopicLanding]) -> Table:
    rows = []
    for landing in landings:
        figures, landed = landing.figures, f"{landing.rows:,}"
        if figures is None:
            rows.append((landing.topic, landed, "-", "-", "-", ""))
            continue
        lag = f"{sum(figures.lag.values()):,}"
        by_partition = ", ".join(f"{partition}: {lag:,}" for partition, lag in figures.lag.items())
        rate, left = f"{figures.rows_per_s:,.0f}", _duration(figures.catch_up_s)
        rows.append((landing.topic, landed, rate, lag, left, by_partition))
    columns = ("topic", "rows", "rows/s", "lag", "caught up in", "lag by partition")
    return table_of("", columns, rows, columns[1:5])


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "never, at this rate"
    whole = round(seconds)
    return f"{whole} s" if whole < 120 else f"{whole // 60} min" if whole < 7200 else f"{whole // 3600} h"


def absolute(to: str) -> str:
    """Return an absolute path, since Spark's workers run elsewhere."""
    return to if "://" in to else os.path.abspath(to)


def _checkpoint(to: str, given: str | None) -> str:
    if given is not None:
        return absolute(given)
    if "://" in to:
        raise CliError(f"--to {to} is not a folder: pass --checkpoint with a folder that Spark can write to")
    return os.path.join(absolute(to), CHECKPOINTS)


def starting_options(text: str) -> dict[str, str]:
    if text in ("earliest", "latest"):
        return {"startingOffsets": text}
    time_ms = parse_time_ms(text)
    if time_ms is None:
        raise CliError(f"--starting {text} is unknown: use earliest, latest or a time as in 2026-01-31T12:00:00")
    return {"startingTimestamp": str(time_ms), "startingOffsetsByTimestampStrategy": "latest"}


def _check_names(topics: list[str], with_dead_letters: bool) -> None:
    from chronik.pipeline.land.topic_landing import dead_letters_name

    taken = {CHECKPOINTS}
    for name in [*topics, *(dead_letters_name(topic) for topic in topics if with_dead_letters)]:
        if name in taken or "/" in name or name in (".", ".."):
            raise CliError(f"{name} cannot be a table next to the other tables of this job: land it with another --to")
        taken.add(name)


def read_schema(schema: str | None) -> str | None:
    if schema is None:
        return None
    try:
        with open(schema, encoding="utf-8") as opened:
            return opened.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise CliError(f"cannot read --schema {schema}: {reason}") from None


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
    deleted: Deleted = None,
    catalog: Catalog = None,
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
        settings = parse_configs("--catalog", catalog, CATALOG_EXAMPLE)
        request = AuditRequest(
            bootstrap, topic, ledger, receipts, table, group, start_ms, log, deleted, catalog=settings
        )
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
    """Print a breakdown by partition, all sides next to each other, the faults, and the verdict last."""
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
        print(f"partition {partition}, {side}: {what}, {offsets}{more}")
    if len(faults_found) > RANGES_SHOWN:
        print(f"... and {len(faults_found) - RANGES_SHOWN} more: see --json or --report")
    for text in result.notes:
        print(f"note: {text}")
    print(sentence(result))


def _breakdown(result: AuditResult) -> str:
    """Return the breakdown by partition, in the format of the earlier system's experiment (see `verify`)."""
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
