"""A run of the coverage-guided fuzzer: a worker in its own process, progress during the run, figures at the end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter

WORKER = "chronik.testing.fuzz.worker"
SAY_EVERY_S = 10.0
TAIL_LINES = 40
_STATUS = re.compile(r"^#(\d+)\s+(\w+)\s+cov: (\d+) ft: (\d+) corp: (\d+)/(\S+)")
"""libFuzzer's status line: inputs, the reason for the line, edges reached, features, inputs kept and their size."""


@dataclass(slots=True)
class Result:
    """The result of a run. `edges` are the branches of instrumented code that were taken."""

    inputs: int = 0
    seconds: float = 0.0
    sessions: int = 0
    edges: int = 0
    kept: int = 0
    outcomes: Mapping[str, int] = field(default_factory=dict)
    kinds: list[list[int]] = field(default_factory=list)
    """API key, version, and the number of requests sent."""
    broken: str | None = None

    def summary(self) -> str:
        outcomes = ", ".join(f"{count:,} {name}" for name, count in sorted(self.outcomes.items()))
        return (
            f"{self.inputs:,} inputs in {self.seconds:.0f} s ({self.inputs / max(self.seconds, 0.001):,.0f}/s) on "
            f"{self.sessions} nodes; {len(self.kinds)} kinds of request; {self.edges:,} edges, {self.kept:,} inputs "
            f"kept; {outcomes}"
        )


def campaign(
    inputs: int,
    seed: int,
    corpus: Path,
    finding: Path,
    *,
    seconds: float | None = None,
    say: Callable[[str], object] = print,
) -> Result:
    """Run this many inputs, or for this long.

    `corpus` keeps inputs that reached new code, and the run starts from its existing inputs. `finding` is the file for
    inputs that break a promise.
    """
    corpus.mkdir(parents=True, exist_ok=True)
    finding.unlink(missing_ok=True)
    task = {"inputs": inputs, "seconds": seconds, "seed": seed, "corpus": str(corpus), "finding": str(finding)}
    result = Result()
    tail: list[str] = []
    started_s = said_s = perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", WORKER, json.dumps(task)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            for line in process.stderr:
                tail = [*tail[1 - TAIL_LINES :], line.rstrip()]
                status = _STATUS.match(line)
                if status is None:
                    continue
                result.inputs, result.edges, result.kept = int(status[1]), int(status[3]), int(status[5])
                now_s = perf_counter()
                if now_s - said_s >= SAY_EVERY_S:
                    said_s = now_s
                    rate = result.inputs / (now_s - started_s)
                    say(f"{result.inputs:,} inputs, {rate:,.0f}/s, {result.edges:,} edges, {result.kept:,} kept")
            output = process.stdout.read()
        except BaseException:
            process.kill()
            raise
    try:
        return replace(result, **json.loads(output.splitlines()[-1]))
    except (IndexError, ValueError):
        # The process itself ended: because of a fault in compiled code, its memory limit, or a bug in the fuzzer.
        return replace(result, broken="\n".join(["the fuzzing process ended by itself:", *tail]))
