"""Ways to damage the files of a folder: what a failing disk, a crash, a careless copy or stray input leaves behind."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from chronik.testing.fuzz import BrokenPromise

PAGE_BYTES = 512
KINDS = ("flip", "flip", "flip", "byte", "cut", "garbage", "zeros", "more", "empty", "remove", "swap", "copy", "shift")


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder, in memory if possible."""
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="chronik-fuzz-", dir=in_memory) as name:
        yield Path(name)


def check_damaged_copies(
    original: Path, copy: Path, seeds: Iterable[int], files: Callable[[], list[Path]], check: Callable[[], None]
) -> None:
    """Copy the original folder for each seed, damage some of `files`, and check the copy.

    A broken promise is raised with its seed and the damage.
    """
    for seed in seeds:
        random = Random(seed)
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(original, copy)
        damages: list[str] = []
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            if present := files():
                damages.append(damage_file(random, present))
        try:
            check()
        except BrokenPromise as broken:
            raise BrokenPromise(f"seed {seed} ({'; '.join(damages)}): {broken}") from broken.__cause__


def damage_file(random: Random, files: list[Path]) -> str:
    """Apply one kind of damage to one or two of the files; return a description."""
    path = random.choice(files)
    kind = random.choice(KINDS)
    data = bytearray(path.read_bytes())
    what = f"{kind} {path.name}"
    if kind in ("swap", "copy"):
        other = random.choice(files)
        if kind == "swap":
            path.write_bytes(other.read_bytes())
        other.write_bytes(data)
        return f"{what} and {other.name}"
    if kind == "remove":
        path.unlink()
        return what
    if kind == "more":
        data += random.choice(
            (random.randbytes(random.randrange(1, 200)), bytes(random.randrange(1, 5000)), bytes(data))
        )
    elif kind == "empty":
        data.clear()
    elif data:
        at = random.randrange(len(data))
        what = f"{what} at {at}"
        if kind == "flip":
            data[at] ^= 1 << random.randrange(8)
        elif kind == "byte":
            data[at] = random.randrange(256)
        elif kind == "cut":
            del data[at:]
        elif kind == "garbage":
            size = random.choice((1, 8, 61, PAGE_BYTES))
            data[at : at + size] = random.randbytes(min(size, len(data) - at))
        elif kind == "zeros":
            at -= at % PAGE_BYTES
            size = min(PAGE_BYTES, len(data) - at)
            data[at : at + size] = bytes(size)
        else:
            del data[at : at + random.randrange(1, 100)]
    path.write_bytes(data)
    return what
