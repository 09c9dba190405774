"""The command itself: its version, and which modules it loads."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.cli.run_chronik import chronik

from chronik import __version__


@pytest.mark.parametrize("argument", ["--version", "version"])
def test_the_version_is_printed_with_the_build(argument: str) -> None:
    shown = chronik(argument)
    assert (shown.code, shown.out, shown.err) == (0, f"{__version__} (pure: a checkout or an editable install)\n", "")


def test_the_version_is_printed_without_loading_the_commands() -> None:
    source = "import sys\nfrom chronik.cli import app\napp.main(['--version'])\nprint(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout
    loaded = {name for name in shown.split() if name.startswith("chronik.cli.")}
    assert loaded == {"chronik.cli.app", "chronik.cli.errors"}
