"""Replacing old segments by compacted ones, safe against a crash at every step.

A group of adjacent segments is compacted into one, under the first one's base offset. The files go through:

    NNN.log.cleaned          being written; useless after a crash, and removed
    NNN-MMM.swap             complete and durable; replaces all segments with base offsets from NNN to below MMM
    OOO.log.deleted          an old segment to be removed, in a thread or when the log is next opened
    NNN.log                  the compacted one in its place

The rename to .swap commits the replacement: the next open of the folder completes it.
Indexes are written as NNN.index.cleaned and may be lost in a crash: they are rebuilt.
"""

from collections.abc import Sequence
from typing import NamedTuple

from chronik.storage.disk import Disk
from chronik.storage.segment import segment_path

__all__ = ["CLEANER_NAME", "Replacement", "finish_swaps", "replace_segments", "swap_path"]

CLEANER_NAME = "cleaner-offset"
"""A text file with one number: everything below that offset has been compacted once."""

INDEX_SUFFIXES = (".index", ".timeindex")


def swap_path(folder: str, base_offset: int, next_base: int) -> str:
    return f"{folder}/{base_offset:020d}-{next_base:020d}.swap"


class Replacement(NamedTuple):
    """Old segments, and whether a compacted one replaces them or nothing is left of them."""

    bases: Sequence[int]
    next_base: int
    """Base offset of the segment after them."""
    has_successor: bool


def replace_segments(disk: Disk, folder: str, replacements: Sequence[Replacement]) -> list[str]:
    """Carry out the replacements; return the files that can now be removed."""
    swaps = [
        (segment_path(folder, bases[0]), swap_path(folder, bases[0], next_base))
        for bases, next_base, has_successor in replacements
        if has_successor
    ]
    for path, swap in swaps:
        disk.rename(path + ".cleaned", swap)
    disk.sync_dir(folder)
    deleted: list[str] = []
    for bases, _, _ in replacements:
        for base in bases:
            _remove_indexes(disk, folder, base)
            path = segment_path(folder, base)
            disk.rename(path, path + ".deleted")
            deleted.append(path + ".deleted")
    # The old names must be gone before the new one exists, or a crash could leave both.
    disk.sync_dir(folder)
    for path, swap in swaps:
        disk.rename(swap, path)
        for suffix in INDEX_SUFFIXES:
            index = path.removesuffix(".log") + suffix
            if disk.exists(index + ".cleaned"):
                disk.rename(index + ".cleaned", index)
    return deleted


def finish_swaps(disk: Disk, folder: str) -> int:
    """Complete or undo what a crash interrupted; return the number of completed replacements."""
    names = disk.listdir(folder)
    swaps = [name for name in names if name.endswith(".swap")]
    for name in swaps:
        first, _, behind = name[: -len(".swap")].partition("-")
        for other in names:
            stem = other[: -len(".log")]
            if other.endswith(".log") and stem.isdigit() and int(first) <= int(stem) < int(behind):
                _remove_indexes(disk, folder, int(stem))
                disk.remove(f"{folder}/{other}")
    if swaps:
        disk.sync_dir(folder)
    for name in swaps:
        first = name.partition("-")[0]
        disk.rename(f"{folder}/{name}", segment_path(folder, int(first)))
    for name in names:
        if name.endswith((".cleaned", ".deleted")):
            disk.remove(f"{folder}/{name}")
    if swaps:
        disk.sync_dir(folder)
    return len(swaps)


def _remove_indexes(disk: Disk, folder: str, base_offset: int) -> None:
    for suffix in INDEX_SUFFIXES:
        path = segment_path(folder, base_offset, suffix)
        if disk.exists(path):
            disk.remove(path)
