"""Backfills: `land --from ... --until ...` lands a range of offsets or times, beside what has landed already."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.run_chronik import Outcome
from tests.support import topics
from tests.support.landing import landed
from tests.support.node import Node

pytestmark = pytest.mark.timeout(300)  # the first test starts Spark and compiles the decoder

RECORDS = 20


def filled(at: str, name: str, partitions: int) -> None:
    """Create a topic whose record with the offset n is n seconds younger than the first one."""
    topics.create(at, name, partitions)
    for partition in range(partitions):
        records = [(None, b"%d" % n, (), topics.NOW_MS + 1_000 * n) for n in range(RECORDS)]
        topics.append(at, name, partition, records)


def offsets(partition: int, *ranges: tuple[int, int]) -> list[tuple[int, int]]:
    return [(partition, offset) for first, end in ranges for offset in range(first, end)]


def test_ranges_land_once_beside_each_other_and_beside_a_landing(
    command: Callable[..., Outcome], shared_node: Node, tmp_path: Path
) -> None:
    at, name = shared_node.bootstrap, "land-range"
    filled(at, name, 2)
    land = ("pipeline", "land", name, "--to", str(tmp_path), "-b", at)
    outcome = command(*land, "--from", "5", "--until", "10")
    assert outcome.code == 0 and "10 rows of land-range landed" in outcome.err, outcome
    assert landed(tmp_path / name) == offsets(0, (5, 10)) + offsets(1, (5, 10))
    outcome = command(*land, "--from", "earliest", "--until", '{"0": 8}')
    assert outcome.code == 0 and "5 rows of land-range landed" in outcome.err, outcome
    assert landed(tmp_path / name) == offsets(0, (0, 10)) + offsets(1, (5, 10))
    assert command(*land, "--from", str(topics.NOW_MS + 18_000)).code == 0, "a time: the last two of each partition"
    assert landed(tmp_path / name) == offsets(0, (0, 10), (18, 20)) + offsets(1, (5, 10), (18, 20))
    outcome = command(*land, "--once")
    assert outcome.code == 0 and "21 rows of land-range landed" in outcome.err, outcome
    assert landed(tmp_path / name) == offsets(0, (0, RECORDS)) + offsets(1, (0, RECORDS))


def test_ranges_that_cannot_land_are_refused_before_spark_starts(
    command_without_spark: Callable[..., Outcome], shared_node: Node, tmp_path: Path
) -> None:
    at, name = shared_node.bootstrap, "land-gone"
    filled(at, name, 1)
    topics.trim(at, name, 0, 7)
    land = ("pipeline", "land", name, "--to", str(tmp_path), "-b", at)
    for given, said in (
        (("--from", "5"), "begins at offset 7 by now, and the range at 5: those records are gone"),
        (("--from", '{"3": 5}'), "land-gone has no partition 3: it has 0 to 0"),
        (("--until", "soon"), "--until soon is unknown: use earliest, latest, an offset"),
        (("--from", '{"0": -1}'), "is unknown"),
        (("--from", "7", "--group", "g"), "--group is for a landing that continues"),
    ):
        outcome = command_without_spark(*land, *given)
        assert outcome.code == 2 and said in outcome.err, outcome
    outcome = command_without_spark(*land, "--from", "20")
    assert outcome.code == 0 and "land-gone has no records in this range" in outcome.err, outcome
