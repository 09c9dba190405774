"""Which lines of the packages the kept inputs reach: each input runs under a line tracer, apart from the fuzzing."""

from __future__ import annotations

import dis
import importlib
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import chronik

ROOMS = ("wire", "node", "groups", "metadata", "storage", "authentication", "authorization", "quotas")
"""The packages that requests should cover completely."""
SOURCE = str(Path(chronik.__file__).resolve().parent)


@contextmanager
def lines_run() -> Iterator[dict[str, set[int]]]:
    """Collect the lines of the package that run within the block, by file."""
    seen: dict[str, set[int]] = {}

    def called(frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(SOURCE):
            return None
        lines = seen.setdefault(name, set())

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            lines.add(frame.f_lineno)
            return line

        return line(frame, event, argument)

    sys.settrace(called)
    try:
        yield seen
    finally:
        sys.settrace(None)


def share(seen: Mapping[str, set[int]], package: str) -> tuple[int, int]:
    """Return how many function lines of a package ran, and how many there are. Import-time lines are excluded."""
    lines = dict(_function_lines(package))
    reached = sum(len(lines[path] & seen.get(path, set())) for path in lines)
    return reached, sum(map(len, lines.values()))


def _function_lines(package: str) -> Iterator[tuple[str, set[int]]]:
    module = importlib.import_module(f"chronik.{package}")
    names = [f"chronik.{package}"]
    names += [found.name for found in pkgutil.walk_packages(module.__path__, f"chronik.{package}.")]
    for name in names:
        path = importlib.import_module(name).__file__
        if path is not None:
            code = compile(Path(path).read_bytes(), path, "exec")
            starts = ((inner, line) for inner in _inner(code) for _, line in dis.findlinestarts(inner))
            yield path, {line for inner, line in starts if line is not None and line != inner.co_firstlineno}


def _inner(code: CodeType) -> Iterator[CodeType]:
    """Yield all functions, including nested ones; a class body runs at import time and is excluded."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & 0x02:
                yield constant
            yield from _inner(constant)
