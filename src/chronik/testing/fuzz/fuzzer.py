"""Runs inputs on one node after another, from any source, and collects the figures."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random

from chronik.node.api_table import APIS
from chronik.testing.fuzz import BrokenPromise
from chronik.testing.fuzz.mutator import Mutate, Mutator, joined
from chronik.testing.fuzz.samples import internal_samples, samples
from chronik.testing.fuzz.secured import authentications, tls_bytes
from chronik.testing.fuzz.session import Session
from chronik.testing.fuzz.ways import INTERNAL, RAW, SASL, TLS, UNPROVEN
from chronik.wire.api import ApiKey


@dataclass(frozen=True, slots=True)
class Finding:
    """The broken promise, and the inputs of one session up to the one that broke it, as a text file for replay:

    # what was broken, one line each
    seed 17
    input <hex>      one line for each input, in order
    """

    broken: str
    seed: int
    inputs: tuple[bytes, ...]

    def write(self, path: Path) -> None:
        comments = "".join(f"# {line}\n" for line in self.broken.splitlines())
        inputs = "".join(f"input {data.hex()}\n" for data in self.inputs)
        path.write_text(f"{comments}seed {self.seed}\n{inputs}")

    @staticmethod
    def read(path: Path) -> Finding:
        comments: list[str] = []
        inputs: list[bytes] = []
        seed = 0
        for line in path.read_text().splitlines():
            word, _, rest = line.partition(" ")
            if word == "#":
                comments.append(rest)
            elif word == "seed":
                seed = int(rest)
            elif word == "input":
                inputs.append(bytes.fromhex(rest))
        return Finding("\n".join(comments), seed, tuple(inputs))


def replay(seed: int, inputs: tuple[bytes, ...]) -> str | None:
    """Return what these inputs break on a fresh node, including its crash and restart at the end; None if nothing."""
    session: Session | None = None
    try:
        session = Session(seed, Counter(), Counter())
        for data in inputs:
            session.run(data)
        session.end()
    except BrokenPromise as broken:
        return str(broken)
    finally:
        if session is not None:
            session.release()
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


class Fuzzer:
    """One run. Every session has the same seed, so that topic ids in kept inputs stay valid."""

    def __init__(self, seed: int, by_engine: Mutate | None = None) -> None:
        # Sessions leave large reference cycles behind; collect them between sessions, not during one.
        gc.disable()
        self.seed = seed
        self.inputs = 0
        self.sessions = 1
        self.outcomes: Counter[str] = Counter()
        self.kinds: Counter[tuple[int, int]] = Counter()
        self.session = Session(seed, self.outcomes, self.kinds)
        topic_id = self.session.fuzzed.fuzzed_id
        versions = {int(api.key): api.parsed_versions for api in APIS}
        on_controller = [int(api.key) for api in APIS if api.on_controller]
        self.samples = samples(versions, topic_id)
        highest = {key: last for key, (_, last) in versions.items()}
        self.internal_samples = internal_samples(on_controller, highest, topic_id)
        self._mutator = Mutator(self.samples, self.internal_samples, topic_id, by_engine)
        # Exclude all current objects from garbage collection.
        gc.freeze()

    def first_inputs(self) -> list[bytes]:
        """Return the valid requests, from which mutation starts."""
        internal = [bytes((INTERNAL,)) + sample.frame for sample in self.internal_samples]
        metadata = next(sample.frame[4:] for sample in self.samples if sample.key == ApiKey.METADATA)
        secured = [
            bytes((how,)) + joined([*frames, metadata])
            for frames in authentications()
            for how in (SASL | UNPROVEN, SASL | UNPROVEN | TLS, SASL)
        ]
        raw = [bytes((how,)) + joined([data]) for data in tls_bytes() for how in (TLS | RAW, TLS | RAW | UNPROVEN)]
        return [bytes(1) + sample.frame for sample in self.samples] + internal + secured + raw

    def mutate(self, data: bytes, random: Random) -> bytes:
        return self._mutator.mutate(data, random)

    def run(self, data: bytes) -> Finding | None:
        """Run one input; start a fresh node if this one is used up. Return what it broke, with the session's inputs."""
        self.inputs += 1
        try:
            self.session.run(data)
            if self.session.is_over:
                self.session.end()
                self.session.release()
                self.sessions += 1
                self.session = Session(self.seed, self.outcomes, self.kinds)
        except BrokenPromise as broken:
            return self._found(broken)
        return None

    def finish(self) -> Finding | None:
        """End the last session with its crash."""
        try:
            self.session.end()
            self.session.release()
        except BrokenPromise as broken:
            return self._found(broken)
        finally:
            gc.unfreeze()
            gc.enable()
        return None

    def _found(self, broken: BrokenPromise) -> Finding:
        found = Finding(str(broken), self.seed, tuple(self.session.inputs))
        self.session.release()
        return shortest(found)
