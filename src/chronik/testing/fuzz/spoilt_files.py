"""Ways to damage the files of a folder: what a failing disk, a crash, a careless copy or stray input leaves behind."""

from __future__ import annotations

from pathlib import Path
from random import Random

PAGE_BYTES = 512
KINDS = ("flip", "flip", "flip", "byte", "cut", "garbage", "zeros", "more", "empty", "remove", "swap", "copy", "shift")


def spoil(random: Random, files: list[Path]) -> str:
    """Apply one kind of damage to one or two of the files; return a description."""
    path = random.choice(files)
    kind = random.choice(KINDS)
    data = bytearray(path.read_bytes())
    told = f"{kind} {path.name}"
    if kind in ("swap", "copy"):
        other = random.choice(files)
        if kind == "swap":
            path.write_bytes(other.read_bytes())
        other.write_bytes(data)
        return f"{told} and {other.name}"
    if kind == "remove":
        path.unlink()
        return told
    if kind == "more":
        data += random.choice(
            (random.randbytes(random.randrange(1, 200)), bytes(random.randrange(1, 5000)), bytes(data))
        )
    elif kind == "empty":
        data.clear()
    elif data:
        at = random.randrange(len(data))
        told = f"{told} at {at}"
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
    return told
