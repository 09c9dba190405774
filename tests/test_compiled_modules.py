"""What mypyc requires of the modules that it compiles, and what it would change silently (CONTRIBUTING.md)."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "chronik"
LISTED = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["chronik"]["compiled"]
CLOSED_BY_CALLERS = {"storage/times: _views"}
"""Generators with blocks to run at their end, whose callers always close them."""
PYTHON_BASES = {"NamedTuple", "Protocol", "IntEnum", "asyncio.BufferedProtocol"}
"""A class that inherits from these stays a Python class, and so can be inherited from."""


@cache
def parse(name: str) -> ast.Module:
    return ast.parse((SOURCE / f"{name}.py").read_text())


def classes(name: str) -> Iterator[tuple[ast.ClassDef, list[str]]]:
    for found in ast.walk(parse(name)):
        if isinstance(found, ast.ClassDef):
            yield found, [ast.unparse(base) for base in found.bases]


def imported(name: str) -> dict[str, str]:
    """Return the names that a module imports from Chronik's modules, each with its module."""
    return {
        alias.asname or alias.name: found.module.removeprefix("chronik.").replace(".", "/")
        for found in ast.walk(parse(name))
        if isinstance(found, ast.ImportFrom) and (found.module or "").startswith("chronik.") and found.module
        for alias in found.names
    }


def own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of functions inside it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        found = waiting.pop()
        yield found
        if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(found)


def unsafe_generators(tree: ast.Module) -> list[str]:
    """Return the generators that leave a block open if they are abandoned."""
    functions = [found for found in ast.walk(tree) if isinstance(found, ast.FunctionDef)]
    return [
        function.name
        for function in functions
        if "contextmanager" not in [ast.unparse(each) for each in function.decorator_list]
        and any(isinstance(found, ast.Yield | ast.YieldFrom) for found in own_nodes(function))
        and any(
            isinstance(found, ast.With) or (isinstance(found, ast.Try) and found.finalbody)
            for found in own_nodes(function)
        )
    ]


def nested_twice(tree: ast.Module) -> list[str]:
    """Return the functions that are inside a function inside another one."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

    def inside(node: ast.AST, depth: int) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, functions):
                if depth >= 2:
                    yield f"line {child.lineno}"
                yield from inside(child, depth + 1)
            else:
                yield from inside(child, 0 if isinstance(child, ast.ClassDef) else depth)

    return list(inside(tree, 0))


def test_every_listed_module_exists_once() -> None:
    assert sorted(LISTED) == LISTED == sorted(set(LISTED))
    assert [name for name in LISTED if not (SOURCE / f"{name}.py").is_file()] == []


def test_no_interpreted_class_inherits_from_a_compiled_one() -> None:
    native = {
        (name, found.name) for name in LISTED for found, bases in classes(name) if not PYTHON_BASES.intersection(bases)
    }
    names = [str(path.relative_to(SOURCE).with_suffix("")) for path in SOURCE.rglob("*.py")]
    faults = [
        f"{name}: {found.name} inherits from {base}"
        for name in names
        if name not in LISTED
        for found, bases in classes(name)
        for base in bases
        if (imported(name).get(base), base) in native
    ]
    assert faults == []


def test_no_compiled_generator_owns_what_must_be_closed() -> None:
    unsafe = {f"{name}: {generator}" for name in LISTED for generator in unsafe_generators(parse(name))}
    assert unsafe == CLOSED_BY_CALLERS


def test_a_generator_with_an_open_file_is_found() -> None:
    source = "def read():\n    with open('x') as file:\n        yield from file\n"
    assert unsafe_generators(ast.parse(source)) == ["read"]
    assert unsafe_generators(ast.parse("@contextmanager\n" + source)) == []


def test_no_compiled_function_is_nested_twice() -> None:
    assert {name: found for name in LISTED if (found := nested_twice(parse(name)))} == {}
    source = "def outer():\n    def middle():\n        return lambda: late\n    late = 1\n"
    assert nested_twice(ast.parse(source)) == ["line 3"]


def test_no_compiled_library_lies_beside_its_source() -> None:
    assert [path for suffix in ("so", "pyd") for path in (ROOT / "src").rglob(f"*.{suffix}")] == []
