"""Which Chronik the nodes of the tests run: the checkout, or a wheel that `make wheel` installed into a folder.

Only processes of nodes take it: nodes and simulators in the process of a test, and the commands, run the checkout.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

TESTED = "TESTED_CHRONIK"
"""The variable that names the folder; the checkout is tested without it."""
SOURCE = Path(__file__).parents[2] / "src" / "chronik"


def tested_folder() -> Path | None:
    folder = os.environ.get(TESTED)
    return Path(folder).resolve() if folder else None


def tested_environment() -> dict[str, str]:
    """Return what the environment of a node needs, so that it runs the tested Chronik."""
    folder = tested_folder()
    return {} if folder is None else {"PYTHONPATH": str(folder)}


def check() -> str:
    """Return what the nodes run, for people. Raise ValueError if the wheel was not built from these sources."""
    folder = tested_folder()
    if folder is None:
        return f"the checkout, pure ({TESTED} names no installed wheel)"
    package = folder / "chronik"
    if not package.is_dir():
        raise ValueError(f"{TESTED}={folder} has no Chronik: run make wheel")
    names = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py")}
    installed = {str(path.relative_to(package)) for path in package.rglob("*.py")}
    changed = [
        name
        for name in sorted(names | installed)
        if name not in names & installed or (SOURCE / name).read_bytes() != (package / name).read_bytes()
    ]
    if changed:
        raise ValueError(f"{folder} was not built from these sources ({changed[0]} differs): run make wheel")
    reason = _reason(folder)
    return f"{folder}, " + ("compiled" if reason is None else f"pure, because {reason}")


def is_compiled() -> bool:
    folder = tested_folder()
    return folder is not None and _reason(folder) is None


def compiled_folder() -> Path:
    """Return the folder of a compiled wheel; skip the test without one."""
    folder = tested_folder()
    if folder is None:
        pytest.skip(f"no compiled wheel: make wheel, then {TESTED}=.compiled/installed")
    reason = _reason(folder)
    if reason is not None:
        pytest.skip(f"the wheel is not compiled, because {reason}")
    return folder


def _reason(folder: Path) -> str | None:
    reason = json.loads((folder / "chronik" / "build.json").read_text())["reason"]
    return None if reason is None else str(reason)
