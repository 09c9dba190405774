"""The Iceberg table that one topic lands in, exactly once: `--table-format iceberg`.

The table's property `chronik.state` has what the application transactions of a Delta table have: the last batch of each
query, the end of each partition, and the last snapshot that a landing made. It is changed in the commit that adds the
files, and unlike a snapshot it does not expire. The summary of each snapshot has the offsets that it added:

    chronik.query, chronik.batch    which micro-batch
    chronik.offsets                 {PARTITION: [first, last]}

The state has the sequence number of that snapshot, too. It shows a rollback when the snapshot has expired.

Every commit adds a snapshot, and requires that the snapshot which was checked is still the current one. pyiceberg would
repeat a refused append on a newer snapshot, which may hold the same records. So the property
`commit.retry.num-retries` is 0: a refused commit is a conflict, and the batch is checked again.

The table is divided by the day of `timestamp`. Executors write the files as for Delta; the driver reads their footers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from chronik.pipeline.catalog import NAMESPACE, find_table, guarded
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.land.delta import TOPIC, TOPIC_ID, Conflict
from chronik.pipeline.land.landed_offsets import LandedOffsets, widened
from chronik.pipeline.land.schema import DATE, RECORD_SCHEMA
from chronik.pipeline.land.task import NewFile
from chronik.pipeline.storage import is_remote
from chronik.pipeline.typed.evolution import plain_type

STATE = "chronik.state"
RETRIES = "commit.retry.num-retries"
BOUNDED = {
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
    "commit.manifest-merge.enabled": "true",
}
"""Properties that keep the metadata small. They are set if a table does not have them, and then belong to its users."""
QUERIES_MAX = 256
"""Queries whose last batch is remembered. Each lost checkpoint and each backfill is a query."""


class State(msgspec.Struct):
    """What has landed. `queries` are in the order of their last commits."""

    queries: dict[str, int] = {}
    ends: dict[int, int] = {}
    snapshot: int | None = None
    sequence: int | None = None


class IcebergTable:
    """One table at one snapshot, which `refresh` and our own commits advance. Used by one thread."""

    def __init__(self, uri: str, table: Any) -> None:
        self.uri = uri
        self._table = table
        self._columns: Sequence[Any] = ()
        self._state = State()
        self._read_state()

    @classmethod
    def open(
        cls,
        catalog: Any,
        uri: str,
        schema: Any,
        topic: str,
        topic_id: str,
        *,
        namespace: str = NAMESPACE,
        may_have_more: bool = False,
    ) -> IcebergTable:
        """Open the table, or create it. Raises PipelineError if the existing table cannot hold this topic."""
        from pyiceberg.exceptions import CommitFailedException, NoSuchTableError, TableAlreadyExistsError

        location = uri if is_remote(uri) else os.path.abspath(uri)
        name = (namespace, location.rstrip("/").rpartition("/")[2])
        fields = pa.schema([column for column in schema if column.name != DATE])

        def opened() -> Any:
            try:
                return catalog.load_table(name)
            except NoSuchTableError:
                catalog.create_namespace_if_not_exists(namespace)
                try:
                    return _create(catalog, name, fields, location, {TOPIC: topic, TOPIC_ID: topic_id})
                except (TableAlreadyExistsError, CommitFailedException):  # another landing was faster
                    return catalog.load_table(name)

        table = guarded(opened, f"cannot open or create the table {uri}")
        _check(uri, table, fields, topic, topic_id, location, may_have_more)
        return cls(location, table)

    @staticmethod
    def check(uri: str, options: Mapping[str, str], topic: str, topic_id: str) -> None:
        """Raise PipelineError if the catalog cannot be used, or has a table that cannot hold this topic."""
        table = find_table(uri, options)
        if table is not None:
            fields = pa.schema([column for column in RECORD_SCHEMA if column.name != DATE])
            location = uri if is_remote(uri) else os.path.abspath(uri)
            _check(uri, table, fields, topic, topic_id, location, may_have_more=True)

    @property
    def version(self) -> int:
        return len(self._table.metadata.snapshots)

    def refresh(self) -> None:
        guarded(self._table.refresh, f"cannot read the table {self.uri}")
        self._read_state()

    def _read_state(self) -> None:
        self._state = _state_of(self._table)

    def more_columns(self) -> list[Any]:
        """Return the columns beside the record's own, as Arrow fields."""
        columns = [column for column in self._table.schema().as_arrow() if column.name not in RECORD_SCHEMA.names]
        marks = msgspec.json.decode(self._table.properties.get("chronik.columns", "{}"))
        return [pa.field(column.name, _plain(column.type), metadata=marks.get(column.name, {})) for column in columns]

    def require(self, columns: Sequence[Any]) -> None:
        """Set the columns, beside the record's own, that the next commit adds or widens. They include existing ones."""
        self._columns = columns

    def landed_batch(self, query: str) -> int | None:
        return self._state.queries.get(query)

    def next_offset(self, partition: int) -> int:
        """Return the highest landed offset + 1, or 0 if none has landed."""
        return self._state.ends.get(partition, 0)

    def landed_offsets(self, firsts: Mapping[int, int]) -> LandedOffsets:
        """Read the landed offsets of these partitions, each from its first offset on. Statistics exclude most files."""
        scan = self._table.scan(row_filter=f"offset >= {min(firsts.values())}", selected_fields=("partition", "offset"))

        def read() -> LandedOffsets:
            return LandedOffsets.of(batch for batch in scan.to_arrow_batch_reader() if batch.num_rows)

        found: LandedOffsets = guarded(read, f"cannot read the table {self.uri}")
        return found

    def check_not_restored(self, query: str) -> None:
        """Raise PipelineError if the table was rolled back to before the last commit of a landing.

        A snapshot whose parent has expired has none. What the sequence numbers do not show then, nothing does.
        """
        last, metadata = self._state.snapshot, self._table.metadata
        if self.landed_batch(query) is None or last is None:
            return  # a new query lands whatever is missing
        sequence, known = self._state.sequence, metadata.snapshot_by_id(last)
        if sequence is None and known is not None:
            sequence = known.sequence_number
        if sequence is None:
            return  # a commit of an earlier release, whose snapshot has expired
        at = metadata.current_snapshot()
        while at is not None and at.snapshot_id != last and at.sequence_number > sequence:
            if at.parent_snapshot_id is None:
                return
            at = metadata.snapshot_by_id(at.parent_snapshot_id)
        if at is None or at.snapshot_id != last:
            raise PipelineError(
                f"the table {self.uri} was rolled back to an earlier snapshot, so rows that this landing had written "
                "are missing: choose a new --checkpoint (they land again, and no record lands twice)"
            )

    def commit(self, query: str, batch: int, files: Sequence[NewFile]) -> None:
        """Commit all files and the state atomically. Raises Conflict."""
        spans = widened({}, ((partition, *span) for file in files for partition, span in file.offsets.items()))
        queries = {name: last for name, last in self._state.queries.items() if name != query}
        queries = dict([*queries.items(), (query, batch)][-QUERIES_MAX:])
        ends = {**self._state.ends}
        for partition, (_, last) in spans.items():
            ends[partition] = max(last + 1, self.next_offset(partition))
        summary = {
            "chronik.query": query,
            "chronik.batch": str(batch),
            "chronik.offsets": msgspec.json.encode({str(name): span for name, span in sorted(spans.items())}).decode(),
        }
        paths = [f"{self.uri}/{file.path}" for file in files]

        def committed() -> None:
            if self._table.properties.get(RETRIES) != "0":
                raise PipelineError(f"the table {self.uri} needs the property {RETRIES} = 0: set it again")
            transaction = self._table.transaction()
            properties = {}
            if self._columns and _types(self._columns) != _types(self.more_columns()):
                with transaction.update_schema() as update:
                    update.union_by_name(pa.schema([*RECORD_SCHEMA, *map(_nullable, self._columns)]))
                properties = _column_properties(transaction, self._columns)
            from pyiceberg.table import _parquet_files_to_data_files

            append = transaction.update_snapshot(snapshot_properties=summary).fast_append()
            sequence = transaction.table_metadata.next_sequence_number()
            state = State(queries, ends, append.snapshot_id, sequence)
            properties[STATE] = msgspec.json.encode(state).decode()
            with append:
                found = _parquet_files_to_data_files(transaction.table_metadata, paths, self._table.io)
                for data_file in found:
                    append.append_data_file(data_file)
            transaction.set_properties(properties)
            commit_snapshot(self._table, transaction, append)

        guarded(committed, f"cannot commit to the table {self.uri}")
        self._read_state()


