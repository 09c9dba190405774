"""`python -m chronik.testing.fuzz`: fuzz every request type, replay a finding, or measure what a corpus reaches.

Exit code 0: no promise was broken. Exit code 1: standard output names the broken promise, the file and the replay
command.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path

from chronik.testing.fuzz.campaign import campaign

FAILED = 1
_say = partial(print, flush=True)


def main() -> int:
    options = _parser().parse_args()
    if options.replay is not None:
        return _replay(options.replay)
    if options.reach is not None:
        return _reach(options.reach)
    with tempfile.TemporaryDirectory(prefix="chronik-fuzz-") as folder:
        corpus = options.corpus or Path(folder)
        result = campaign(options.inputs, options.seed, corpus, options.finding, seconds=options.seconds, say=_say)
    _say(result.summary())
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(result), indent=1) + "\n")
    if result.broken is None:
        return 0
    _say(f"BROKEN: {result.broken}")
    if options.finding.exists():
        _say(f"replay: python -m chronik.testing.fuzz --replay {options.finding}")
    return FAILED


def _replay(path: Path) -> int:
    from chronik.testing.fuzz.fuzzer import Finding, replay

    found = Finding.read(path)
    broken = replay(found.seed, found.inputs)
    _say(f"{len(found.inputs)} inputs: {'nothing is broken' if broken is None else f'BROKEN: {broken}'}")
    return 0 if broken is None else FAILED


def _reach(corpus: Path) -> int:
    """Print the share of each package's lines that the inputs of a corpus reach."""
    from chronik.testing.fuzz.coverage import ROOMS, lines_run, share
    from chronik.testing.fuzz.fuzzer import Fuzzer

    with lines_run() as seen:
        fuzzer = Fuzzer(1)
        for path in sorted(corpus.iterdir()):
            fuzzer.run(path.read_bytes())
        fuzzer.finish()
    for room in (*ROOMS, "node.apis"):
        reached, total = share(seen, room)
        _say(f"{room:12} {reached:5} of {total:5} lines, {100 * reached / total:.0f} %")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m chronik.testing.fuzz", description="Fuzz a node's requests.")
    parser.add_argument("--inputs", type=int, default=100_000, help="how many inputs (default 100,000)")
    parser.add_argument("--seconds", type=float, help="stop after this many seconds, even with fewer inputs")
    parser.add_argument("--seed", type=int, default=1, help="the seed (default 1)")
    parser.add_argument(
        "--corpus", type=Path, help="the folder of inputs that reached new code; a run starts from them"
    )
    parser.add_argument("--finding", type=Path, default=Path("fuzz-finding.txt"), help="the file for a broken promise")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="replay a finding instead")
    parser.add_argument("--reach", type=Path, metavar="CORPUS", help="print the lines that a corpus reaches instead")
    return parser


if __name__ == "__main__":
    sys.exit(main())
