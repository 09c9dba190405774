"""Runs inputs on one node after another, from any source, and collects the figures."""

from __future__ import annotations

import gc
from collections import Counter
from random import Random

from chronik.node.api_table import APIS
from chronik.testing.fuzz.findings import Finding, let_go, shortest
from chronik.testing.fuzz.fuzzed_node import Broken
from chronik.testing.fuzz.mutator import INTERNAL, Mutate, Mutator
from chronik.testing.fuzz.samples import Sample, internal_samples, samples
from chronik.testing.fuzz.session import Session


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
        self.internal_samples = internal_samples(
            on_controller, {key: highest for key, (_, highest) in versions.items()}, topic_id
        )
        self._mutator = Mutator(self.samples, self.internal_samples, topic_id, by_engine)
        # Exclude all current objects from garbage collection.
        gc.freeze()

    def first_inputs(self) -> list[bytes]:
        """Return the valid requests, from which mutation starts."""

        def inputs(samples: list[Sample], how: int) -> list[bytes]:
            return [bytes((how,)) + sample.frame for sample in samples]

        return inputs(self.samples, 0) + inputs(self.internal_samples, INTERNAL)

    def mutate(self, data: bytes, random: Random) -> bytes:
        return self._mutator.mutate(data, random)

    def run(self, data: bytes) -> Finding | None:
        """Run one input; start a fresh node if this one is used up. Return what it broke, with the session's inputs."""
        self.inputs += 1
        try:
            self.session.run(data)
            if self.session.is_over:
                self.session.end()
                self._next()
        except Broken as broken:
            return self._found(broken)
        return None

    def finish(self) -> Finding | None:
        """End the last session with its crash."""
        try:
            self.session.end()
            let_go(self.session)
        except Broken as broken:
            return self._found(broken)
        finally:
            gc.unfreeze()
            gc.enable()
        return None

    def go_on(self) -> None:
        """Continue after a finding, on a fresh node."""
        self._next()

    def _found(self, broken: Broken) -> Finding:
        found = Finding(str(broken), self.seed, tuple(self.session.inputs))
        let_go(self.session)
        return shortest(found)

    def _next(self) -> None:
        let_go(self.session)
        self.sessions += 1
        self.session = Session(self.seed, self.outcomes, self.kinds)
