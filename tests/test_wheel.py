"""The build backend where nothing can or shall be compiled; `make wheel` covers the other case."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]


def build(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    return subprocess.run(command, env={**os.environ, **environment}, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"CC": "no-such-compiler"}, "there was no C compiler (no-such-compiler) when it was built"),
        ({"CC": "false"}, "the C compiler (false) failed when it was built"),
        ({"CHRONIK_COMPILE": "no"}, "it was built with CHRONIK_COMPILE=no"),
    ],
)
def test_without_a_compiler_the_wheel_is_pure_and_has_the_reason(
    environment: dict[str, str], reason: str, tmp_path: Path
) -> None:
    done = build(tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    assert f"chronik: not compiled, because {reason}" in done.stderr
    (wheel,) = tmp_path.iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    with ZipFile(wheel) as archive:
        assert [name for name in archive.namelist() if name.endswith(".so")] == []
        assert json.loads(archive.read("chronik/build.json")) == {"reason": reason, "compiled": {}}


def test_a_required_compilation_fails_without_a_compiler(tmp_path: Path) -> None:
    done = build(tmp_path, CC="no-such-compiler", CHRONIK_COMPILE="yes")
    assert done.returncode != 0
    assert "CHRONIK_COMPILE=yes, but there was no C compiler" in done.stderr
    assert list(tmp_path.iterdir()) == []
