"""The audit moonshot: N records of 100 B, produced and landed while faults are injected throughout, then audited.

    .venv/bin/python -m bench.moonshot --records 100000000 --seed 1

Three nodes; idempotent producers (acks=all) with ledgers; `chronik pipeline land` into a Delta table while they
produce. From the first record to the last landed one, brokers, the driver and Spark's Python workers are killed at
moments that the seed determines; each kind of fault comes up in every round of six. Then `chronik pipeline audit`
compares the ledger, the log and the table. Exit code 0 only if N acknowledged = N readable = N landed and the verdict
is `complete`. Writes bench/results/moonshot.json (`--to` for another file), and removes everything else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from tests.support.tested_build import check, tested_environment

from bench.processes import TICKS_PER_S, cpu_ticks, with_children
from chronik.client.ledger import Ledger
from chronik.client.topics import EARLIEST, LATEST, Topics
from chronik.local.temporary_cluster import TemporaryCluster
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.source.blocking import BlockingCluster
from chronik.testing.tied_node import TIED_NODE, tied_environment

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "bench" / "results" / "moonshot.json"
TOPIC = "moonshot"
NODES, PARTITIONS, PRODUCERS = 3, 6, 2
RECORD_BYTES = 100
ROWS_PER_BATCH_MAX, MICRO_BATCHES_MIN = 2_000_000, 20
DISK_BYTES_PER_RECORD = 620
"""What a run needs at its end: three copies of the log, the ledger while its parts are joined, table and shuffle."""
ROUND_OF_FAULTS = ("broker", "broker", "broker", "worker", "worker", "driver")
DOWN_S = (0.5, 5.0)
"""How long a killed broker stays down."""
TICK_S = 0.2
LOOK_S = 2.0
STALLED_S_MAX = 600.0
HEALED_S_MAX = 120.0
END_S_MAX = 60.0
QUEUED_MAX, POLL_RECORDS = 200_000, 2_000
LINE_S = 30.0


class Failed(Exception):
    """The run cannot be finished."""


def produce(bootstrap: str, ledger_path: str, first: int, count: int, acknowledged: Any, failed: Any) -> None:
    """Send the records, and record each acknowledgement: the process of one producer."""
    settings = {
        "bootstrap.servers": bootstrap,
        "enable.idempotence": True,
        "acks": "all",
        "linger.ms": 20,
        "batch.size": 256 * 1024,
        "message.timeout.ms": 0,  # a broker that is down delays records, and loses none
        "queue.buffering.max.messages": QUEUED_MAX,
        "log_level": 2,
    }
    padding = b"." * (RECORD_BYTES - 20)
    with Ledger(ledger_path) as ledger:
        producer = Producer(settings)
        report = ledger.confluent
        sent = 0
        while sent < count:
            while len(producer) > QUEUED_MAX - POLL_RECORDS:
                producer.poll(0.05)
            stop = min(count, sent + POLL_RECORDS)
            messages: list[Any] = [{"value": b"%020d" % (first + at) + padding} for at in range(sent, stop)]
            if producer.produce_batch(TOPIC, messages, on_delivery=report) != stop - sent:
                raise Failed(f"the producer did not take {messages}")
            sent = stop
            producer.poll(0)
            acknowledged.value = sent - len(producer) - ledger.failed
        while len(producer):
            producer.poll(0.2)
            acknowledged.value = sent - len(producer) - ledger.failed
        failed.value = ledger.failed


class Driver:
    """`chronik pipeline land`: started again whenever it has ended."""

    def __init__(self, bootstrap: str, folder: Path, rows_per_batch: int, say: Callable[[str], None]) -> None:
        self._say = say
        self.starts = 0
        self.own_exits: list[str] = []
        """The last lines of runs that ended without being killed."""
        self._log = folder / "driver.log"
        self._command = [
            *(sys.executable, "-m", "chronik.cli", "pipeline", "land", TOPIC, "--to", str(folder / "tables")),
            *("--trigger", "0", "-b", bootstrap, "--conf", f"spark.local.dir={folder / 'spark'}"),
            *("--conf", f"spark.chronik.maxOffsetsPerTrigger={rows_per_batch}"),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def keep_running(self) -> None:
        if self._process is not None and self._process.poll() is not None:
            self.own_exits.append(f"code {self._process.returncode}: {self.last_line()}")
            self._say(f"the landing ended by itself: {self.own_exits[-1]}")
            self._process = None
        if self._process is None:
            self.starts += 1
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(self._command, stdout=log, stderr=log, start_new_session=True)

    def kill(self, *, with_jvm: bool) -> None:
        """Kill the Python process, and its JVM with it or not: then that ends by itself, and the next run waits."""
        if self._process is not None:
            if with_jvm:
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
            self._process.wait()
            self._process = None

    def workers(self) -> list[int]:
        """Return the Python processes that tasks run in: what Spark's daemon has forked."""
        if self._process is None:
            return []
        daemons, found = set(), dict[int, int]()
        for pid in sorted(with_children([self._process.pid])):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if b"pyspark.daemon" in command:
                    found[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                    daemons.add(pid)
        return [pid for pid, parent in found.items() if parent in daemons]

    def end(self) -> str:
        """Stop the landing as Ctrl-C does; kill what is left of it. Return its exit code and its last line."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S_MAX)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            code = self._process.wait()
            self._process = None
            return f"code {code}: {self.last_line()}"
        return "was not running"

    def last_line(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


@dataclass
class Faults:
    """Kills brokers, the driver and workers at moments that the seed determines."""

    cluster: TemporaryCluster
    driver: Driver
    chance: random.Random
    every_s: float
    done: list[dict[str, Any]] = field(default_factory=list)
    _waiting: list[str] = field(default_factory=list)
    _down: dict[int, float] = field(default_factory=dict)
    _next_s: float = 0.0
    _landed_at_kill: int = 0

    def begin(self, now_s: float) -> None:
        self._began_s = now_s
        self._plan(now_s)

    def _plan(self, now_s: float) -> None:
        self._next_s = now_s + self.every_s * self.chance.uniform(0.3, 1.7)

    def tick(self, now_s: float, landed: int) -> None:
        """Restart the brokers whose time has come, and inject the next fault if it is due."""
        for node in [node for node, until_s in self._down.items() if now_s >= until_s]:
            del self._down[node]
            self.cluster.launch(node)
        if now_s < self._next_s:
            return
        if not self._waiting:
            self._waiting = self.chance.sample(ROUND_OF_FAULTS, len(ROUND_OF_FAULTS))
        for kind in (*self._waiting, "broker"):  # brokers while there is nothing else to kill
            fault: dict[str, Any] | None = getattr(self, f"_{kind}")(now_s, landed)
            if fault is not None:
                with contextlib.suppress(ValueError):
                    self._waiting.remove(kind)
                self.done.append({"at_s": round(now_s - self._began_s, 1), "fault": kind, **fault})
                self._plan(now_s)
                return

    def end(self) -> None:
        for node in self._down:
            self.cluster.launch(node)
        self._down.clear()

    def _broker(self, now_s: float, _: int) -> dict[str, Any] | None:
        """One broker is down at a time, because two of three replicas acknowledge."""
        if self._down:
            return None
        node, down_s = self.chance.randint(1, NODES), self.chance.uniform(*DOWN_S)
        self.cluster.kill(node)
        self._down[node] = now_s + down_s
        return {"node": node, "down_s": round(down_s, 1)}

    def _driver(self, _: float, landed: int) -> dict[str, Any] | None:
        if not self._has_landed_since(landed):
            return None
        with_jvm = self.chance.random() < 0.5
        self.driver.kill(with_jvm=with_jvm)
        return {"with_jvm": with_jvm}

    def _worker(self, _: float, landed: int) -> dict[str, Any] | None:
        workers = self.driver.workers()
        if not workers or not self._has_landed_since(landed):
            return None
        killed = self.chance.choice(workers)
        with contextlib.suppress(ProcessLookupError):
            os.kill(killed, signal.SIGKILL)
        return {"of_workers": len(workers)}

    def _has_landed_since(self, landed: int) -> bool:
        """Let the landing make progress between two kills of its processes: a busy machine would never finish."""
        if landed == self._landed_at_kill:
            return False
        self._landed_at_kill = landed
        return True


class Cpu:
    """CPU seconds of all processes of the run, killed ones up to their last sample, by what they are for."""

    def __init__(self) -> None:
        self._taken: dict[int, tuple[str, float]] = {}

    def sample(self, phase: str) -> None:
        """Count what is neither a node nor a producer for the phase: Python, Java and workers of the Spark job."""
        for pid in with_children([os.getpid()]) - {os.getpid()}:
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                kinds = {b"chronik.testing.tied_node": "nodes", b"multiprocessing.spawn": "producers"}
                kind = next((kind for part, kind in kinds.items() if part in command), phase)
                cpu_s = cpu_ticks(Path(f"/proc/{pid}/stat").read_text()) / TICKS_PER_S
                self._taken[pid] = self._taken.get(pid, (kind, 0.0))[0], cpu_s

    def seconds(self) -> dict[str, float]:
        totals: dict[str, float] = {}
        for kind, cpu_s in self._taken.values():
            totals[kind] = totals.get(kind, 0.0) + cpu_s
        return {kind: round(cpu_s, 1) for kind, cpu_s in totals.items()}


class Display:
    """A bar on a terminal, or a line now and then; and the most disk space that was in use."""

    def __init__(self, records: int, folder: Path) -> None:
        self._records, self._folder = records, folder
        self._began_s = self._shown_s = time.monotonic()
        self._free_bytes = self._least_bytes = shutil.disk_usage(folder).free

    @property
    def disk_bytes(self) -> int:
        return self._free_bytes - self._least_bytes

    def show(self, what: str, done: int, text: str = "") -> None:
        self._least_bytes = min(self._least_bytes, shutil.disk_usage(self._folder).free)
        now_s = time.monotonic()
        is_terminal = sys.stdout.isatty()
        if not is_terminal and now_s - self._shown_s < LINE_S:
            return
        self._shown_s = now_s
        share = min(1.0, done / self._records)
        bar = "#" * round(share * 30)
        line = f"[{bar:.<30}] {share:4.0%} {now_s - self._began_s:5.0f} s  {what}  {text}"
        print(f"\r{line:<110}" if is_terminal else line, end="" if is_terminal else "\n", flush=True)

    def note(self, text: str) -> None:
        print(f"\n{text}" if sys.stdout.isatty() else text, flush=True)


class Landed:
    """Counts the rows of the table from its log."""

    def __init__(self, folder: Path) -> None:
        self._uri = str(folder / "tables" / TOPIC)
        self._table: DeltaTable | None = None

    def rows(self) -> int:
        try:
            if self._table is None:
                self._table = DeltaTable(self._uri)
            else:
                self._table.update_incremental()
        except TableNotFoundError:
            return 0
        import pyarrow as pa

        actions = pa.table(self._table.get_add_actions(flatten=True))
        return sum(actions.column("num_records").to_pylist())


@contextlib.contextmanager
def producing(bootstrap: str, folder: Path, records: int) -> Iterator[tuple[list[Any], list[Any], list[Any]]]:
    context = multiprocessing.get_context("spawn")
    share = -(-records // PRODUCERS)
    processes, acknowledged, failed = [], [], []
    for number in range(PRODUCERS):
        first = number * share
        counters = context.Value("q", 0, lock=False), context.Value("q", 0, lock=False)
        place = (bootstrap, str(folder / f"acked-{number}.jsonl"), first, min(share, records - first))
        process = context.Process(target=produce, args=(*place, *counters), daemon=True)
        process.start()
        processes.append(process)
        acknowledged.append(counters[0])
        failed.append(counters[1])
    try:
        yield processes, acknowledged, failed
    finally:
        for process in processes:
            process.kill()
            process.join()


def run(options: argparse.Namespace, folder: Path, display: Display) -> dict[str, Any]:
    result: dict[str, Any] = {"records": options.records, "record_bytes": RECORD_BYTES, "seed": options.seed}
    result |= {
        "nodes_run": check().replace(f"{ROOT}/", ""),
        "cpus": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
    }
    started_s, cpu = time.monotonic(), Cpu()
    environment = {**tied_environment(), **tested_environment()}
    with TemporaryCluster(NODES, command=TIED_NODE, environment=environment) as cluster:
        with BlockingCluster(cluster.bootstrap) as client:
            client.run(Topics(client.cluster).create(TOPIC, PARTITIONS, NODES, {"min.insync.replicas": "2"}))
        rows_per_batch = min(ROWS_PER_BATCH_MAX, max(1, options.records // MICRO_BATCHES_MIN))
        driver = Driver(cluster.bootstrap, folder, rows_per_batch, display.note)
        faults = Faults(cluster, driver, random.Random(options.seed), options.fault_every)
        try:
            result |= load(options.records, cluster, driver, faults, folder, display, cpu)
        finally:
            result["landing_end"] = driver.end()
        result["seconds"] = {"produced": result.pop("produced_s"), "landed": round(time.monotonic() - started_s, 1)}
        cluster.start_all(HEALED_S_MAX)
        if not cluster.wait_until_in_sync(HEALED_S_MAX):
            raise Failed(f"the replicas are not in sync {HEALED_S_MAX:g} s after the last fault")
        ledger = joined([folder / f"acked-{number}.jsonl" for number in range(PRODUCERS)])
        began_s = time.monotonic()

        def on_wait() -> None:
            cpu.sample("audit")
            display.show("audit", options.records)

        result["audit"] = audit(cluster.bootstrap, ledger, folder, on_wait)
        result["cpu_seconds"] = cpu.seconds()
        result["seconds"]["audit"] = round(time.monotonic() - began_s, 1)
        sizes = {"logs": Path(cluster.folder), "ledger": ledger, "tables": folder / "tables"}
        result["disk_bytes"] = {name: size_of(path) for name, path in sizes.items()} | {"most": display.disk_bytes}
    result["seconds"]["all"] = round(time.monotonic() - started_s, 1)
    counts = [result["audit"][side] for side in ("acked", "readable", "landed")]
    result["equal"] = counts == [options.records] * 3 and result["audit"]["verdict"] == "complete"
    return result


def load(
    records: int,
    cluster: TemporaryCluster,
    driver: Driver,
    faults: Faults,
    folder: Path,
    display: Display,
    cpu: Cpu,
) -> dict[str, Any]:
    """Produce and land everything, with faults from the first record to the last landed row."""
    started_s = time.monotonic()
    produced_s, end, landed, look_s, seen = None, records, Landed(folder), 0.0, (0, 0)
    with producing(cluster.bootstrap, folder, records) as (processes, acknowledged, failed):
        faults.begin(started_s)
        moved_s = started_s
        while True:
            now_s = time.monotonic()
            driver.keep_running()
            faults.tick(now_s, seen[1])
            if now_s - look_s >= LOOK_S:
                look_s = now_s
                cpu.sample("landing")
                counts = sum(one.value for one in acknowledged), landed.rows()
                if counts != seen:
                    moved_s, seen = now_s, counts
                acked, rows = counts
                what = f"{acked:,} acknowledged, {rows:,} landed, {len(faults.done)} faults"
                display.show(what, (acked + rows) // 2)
                if now_s - moved_s > STALLED_S_MAX:
                    raise Failed(f"no progress for {STALLED_S_MAX:g} s: {what}; the landing: {driver.last_line()}")
                if produced_s is None and not any(process.is_alive() for process in processes):
                    produced_s = round(now_s - started_s, 1)
                    codes = [process.exitcode for process in processes]
                    if any(codes):
                        raise Failed(f"producers ended with {codes}")
                    with contextlib.suppress(PipelineError):
                        end = log_records(cluster.bootstrap)
                if produced_s is not None and rows >= end:
                    break
            time.sleep(TICK_S)
        faults.end()
        kinds = Counter(fault["fault"] for fault in faults.done)
        return {
            "produced_s": produced_s,
            "not_acknowledged": sum(one.value for one in failed),
            "faults": dict(kinds),
            "fault_list": faults.done,
            "landing_starts": driver.starts,
            "landing_own_exits": driver.own_exits,
        }


def log_records(bootstrap: str) -> int:
    partitions = [(TOPIC, number) for number in range(PARTITIONS)]
    with BlockingCluster(bootstrap) as cluster:
        ends, starts = cluster.offsets(partitions, LATEST), cluster.offsets(partitions, EARLIEST)
    return sum(ends[one] - starts[one] for one in partitions)


def joined(parts: list[Path]) -> Path:
    """Append the later ledgers to the first one, and remove each when it is copied."""
    with parts[0].open("ab") as to:
        for part in parts[1:]:
            with part.open("rb") as file:
                shutil.copyfileobj(file, to, 16 * 1024 * 1024)
            part.unlink()
    return parts[0]


def audit(bootstrap: str, ledger: Path, folder: Path, on_wait: Callable[[], None]) -> dict[str, Any]:
    """Return what the audit's JSON says of the whole topic, without the lists of its parts."""
    command = [
        *(sys.executable, "-m", "chronik.cli", "pipeline", "audit", TOPIC, "-b", bootstrap, "--json"),
        *("--ledger", str(ledger), "--table", str(folder / "tables")),
        *("--conf", f"spark.local.dir={folder / 'spark'}", "--conf", "spark.driver.memory=2g"),
    ]
    with (folder / "audit.json").open("w+") as out, (folder / "audit.log").open("w+") as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors)
        try:
            while process.poll() is None:
                on_wait()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_S)
        finally:
            process.kill()
            process.wait()
        out.seek(0), errors.seek(0)
        if process.returncode not in (0, 1):
            raise Failed(f"the audit failed: {errors.read().strip()[-500:]}")
        found = json.loads(out.read())
    return {name: value for name, value in found.items() if not isinstance(value, list | dict) or name == "notes"}


