"""The process that fuzzes: atheris (libFuzzer) chooses inputs by the code that they reach, and this module runs them.

`campaign` starts it, with its task as JSON in the first argument. It ends with one line of JSON on standard output;
libFuzzer prints to standard error. The packages under test are instrumented as they are imported, so none of them is
imported earlier. Other packages are not instrumented: new branches in the simulator would count as new coverage.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from random import Random
from time import perf_counter
from typing import TYPE_CHECKING

import atheris

import chronik
from chronik.testing.fuzz.coverage import ROOMS

if TYPE_CHECKING:
    from chronik.testing.fuzz.fuzzer import Fuzzer

INPUT_BYTES_MAX = 64 * 1024
FOUND = 1
MEMORY_MB = 4096


class Worker:
    """Counts inputs and ends the process when there were enough: libFuzzer itself never returns."""

    def __init__(self, fuzzer: Fuzzer, inputs: int, seconds: float | None, finding: Path) -> None:
        self.fuzzer = fuzzer
        self._inputs_max = inputs
        self._seconds_max = math.inf if seconds is None else seconds
        self._finding = finding
        self._started_s = perf_counter()

    def mutate(self, data: bytes, max_size: int, seed: int) -> bytes:
        return self.fuzzer.mutate(data, Random(seed))[:max_size]

    def run(self, data: bytes) -> None:
        found = self.fuzzer.run(data)
        is_enough = self.fuzzer.inputs >= self._inputs_max or perf_counter() - self._started_s > self._seconds_max
        if found is None and is_enough:
            found = self.fuzzer.finish()
            if found is None:
                self._end(None)
        if found is not None:
            found.write(self._finding)
            self._end(found.broken)

    def _end(self, broken: str | None) -> None:
        fuzzer = self.fuzzer
        figures = {
            "inputs": fuzzer.inputs,
            "sessions": fuzzer.sessions,
            "seconds": perf_counter() - self._started_s,
            "outcomes": fuzzer.outcomes,
            "kinds": [[key, version, count] for (key, version), count in sorted(fuzzer.kinds.items())],
            "broken": broken,
        }
        print(json.dumps(figures), flush=True)
        # Not by an exception: libFuzzer would treat it as a finding of its own.
        os._exit(0 if broken is None else FOUND)


def main() -> None:
    task = json.loads(sys.argv[1])
    corpus = Path(task["corpus"])
    with atheris.instrument_imports(include=["chronik"], exclude=_beside()):
        from chronik.testing.fuzz.fuzzer import Fuzzer

        # Includes its first node: that imports the API modules.
        fuzzer = Fuzzer(task["seed"], by_engine=_mutated)
    worker = Worker(fuzzer, task["inputs"], task["seconds"], Path(task["finding"]))
    for number, data in enumerate(worker.fuzzer.first_inputs()):
        (corpus / f"sample-{number:03}").write_bytes(data)
    options = {
        "seed": task["seed"],
        "max_len": INPUT_BYTES_MAX,
        "len_control": 0,
        "timeout": 0,
        "rss_limit_mb": MEMORY_MB,
        "report_slow_units": 0,
        "artifact_prefix": f"{task['finding']}-",
    }
    flags = [f"-{name}={value}" for name, value in options.items()]
    atheris.Setup([sys.argv[0], str(corpus), *flags], worker.run, custom_mutator=worker.mutate)
    atheris.Fuzz()


def _mutated(data: bytes, size_max: int) -> bytes:
    # Look it up at each call: atheris replaces it with the real function when fuzzing starts.
    return bytes(atheris.Mutate(data, size_max))


def _beside() -> list[str]:
    """Return the names of the modules that are not under test."""
    source = Path(chronik.__file__).resolve().parent
    paths = [path.relative_to(source.parent).with_suffix("") for path in source.rglob("*.py")]
    names = [".".join(path.parts).removesuffix(".__init__") for path in paths]
    return [name for name in names if name.partition(".")[2].partition(".")[0] not in ROOMS]


if __name__ == "__main__":
    main()
