"""What can go wrong with `chronik pipeline land`: one line that says what to do, exit 2, and no table is damaged."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import topics
from tests.support.landing import landed
from tests.support.node import Node
from tests.support.topics import numbered

from chronik.pipeline.session import java_fault

CHRONIK = Path(sys.executable).with_name("chronik")
RUN_S_MAX = 200.0
NO_ROOM_BYTES = 256 * 1024


def land(*arguments: str, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [str(CHRONIK), "pipeline", "land", *arguments],
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.stdout == ""
    return done.returncode, done.stderr


def refused(*arguments: str, **environment: str) -> str:
    code, said = land(*arguments, **environment)
    assert code == 2, said
    assert said.startswith("chronik: ")
    assert said.count("\n") == 1, said
    return said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["t", "-b", "127.0.0.1:1"], "no answer from 127.0.0.1:1"),
        (["land-no-such-topic"], "topic land-no-such-topic does not exist"),
        (["t", "--starting", "soon"], "--starting soon is unknown"),
        (["t", "--conf", "x"], "--conf x is not NAME=VALUE"),
        (["t", "--source", "x"], "--source x is unknown"),
        (["t", "--schema", "/no/such/file"], "cannot read --schema /no/such/file"),
        (["t", "t_dead_letters", "--schema", "/dev/null"], "t_dead_letters cannot be a table beside the others"),
    ],
)
def test_wrong_use_is_told_before_spark_starts(
    shared_node: Node, tmp_path: Path, arguments: list[str], said: str
) -> None:
    where = [] if "-b" in arguments else ["-b", shared_node.bootstrap]
    assert said in refused(*arguments, "--to", str(tmp_path), "--once", *where)
    assert list(tmp_path.iterdir()) == []


def test_without_java_one_line_says_what_to_install(shared_node: Node, tmp_path: Path) -> None:
    topics.create(shared_node.bootstrap, "land-no-java")
    line = refused("land-no-java", "--to", str(tmp_path), "-b", shared_node.bootstrap, JAVA_HOME="/no/such/folder")
    assert "Spark needs Java" in line


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """With room for a table, and not for its rows."""
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
def test_a_full_disk_stops_the_job_and_what_has_landed_stays(
    shared_node: Node, tmp_path: Path, small_disk: Path
) -> None:
    fault = java_fault()
    if fault is not None:
        pytest.skip(fault)
    at, name = shared_node.bootstrap, "land-full"
    topics.create(at, name)
    topics.append(at, name, 0, numbered(5))
    command = [name, "--to", str(small_disk), "--checkpoint", str(tmp_path / "c"), "--once", "--master", "local[2]"]
    code, said = land(*command, "-b", at)
    assert (code, said.count("\n")) == (0, 1), said
    assert f"5 rows of {name} landed" in said
    topics.append(at, name, 0, [(None, os.urandom(NO_ROOM_BYTES), (), topics.NOW_MS)])
    assert "No space left on device" in refused(*command, "-b", at)
    assert landed(small_disk / name) == [(0, offset) for offset in range(5)]
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    assert land(*command, "-b", at)[0] == 0
    assert landed(small_disk / name) == [(0, offset) for offset in range(6)]