def size_of(path: Path) -> int:
    if path.is_file():
        return path.stat().st_blocks * 512
    return sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=100_000_000)
    parser.add_argument("--seed", type=int, default=None, help="of the faults; default: a new one, which is reported")
    parser.add_argument("--fault-every", type=float, default=15.0, metavar="SECONDS", help="on average")
    parser.add_argument("--to", type=Path, default=RESULT, metavar="FILE")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(2**32)
    folder = Path(tempfile.mkdtemp(prefix="chronik-moonshot-"))
    try:
        free, needed = shutil.disk_usage(folder).free, options.records * DISK_BYTES_PER_RECORD
        if free < needed:
            print(
                f"{folder} has {free / 1e9:.0f} GB free, {needed / 1e9:.0f} GB are needed: set TMPDIR to another disk"
            )
            return 2
        display = Display(options.records, folder)
        display.note(f"{options.records:,} records, seed {options.seed}, nodes: {check()}")
        result = run(options, folder, display)
    except Failed as error:
        print(f"\nFAILED  {error}", flush=True)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    options.to.write_text(json.dumps(result, indent=1) + "\n")
    said = "{acked:,} acknowledged, {readable:,} readable, {landed:,} landed: {verdict}".format(**result["audit"])
    display.note(f"{said}; {sum(result['faults'].values())} faults, {result['seconds']['all']:.0f} s: {options.to}")
    return 0 if result["equal"] else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
