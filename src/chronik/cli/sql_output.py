"""The rows of a query for people and for programs. All printers but the table write rows as they arrive.

Bytes are shown as text if they are UTF-8. Otherwise they are hexadecimal for people, and base64 for programs.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import json
import shutil
import uuid
from base64 import b64encode
from collections.abc import Iterator
from typing import Any, TextIO

from chronik.cli.errors import printable

TABLE_ROWS_MAX = 10_000
"""A table is laid out when all rows are there. Rows after these are printed as the next table."""
CELL_CHARACTERS_MAX = 60
PIPE_CELL_CHARACTERS_MAX = 200


class TablePrinter:
    """A table for people. Wide cells are cut."""

    def __init__(self, schema: Any, out: TextIO) -> None:
        self._schema = schema
        self._out = out
        self._waiting: list[list[str | None]] = []
        self._rows = 0
        self._cell_max = CELL_CHARACTERS_MAX if out.isatty() else PIPE_CELL_CHARACTERS_MAX

    def add(self, batch: Any) -> None:
        for row in rows_of(batch):
            self._waiting.append([None if value is None else cut(cell(value), self._cell_max) for value in row])
            if len(self._waiting) == TABLE_ROWS_MAX:
                self._print()

    def close(self) -> None:
        if self._waiting or not self._rows:
            self._print()
        if self._schema.names:
            print(f"{self._rows:,} {'row' if self._rows == 1 else 'rows'}", file=self._out)

    def _print(self) -> None:
        import pyarrow as pa
        from rich.box import SIMPLE
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        if not self._schema.names:
            return
        width = shutil.get_terminal_size().columns if self._out.isatty() else PIPE_CELL_CHARACTERS_MAX * 10
        table = Table(box=SIMPLE)
        for field in self._schema:
            is_number = (
                pa.types.is_integer(field.type) or pa.types.is_floating(field.type) or pa.types.is_decimal(field.type)
            )
            table.add_column(
                Text(printable(field.name)),
                justify="right" if is_number else "left",
                overflow="ellipsis",
                no_wrap=True,
                min_width=min(len(field.name), 12),
            )
        for row in self._waiting:
            table.add_row(*(Text("NULL", style="dim") if each is None else Text(each) for each in row))
        Console(file=self._out, width=width).print(table)
        self._rows += len(self._waiting)
        self._waiting = []


class LinesPrinter:
    """One JSON object for each row."""

    def __init__(self, schema: Any, out: TextIO) -> None:
        self._names = schema.names
        self._out = out

    def add(self, batch: Any) -> None:
        for row in rows_of(batch):
            self._out.write(to_json(dict(zip(self._names, row, strict=True))) + "\n")
        self._out.flush()

    def close(self) -> None:
        self._out.flush()


class JsonPrinter:
    """One JSON object with all rows, written as they arrive: columns, and rows as arrays, each on its own line."""

    def __init__(self, schema: Any, out: TextIO) -> None:
        self._out = out
        self._rows = 0
        out.write(f'{{"columns": {json.dumps(schema.names)}, "rows": [')

    def add(self, batch: Any) -> None:
        for row in rows_of(batch):
            self._out.write((",\n" if self._rows else "\n") + to_json(row))
            self._rows += 1
        self._out.flush()

    def close(self) -> None:
        self._out.write("]}\n")
        self._out.flush()


class CsvPrinter:
    """CSV with a header line. Null is an empty field; nested values are JSON."""

    def __init__(self, schema: Any, out: TextIO) -> None:
        self._writer = csv.writer(out, lineterminator="\n")
        self._out = out
        if schema.names:
            self._writer.writerow(schema.names)

    def add(self, batch: Any) -> None:
        for row in rows_of(batch):
            self._writer.writerow(["" if value is None else csv_field(value) for value in row])
        self._out.flush()

    def close(self) -> None:
        self._out.flush()


def rows_of(batch: Any) -> Iterator[tuple[Any, ...]]:
    columns = [_values(column) for column in batch.columns]
    return zip(*columns, strict=True)


def _values(column: Any) -> list[Any]:
    """Return Python values. A time that Python cannot represent is its number of microseconds."""
    try:
        return list(column.to_pylist())
    except (ValueError, OverflowError):
        return [_value(each) for each in column]


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except (ValueError, OverflowError):
        return getattr(scalar, "value", None) or str(scalar)


def cell(value: Any) -> str:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, bytes):
        text = as_text(value)
        return f"0x{value.hex()}" if text is None else printable(text)
    if isinstance(value, datetime.datetime):
        return time_text(value)
    return printable(to_json(value) if isinstance(value, dict | list | tuple) else str(value))


def cut(text: str, characters_max: int) -> str:
    return text if len(text) <= characters_max else text[: characters_max - 1] + "…"


def csv_field(value: Any) -> Any:
    if isinstance(value, bytes):
        text = as_text(value)
        return b64encode(value).decode() if text is None else text
    if isinstance(value, datetime.datetime):
        return time_text(value)
    return to_json(value) if isinstance(value, dict | list | tuple) else value


def as_text(content: bytes) -> str | None:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None


def time_text(value: datetime.datetime) -> str:
    """Return ISO 8601; Z for UTC."""
    return value.isoformat(timespec="microseconds" if value.microsecond % 1000 else "milliseconds").replace(
        "+00:00", "Z"
    )


def to_json(value: Any) -> str:
    return json.dumps(_plain(value), ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Return a value that JSON has. Bytes that are no text are an object with `base64`."""
    if isinstance(value, bytes):
        text = as_text(value)
        return {"base64": b64encode(value).decode()} if text is None else text
    if isinstance(value, datetime.datetime):
        return time_text(value)
    if isinstance(value, dict):
        return {str(name): _plain(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(member) for member in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | decimal.Decimal | uuid.UUID):
        return str(value)
    return value
