"""A query over topics: which topics it names, the snapshot that it reads, and DuckDB's errors as one line.

The high watermarks (or last stable offsets) of all topics are read before the query starts, so that it ends while
producers write. DuckDB resolves names that are no topics: files, functions, tables of earlier statements.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from queue import Empty, Queue
from typing import Any

import duckdb
import pyarrow as pa

from chronik.client.layout import TopicLayout
from chronik.client.properties import Target
from chronik.client.topics import EARLIEST, LATEST
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.source.blocking import BlockingCluster, topic_id
from chronik.pipeline.source.ranges import RecordRange
from chronik.pipeline.sql.scan import WAIT_S, ScanProgress, ScanSettings, put_unless
from chronik.pipeline.sql.topic_table import TopicTable, TypedColumns

ROWS_PER_BATCH = 2_048
"""Rows in a batch of the result. DuckDB's own vectors have as many, so the first rows wait for no further ones."""
RESULTS_WAITING_MAX = 4
END_S_MAX = 10.0
"""How long a query that is stopped may take to end: a fetch may be waiting for a broker."""
SIMILAR_MAX = 3
HIDDEN = "chronik topic "
"""Begins the names of the datasets. Each topic is a view of one, with the columns in Spark's order."""

Typing = Callable[[str], TypedColumns | None]
"""Returns how a topic's values are decoded; None if they are not."""


