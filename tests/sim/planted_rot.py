"""Bugs in reading damaged segments: the simulator finds them because it also damages the files of running nodes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from tests.sim.planted import Planted
from tests.sim.planted_disks import Found

from chronik.storage.reading import ReadJob, ReadResult
from chronik.testing.sim.cluster_scenarios import BadDisks


def batches_are_read_without_their_checksums() -> AbstractContextManager[Any]:
    """A batch that rotted on the disk is sent to consumers."""

    def unchecked(job: ReadJob, result: ReadResult) -> ReadResult:
        return result

    return patch.object(ReadJob, "_checked", unchecked)


def reader_passes_a_segment_that_was_cut() -> AbstractContextManager[Any]:
    """A reader continues with the next segment after one that was cut between two batches, and skips records."""
    read = ReadJob._read

    def pass_gaps(job: ReadJob) -> ReadResult:
        job.may_have_gap = True
        return read(job)

    return patch.object(ReadJob, "_read", pass_gaps)


PLANTED_IN_ROT: dict[Planted, Found] = {
    batches_are_read_without_their_checksums: Found(BadDisks.name, 13),
    reader_passes_a_segment_that_was_cut: Found(BadDisks.name, 11),
}