def _state_of(table: Any) -> State:
    text = table.properties.get(STATE)
    return State() if text is None else msgspec.json.decode(text, type=State)


def landed_snapshot(table: Any) -> int | None:
    """Return the last snapshot that a landing made."""
    return _state_of(table).snapshot


def commit_snapshot(table: Any, transaction: Any, producer: Any) -> None:
    """Commit a transaction with one new snapshot. Raises Conflict if the table shows that it was not committed.

    A proxy may repeat a request that was applied, and the catalog refuses the second one. pyiceberg would remove the
    manifests of a refused commit at once, even if the table has the snapshot. So they are removed here.
    """
    from pyiceberg.exceptions import CommitFailedException

    transaction._snapshot_producers.clear()
    try:
        transaction.commit_transaction()
    except CommitFailedException as error:
        table.refresh()
        if table.metadata.snapshot_by_id(producer.snapshot_id) is None:
            producer._clean_all_uncommitted()
            raise Conflict(str(error)) from None


def _create(catalog: Any, name: tuple[str, str], fields: Any, location: str, marks: dict[str, str]) -> Any:
    """Create the table, divided by the day of the timestamp, in one commit."""
    from pyiceberg.transforms import DayTransform

    with catalog.create_table_transaction(name, schema=fields, location=location) as transaction:
        with transaction.update_spec() as update:
            update.add_field("timestamp", DayTransform(), "timestamp_day")
        transaction.set_properties(
            {
                **marks,
                **BOUNDED,
                RETRIES: "0",
                "schema.name-mapping.default": transaction.table_metadata.schema().name_mapping.model_dump_json(),
            }
        )
    return catalog.load_table(name)


