"""Which lines of the packages the kept inputs reach: each input runs under a line tracer, apart from the fuzzing."""

from __future__ import annotations

import dis
import importlib
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import chronik

ROOMS = ("wire", "node", "groups", "metadata", "storage")
"""The packages that requests should cover completely."""
SOURCE = str(Path(chronik.__file__).resolve().parent)


class Lines:
    """Collects the lines of the package that run while it is active."""

    def __init__(self) -> None:
        self.seen: dict[str, set[int]] = {}

    def __enter__(self) -> Lines:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(SOURCE):
            return None
        seen = self.seen.setdefault(name, set())

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            seen.add(frame.f_lineno)
            return line

        seen.add(frame.f_lineno)
        return line


def shares(seen: Mapping[str, Iterable[int]], packages: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return for each package the function lines that ran, and all function lines. Import-time lines are excluded."""
    found: dict[str, tuple[int, int]] = {}
    for package in packages:
        reached = total = 0
        for path, lines in _function_lines(package):
            total += len(lines)
            reached += len(lines & set(seen.get(path, ())))
        found[package] = (reached, total)
    return found


def _function_lines(package: str) -> Iterator[tuple[str, set[int]]]:
    module = importlib.import_module(f"chronik.{package}")
    names = [f"chronik.{package}"]
    names += [found.name for found in pkgutil.walk_packages(module.__path__, f"chronik.{package}.")]
    for name in names:
        path = importlib.import_module(name).__file__
        if path is not None:
            code = compile(Path(path).read_bytes(), path, "exec")
            yield path, {line for inner in _inner(code) for line in _lines(inner)}


def _inner(code: CodeType) -> Iterator[CodeType]:
    """Yield all functions, including nested ones; a class body runs at import time and is excluded."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & 0x02:
                yield constant
            yield from _inner(constant)


def _lines(code: CodeType) -> Iterator[int]:
    for _, line in dis.findlinestarts(code):
        if line is not None and line != code.co_firstlineno:
            yield line
