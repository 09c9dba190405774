"""The options of a landing that say what its tables are. The command line and the file of a service both make them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from chronik.pipeline.errors import PipelineError

FORMATS = ("json", "avro", "json-schema", "protobuf", "auto")
REGISTRY_FORMATS = FORMATS[1:]
ON_CHANGE = ("evolve", "dead-letter", "stop")
APPEND, UPSERT = "append", "upsert"
MODES = (APPEND, UPSERT)
DELTA, ICEBERG = "delta", "iceberg"
TABLE_FORMATS = (DELTA, ICEBERG)
DEBEZIUM = "debezium"
ENVELOPES = (DEBEZIUM,)


@dataclass(frozen=True, slots=True)
class TableOptions:
    """One landing's options, with the names of the command's. Raises PipelineError if they contradict each other."""

    schema: str | None = None
    """The file with the columns of JSON values."""
    format: str | None = None
    key_format: str | None = None
    on_change: str = "evolve"
    mode: str = APPEND
    key: tuple[str, ...] = ()
    """The columns that identify a row. Empty: the record's key."""
    envelope: str | None = None
    buckets: int | None = None
    table_format: str = DELTA
    catalog: Mapping[str, str] = field(default_factory=dict)
    """Settings of pyiceberg's catalog. Empty: a file in the folder of the tables."""

    def __post_init__(self) -> None:
        _check("--format", self.format, FORMATS)
        _check("--key-format", self.key_format, REGISTRY_FORMATS)
        _check("--on-change", self.on_change, ON_CHANGE)
        if self.format == "json" and self.schema is None:
            raise PipelineError(
                "--format json needs the columns: pass --schema FILE with, for example, id BIGINT, name STRING"
            )
        if self.registry_formats and self.schema is not None:
            raise PipelineError(
                "--schema is for JSON values, and the registry has the schemas of other formats: omit one"
            )

        _check("--mode", self.mode, MODES)
        _check("--envelope", self.envelope, ENVELOPES)
        _check("--table-format", self.table_format, TABLE_FORMATS)
        if self.catalog and not self.is_iceberg:
            raise PipelineError("--catalog is for Iceberg tables: add --table-format iceberg")
        if self.is_upsert and self.is_iceberg:
            raise PipelineError("--mode upsert needs --table-format delta: an Iceberg table can be appended to only")
        for option, given in (("--key", self.key), ("--envelope", self.envelope), ("--buckets", self.buckets)):
            if given and not self.is_upsert:
                raise PipelineError(f"{option} is for tables with one row per key: add --mode upsert")
        if self.key and not self.has_columns:
            raise PipelineError("--key names columns, and there are none: add --format or --schema, or omit --key")
        if self.envelope and not self.has_columns:
            raise PipelineError("--envelope is for values that become columns: add --format or --schema")

    @property
    def is_upsert(self) -> bool:
        return self.mode == UPSERT

    @property
    def is_iceberg(self) -> bool:
        return self.table_format == ICEBERG

    @property
    def has_columns(self) -> bool:
        """Whether values or keys become columns."""
        return self.schema is not None or bool(self.registry_formats)

    @property
    def registry_formats(self) -> dict[str, str]:
        """Return the formats of keys and values that the schemas of a registry decode."""
        sides = {"key": self.key_format, "value": self.format}
        return {side: given for side, given in sides.items() if given in REGISTRY_FORMATS and given is not None}

    @property
    def has_dead_letters(self) -> bool:
        return self.has_columns or self.is_upsert


def _check(option: str, given: str | None, known: tuple[str, ...]) -> None:
    if given is not None and given not in known:
        raise PipelineError(f"{option} {given} is unknown: use {', '.join(known)}")
