"""The packages of src/chronik: which package may import which, and what no module may call.

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
    ("groups", "replication", "metadata", "raft"),
    ("client", "storage", "observe"),
    ("wire",),
)
# The same inside `node`: its packages and its modules.
NODE_LEVELS: tuple[tuple[str, ...], ...] = (
    ("broker", "metadata_restore"),
    ("api_table", "trace_topic"),
    ("apis",),
    ("coordinators", "forwarding"),
    ("admin",),
    ("replicas",),
    ("membership",),
    ("serving",),
    ("runtime",),
    ("environment", "topic_settings", "age_clock", "disk_watch"),
    ("config",),
)
# The same inside `pipeline`.
PIPELINE_LEVELS: tuple[tuple[str, ...], ...] = (
    ("report",),
    ("land", "audit", "stalls", "session"),
    ("source",),
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

# The packages that may read the real clock and random source; they pass both to all other packages.
SEAMS = ("cli", "local", "testing")
SEAM_MODULES = ("observe/logging.py",)
BANNED_MODULES = {
    "time": "time is handed in: loop.time(), or Environment.wall_ms",
    "random": "chance is handed in: Environment.random",
    "secrets": "chance is handed in: Environment.random",
}
BANNED_CALLS = {
    "uuid.uuid1": "ids come from Environment.new_uuid",
    "uuid.uuid4": "ids come from Environment.new_uuid",
    "os.urandom": "chance is handed in: Environment.random",
    "datetime.datetime.now": "the wall clock is handed in",
    "datetime.datetime.utcnow": "the wall clock is handed in",
    "datetime.datetime.today": "the wall clock is handed in",
    "datetime.date.today": "the wall clock is handed in",
    "asyncio.as_completed": "its order differs from run to run",
}
# A type used in annotations only, not a call.
ALLOWED_IMPORTS = {"random.Random"}


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
        return f"nothing imports {imported}: it stands beside the rooms"
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


def banned_uses(tree: ast.Module, path: Path) -> Iterator[tuple[int, str]]:
    """Find uses of the real clock and randomness: banned modules by import, banned functions by use."""
    bound: dict[str, str] = {}
    for found in ast.walk(tree):
        if isinstance(found, ast.Import):
            for alias in found.names:
                bound[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(found, ast.ImportFrom) and not found.level:
            for alias in found.names:
                bound[alias.asname or alias.name] = f"{found.module}.{alias.name}"
    for line, name in imported_names(tree, path):
        top = name.split(".")[0]
        if top in BANNED_MODULES and name not in ALLOWED_IMPORTS:
            yield line, f"{name}: {BANNED_MODULES[top]}"
    for found in ast.walk(tree):
        if isinstance(found, ast.Call):
            called = dotted(found.func, bound)
            if called in ALLOWED_IMPORTS:
                yield found.lineno, f"{called}(): {BANNED_MODULES['random']}"
        if isinstance(found, ast.Attribute | ast.Name):
            used = dotted(found, bound)
            if used in BANNED_CALLS:
                yield found.lineno, f"{used}: {BANNED_CALLS[used]}"


def dotted(expression: ast.expr, bound: dict[str, str]) -> str:
    """Return `expression` as a dotted name that starts at its import; empty if it is not such a name."""
    if isinstance(expression, ast.Name):
        return bound.get(expression.id, "")
    if isinstance(expression, ast.Attribute):
        base = dotted(expression.value, bound)
        return f"{base}.{expression.attr}" if base else ""
    return ""


def is_seam(path: Path) -> bool:
    return room_of(path) in SEAMS or path.relative_to(SOURCE).as_posix() in SEAM_MODULES


def test_only_seam_modules_use_the_real_clock_and_randomness() -> None:
    faults = [
        f"{place(path, line)}: {fault}"
        for path in MODULES
        if not is_seam(path)
        for line, fault in banned_uses(parse(path), path)
    ]
    assert faults == []


def test_banned_uses_are_found_under_import_aliases() -> None:
    source = (
        "import time as t\nimport asyncio, datetime, uuid as u\nfrom random import Random, choice\n"
        "from datetime import datetime as dt\n"
        "def f(random: Random): return u.uuid4(), dt.now(), datetime.datetime.now(), Random(1)\n"
        "def g(): return asyncio.as_completed([])\n"
    )
    found = sorted(fault.split(":")[0] for _, fault in banned_uses(ast.parse(source), SOURCE / "wire" / "frames.py"))
    assert found == [
        "asyncio.as_completed",
        "datetime.datetime.now",
        "datetime.datetime.now",
        "random.Random()",
        "random.choice",
        "time",
        "uuid.uuid4",
    ]


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
