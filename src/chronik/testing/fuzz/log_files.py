"""Fuzzing of a log's files: damage them in many ways, then open, read, search, append to and reopen the log.

What must hold, whatever the damage:
- Opening ends with a log, or with an error for people (`KafkaError`, `OSError`), never with another exception.
- Reads return what was written. If a batch's bytes differ, its CRC must reveal that to the consumer. The CRC does not
  cover a batch's offset: a scan of the log detects a wrong offset, otherwise the batch is served as it is.
- If only files other than the batches are damaged (indexes, snapshots, checkpoints), every record is there.
- Otherwise every batch below the first damaged byte is there, unless the log reports damage.
- Missing or bad durable batches are reported: by the recovery report (`is_damaged`), by an error to the reader, or by
  the CRC to a consumer. The one exception: missing files of the first segments look as if retention deleted them.
- A log that accepts appends keeps them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from chronik.storage.config import LogConfig
from chronik.storage.disk import RealDisk
from chronik.storage.log import Log
from chronik.testing.fuzz import BrokenPromise
from chronik.testing.fuzz.file_damage import check_damaged_copies, scratch_folder
from chronik.wire.batch import CRC_START, HEADER_BYTES, check_batches, encode_batch, read_batch_header
from chronik.wire.errors import KafkaError

NOW_MS = 1_700_000_000_000
CONFIG = LogConfig(
    segment_bytes=3000,
    index_interval_bytes=200,
    preallocate_bytes_min=256,
    preallocate_bytes_max=1024,
    checkpoint_bytes=1500,
    retention_ms=-1,
)
"""Small limits, so that everything happens within a few records."""
BATCHES = 60
READ_BYTES_MAX = 1 << 20


class Written(NamedTuple):
    """A batch, with its file and its position there."""

    segment: str
    at: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Original:
    """A log as it was written. `batches` by base offset."""

    folder: Path
    clean: bool
    recovery_point: int
    log_start_offset: int
    batches: dict[int, Written]

    def segments(self) -> list[str]:
        return sorted({batch.segment for batch in self.batches.values()})


def write_original(folder: Path, *, clean: bool, deletes: bool = False) -> Original:
    """Write a log of several segments, codecs, producers and leader epochs. Not `clean`: as a crash leaves it.

    `deletes`: DeleteRecords has moved its start into a segment.
    """
    log = Log.open(RealDisk(), str(folder), CONFIG, NOW_MS)
    sequences: Counter[int] = Counter()
    for number in range(BATCHES):
        producer_id = number % 3 - 1
        count = 1 + number % 3
        records = [
            (b"key-%d" % number, b"value-%d-%d" % (number, each) * (1 + number % 5), [("h", b"x")], NOW_MS + number)
            for each in range(count)
        ]
        batch = encode_batch(
            records,
            codec=number % 5,
            producer_id=producer_id,
            producer_epoch=0 if producer_id >= 0 else -1,
            base_sequence=sequences[producer_id] if producer_id >= 0 else -1,
        )
        sequences[producer_id] += count
        _append(log, batch, epoch=number // 20)
        if number % 4 == 3:
            _sync(log)
    _sync(log)
    if deletes:
        log.increment_log_start(log.log_end_offset // 2).run()
    end, start = log.log_end_offset, log.log_start_offset
    if clean:
        log.close()
    batches: dict[int, Written] = {}
    for path in sorted(folder.glob("*.log")):
        data = path.read_bytes()
        at = 0
        while at + HEADER_BYTES <= len(data) and (header := read_batch_header(data, at)).magic == 2:
            batches[header.base_offset] = Written(path.name, at, data[at : at + header.size_bytes])
            at += header.size_bytes
    return Original(folder, clean, end, start, batches)


class LogFuzzer:
    """Damages copies of a log and opens them. `outcomes` counts the results."""

    def __init__(self, original: Original, scratch: Path) -> None:
        self._original = original
        self._folder = scratch / "log"
        self.outcomes: Counter[str] = Counter()

    def run(self, seeds: Iterable[int]) -> None:
        """Check one damaged copy for each seed. Raise `BrokenPromise` with the damage and the result."""
        check_damaged_copies(
            self._original.folder, self._folder, seeds, lambda: sorted(self._folder.iterdir()), self._check
        )

    def _check(self) -> None:
        # Before opening, which repairs what it can.
        intact, gone = self._intact(), self._gone_from_the_start()
        log = self._opened(self._original.recovery_point, clean=self._original.clean)
        if log is None:
            self.outcomes["refused"] += 1
            return
        try:
            self._check_opened(log, intact, gone)
        finally:
            log.close()

    def _check_opened(self, log: Log, intact: list[int], gone: list[str]) -> None:
        report = log.recovery
        is_damaged = report is not None and report.is_damaged
        counts: Counter[str] = Counter()
        for base, batch in self._original.batches.items():
            if base < self._first() or batch.segment in gone:
                continue
            outcome = self._read(log, base)
            if outcome == "lost" and is_damaged:
                outcome = "lost, and reported"
            counts[outcome] += 1
            if base in intact and outcome != "served":
                raise BrokenPromise(f"the batch at {base} is below all damage, and {outcome}; {report}")
            if outcome == "lost":
                raise BrokenPromise(f"the batch at {base} is lost, and the loss is not reported; {report}")
        is_whole = set(counts) == {"served"}
        self.outcomes["damaged, and says so" if is_damaged else "whole" if is_whole else "damage met by readers"] += 1
        _search(log.offset_for_timestamp_job(NOW_MS + BATCHES // 2))
        _search(log.max_timestamp_job())
        self._append_and_reopen(log)

    def _append_and_reopen(self, log: Log) -> None:
        batch = encode_batch([(None, b"after the damage", (), NOW_MS + 1000)])
        try:
            offset = _append(log, batch, epoch=max(log.epochs.latest, 3))
            _sync(log)
        except KafkaError:
            self.outcomes["read only"] += 1
            return
        except Exception as error:
            raise BrokenPromise(f"appending ends with {error!r}") from error
        again = self._opened(log.log_end_offset, clean=False)
        if again is None:
            raise BrokenPromise("it was opened and written to, and cannot be opened again")
        try:
            found = memoryview(bytes(again.read_job(offset, READ_BYTES_MAX, again.log_end_offset)()))
            if bytes(found)[CRC_START:] != batch[CRC_START:]:
                raise BrokenPromise(f"the batch appended at {offset} is lost after the next start; {again.recovery}")
        except KafkaError:
            # Damage precedes the record in the same segment, and no index leads past it: the reader gets an error.
            self.outcomes["appended after damage"] += 1
        finally:
            again.close()

    def _opened(self, recovery_point: int, *, clean: bool) -> Log | None:
        try:
            return Log.open(RealDisk(), str(self._folder), CONFIG, NOW_MS, recovery_point, clean)
        except (KafkaError, OSError):
            return None
        except Exception as error:
            raise BrokenPromise(f"opening ends with {error!r}") from error

    def _read(self, log: Log, base: int) -> str:
        """Return what happens to a consumer that reaches the batch at `base`."""
        if not log.log_start_offset <= base < log.log_end_offset:
            return "lost"
        try:
            data = memoryview(bytes(log.read_job(base, READ_BYTES_MAX, log.log_end_offset)()))
        except (KafkaError, OSError):
            return "refused with an error"
        except Exception as error:
            raise BrokenPromise(f"reading at {base} ends with {error!r}") from error
        if len(data) < HEADER_BYTES:
            raise BrokenPromise(f"reading at {base} gives nothing, and no error: a consumer waits there for ever")
        header = read_batch_header(data)
        batch = data[: header.size_bytes]
        if bytes(batch)[CRC_START:] == self._original.batches[base].data[CRC_START:]:
            return "served" if header.base_offset == base else "served with a wrong offset"
        try:
            check_batches(batch, READ_BYTES_MAX, from_producer=False)
        except KafkaError:
            return "detected by its CRC"
        if header.base_offset > base:
            return "lost"
        raise BrokenPromise(f"the batch at {base} is not the one that was written there, and its CRC is right")

    def _first(self) -> int:
        """Return the base offset of the first batch that was served before the damage."""
        return max(base for base in self._original.batches if base <= self._original.log_start_offset)

    def _gone_from_the_start(self) -> list[str]:
        """Return the first segments whose files are missing: retention leaves the same state."""
        return list(takewhile(lambda name: not (self._folder / name).exists(), self._original.segments()))

    def _intact(self) -> list[int]:
        """Return the batches below the first differing byte of batch data; all of them if no byte differs."""
        found: list[int] = []
        for name in self._original.segments():
            whole = (self._original.folder / name).read_bytes()
            path = self._folder / name
            now = path.read_bytes() if path.exists() else b""
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(whole, now, strict=False)))
            found += [
                base
                for base, batch in self._original.batches.items()
                if batch.segment == name and batch.at + len(batch.data) <= same and base >= self._first()
            ]
            if whole != now:
                break
        return sorted(found)


def fuzz_logs(count: int, seed: int) -> Counter[str]:
    """Check `count` damaged logs of each kind: after a crash, after a clean stop, after DeleteRecords."""
    outcomes: Counter[str] = Counter()
    with scratch_folder() as folder:
        for kind, (clean, deletes) in enumerate(((False, False), (True, False), (False, True))):
            original = write_original(folder / f"original-{kind}", clean=clean, deletes=deletes)
            fuzzer = LogFuzzer(original, folder)
            fuzzer.run(range(seed, seed + count))
            outcomes.update(fuzzer.outcomes)
    return outcomes


def _append(log: Log, batch: bytes, *, epoch: int) -> int:
    buffer = memoryview(bytearray(batch))
    return log.append(buffer, check_batches(buffer, READ_BYTES_MAX), epoch, NOW_MS).base_offset


def _sync(log: Log) -> None:
    job = log.sync_job()
    if job is not None:
        job.run()
        log.synced(job)


def _search(search: Callable[[], object]) -> None:
    """Run a search, which may find nothing or report that the log is damaged."""
    try:
        search()
    except (KafkaError, OSError):
        return
    except Exception as error:
        raise BrokenPromise(f"searching by time ends with {error!r}") from error
