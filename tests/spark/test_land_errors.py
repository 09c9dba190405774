"""Errors of `chronik pipeline land`: one line that says what to do, exit 2, and no damaged table."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cli.run_chronik import Outcome, chronik
from tests.support import topics
from tests.support.landing import landed
from tests.support.node import Node
from tests.support.topics import numbered

RUN_S_MAX = 200.0
NO_ROOM_BYTES = 256 * 1024

Command = Callable[..., Outcome]


def refused(done: Outcome) -> str:
    assert (done.code, done.out) == (2, "")
    return done.error_line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["t", "-b", "127.0.0.1:1"], "no answer from 127.0.0.1:1"),
        (["land-no-such-topic"], "topic land-no-such-topic does not exist"),
        (["t", "--starting", "soon"], "--starting soon is unknown"),
        (["t", "--conf", "x"], "--conf x is not NAME=VALUE"),
        (["t", "--source", "x"], "--source x is unknown"),
        (["t", "--schema", "/no/such/file"], "cannot read --schema /no/such/file"),
        (["t", "t_dead_letters", "--schema", "/dev/null"], "t_dead_letters cannot be a table next to the other tables"),
    ],
)
def test_wrong_usage_is_an_error_before_spark_starts(
    shared_node: Node, tmp_path: Path, command_without_spark: Command, arguments: list[str], said: str
) -> None:
    where = [] if "-b" in arguments else ["-b", shared_node.bootstrap]
    done = command_without_spark("pipeline", "land", *arguments, "--to", str(tmp_path), "--once", *where)
    assert said in refused(done)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_java_is_a_one_line_error(shared_node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topics.create(shared_node.bootstrap, "land-no-java")
    monkeypatch.setenv("JAVA_HOME", "/no/such/folder")
    done = chronik("pipeline", "land", "land-no-java", "--to", str(tmp_path), "-b", shared_node.bootstrap)
    assert "Spark needs Java" in refused(done)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for a table, but not for its rows."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={NO_ROOM_BYTES}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a small disk to fill takes the right to mount one")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.timeout(500)
def test_a_full_disk_stops_the_job_and_keeps_the_landed_rows(
    shared_node: Node, tmp_path: Path, small_disk: Path, command: Command
) -> None:
    at, name = shared_node.bootstrap, "land-full"
    topics.create(at, name)
    topics.append(at, name, 0, numbered(5))
    to = ("--to", str(small_disk), "--checkpoint", str(tmp_path / "c"), "--once", "-b", at)
    done = command("pipeline", "land", name, *to)
    assert (done.code, done.out) == (0, ""), done.err
    assert f"5 rows of {name} landed" in done.error_line
    topics.append(at, name, 0, [(None, os.urandom(NO_ROOM_BYTES), (), topics.NOW_MS)])
    failed = chronik("pipeline", "land", name, *to, "--master", "local[2]", timeout_s=RUN_S_MAX)
    assert "No space left on device" in refused(failed)
    assert landed(small_disk / name) == [(0, offset) for offset in range(5)]
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    assert command("pipeline", "land", name, *to).code == 0
    assert landed(small_disk / name) == [(0, offset) for offset in range(6)]