def _column_properties(transaction: Any, columns: Sequence[Any]) -> dict[str, str]:
    """Return the properties that follow the columns: what they were made from, and the ids of their names in files."""
    marks = {
        column.name: {key.decode(): value.decode() for key, value in (column.metadata or {}).items()}
        for column in columns
    }
    mapping = transaction.table_metadata.schema().name_mapping.model_dump_json()
    return {"chronik.columns": msgspec.json.encode(marks).decode(), "schema.name-mapping.default": mapping}


def _types(columns: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(column.name, _plain(column.type)) for column in columns]


def _nullable(column: Any) -> Any:
    return pa.field(column.name, _plain(column.type), nullable=True)


def _plain(kind: Any) -> Any:
    """Return the type that a column has after Iceberg has kept it: there are no small integers and no large texts."""
    kind = plain_type(kind)
    if pa.types.is_int8(kind) or pa.types.is_int16(kind):
        return pa.int32()
    if pa.types.is_large_string(kind):
        return pa.string()
    if pa.types.is_large_binary(kind):
        return pa.binary()
    if pa.types.is_large_list(kind) or pa.types.is_list(kind):
        return pa.list_(pa.field("element", _plain(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(member.name, _plain(member.type)) for member in kind])
    if pa.types.is_map(kind):
        return pa.map_(_plain(kind.key_type), _plain(kind.item_type))
    return kind


def can_promote(old: Any, new: Any) -> bool:
    """Return whether Iceberg can change the type of a column so, and of all columns inside it."""
    old, new = _plain(old), _plain(new)
    if old == new:
        return True
    if pa.types.is_struct(old) and pa.types.is_struct(new):
        members = {member.name: member.type for member in new}
        return all(member.name in members and can_promote(member.type, members[member.name]) for member in old)
    if pa.types.is_list(old) and pa.types.is_list(new):
        return can_promote(old.value_type, new.value_type)
    if pa.types.is_map(old) and pa.types.is_map(new):
        return old.key_type == new.key_type and can_promote(old.item_type, new.item_type)
    if pa.types.is_decimal(old) and pa.types.is_decimal(new):
        return bool(old.scale == new.scale and old.precision <= new.precision)
    return (old, new) in ((pa.int32(), pa.int64()), (pa.float32(), pa.float64()))


def _check(uri: str, table: Any, fields: Any, topic: str, topic_id: str, location: str, may_have_more: bool) -> None:
    settings = table.properties
    if settings.get(TOPIC) != topic:
        holds = f"the topic {settings[TOPIC]}" if settings.get(TOPIC) else "something else"
        raise PipelineError(f"the table {uri} holds {holds}, not {topic}: choose another --to")
    if topic_id and settings.get(TOPIC_ID) and settings[TOPIC_ID] != topic_id:
        raise PipelineError(
            f"topic {topic} was deleted and recreated since the table {uri} was created: its offsets would be there "
            "twice; choose another --to and --checkpoint"
        )
    if table.location().removeprefix("file://").rstrip("/") != location.rstrip("/"):
        raise PipelineError(
            f"the catalog has the table {'.'.join(table.name())} at {table.location()}, not at {uri}: choose another "
            "--to, or another --catalog namespace=NAME"
        )
    existing = dict(_types(list(table.schema().as_arrow())))
    required = dict(_types(list(fields)))
    names = required if may_have_more else existing | required
    differ = sorted(name for name in names if existing.get(name) != required.get(name))
    if differ:
        raise PipelineError(
            f"the table {uri} was created with another --schema (they differ in {', '.join(differ)}): "
            "choose another --to and --checkpoint"
        )
