"""Continuous audits: what has landed since the last audit is compared with the log, one topic after another.

The offsets that a complete audit has covered are kept in a file next to the checkpoints, per partition. An audit begins
there and ends where the landing's last finished micro-batch ended. After a fault, a partition's offset stays, so the
fault is reported until the table is repaired or the records expire.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import TYPE_CHECKING

import msgspec
import pyarrow.parquet as pq

from chronik.client.pipelines import AuditState
from chronik.client.properties import Target
from chronik.client.topics import EARLIEST
from chronik.observe.logging import Logger
from chronik.pipeline.audit.job import AuditRequest, prepare, run
from chronik.pipeline.audit.result import AuditResult
from chronik.pipeline.audit.table import find_tables
from chronik.pipeline.errors import PipelineError, failure_line, reason_of, task_errors
from chronik.pipeline.land.landed_offsets import first_and_last
from chronik.pipeline.service.job import REASON_CHARACTERS_MAX, Clocks, Job
from chronik.pipeline.source.blocking import BlockingCluster
from chronik.pipeline.storage import TableFiles, is_remote

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OFFSETS_MAX = 20_000_000
"""Offsets of a partition that one audit covers at most. The next one covers the next ones."""
POLL_S = 0.5
STOP_S_MAX = 5.0
STATE_FOLDER = ".audit"
JOB_GROUP = "chronik-audit"


class _Kept(msgspec.Struct, frozen=True):
    """The file of one topic."""

    verified: dict[int, int]


@dataclass(slots=True)
class AuditedTopic:
    """One topic to audit. `folder`: where its verified offsets are kept. `is_whole`: it landed from its log start."""

    job: Job
    topic: str
    table: str
    folder: str
    every_s: float
    deleted: str | None
    is_whole: bool
    due_s: float = 0.0
    verified: dict[int, int] | None = None
    state: AuditState = field(default_factory=AuditState)
    catalog: Mapping[str, str] = field(default_factory=dict)


class Audits:
    """Runs the audits in one thread until `stop`."""

    def __init__(
        self, spark: SparkSession, target: Target, topics: Sequence[AuditedTopic], clocks: Clocks, log: Logger
    ) -> None:
        self._spark = spark
        self._target = target
        self._topics = topics
        self._clocks = clocks
        self._log = log.bind(component="audit")
        self._stopping = Event()
        self._thread = Thread(target=self._run, name="chronik-audits", daemon=True)

    def start(self) -> None:
        for each in self._topics:
            each.job.set_audit(each.state)
        self._thread.start()

    def stop(self) -> None:
        """Abandon the audit that is under way."""
        self._stopping.set()
        with suppress(Exception):  # Spark may have ended
            self._spark.sparkContext.cancelJobGroup(JOB_GROUP)
        self._thread.join(STOP_S_MAX)

    def _run(self) -> None:
        while not self._stopping.wait(POLL_S):
            for each in self._topics:
                now_s = self._clocks.monotonic_s()
                # The first audit runs once something has landed, the next ones at the interval.
                if now_s >= each.due_s and each.job.landed_ends and not self._stopping.is_set():
                    each.due_s = now_s + each.every_s
                    self._audit(each)

    def _audit(self, each: AuditedTopic) -> None:
        before = each.state
        try:
            each.state = self._audited(each)
        except Exception as error:
            if self._stopping.is_set():
                return
            reason = (failure_line(error) or reason_of(error))[:REASON_CHARACTERS_MAX]
            each.state = msgspec.structs.replace(
                each.state, verdict="failed", checked_ms=self._clocks.wall_ms(), reason=reason
            )
            if before.reason != reason:
                self._log.warning("audit_failed", topic=each.topic, reason=reason)
        each.job.set_audit(each.state)
        if each.state.verdict == "incomplete" and before.verdict != "incomplete":
            faults = {name: getattr(each.state, name) for name in ("gaps", "duplicates", "mismatches", "unexpected")}
            self._log.error("audit_incomplete", topic=each.topic, table=each.table, reason=each.state.reason, **faults)
        elif each.state.verdict == "complete" and before.verdict != "complete":
            self._log.info("audit_complete", topic=each.topic, verified=sum(each.state.verified.values()))

    def _audited(self, each: AuditedTopic) -> AuditState:
        landed = dict(each.job.landed_ends)
        if each.verified is None:
            each.verified = self._kept(each) or (
                {} if each.is_whole else lowest_landed(each.table, each.topic, each.catalog)
            )
        with BlockingCluster(self._target) as cluster:
            starts = cluster.offsets([(each.topic, partition) for partition in landed], EARLIEST)
        begins = {number: max(each.verified.get(number, 0), starts[each.topic, number]) for number in landed}
        ends = {number: min(end, begins[number] + OFFSETS_MAX) for number, end in landed.items()}
        ends = {number: max(end, begins[number]) for number, end in ends.items()}
        if ends == begins and each.state.verdict == "complete":
            return msgspec.structs.replace(each.state, checked_ms=self._clocks.wall_ms())
        request = AuditRequest(
            self._target,
            each.topic,
            table=each.table,
            deleted=each.deleted,
            begins=begins,
            ends=ends,
            catalog=each.catalog,
        )
        self._spark.sparkContext.setJobGroup(JOB_GROUP, f"audit of {each.topic}", interruptOnCancel=True)
        result = run(self._spark, prepare(request))
        complete = {part.partition for part in result.partitions if part.is_complete}
        each.verified = {number: end if number in complete else begins[number] for number, end in ends.items()}
        self._keep(each)
        unverified = sum(max(0, end - each.verified[number]) for number, end in landed.items())
        return state_of(result, each.verified, unverified, self._clocks.wall_ms())

    def _kept(self, each: AuditedTopic) -> dict[int, int] | None:
        files = TableFiles(each.folder)
        path = files.full(f"{each.topic}.json")
        try:
            with files.store.open_input_file(path) as file:
                return msgspec.json.decode(file.read(), type=_Kept).verified
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise PipelineError(f"cannot read {path}: {error}; remove it, and the audit begins anew") from None

    def _keep(self, each: AuditedTopic) -> None:
        files = TableFiles(each.folder)
        path = files.full(f"{each.topic}.json")
        content = msgspec.json.encode(_Kept(each.verified or {}))
        try:
            if is_remote(each.folder):
                with files.store.open_output_stream(path) as stream:
                    stream.write(content)
                return
            os.makedirs(each.folder, exist_ok=True)
            with open(f"{path}.new", "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(f"{path}.new", path)
        except OSError as error:
            raise PipelineError(f"cannot write {path}: {error.strerror or error}") from None


def lowest_landed(table: str, topic: str, catalog: Mapping[str, str]) -> dict[int, int]:
    """Return the lowest offset of each partition in a table, where a landing began that did not land the whole log."""
    lowest: dict[int, int] = {}
    for each in find_tables(table, topic, catalog):
        files = TableFiles(each.name)
        for file in each.files:
            with (
                task_errors(f"reading {file.path} of the table {each.name}"),
                files.store.open_input_file(files.full(file.path)) as opened,
            ):
                for batch in pq.ParquetFile(opened).iter_batches(columns=["partition", "offset"]):
                    for number, first, _ in first_and_last(batch):
                        lowest[number] = min(first, lowest.get(number, first))
    return lowest


def state_of(result: AuditResult, verified: Mapping[int, int], unverified: int, now_ms: int) -> AuditState:
    counts = result.to_json()
    names = ("gaps", "duplicates", "mismatches", "unexpected", "deleted")
    faulty = [part.partition for part in result.partitions if not part.is_complete]
    where = f"partitions {', '.join(map(str, faulty[:10]))}"
    return AuditState(
        verdict="complete" if result.verdict == "complete" else "incomplete",
        checked_ms=now_ms,
        verified={str(number): offset for number, offset in sorted(verified.items())},
        unverified=unverified,
        reason=f"{where}: chronik pipeline audit {result.topic} --table DIR lists the faults" if faulty else "",
        **{name: counts[name] for name in names},
    )
