"""`chronik sql`: SQL over topics with DuckDB. Needs neither Spark nor Java."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chronik.cli.errors import CliError, say
from chronik.cli.options import DEFAULT_BOOTSTRAP, Bootstrap
from chronik.cli.output import progress
from chronik.cli.registry import RegistryUrl, registry_client
from chronik.client.properties import ClientSettings

if TYPE_CHECKING:
    from chronik.pipeline.sql.query import SqlSession, Typing
    from chronik.pipeline.sql.scan import ScanProgress
    from chronik.pipeline.sql.topic_table import TypedColumns

ISOLATION = ("read_committed", "read_uncommitted")


def sql(
    query: Annotated[
        str | None, typer.Argument(metavar="QUERY", help="A topic is a table. Default: read standard input.")
    ] = None,
    isolation: Annotated[
        str, typer.Option(metavar="|".join(ISOLATION), help="Whether open and aborted transactions are read.")
    ] = ISOLATION[0],
    registry: RegistryUrl = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object: columns, rows.")] = False,
    as_lines: Annotated[bool, typer.Option("--jsonl", help="Print one JSON object for each row.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a header line.")] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Query topics with SQL (DuckDB): chronik sql "SELECT count(*) FROM orders WHERE partition = 1"."""
    if isolation not in ISOLATION:
        raise CliError(f"--isolation {isolation} is unknown: use {' or '.join(ISOLATION)}")
    if as_json + as_lines + as_csv > 1:
        raise CliError("--json, --jsonl and --csv exclude each other: choose one")
    bootstrap.endpoints  # noqa: B018 - a wrong address fails before the query is read
    text = _query(query)
    with one_line_errors():
        _load_arrow()
        from chronik.cli.sql_output import CsvPrinter, JsonPrinter, LinesPrinter, TablePrinter
        from chronik.pipeline.sql.query import SqlSession

        kind = JsonPrinter if as_json else LinesPrinter if as_lines else CsvPrinter if as_csv else TablePrinter
        typing = _typing(registry, bootstrap)
        with SqlSession(bootstrap, committed_only=isolation == ISOLATION[0], typing=typing) as session:
            _print(session, text, kind)
        _warn(session.progress)


class _WithoutPandas:
    """A finder of modules that finds no pandas."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


def _load_arrow() -> None:
    """Load Arrow's datasets without pandas: they import it if it is installed, for 0.2 s, and no query uses it."""
    finder = _WithoutPandas()
    sys.meta_path.insert(0, finder)
    try:
        import pyarrow.dataset  # noqa: F401
    finally:
        sys.meta_path.remove(finder)


def _typing(given: str | None, bootstrap: ClientSettings) -> Typing:
    """Return what decodes values by a schema registry. Without --registry, one that does not answer is not used."""
    from chronik.client.schema_registry import RegistryError
    from chronik.pipeline.errors import PipelineError
    from chronik.pipeline.sql.subject import registry_columns

    def typed_columns(topic: str) -> TypedColumns | None:
        try:
            return registry_columns(topic, registry_client(given, bootstrap))
        except (CliError, RegistryError, PipelineError) as error:
            if given is not None:
                raise PipelineError(f"{error}; check --registry") from None
            return None

    return typed_columns


def _query(given: str | None) -> str:
    if given is None and sys.stdin.isatty():
        raise CliError(
            'no query is given: write chronik sql "SELECT count(*) FROM TOPIC", or pass it on standard input'
        )
    return sys.stdin.read() if given is None else given


def _print(session: SqlSession, text: str, kind: Any) -> None:
    with progress("reading", None) as show:

        def update() -> None:
            done = session.progress
            show(done.offsets, f"{done.rows:,} of {done.offsets_total:,} records, {done.bytes / 1e6:,.0f} MB")

        session.on_wait = update
        schema, batches = session.run(text)
        printer = kind(schema, sys.stdout)
        for batch in batches:
            printer.add(batch)
    printer.close()


def _warn(done: ScanProgress) -> None:
    for loss in done.lost:
        say(f"{loss}: they were deleted while the query ran, and are not in its result")
    for topic, count in done.unfit.items():
        say(f"{count:,} records of {topic} do not fit their schema: see the column decode_error")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Report as one line missing packages before they are used, or a PipelineError from the block."""
    missing = next((name for name in ("duckdb", "pyarrow") if find_spec(name) is None), None)
    if missing is not None:
        raise CliError(f"{missing} is not installed: pip install 'chronik[sql]'")
    from chronik.pipeline.errors import PipelineError

    try:
        yield
    except PipelineError as error:
        raise CliError(str(error)) from None
