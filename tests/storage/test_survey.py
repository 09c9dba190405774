"""Surveying a log returns what opening it would find, and changes no file."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from tests.storage.helpers import NOW_MS, SMALL, append, append_many, batch

from chronik.storage.disk import RealDisk
from chronik.storage.log import Log
from chronik.storage.recovery import LogSurvey, survey_log
from chronik.storage.syncing import SYNCED_END_NAME


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def surveyed(folder: Path, recovery_point: int = 0) -> LogSurvey:
    before = contents(folder)
    found = survey_log(RealDisk(), str(folder), recovery_point)
    assert contents(folder) == before
    return found


def opened(folder: Path, recovery_point: int | None = None) -> Log:
    return Log.open(RealDisk(), str(folder), SMALL, NOW_MS, recovery_point)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A log of several segments, with two epochs and two producers."""
    log = opened(tmp_path / "t-0")
    append_many(log, 60)
    append(log, batch(producer_id=4000, producer_epoch=0, base_sequence=0), epoch=3)
    append(log, batch(3, producer_id=1000, producer_epoch=0, base_sequence=0), epoch=3)
    assert log.segment_count > 2
    log.close()
    return tmp_path / "t-0"


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.log"))


def test_a_survey_returns_the_end_epoch_and_producers_of_the_batches(folder: Path) -> None:
    assert surveyed(folder) == LogSurvey(64, 3, 4000)


def test_an_empty_log_ends_at_0(tmp_path: Path) -> None:
    opened(tmp_path / "t-0").close()
    assert surveyed(tmp_path / "t-0") == LogSurvey(0, -1, -1)


def test_a_missing_segment_ends_a_log_that_was_never_compacted(folder: Path) -> None:
    gone = segments(folder)[1]
    gone.unlink()
    assert surveyed(folder, 64).log_end_offset == int(gone.stem)
    (folder / "cleaner-offset").write_text("20\n")
    assert surveyed(folder, 64) == LogSurvey(64, 3, 4000, is_compacted=True)


def test_a_log_whose_records_all_expired_keeps_its_end_and_epoch(folder: Path) -> None:
    log = opened(folder)
    log.configure(replace(SMALL, retention_ms=1))
    job = log.apply_retention(NOW_MS + 10_000, 64)
    assert job is not None
    job.run()
    log.close()
    assert (folder / segments(folder)[0].name).stat().st_size == 0
    assert surveyed(folder)[:2] == (64, 3)


def test_a_survey_finds_the_same_log_end_as_opening_the_log_after_a_crash(folder: Path, tmp_path: Path) -> None:
    chooser = random.Random(5)
    last = segments(folder)[-1]
    whole = last.read_bytes()
    base = int(last.stem)
    # A power loss may remove the synced end. If it exists, a crash cannot cause the damage below.
    (folder / SYNCED_END_NAME).unlink()
    for _ in range(60):
        torn = bytearray(whole)
        at = chooser.randrange(len(torn))
        if chooser.random() < 0.5:
            del torn[at:]
        else:
            torn[at] ^= 1 << chooser.randrange(8)
        last.write_bytes(torn)
        copy = tmp_path / "copy"
        copy.mkdir()
        for name, data in contents(folder).items():
            # Leave out snapshots: they prove that the records before them were durable.
            if not name.endswith(".snapshot"):
                (copy / name).write_bytes(data)
        log = opened(copy, base)
        assert surveyed(folder, base)[:2] == (log.log_end_offset, log.epoch_of(log.log_end_offset - 1))
        log.close()
        for path in copy.iterdir():
            path.unlink()
        copy.rmdir()
