"""`chronik pipeline replay TABLE`: decode a table's dead letters again, after their schema was corrected."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Annotated

import typer

from chronik.cli.options import DEFAULT_BOOTSTRAP, AsJson, Bootstrap, parse_configs
from chronik.cli.output import print_json
from chronik.cli.pipeline_spark import CATALOG_EXAMPLE, Catalog, one_line_errors, spark_for
from chronik.cli.registry import RegistryUrl, registry_client
from chronik.pipeline.land.options import FORMATS, ON_CHANGE, REGISTRY_FORMATS, TABLE_FORMATS, TableOptions

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

REASONS_SHOWN = 20


def replay(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="A topic's table, DIR/TOPIC.")],
    schema: Annotated[str | None, typer.Option(metavar="FILE", help="The columns of JSON values.")] = None,
    value_format: Annotated[
        str | None, typer.Option("--format", metavar="|".join(FORMATS), help="How to decode values.")
    ] = None,
    key_format: Annotated[
        str | None, typer.Option("--key-format", metavar="|".join(REGISTRY_FORMATS), help="How to decode keys.")
    ] = None,
    registry: RegistryUrl = None,
    on_change: Annotated[
        str, typer.Option("--on-change", metavar="|".join(ON_CHANGE), help="What a change of the schema does.")
    ] = "evolve",
    deleted: Annotated[
        str | None, typer.Option("--deleted", metavar="FILE|TABLE", help="Keys whose records must not land.")
    ] = None,
    table_format: Annotated[
        str, typer.Option("--table-format", metavar="|".join(TABLE_FORMATS), help="What the table is.")
    ] = "delta",
    catalog: Catalog = None,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Land dead letters that can be decoded by now, exactly once, and report what still fails."""
    with one_line_errors(with_java=False):
        from chronik.cli.pipeline import absolute, read_schema
        from chronik.pipeline.deleted import DeletedList
        from chronik.pipeline.errors import PipelineError
        from chronik.pipeline.land.replay import Replay, ReplayedTable, topic_of
        from chronik.pipeline.typed.topic_schemas import TopicSchemas

        options = TableOptions(
            schema=schema,
            format=value_format,
            key_format=key_format,
            on_change=on_change,
            table_format=table_format,
            catalog=parse_configs("--catalog", catalog, CATALOG_EXAMPLE),
        )
        if not options.has_dead_letters:
            raise PipelineError("a replay needs to know how records are decoded: pass the --schema or --format of land")
        text, uri = read_schema(schema), absolute(table)
        topic_of(uri, options)  # a wrong table fails before Spark starts
        fields = _fields(text, schema or "")
        opened = ReplayedTable.open(uri, options, fields)
        schemas = None
        if options.registry_formats:
            client = registry_client(registry, bootstrap)
            schemas = TopicSchemas(opened.topic, options.registry_formats, on_change, client.schema)
            schemas.can_promote = opened.can_promote
        keys = None if deleted is None else DeletedList(absolute(deleted)).current()
        done = Replay(opened, uuid.uuid4().hex, time.time_ns() // 1_000_000, fields, schemas, keys).run()
    if as_json:
        print_json(done.to_json())
        return
    print(f"{done.replayed:,} dead letters of {opened.topic} landed in {uri}")
    for number, what in ((done.landed_before, "had landed before"), (done.deleted, "are deleted on purpose")):
        if number:
            print(f"{number:,} {what}")
    print(f"{done.failing:,} still fail")
    for reason, number in done.reasons.most_common(REASONS_SHOWN):
        print(f"  {number:,}: {reason} ({'; '.join(done.places[reason])})")
    if len(done.reasons) > REASONS_SHOWN:
        print(f"  ... and {len(done.reasons) - REASONS_SHOWN} more reasons: see --json")


def _fields(text: str | None, path: str) -> StructType | None:
    """Parse a schema. Only Spark parses its short form, so start a small session for that."""
    from chronik.pipeline.land.schema import parse_schema

    if text is None:
        return None
    if text.lstrip().startswith("{"):
        return parse_schema(text, path)
    with one_line_errors(), spark_for("chronik-schema", "local[1]", {}):
        return parse_schema(text, path)
