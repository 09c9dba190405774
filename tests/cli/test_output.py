"""What commands print: names that clients choose must not control the terminal."""

from __future__ import annotations

import pytest

from chronik.cli.output import print_table


def test_table_escapes_what_could_control_a_terminal_or_forge_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("", ("id",), [("a\x1b[31m\nb\u202e [bold]c d é",)], ())
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "a" in line]
    assert line.strip() == r"a\x1b[31m\nb\u202e [bold]c d é"
