"""The file of `chronik pipeline run`.

    name = "orders"                     # default: the file's name
    bootstrap = "127.0.0.1:9092"        # or properties = "client.properties"
    registry = "http://127.0.0.1:6092"
    listen = "127.0.0.1:9400"           # /healthz, /readyz, /metrics; "" for none
    retry_longest = 60                  # seconds between two attempts, at most

    [spark]
    master = "local[2]"
    ui = false
    [spark.conf]
    "spark.driver.memory" = "2g"

    [[landing]]
    topics = ["orders", "payments"]
    to = "tables"

    [[sink]]
    name = "totals"
    topic = "orders"
    to = "orders_eu"
    where = "key like 'eu-%'"

    [[audit]]
    every = 300                         # seconds

An unknown key is an error that names it. Paths are relative to the file. Pure: nothing here reads a file.
"""

from __future__ import annotations

import dataclasses
import difflib
import os.path
import tomllib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec

from chronik.client.endpoint import Endpoint, EndpointError
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.land.options import TableOptions

JOBS_MAX = 200
NAME_PATTERN = r"^[A-Za-z0-9._-]{1,100}$"
CHECKPOINTS = ".checkpoints"
TABLE_OPTIONS = tuple(field.name for field in dataclasses.fields(TableOptions))

Seconds = Annotated[float, msgspec.Meta(ge=0)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Topics = Annotated[list[Text], msgspec.Meta(min_length=1)]


class SparkSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The session that all jobs share."""

    master: str | None = None
    ui: bool = False
    conf: dict[str, str] = {}


class LandingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Topics that land in tables `to/TOPIC`, with the options of `chronik pipeline land`."""

    topics: Topics
    to: Text
    checkpoint: str | None = None
    group: str = ""
    starting: str = "earliest"
    trigger: Seconds = 10.0
    registry: str | None = None
    source: Literal["chronik", "kafka"] = "chronik"
    vacuum_after: AtLeastOne | None = None
    log_retention: AtLeastOne | None = None
    deleted: str | None = None
    options: TableOptions = TableOptions()
    """What the tables are. In the file, its fields are beside the other keys."""


class SinkSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Records of a topic that become records of the topic `to`."""

    name: Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]
    topic: Text
    to: Text
    checkpoint: Text
    select: list[Text] = []
    where: str | None = None
    starting: str = "earliest"
    trigger: Seconds = 10.0
    delivery: Literal["exactly-once", "at-least-once"] = "exactly-once"
    compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = "none"


class AuditSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Landed topics that are compared with the log again and again. Without `topics`: all of them."""

    topics: list[Text] = []
    every: Annotated[float, msgspec.Meta(ge=1)] = 300.0


class PipelineSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    name: Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)] | None = None
    bootstrap: str | None = None
    properties: str | None = None
    registry: str | None = None
    listen: str = "127.0.0.1:9400"
    retry_longest: Annotated[float, msgspec.Meta(ge=1)] = 60.0
    spark: SparkSettings = SparkSettings()
    landing: list[LandingSettings] = []
    sink: list[SinkSettings] = []
    audit: list[AuditSettings] = []


