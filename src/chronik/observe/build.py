"""How this Chronik was built: compiled by mypyc, or pure.

`scripts/build_backend.py` writes `build.json` into every wheel: the reason if the wheel is pure, otherwise the SHA-256
of the source of each compiled module. A checkout has no such file.
"""

from __future__ import annotations

import hashlib
import os
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from typing import Final, Literal

import msgspec

import chronik

Build = Literal["compiled", "pure"]

RECORD: Final = "build.json"
PROBE: Final = "chronik.wire.batch"
"""All modules of the list are compiled together, so one tells for all."""


class BuildRecord(msgspec.Struct, frozen=True):
    """What the build backend wrote."""

    reason: str | None
    compiled: dict[str, str]


def kind() -> Build:
    """Return what runs in this process, whatever the record says."""
    found = find_spec(PROBE)  # imports only its package
    is_compiled = found is not None and (found.origin or "").endswith(tuple(EXTENSION_SUFFIXES))
    return "compiled" if is_compiled else "pure"


def description() -> str:
    """Return what runs and, if it is pure, why, in a few words."""
    if kind() == "compiled":
        return "compiled"
    record = read_record()
    reason = "a checkout or an editable install" if record is None else record.reason or "its libraries are missing"
    return f"pure: {reason}"


def edited_sources() -> list[str]:
    """Return the modules whose source differs from the one that was compiled: their edits have no effect."""
    record = read_record() if kind() == "compiled" else None
    return [] if record is None else [path for path, digest in record.compiled.items() if _digest(path) != digest]


def read_record() -> BuildRecord | None:
    try:
        with open(_installed(f"chronik/{RECORD}"), "rb") as opened:
            return msgspec.json.decode(opened.read(), type=BuildRecord)
    except (OSError, msgspec.MsgspecError):
        return None


def _installed(path: str) -> str:
    return os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(chronik.__file__))), path)


def _digest(path: str) -> str:
    try:
        with open(_installed(path), "rb") as opened:
            return hashlib.sha256(opened.read()).hexdigest()
    except OSError:
        return ""
