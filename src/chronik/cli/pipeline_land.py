"""`chronik pipeline land`: topics into Delta tables, exactly once."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from chronik.cli.errors import CliError, say
from chronik.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, parse_configs, parse_time_ms
from chronik.cli.output import table_of
from chronik.cli.pipeline_spark import CONF_EXAMPLE, Conf, Master, jvm_pid, one_line_errors, spark_for, with_connector
from chronik.client.endpoint import parse_bootstrap

if TYPE_CHECKING:
    from rich.table import Table

    from chronik.pipeline.land.topic_landing import LandSettings, TopicLanding

CHECKPOINTS = ".checkpoints"
SOURCES = ("chronik", "kafka")


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
    trigger: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="Interval between micro-batches.")] = 1.0,
    schema: Annotated[
        str | None, typer.Option(metavar="FILE", help="Land JSON values as columns: id BIGINT NOT NULL, name STRING.")
    ] = None,
    master: Master = None,
    conf: Conf = None,
    source: Annotated[str, typer.Option(metavar="|".join(SOURCES), help="kafka: Spark's own connector.")] = "chronik",
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Land topics in Delta tables DIR/TOPIC, exactly once."""
    parse_bootstrap(bootstrap)
    names = list(dict.fromkeys(topics))
    settings_of_spark = parse_configs("--conf", conf, CONF_EXAMPLE)
    if source not in SOURCES:
        raise CliError(f"--source {source} is unknown: use {' or '.join(SOURCES)}")
    checkpoint, start = _checkpoint(to, checkpoint), _starting(starting)
    with one_line_errors():
        from chronik.pipeline.land.topic_landing import LandSettings

        settings = LandSettings(
            bootstrap=bootstrap,
            to=_folder(to),
            checkpoint=checkpoint,
            token=uuid.uuid4().hex,
            starting=start,
            group=group,
            once=once,
            trigger_s=trigger,
            source=source,
        )
        _check_names(names, schema is not None)
        if source == "kafka":
            import pyspark

            settings_of_spark = with_connector(settings_of_spark, pyspark.__version__)
        _run(settings, names, schema, master, settings_of_spark)


def _run(
    settings: LandSettings, topics: list[str], schema_path: str | None, master: str | None, conf: dict[str, str]
) -> None:
    from chronik.pipeline.land.claim import claim
    from chronik.pipeline.land.schema import parse_schema
    from chronik.pipeline.land.topic_landing import TopicLanding, topic_ids

    schema = _read(schema_path)
    ids = topic_ids(settings.bootstrap, topics)
    with claim(settings.checkpoint) as record_jvm, spark_for("chronik-land", master, conf) as spark:
        record_jvm(jvm_pid(spark))
        fields = None if schema is None else parse_schema(schema, schema_path or "")
        landings = [TopicLanding(spark, topic, ids[topic], settings, fields) for topic in topics]
        started_s = time.monotonic()
        try:
            for landing in landings:
                landing.start()
            _watch(landings)
        except KeyboardInterrupt:
            _summarise(landings, time.monotonic() - started_s)
            raise
        finally:
            for landing in landings:
                landing.stop()
        _summarise(landings, time.monotonic() - started_s)


def _watch(landings: list[TopicLanding]) -> None:
    """Wait until all have ended; without --once they never end."""
    running = landings
    with _display() as show:
        while running:
            running = [landing for landing in running if not landing.wait(0.25)]
            show(landings)


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


def _folder(to: str) -> str:
    """Return an absolute path, since Spark's workers run elsewhere."""
    return to if "://" in to else os.path.abspath(to)


def _checkpoint(to: str, given: str | None) -> str:
    if given is not None:
        return _folder(given)
    if "://" in to:
        raise CliError(f"--to {to} is not a folder: pass --checkpoint with a folder that Spark can write to")
    return os.path.join(_folder(to), CHECKPOINTS)


def _starting(text: str) -> dict[str, str]:
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


def _read(schema: str | None) -> str | None:
    if schema is None:
        return None
    try:
        with open(schema, encoding="utf-8") as opened:
            return opened.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise CliError(f"cannot read --schema {schema}: {reason}") from None
