"""What commands print and write: one JSON object, or tables and lines for people; reports and ledgers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from chronik.cli.errors import CliError, printable

if TYPE_CHECKING:
    from rich.table import Table

    from chronik.client.ledger import Ledger


Progress = Callable[[float, str], None]
"""Takes how much is done, and a text about it."""


def print_json(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], numbers: Sequence[str]) -> None:
    """Print a table on standard output; in a pipe it is wide enough that scripts see no wrapped cells."""
    from rich.console import Console

    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(table_of(title, columns, rows, numbers))


def table_of(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], numbers: Sequence[str]) -> Table:
    """Return a table; the columns named in `numbers` are right-aligned."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=SIMPLE)
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text("-" if cell is None else printable(str(cell))) for cell in row))
    return table


@contextmanager
def writing(path: str, flag: str) -> Iterator[None]:
    """Report as one line that the file which `flag` names cannot be written."""
    try:
        yield
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}; choose another {flag}") from None


def open_ledger(path: str | None, flag: str) -> Ledger | None:
    """Start an empty ledger or receipt file, which holds a single run; return None if no path is given."""
    from chronik.client.ledger import Ledger

    if not path:
        return None
    with writing(path, flag):
        return Ledger(path, append=False)


def write_report(path: str, page: str) -> None:
    with writing(path, "--report"), open(path, "w", encoding="utf-8") as opened:
        opened.write(page)


def note(text: str) -> None:
    """Print a progress line on standard error if that is a terminal."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


@contextmanager
def progress(what: str, total: float | None) -> Iterator[Progress]:
    """Show a progress bar on standard error if that is a terminal; yield the function that updates it."""
    if not sys.stderr.isatty():
        yield lambda done, text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"), TimeElapsedColumn())
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total, text="")
        yield lambda done, text: bar.update(task, completed=done, text=text)
