"""What a registered schema means for a table, for every format: its fields as columns, and a decoder of records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

SINGLE = "typed"
"""The name of the only field of a schema that is no record."""

Numbers = npt.NDArray[np.int64]


class SchemaError(Exception):
    """The schema cannot become columns. The text is the reason."""


@dataclass(frozen=True, slots=True)
class WriterField:
    """One field of a schema, as a column: `kind` is its Arrow type."""

    name: str
    kind: Any
    is_required: bool = False
    """Whether the schema allows no record without a value for it."""
    aliases: tuple[str, ...] = ()
    """Names that the field had in earlier schemas."""
    number: int | None = None
    """What identifies the field in records instead of its name, as in Protobuf."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """The columns of the records that could be decoded, and the other records with their reasons."""

    columns: Sequence[Any]
    """Arrow arrays, one for each field of the schema."""
    good: Numbers
    """Which of the given records are rows, in order."""
    bad: Numbers
    reasons: Sequence[str]


@runtime_checkable
class WriterSchema(Protocol):
    """A parsed schema. Tasks on executors decode with it, so it can be pickled."""

    @property
    def record(self) -> str:
        """The name of the record type. Fields of different types are never compared with each other."""

    @property
    def fields(self) -> Sequence[WriterField]: ...

    def decode(self, data: npt.NDArray[np.uint8], starts: Numbers, stops: Numbers) -> Decoded:
        """Decode the records data[start:stop]."""


@runtime_checkable
class Router(Protocol):
    """A parsed schema with several types of records. Each type is a writer schema with an id of its own: `typed_id`."""

    def route(self, data: npt.NDArray[np.uint8], starts: Numbers, stops: Numbers) -> tuple[Numbers, Numbers]:
        """Return the number of each record's type, -1 if it has none, and where its value begins."""


def typed_id(schema_id: Any, code: Any) -> Any:
    """Return the id of one type of a schema with several. Takes numbers and arrays."""
    return schema_id + ((code + 1) << 32)


def split_id(typed: int) -> tuple[int, int]:
    """Return the id of the schema, and the number of the type; -1 for the schema itself."""
    return typed & 0xFFFFFFFF, (typed >> 32) - 1


def bitmap(flags: npt.NDArray[np.uint8]) -> Any:
    """Return a validity bitmap, or None if all values are present."""
    return None if flags.all() else pa.py_buffer(np.packbits(flags, bitorder="little"))
