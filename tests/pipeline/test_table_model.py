"""Tables under everything that happens to them at once, as a model: no record is lost or twice, whatever the order.

Several landings, backfills and maintainers of one table run from step to step in a random order. Any of them is killed
between two steps, gets no answer to a commit that took place, or loses its checkpoint. The table is restored, and time
passes. After each step:

    no version of the table has a record twice
    each version that the retention still promises has the rows that it had when it was made, and all of its files

When everything has ended: all records are in the table, and no file is there that it does not need. A seed that fails
is run again with `-k`. `make soak-counts` runs more seeds.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import obstore
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from obstore.exceptions import AlreadyExistsError
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException
from pyspark.sql.types import LongType, StructField, StructType
from tests.support import upsert
from tests.support.actors import Actor, make_steps
from tests.support.aged import age_delta, age_iceberg
from tests.support.landing import TIME, records, writer
from tests.support.upsert import Record

from chronik.pipeline.catalog import open_catalog
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.land import iceberg_maintenance, maintenance
from chronik.pipeline.land.delta import BatchLander, LandingTable
from chronik.pipeline.land.iceberg import IcebergTable
from chronik.pipeline.land.iceberg_maintenance import maintain_at
from chronik.pipeline.land.maintenance import maintain
from chronik.pipeline.land.schema import dead_letter_schema, table_schema
from chronik.pipeline.land.task import OpenFile
from chronik.pipeline.storage import TableFiles

SEEDS, SOAK_SEEDS = 1, 40
NUMBER = StructType([StructField("n", LongType(), nullable=False)])
PARTITIONS = 2
LOG_END = 30
STEPS = 140
LANDINGS = 3
KEEP_FILES_H, KEEP_LOG_D = 24, 5
KEEP_ALL_H = 10 / 60
"""How long every snapshot of an Iceberg table is kept. Those that remain later are read as long as they are there."""
READER_H = 22
"""How long a reader may still use the files of a snapshot that has expired."""
ATTEMPT_H_MAX = 20
"""How long an attempt may take: files are kept longer than that."""
DAY_US = 24 * 3600 * 1_000_000
NOW_MS = 1_000

Row = tuple[int, int] | tuple[bytes | None, bytes | None]
Content = Counter[Row]

EACH_SEED = pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.soak if seed >= SEEDS else []) for seed in range(SOAK_SEEDS)]
)


class DeltaFolder:
    """The table and its dead letters, as Delta tables."""

    names: tuple[str, ...] = ("t", "t_dead_letters")

    def __init__(self, folder: Path, wall_ms: Callable[[], int]) -> None:
        self.folder = folder
        self.wall_ms = wall_ms
        self._read: dict[Any, Content] = {}
        self.open()

    def open(self) -> BatchLander:
        keep = {"delta.checkpointInterval": "7"}
        schemas = zip(self.names, (table_schema(NUMBER), dead_letter_schema()), strict=True)
        opened = [LandingTable.open(self.uri(name), each, "t", "id-1", properties=keep) for name, each in schemas]
        return BatchLander(*opened)

    def uri(self, name: str) -> str:
        return str(self.folder / name)

    def write(self, spans: Sequence[tuple[int, range]]) -> Any:
        return writer(self.folder, *(batch_of(*span) for span in spans), fields=NUMBER)

    def maintain(self, name: str, token: str, *, remove: bool) -> None:
        maintain(self.uri(name), token, self.wall_ms(), vacuum=remove, keep_files_h=KEEP_FILES_H, keep_log_d=KEEP_LOG_D)

    def marks(self, name: str) -> set[str]:
        """Return the names of the files of which a new one shows a commit."""
        return {path.name for path in (self.folder / name / "_delta_log").glob("*.json")}

    def versions(self, name: str, known: set[int]) -> list[int]:
        newest = DeltaTable(self.uri(name)).version()
        return [version for version in range(newest + 1) if version not in known]

    def present(self, name: str) -> list[int]:
        """Return the versions that the table offers, promised or not."""
        return []

    def current(self, name: str) -> int:
        return DeltaTable(self.uri(name)).version()

    def content(self, name: str, version: int) -> Content:
        return self.rows_of(DeltaTable(self.uri(name), version=version).file_uris(), ("partition", "offset"))

    def rows_of(self, paths: Sequence[str], columns: tuple[str, str]) -> Content:
        """Return the rows of files, which do not change: each is read once."""
        found: Content = Counter()
        for path in paths:
            assert Path(path).exists(), f"{path} is gone"
            if (path, columns) not in self._read:
                rows = pq.ParquetFile(path).read(columns=list(columns))
                self._read[path, columns] = Counter(
                    zip(*(rows.column(name).to_pylist() for name in columns), strict=True)
                )
            found.update(self._read[path, columns])
        return found

    def is_promised(self, created_h: float, superseded_h: float, now_h: float) -> bool:
        return superseded_h > now_h - KEEP_FILES_H and created_h > now_h - KEEP_LOG_D * 24

    def can_finish(self, version: int, superseded_h: float, now_h: float) -> bool:
        return True  # every version that a reader may have is promised

    def restore(self, version: int) -> None:
        DeltaTable(self.uri("t")).restore(version)

    def age(self, hours: float) -> None:
        for name in self.names:
            age_delta(self.folder / name, hours)

    def unneeded(self, name: str) -> set[str]:
        table = DeltaTable(self.uri(name))
        files = {str(path) for path in (self.folder / name).rglob("*.parquet")}
        files = {path for path in files if "_delta_log" not in path}
        return files - set(table.file_uris()) - self.hidden(table)

    def hidden(self, table: DeltaTable) -> set[str]:
        return set()


class IcebergFolder(DeltaFolder):
    """The same as Iceberg tables in a SQL catalog."""

    def __init__(self, folder: Path, wall_ms: Callable[[], int]) -> None:
        self._manifests: dict[str, list[str]] = {}
        self.needed: dict[int, set[str]] = {}
        self._catalog = open_catalog(str(folder), {})
        super().__init__(folder, wall_ms)

    def open(self) -> BatchLander:
        catalog = open_catalog(str(self.folder), {})
        schemas = zip(self.names, (table_schema(NUMBER), dead_letter_schema()), strict=True)
        return BatchLander(*(IcebergTable.open(catalog, self.uri(name), each, "t", "id-1") for name, each in schemas))

    def loaded(self, name: str) -> Any:
        return self._catalog.load_table(("chronik", name))

    def maintain(self, name: str, token: str, *, remove: bool) -> None:
        keep = (KEEP_LOG_D, KEEP_FILES_H)
        if remove:
            maintain_at(self.uri(name), {}, token, self.wall_ms(), *keep)
        else:
            catalog = open_catalog(str(self.folder), {})
            iceberg_maintenance.maintain_iceberg(catalog, ("chronik", name), token, self.wall_ms(), expire=False)

    def marks(self, name: str) -> set[str]:
        return {path.name for path in (self.folder / name / "metadata").glob("*.metadata.json")}

    def versions(self, name: str, known: set[int]) -> list[int]:
        metadata = self.loaded(name).metadata
        return [each.snapshot_id for each in metadata.snapshots if each.snapshot_id not in known]

    def present(self, name: str) -> list[int]:
        return [each.snapshot_id for each in self.loaded(name).metadata.snapshots]

    def current(self, name: str) -> int:
        return self.loaded(name).metadata.current_snapshot_id or 0

    def content(self, name: str, version: int) -> Content:
        table = self.loaded(name)
        assert table.metadata.snapshot_by_id(version) is not None, f"snapshot {version} is gone"
        paths: list[str] = []
        self.needed.setdefault(version, set())
        for manifest in table.snapshot_by_id(version).manifests(table.io):
            path = manifest.manifest_path
            assert Path(path.removeprefix("file://")).exists(), f"{path} is gone"
            if path not in self._manifests:
                entries = manifest.fetch_manifest_entry(table.io)
                self._manifests[path] = [entry.data_file.file_path.removeprefix("file://") for entry in entries]
            paths += self._manifests[path]
            self.needed[version].add(path.removeprefix("file://"))
        self.needed[version].update(paths)
        return self.rows_of(paths, ("partition", "offset"))

    def is_promised(self, created_h: float, superseded_h: float, now_h: float) -> bool:
        return superseded_h > now_h - KEEP_ALL_H

    def can_finish(self, version: int, superseded_h: float, now_h: float) -> bool:
        """Return whether a reader that has planned its read of a snapshot still finds all files."""
        return superseded_h < now_h - READER_H or all(Path(path).exists() for path in self.needed.get(version, ()))

    def restore(self, version: int) -> None:
        self.loaded("t").manage_snapshots().set_current_snapshot(snapshot_id=version).commit()

    def age(self, hours: float) -> None:
        for name in self.names:
            age_iceberg(self.folder / name, self.loaded(name).metadata_location, hours)

    def unneeded(self, name: str) -> set[str]:
        table = self.loaded(name)
        used = {path.removeprefix("file://") for path in iceberg_maintenance._used(table)}
        for snapshot in table.metadata.snapshots:
            used.add(snapshot.manifest_list.removeprefix("file://"))
        return {str(path) for path in (self.folder / name).rglob("*") if path.is_file()} - used


class StateFolder(DeltaFolder):
    """A table with one row per key."""

    def open(self) -> BatchLander:
        return upsert.lander(self.folder)

    def write(self, spans: Sequence[tuple[int, range]]) -> Any:
        return upsert.writer(self.folder, *([LOG[partition][at] for at in offsets] for partition, offsets in spans))

    def content(self, name: str, version: int) -> Content:
        if name != "t":
            return super().content(name, version)
        table = DeltaTable(self.uri(name), version=version)
        found = self.rows_of(table.file_uris(), ("key", "value"))
        ends = [table.transaction_version(f"chronik:offset:{partition}") or 0 for partition in range(PARTITIONS)]
        known = [each for log, end in zip(LOG, ends, strict=True) for each in log[:end]]
        assert found == state_of(known), "the rows are not the state of what has landed"
        return found

    def hidden(self, table: DeltaTable) -> set[str]:
        from chronik.pipeline.land.hidden_files import deleted_path, deleted_transaction

        numbers = {bucket: table.transaction_version(deleted_transaction(bucket)) for bucket in range(4)}
        paths = [deleted_path(bucket, number) for bucket, number in numbers.items() if number is not None]
        return {str(self.folder / "t" / path) for path in paths}


def state_of(known: Sequence[Record]) -> Content:
    return Counter(upsert.expected([each for each in known if each.key is not None]).items())


def _log() -> list[list[Record]]:
    chance = random.Random(1)
    return [
        [
            Record(
                partition,
                offset,
                None if offset % 13 == 5 else b"k%d" % chance.randrange(12),
                None if chance.random() < 0.3 else b"%d-%d" % (partition, offset),
                offset * 3_600_000 + chance.randrange(20_000_000),
            )
            for offset in range(LOG_END)
        ]
        for partition in range(PARTITIONS)
    ]


LOG = _log()


def batch_of(partition: int, offsets: range) -> Any:
    """Return records of three days, of which every seventh is a dead letter."""
    values = [b'{"n": 1}' if offset % 7 else b"x" for offset in offsets]
    return records(partition, offsets, values, [TIME + offset // 16 * DAY_US for offset in offsets])


class Landing:
    """A query with its checkpoint: what it has read, and the batch that it has planned and not yet landed."""

    def __init__(self, model: Model, number: int) -> None:
        self._model = model
        self._number = number
        self._queries = 0
        self.lander: BatchLander | None = None
        self.lose_checkpoint()

    def lose_checkpoint(self) -> None:
        self._queries += 1
        self._query = f"q{self._number}-{self._queries}"
        self._next = [0] * PARTITIONS
        self._batch = 0
        self._planned: list[tuple[int, range]] | None = None

    @property
    def is_done(self) -> bool:
        return self._planned is None and min(self._next) >= LOG_END

    def land(self) -> None:
        if self._planned is None:
            chance = self._model.chance
            lengths = [chance.choice([0, 1, 1, 3]) for _ in range(PARTITIONS)]
            stops = [min(LOG_END, first + length) for first, length in zip(self._next, lengths, strict=True)]
            spans = [range(*span) for span in zip(self._next, stops, strict=True)]
            self._planned = [(partition, span) for partition, span in enumerate(spans) if span]
        planned = self._planned
        if self.lander is None:
            self.lander = self._model.tables.open()
        try:
            self.lander.land(self._query, self._batch, self._model.tables.write(planned))
        except PipelineError as error:
            self.lander = None  # opened again, as a service does
            if "choose a new --checkpoint" in str(error):
                self.lose_checkpoint()
            return
        for partition, span in planned:
            self._next[partition] = span.stop
        self._batch, self._planned = self._batch + 1, None


class Model:
    """One table, what it must have, and the actors on it."""

    def __init__(self, tables: DeltaFolder, seed: int, *, can_restore: bool) -> None:
        self.tables = tables
        self.chance = random.Random(seed)
        self.now_h = 0.0
        self._can_restore = can_restore
        self._busy: dict[str, Actor] = {}
        self._busy_since_h = 0.0
        self._landings = [Landing(self, number) for number in range(LANDINGS)]
        self._seen: dict[str, dict[int, tuple[Content, float]]] = {name: {} for name in tables.names}
        self._superseded_h: dict[str, dict[int, float]] = {name: {} for name in tables.names}
        self._current: dict[str, int] = {}
        self._marks: dict[str, set[str]] = {}
        self._numbers = 0
        self.notes: list[str] = []

    def run(self) -> None:
        self._look()
        for _ in range(STEPS):
            self._act()
            self._look()
        self._drain()
        while not all(landing.is_done for landing in self._landings):
            for landing in self._landings:
                if not landing.is_done:
                    landing.land()
            self._look()
        self._check_promises()
        self._check_complete()
        for _ in range(4):  # one more than the rounds in which files are merged
            self._age(24 * 45)
            for name in self.tables.names:
                self.tables.maintain(name, self._token(), remove=True)
            self._look()
        self._check_complete()
        for name in self.tables.names:
            leaked = self.tables.unneeded(name)
            assert not leaked, self._told(f"files leak in {name}: {sorted(leaked)}")

    def _act(self) -> None:
        chance, busy = self.chance, self._busy
        choice = chance.random()
        if busy and choice < 0.62:
            name = chance.choice(sorted(busy))
            for _ in range(chance.choice([1, 2, 5, 15])):
                if name in busy:
                    self._resume(name)
                    self._look()
        elif busy and choice < 0.65:
            name = chance.choice(sorted(busy))
            self._note(f"kill {name} {busy[name].at}")
            busy.pop(name).kill()
            self._killed(name)
        elif busy and choice < 0.68:
            actor = busy[chance.choice(sorted(busy))]
            self._note(f"{actor.name} will lose an answer")
            actor.lose_next_answer = True
        elif choice < 0.89:
            self._start()
        elif choice < 0.97:
            self._age(chance.choice([0.2, 1, 5, 30, 30, 30, 150]))
        elif choice < 0.985:
            landing = chance.choice(self._landings)
            if f"landing {landing._number}" not in busy:
                self._note(f"landing {landing._number} loses its checkpoint")
                landing.lose_checkpoint()
        elif self._can_restore and chance.random() < 0.5:
            promised = [each for each in self._promised("t") if each != self._current["t"]]
            if promised:
                version = chance.choice(promised)
                self._note(f"restore {version}")
                self.tables.restore(version)

    def _start(self) -> None:
        number = self.chance.randrange(LANDINGS + 3)
        name = f"{'landing' if number < LANDINGS else 'backfill' if number == LANDINGS else 'maintainer'} {number}"
        if name in self._busy:
            return
        if number < LANDINGS:
            if self._landings[number].is_done:
                return
            work: Callable[[], None] = self._landings[number].land
        elif number == LANDINGS:
            if isinstance(self.tables, StateFolder):
                return
            first = self.chance.randrange(LOG_END)
            query, spans = self._token(), [(self.chance.randrange(PARTITIONS), range(first, min(LOG_END, first + 4)))]

            def work() -> None:
                try:
                    self.tables.open().land(query, 0, self.tables.write(spans))
                except PipelineError as error:
                    self._note(f"{name}: {error}")
        else:
            table, token, remove = self.chance.choice(self.tables.names), self._token(), self.chance.random() < 0.6

            def work() -> None:
                try:
                    self.tables.maintain(table, token, remove=remove)
                except PipelineError as error:
                    self._note(f"{name}: {error}")

        if not self._busy:
            self._busy_since_h = self.now_h
        self._note(f"start {name}")
        self._busy[name] = Actor(name, work)

    def _resume(self, name: str) -> None:
        actor = self._busy[name]
        actor.resume()
        self._note(f"{name} {'ends' if actor.is_done else actor.at}")
        if actor.is_done:
            del self._busy[name]
            if name.startswith("maintainer"):
                self._look()
                self._check_promises()

    def _killed(self, name: str) -> None:
        """The process is gone, with the tables that it had open."""
        if name.startswith("landing"):
            self._landings[int(name.rpartition(" ")[2])].lander = None

    def _age(self, hours: float) -> None:
        if self.now_h + hours > self._busy_since_h + ATTEMPT_H_MAX:
            self._drain()
        self._note(f"{hours:g} h pass")
        self.tables.age(hours)
        self.now_h += hours

    def _drain(self) -> None:
        while self._busy:
            self._resume(min(self._busy))
            self._look()

    def _look(self) -> None:
        """Remember the content of new versions."""
        for name, seen in self._seen.items():
            marks = self.tables.marks(name)
            if marks == self._marks.get(name):
                continue
            self._marks[name] = marks
            for version in self.tables.versions(name, set(seen)):
                content = self.tables.content(name, version)
                twice = [row for row, times in content.items() if times > 1]
                assert not twice, self._told(f"{name} {version} has {twice} twice")
                seen[version] = content, self.now_h
                self._note(f"{name} has version {version}, {len(content)} rows")
            current = self.tables.current(name)
            if current != (before := self._current.get(name)):
                if before is not None:
                    self._superseded_h[name][before] = self.now_h
                self._superseded_h[name].pop(current, None)
                self._current[name] = current

    def _promised(self, name: str) -> list[int]:
        superseded = self._superseded_h[name]
        return [
            version
            for version, (_, created_h) in self._seen[name].items()
            if version == self._current[name]
            or self.tables.is_promised(created_h, superseded.get(version, created_h), self.now_h)
        ]

    def _check_promises(self) -> None:
        for name in self.tables.names:
            for version in {*self._promised(name), *self.tables.present(name)}:
                try:
                    content = self.tables.content(name, version)
                except Exception as error:
                    raise AssertionError(self._told(f"{name} {version} cannot be read: {error}")) from error
                assert content == self._seen[name][version][0], self._told(f"{name} {version} has changed")
            for version, superseded_h in self._superseded_h[name].items():
                can_finish = self.tables.can_finish(version, superseded_h, self.now_h)
                assert can_finish, self._told(f"{name} {version} lost a file {self.now_h - superseded_h} h later")

    def _check_complete(self) -> None:
        rows, dead = (self.tables.content(name, self._current[name]) for name in self.tables.names)
        if isinstance(self.tables, StateFolder):
            known = [each for log in LOG for each in log]
            assert rows == state_of(known), self._told("the state is wrong")
            assert dead == Counter((each.partition, each.offset) for each in known if each.key is None)
            return
        every: Content = Counter((partition, offset) for partition in range(PARTITIONS) for offset in range(LOG_END))
        assert rows + dead == every, self._told(f"missing {every - rows - dead}, twice {rows + dead - every}")

    def _token(self) -> str:
        self._numbers += 1
        return f"m{self._numbers}"

    def _note(self, note: str) -> None:
        self.notes.append(f"{self.now_h:g} h: {note}")

    def _told(self, fault: str) -> str:
        return "\n".join([fault, *self.notes[-150:]])


@pytest.fixture(autouse=True)
def stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge early, and let others act wherever a process accesses a table, a catalog or a file."""
    monkeypatch.setattr(maintenance, "MERGE_FILES", 3)
    monkeypatch.setattr(maintenance, "MERGE_OLD_FILES", 2)
    monkeypatch.setattr("chronik.pipeline.land.delta_log.CHECKPOINT_COMMITS", 5)
    chance = random.Random(1)

    def refused(_: object) -> Any:
        raise CommitFailedError("the retry of the client has met its own entry")

    def exists(_: object) -> Any:
        raise AlreadyExistsError("the retry of the client has met its own entry")

    def unclear(_: object) -> Any:
        raise chance.choice([CommitFailedException, CommitStateUnknownException])("answer lost")

    def lost(_: object) -> Any:
        raise OSError("answer lost")

    make_steps(monkeypatch, DeltaTable, "create_write_transaction", refused)
    make_steps(monkeypatch, obstore, "put", exists)
    make_steps(monkeypatch, SqlCatalog, "commit_table", unclear)
    make_steps(monkeypatch, DeltaTable, "vacuum", lost)
    make_steps(monkeypatch, DeltaTable, "cleanup_metadata", lost)
    make_steps(monkeypatch, DeltaTable, "create_checkpoint", lost)
    for owner, name in (
        (DeltaTable, "update_incremental"),
        (DeltaTable, "history"),
        (SqlCatalog, "load_table"),
        (OpenFile, "close"),
        (TableFiles, "full"),
        (iceberg_maintenance, "_used"),
        (iceberg_maintenance, "_remove_unused"),
    ):
        make_steps(monkeypatch, owner, name)


def run(tables: type[DeltaFolder], folder: Path, seed: int, *, can_restore: bool = True) -> None:
    model: list[Model] = []
    wall_ms = _wall_ms
    model.append(Model(tables(folder, wall_ms), seed, can_restore=can_restore))
    model[0].run()


def _wall_ms() -> int:
    import time

    return int(time.time() * 1000)


@EACH_SEED
def test_a_delta_table_has_every_record_once_whatever_happens_to_it(tmp_path: Path, seed: int) -> None:
    run(DeltaFolder, tmp_path, seed)


@EACH_SEED
def test_an_iceberg_table_has_every_record_once_whatever_happens_to_it(tmp_path: Path, seed: int) -> None:
    run(IcebergFolder, tmp_path, seed)


@EACH_SEED
def test_a_table_with_one_row_per_key_has_the_state_whatever_happens_to_it(tmp_path: Path, seed: int) -> None:
    run(StateFolder, tmp_path, seed, can_restore=False)