class SqlSession:
    """A DuckDB connection with topics as tables. Used by one thread."""

    def __init__(self, target: Target, *, committed_only: bool = True, typing: Typing = lambda _: None) -> None:
        self.progress = ScanProgress()
        self._target = target
        self._committed_only = committed_only
        self._typing = typing
        self.on_wait: Callable[[], None] = lambda: None
        """Called several times a second while no row arrives."""
        self._stopped = threading.Event()
        self._failures: list[PipelineError] = []
        self._threads: list[threading.Thread] = []
        self._known: dict[str, TopicLayout] | None = None
        self._views: set[str] = set()
        self._duckdb = duckdb.connect(":memory:")
        # Python's variables are no tables. Times are those of the cluster, in one zone for input and output.
        self._duckdb.execute("SET python_enable_replacements = false; SET TimeZone = 'UTC'")

    def __enter__(self) -> SqlSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the scans and the query, wherever they are.

        Threads must not outlive this: a thread that is inside DuckDB or Arrow when the interpreter exits aborts it.
        """
        self._stopped.set()
        self._duckdb.interrupt()
        for thread in self._threads:
            thread.join(END_S_MAX)
        self._duckdb.close()

    def run(self, text: str) -> tuple[Any, Iterator[Any]]:
        """Run the statements. Return the schema and the batches of the last one's result. Raises PipelineError.

        DuckDB runs in another thread, so that Ctrl-C and the caller's display do not wait for it.
        """
        results: Queue[Any] = Queue(RESULTS_WAITING_MAX)
        thread = threading.Thread(target=self._execute, args=(text, results), name="chronik-sql", daemon=True)
        self._threads.append(thread)
        thread.start()
        schema = self._next(results)
        return schema, self._remaining(results)

    def _remaining(self, results: Queue[Any]) -> Iterator[Any]:
        while (batch := self._next(results)) is not None:
            yield batch

    def _next(self, results: Queue[Any]) -> Any:
        while True:
            try:
                result = results.get(timeout=WAIT_S)
                break
            except Empty:
                self.on_wait()
        if isinstance(result, BaseException):
            raise result
        return result

    def _execute(self, text: str, results: Queue[Any]) -> None:
        try:
            with self._one_line_errors(text):
                reader = self._start(text)
                put_unless(self._stopped, results, pa.schema([]) if reader is None else reader.schema)
                for batch in reader or ():
                    put_unless(self._stopped, results, batch)
                if self._failures:
                    raise self._failures[0]
        except BaseException as error:
            put_unless(self._stopped, results, error)
        else:
            put_unless(self._stopped, results, None)

    def _start(self, text: str) -> Any:
        """Return the reader of the last statement's result; None if it has none."""
        statements = self._duckdb.extract_statements(text)
        if not statements:
            raise PipelineError('there is no query: write chronik sql "SELECT count(*) FROM TOPIC"')
        self._add_topics(self._tables_in(statements))
        for statement in statements[:-1]:
            self._duckdb.execute(statement)
            while self._duckdb.fetchmany(ROWS_PER_BATCH):
                pass  # DuckDB refuses the next statement while rows of this one are left
        relation = self._duckdb.sql(statements[-1])
        return None if relation is None else relation.to_arrow_reader(ROWS_PER_BATCH)

    # Topics.

    def _tables_in(self, statements: Sequence[Any]) -> list[str]:
        """Return the names of tables in the statements, as DuckDB parses them; of all topics if it cannot list them."""
        names: dict[str, None] = {}
        for statement in statements:
            try:
                names.update(dict.fromkeys(self._duckdb.get_table_names(statement.query)))
            except duckdb.Error:
                # DuckDB rewrites the statement to several ones (PIVOT), or it is wrong, which running it will show.
                names.update((name, None) for name, topic in self._topics().items() if not topic.is_internal)
        return list(names)

    def _topics(self) -> dict[str, TopicLayout]:
        if self._known is None:
            with BlockingCluster(self._target) as cluster:
                self._known = cluster.topics(None)
        return self._known

    def _add_topics(self, names: Sequence[str]) -> None:
        found = {name: topic for name in names if (topic := self._topic_named(name)) is not None}
        for name in found:
            twin = next((other for other in found if other != name and other.lower() == name.lower()), None)
            if twin is not None and found[twin] != found[name]:
                raise PipelineError(f"{name} and {twin} differ only in case, which SQL ignores: query one at a time")
        topics = [topic for topic in dict.fromkeys(found.values()) if topic not in self._views]
        if not topics:
            return
        bounds, ids = self._snapshot(topics)
        settings = ScanSettings(
            self._target, self._committed_only, ids, self.progress, self._stopped, self._failures, self._threads
        )
        for topic in topics:
            table = TopicTable([each for each in bounds if each.topic == topic], settings, self._typing(topic))
            self._duckdb.register(HIDDEN + topic, table)
            columns = ", ".join(map(quoted, table.names))
            self._duckdb.execute(f"CREATE TEMP VIEW {quoted(topic)} AS SELECT {columns} FROM {quoted(HIDDEN + topic)}")  # noqa: S608
            self._views.add(topic)

    def _topic_named(self, name: str) -> str | None:
        """Return the topic with this name, otherwise the only one whose name differs in case alone."""
        topics = self._topics()
        alike = [topic for topic in topics if topic.lower() == name.lower()]
        return name if name in topics else alike[0] if len(alike) == 1 else None

    def _snapshot(self, topics: Sequence[str]) -> tuple[list[RecordRange], dict[str, str]]:
        layouts = {topic: self._topics()[topic] for topic in topics}
        partitions = [(topic, each.partition) for topic, layout in layouts.items() for each in layout.partitions]
        with BlockingCluster(self._target) as cluster:
            starts = cluster.offsets(partitions, EARLIEST)
            stops = cluster.offsets(partitions, LATEST, committed_only=self._committed_only)
        ranges = [RecordRange(*partition, starts[partition], stops[partition]) for partition in partitions]
        return ranges, {topic: topic_id(layout) for topic, layout in layouts.items()}

    # Errors.

    @contextmanager
    def _one_line_errors(self, text: str) -> Iterator[None]:
        try:
            yield
        except duckdb.CatalogException as error:
            raise PipelineError(f"{first_line(error)}{self._similar(text)}") from None
        except (duckdb.Error, OSError, pa.ArrowException) as error:
            if self._failures:  # DuckDB and Arrow wrap what a scan raises
                raise self._failures[0] from None
            raise PipelineError(f"{first_line(error)}{hint(error)}") from None

    def _similar(self, text: str) -> str:
        """Name the topics whose names are similar to those of missing tables."""
        topics = [name for name, topic in self._topics().items() if not topic.is_internal]
        by_lower = {name.lower(): name for name in topics}
        try:
            missing = [name for name in self._duckdb.get_table_names(text) if name.lower() not in by_lower]
        except duckdb.Error:
            missing = []
        similar = [near for name in missing for near in get_close_matches(name.lower(), by_lower, SIMILAR_MAX)]
        parts = [each for each in by_lower for name in missing if name.lower() in each.split(".")]
        found = [quoted(by_lower[near]) for near in dict.fromkeys([*similar, *parts])]
        if found:
            return f"; topics with similar names: {', '.join(found[:SIMILAR_MAX])}"
        return "; see chronik topic list" if missing else ""


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def first_line(error: Exception) -> str:
    """Return DuckDB's message without the excerpt of the query that follows it."""
    return str(error).strip().split("\n\n")[0].split("\nLINE ")[0].replace("\n", " ")


def hint(error: Exception) -> str:
    """Return the way out of mistakes that topics invite."""
    text = str(error)
    if isinstance(error, duckdb.ParserException) and '"offset"' in text:
        return '; offset is a word of SQL: write "offset" in double quotes, or TOPIC.offset'
    if isinstance(error, duckdb.ParserException):
        return "; write names with dots or dashes in double quotes"
    if isinstance(error, duckdb.BinderException) and "BLOB" in text:
        return "; keys and values are bytes: write decode(value) for text, decode(value)::JSON for JSON"
    return ""
