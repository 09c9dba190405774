"""The sink's options and columns, with the names and meanings of Spark's own Kafka sink.

    kafka.bootstrap.servers        HOST:PORT[,...]
    topic                          the topic of all rows; takes precedence over the column `topic`
    delivery                       exactly-once (default) or at-least-once
    kafka.compression.type         none (default), gzip, snappy, lz4 or zstd
    kafka.transaction.timeout.ms   how long the transaction of a micro-batch may stay open; 60000 by default

The columns are `value` and optionally `key` (string or binary), `headers`, `topic` and `partition`. All other `kafka.`
options and all other columns are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql.types import ArrayType, BinaryType, DataType, IntegerType, StringType, StructField, StructType

from chronik.client.producer import TIMEOUT_MS
from chronik.client.properties import Target
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.source.options import bootstrap_of, checked, number, one_of
from chronik.wire.compression import CODECS

NAMES = {name.lower(): name for name in ("topic", "delivery", "checkpointLocation", "queryName")}
EXACTLY_ONCE, AT_LEAST_ONCE = "exactly-once", "at-least-once"

_TEXT: tuple[DataType, ...] = (StringType(), BinaryType())
_HEADER = StructType([StructField("key", StringType()), StructField("value", BinaryType())])
_COLUMNS: Mapping[str, tuple[DataType, ...]] = {
    "key": _TEXT,
    "value": _TEXT,
    "headers": (ArrayType(_HEADER),),
    "topic": (StringType(),),
    "partition": (IntegerType(),),
}


@dataclass(frozen=True, slots=True)
class SinkOptions:
    bootstrap: Target
    topic: str | None
    is_exactly_once: bool
    codec: int
    timeout_ms: int

    @classmethod
    def parse(cls, given: Mapping[str, str], schema: StructType) -> SinkOptions:
        """Raises a PipelineError that names the option or the column."""
        options = checked(given, NAMES)
        topic = options.get("topic", "").strip() or None
        _check_columns(schema, topic)
        return cls(
            bootstrap=bootstrap_of(options),
            topic=topic,
            is_exactly_once=one_of(options, "delivery", (EXACTLY_ONCE, AT_LEAST_ONCE), EXACTLY_ONCE) == EXACTLY_ONCE,
            codec=CODECS.index(one_of(options, "kafka.compression.type", CODECS, "none")),
            timeout_ms=number(options, "kafka.transaction.timeout.ms", 1) or TIMEOUT_MS,
        )


def _check_columns(schema: StructType, topic: str | None) -> None:
    names = schema.fieldNames()
    if "value" not in names:
        raise PipelineError(f"the rows have no column value (they have {', '.join(names)}): name one of them value")
    if topic is None and "topic" not in names:
        raise PipelineError("the rows have no column topic: add it, or give the option topic")
    for field in schema.fields:
        allowed = _COLUMNS.get(field.name)
        if allowed is not None and not any(_equals(field.dataType, each) for each in allowed):
            kinds = " or ".join(each.simpleString() for each in allowed)
            raise PipelineError(f"column {field.name} is {field.dataType.simpleString()}: cast it to {kinds}")


def _equals(found: DataType, allowed: DataType) -> bool:
    """Compare types, regardless of what may be null in them."""
    return found.simpleString() == allowed.simpleString()
