"""The packages of src/chronik: which package may import which, and which may make random generators.

docs/design.md draws the packages. Imports run downwards only. This includes imports inside a function or under
TYPE_CHECKING, because a type that a package uses is a dependency too.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import chronik

SOURCE = Path(chronik.__file__).resolve().parent
MODULES = sorted(SOURCE.rglob("*.py"))

# From the top down. A package imports from the levels below its own, never from the same level.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("cli", "web"),
    ("pipeline", "doctor", "local"),
    ("node",),
    ("transactions", "shares"),
    ("groups", "replication", "metadata", "raft"),
    ("client", "storage", "observe"),
    ("authentication", "authorization", "quotas", "schemas"),
    ("wire",),
)
# The same inside `node`: its packages and its modules.
NODE_LEVELS: tuple[tuple[str, ...], ...] = (
    ("broker", "metadata_restore"),
    ("api_table", "trace_topic", "schema_registry"),
    ("apis",),
    ("shares",),
    ("coordinators", "forwarding"),
    ("admin",),
    ("replicas",),
    ("membership",),
    ("serving",),
    ("runtime",),
    ("environment", "topic_settings", "age_clock", "disk_watch", "process_config"),
    ("config", "commit_log_thread"),
)
# The same inside `pipeline`.
PIPELINE_LEVELS: tuple[tuple[str, ...], ...] = (
    ("service",),
    ("report",),
    ("land", "audit", "stalls", "session", "sql"),
    ("sink",),
    ("typed",),
    ("source", "catalog", "deleted"),
    ("storage",),
    ("errors",),
)
INNER_LEVELS = {"node": NODE_LEVELS, "pipeline": PIPELINE_LEVELS}
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
# Outside the levels: may import every package, and no package imports it.
BESIDE = ("testing",)
# `cli start` runs a node and its web pages together, so it may import across its level.
ACROSS = {("cli", "web")}
# Pure state machines that exchange bytes and own no files: they import `wire` only.
WIRE_ONLY = ("groups",)
# The public API; every other name of the package is private.
EXPORTS: frozenset[str] = frozenset({"__version__", "Ledger"})


def room_of(path: Path) -> str:
    """Return the package that a file belongs to; empty for the top-level `__init__`."""
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else ""


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imported_names(tree: ast.Module, path: Path) -> Iterator[tuple[int, str]]:
    """Return every dotted name that the module imports, absolute, with its line."""
    package = ["chronik", *path.relative_to(SOURCE).parent.parts]
    for found in ast.walk(tree):
        if isinstance(found, ast.Import):
            for alias in found.names:
                yield found.lineno, alias.name
        elif isinstance(found, ast.ImportFrom):
            base = package[: len(package) - found.level + 1] if found.level else []
            prefix = ".".join([*base, *([found.module] if found.module else [])])
            for alias in found.names:
                yield found.lineno, f"{prefix}.{alias.name}"


def imported_rooms(tree: ast.Module, path: Path) -> Iterator[tuple[int, str]]:
    for line, name in imported_names(tree, path):
        parts = name.split(".")
        if parts[0] == "chronik" and len(parts) > 1 and (SOURCE / parts[1]).is_dir():
            yield line, parts[1]


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(SOURCE.parent)}:{line}"


def direction_fault(room: str, imported: str) -> str | None:
    """Return why `room` may not import `imported`, or None if it may."""
    if room in (imported, *BESIDE) or (room, imported) in ACROSS:
        return None
    if imported in BESIDE:
        return f"no package may import {imported}"
    if room in WIRE_ONLY and imported != "wire":
        return f"{room} uses wire alone"
    if room == "":
        return None
    if LEVEL_OF[imported] <= LEVEL_OF[room]:
        return f"{room} may not import {imported}: imports run downwards only"
    return None


def test_imports_run_downwards_only() -> None:
    faults = [
        f"{place(path, line)}: {fault}"
        for path in MODULES
        for line, imported in imported_rooms(parse(path), path)
        if (fault := direction_fault(room_of(path), imported))
    ]
    assert faults == []


def part_of(path: Path, room: str) -> str:
    """Return the package or module of `room` that a file belongs to; empty outside `room`."""
    parts = path.relative_to(SOURCE).parts
    return parts[1].removesuffix(".py") if parts[0] == room and parts[-1] != "__init__.py" else ""


@pytest.mark.parametrize("room", INNER_LEVELS)
def test_imports_inside_a_package_run_downwards_only(room: str) -> None:
    level_of = {part: level for level, parts in enumerate(INNER_LEVELS[room]) for part in parts}
    faults = []
    for path in MODULES:
        part = part_of(path, room)
        for line, name in imported_names(parse(path), path) if part else ():
            parts = name.split(".")
            imported = parts[2] if parts[:2] == ["chronik", room] and len(parts) > 2 else part
            if imported != part and level_of[imported] <= level_of[part]:
                faults.append(f"{place(path, line)}: {part} may not import {imported}")
    assert faults == []


@pytest.mark.parametrize("room", INNER_LEVELS)
def test_modules_of_a_package_have_no_import_cycle(room: str) -> None:
    def name_of(path: Path) -> str:
        return ".".join(("chronik", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")

    modules = {name_of(path): path for path in MODULES if room_of(path) == room}
    graph = {
        module: {
            found
            for _, name in imported_names(parse(path), path)
            if (found := name if name in modules else name.rpartition(".")[0]) in modules and found != module
        }
        for module, path in modules.items()
    }
    # Raises CycleError, which names the cycle.
    list(graphlib.TopologicalSorter(graph).static_order())


def test_only_some_packages_make_random_generators() -> None:
    """Others receive one. Ruff finds the functions of `random`, but cannot tell the type `Random` from its calls."""
    calls = [
        place(path, found.lineno)
        for path in MODULES
        if room_of(path) not in ("cli", "local", "testing")
        for found in ast.walk(parse(path))
        if isinstance(found, ast.Call) and ast.unparse(found.func) in ("Random", "random.Random")
    ]
    assert calls == []


def test_every_package_has_a_level() -> None:
    rooms = {room_of(path) for path in MODULES} - {""}
    assert rooms <= LEVEL_OF.keys() | set(BESIDE)


def test_direction_rule_rejects_forbidden_imports_only() -> None:
    assert direction_fault("wire", "storage")
    assert direction_fault("storage", "observe")
    assert direction_fault("groups", "storage")
    assert direction_fault("groups", "observe")
    assert direction_fault("node", "testing")
    assert direction_fault("web", "cli")
    assert direction_fault("cli", "web") is None
    assert direction_fault("node", "wire") is None
    assert direction_fault("testing", "cli") is None


def test_nested_and_relative_imports_are_found() -> None:
    source = "def f():\n    from chronik.node import broker\nif TYPE_CHECKING:\n    from ..storage.log import Log\n"
    tree = ast.parse(source)
    assert [room for _, room in imported_rooms(tree, SOURCE / "wire" / "frames.py")] == ["node", "storage"]


def test_every_package_and_module_has_a_docstring() -> None:
    assert [place(path, 1) for path in MODULES if not ast.get_docstring(parse(path))] == []


def test_package_exports_what_users_import_and_nothing_else() -> None:
    exported = frozenset(getattr(chronik, "__all__", ()))
    assert exported <= EXPORTS
    assert all(hasattr(chronik, name) for name in exported)
    rooms = {path.name for path in SOURCE.iterdir() if path.is_dir()}
    # pytest adds names that are not identifiers when it rewrites assertions, as it does with a plugin's package.
    public = {name for name in vars(chronik) if name.isidentifier() and not name.startswith("_")} - rooms
    assert public == {name for name in exported if not name.startswith("_")}


def test_package_is_typed() -> None:
    assert (SOURCE / "py.typed").is_file()
