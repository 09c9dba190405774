"""A finding: the inputs of one session up to the one that broke a promise, as a text file for replay.

# what was broken, one line each
seed 17
input <hex>      one line for each input, in order
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from chronik.testing.fuzz.fuzzed_node import Broken
from chronik.testing.fuzz.session import Session


@dataclass(frozen=True, slots=True)
class Finding:
    """The broken promise, and the inputs that lead to it."""

    broken: str
    seed: int
    inputs: tuple[bytes, ...]

    def write(self, path: Path) -> None:
        told = "".join(f"# {line}\n" for line in self.broken.splitlines())
        inputs = "".join(f"input {data.hex()}\n" for data in self.inputs)
        path.write_text(f"{told}seed {self.seed}\n{inputs}")

    @staticmethod
    def read(path: Path) -> Finding:
        told: list[str] = []
        inputs: list[bytes] = []
        seed = 0
        for line in path.read_text().splitlines():
            word, _, rest = line.partition(" ")
            if word == "#":
                told.append(rest)
            elif word == "seed":
                seed = int(rest)
            elif word == "input":
                inputs.append(bytes.fromhex(rest))
        return Finding("\n".join(told), seed, tuple(inputs))


def replay(seed: int, inputs: tuple[bytes, ...]) -> str | None:
    """Return what these inputs break on a fresh node, including its crash and restart at the end; None if nothing."""
    try:
        session = Session(seed, Counter(), Counter())
    except Broken as broken:
        return str(broken)
    try:
        for data in inputs:
            session.run(data)
        session.end()
    except Broken as broken:
        return str(broken)
    finally:
        let_go(session)
    return None


def shortest(found: Finding) -> Finding:
    """Return the last input alone, or the last few, if those are enough; otherwise all inputs."""
    for count in (1, 2, 4, 16, 64):
        if count >= len(found.inputs):
            break
        broken = replay(found.seed, found.inputs[-count:])
        if broken is not None:
            return Finding(broken, found.seed, found.inputs[-count:])
    return found


def let_go(session: Session) -> None:
    """Free a session's dead objects now, and ignore the exceptions that they raise while they are freed."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None
    try:
        session.bury()
        gc.collect()
    finally:
        sys.unraisablehook = hook