def parse(text: str, path: str) -> PipelineSettings:
    """Parse a file's text. Raises a PipelineError that names the file and the setting."""
    try:
        given = tomllib.loads(text)
        options = [_table_options(number, table) for number, table in enumerate(_tables(given, "landing"))]
        settings = msgspec.convert(given, PipelineSettings)
    except tomllib.TOMLDecodeError as error:
        raise PipelineError(f"{path} is not TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise PipelineError(f"{path}: {_place(str(error))}") from None
    except PipelineError as error:
        raise PipelineError(f"{path}: {error}") from None
    landings = zip(settings.landing, options, strict=True)
    folder = os.path.dirname(os.path.abspath(path))
    stem = os.path.basename(path).rpartition(".")[0] or os.path.basename(path)
    settings = msgspec.structs.replace(
        settings,
        name=settings.name or stem,
        properties=_beside(folder, settings.properties),
        landing=[_absolute_landing(folder, landing, table) for landing, table in landings],
        sink=[msgspec.structs.replace(sink, checkpoint=_beside(folder, sink.checkpoint)) for sink in settings.sink],
    )
    for fault in _faults(settings):
        raise PipelineError(f"{path}: {fault}")
    return settings


def _tables(given: dict[str, Any], name: str) -> list[dict[str, Any]]:
    tables = given.get(name)
    return [table for table in tables if isinstance(table, dict)] if isinstance(tables, list) else []


def _table_options(number: int, landing: dict[str, Any]) -> TableOptions:
    """Take the options of the tables out of a landing: `chronik pipeline land` has the same ones."""
    own = {name: landing.pop(name) for name in TABLE_OPTIONS if name in landing}
    if "options" in landing:
        raise PipelineError(f"landing[{number}].options is unknown: write its keys beside the others")
    try:
        return msgspec.convert(own, TableOptions)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$.")
        raise PipelineError(f"landing[{number}].{place.rstrip('`')}: {what[:1].lower()}{what[1:]}") from None
    except PipelineError as error:
        raise PipelineError(f"landing[{number}]: {error}") from None


def _absolute_landing(folder: str, landing: LandingSettings, options: TableOptions) -> LandingSettings:
    paths = {name: _beside(folder, getattr(landing, name)) for name in ("to", "checkpoint", "deleted")}
    to = paths["to"] or ""
    if paths["checkpoint"] is None and "://" not in to:
        paths["checkpoint"] = os.path.join(to, CHECKPOINTS)
    options = dataclasses.replace(options, schema=_beside(folder, options.schema))
    return msgspec.structs.replace(landing, **paths, options=options)


def _beside(folder: str, path: str | None) -> str | None:
    return path if path is None or "://" in path else os.path.join(folder, path)


def _faults(settings: PipelineSettings) -> Iterator[str]:
    """Yield what cannot work, the first fault first."""
    if not (settings.landing or settings.sink):
        yield "there is nothing to run: add [[landing]] with topics and to"
    if settings.bootstrap is not None:
        try:
            for address in settings.bootstrap.split(","):
                Endpoint.parse(address.strip())
        except EndpointError as error:
            yield f"bootstrap: {error}"
    if settings.listen:
        try:
            Endpoint.parse(settings.listen)
        except EndpointError as error:
            yield f"listen: {error}"
    jobs = sum(len(landing.topics) for landing in settings.landing) + len(settings.sink)
    if jobs > JOBS_MAX:
        yield f"{jobs} topics and sinks are too many for one service: use several files, each with at most {JOBS_MAX}"
    yield from _landing_faults(settings.landing)
    used = {_folder(f"{each.checkpoint}/{topic}"): topic for each in settings.landing for topic in each.topics}
    yield from _sink_faults(settings.sink, used)
    landed = {topic for landing in settings.landing for topic in landing.topics}
    audited: set[str] = set()
    for number, audit in enumerate(settings.audit):
        for topic in audit.topics:
            if topic not in landed:
                yield f"audit[{number}].topics: {topic} is not landed here: add it to a [[landing]]"
        twice = audited & (set(audit.topics) or landed)
        if twice:
            yield f"audit[{number}]: {min(twice)} is audited twice: name the topics of each [[audit]]"
        audited |= set(audit.topics) or landed


def _landing_faults(landings: list[LandingSettings]) -> Iterator[str]:
    tables: dict[str, str] = {}
    checkpoints: set[str] = set()
    for number, landing in enumerate(landings):
        place = f"landing[{number}]"
        if landing.checkpoint is None:
            yield f"{place}: to = {landing.to} is not a folder: add checkpoint with a folder that Spark can write to"
        for topic in landing.topics:
            table, checkpoint = _folder(f"{landing.to.rstrip('/')}/{topic}"), _folder(f"{landing.checkpoint}/{topic}")
            if table in tables or checkpoint in checkpoints:
                yield f"{place}: {topic} lands in {table} twice: name it once, or with another to and checkpoint"
            tables[table] = topic
            checkpoints.add(checkpoint)


def _folder(path: str) -> str:
    """Return one name for all names of a folder."""
    return path if "://" in path else os.path.realpath(path)


def _sink_faults(sinks: list[SinkSettings], landings: Mapping[str, str]) -> Iterator[str]:
    names: set[str] = set()
    checkpoints: set[str] = set()
    for number, sink in enumerate(sinks):
        place = f"sink[{number}]"
        if sink.topic == sink.to:
            yield f"{place}: the sink writes to the topic {sink.to} that it reads: choose another"
        if sink.name in names:
            yield f"{place}: the name {sink.name} is used twice"
        checkpoint = _folder(sink.checkpoint)
        if checkpoint in checkpoints:
            yield f"{place}: the checkpoint {sink.checkpoint} is used twice"
        if checkpoint in landings:
            yield f"{place}: the checkpoint {sink.checkpoint} is that of the landing of {landings[checkpoint]}"
        names.add(sink.name)
        checkpoints.add(checkpoint)


def _place(message: str) -> str:
    """Rewrite msgspec's text to begin with the setting, and suggest a known key for an unknown one."""
    what, _, place = message.partition(" - at `$")
    place = place.rstrip("`").lstrip(".")
    if what.startswith("Object contains unknown field"):
        name = what.split("`")[1]
        close = difflib.get_close_matches(name, _keys(place), 1, 0.5)
        known = f"did you mean {close[0]}?" if close else f"known are {', '.join(_keys(place))}"
        return f"{place}.{name} is unknown: {known}" if place else f"{name} is unknown: {known}"
    return f"{place}: {what[:1].lower()}{what[1:]}" if place else f"{what[:1].lower()}{what[1:]}"


def _keys(place: str) -> list[str]:
    structs: dict[str, Any] = {
        "": PipelineSettings,
        "spark": SparkSettings,
        "landing": LandingSettings,
        "sink": SinkSettings,
        "audit": AuditSettings,
    }
    struct = structs.get(place.partition("[")[0], PipelineSettings)
    names = [field.encode_name for field in msgspec.structs.fields(struct) if field.name != "options"]
    return [*names, *TABLE_OPTIONS] if struct is LandingSettings else names
