"""`python -m chronik.testing.sim`: run one seed, or many on --jobs cores, and print how to replay a failure.

Exit code 0: no violation; 1: a violation, printed on standard output with the command that replays it.
"""

from __future__ import annotations

import argparse
import random
import sys
from functools import partial

from chronik.testing.sim.campaign import campaign
from chronik.testing.sim.runner import DEFAULT_SCENARIO, SCENARIOS, run_seed

FAILED = 1
_say = partial(print, flush=True)


def main() -> int:
    options = _parser().parse_args()
    first = random.randrange(1 << 32) if options.seed is None else options.seed
    if options.seconds is not None:
        result = campaign(options.scenario, first, seconds=options.seconds, jobs=options.jobs)
        print("\n\n".join([*result.failures, result.summary()]))
        return FAILED if result.failures else 0
    for seed in range(first, first + options.seeds):
        report = run_seed(seed, options.scenario, events_max=options.steps, print_note=_say if options.notes else None)
        if report.violation is not None:
            print(report.failure())
            return FAILED
        print(report.summary(), flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m chronik.testing.sim", description="Run the simulator.")
    parser.add_argument("--seed", type=int, help="the first seed (default: a random one)")
    parser.add_argument("--seeds", type=int, default=1, help="the number of seeds, run in sequence")
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), default=DEFAULT_SCENARIO)
    parser.add_argument("--steps", type=int, metavar="EVENTS", help="stop after this many events")
    parser.add_argument("--notes", action="store_true", help="print events as they happen")
    parser.add_argument("--seconds", type=float, help="run consecutive seeds for this many seconds instead")
    parser.add_argument("--jobs", type=int, default=1, help="with --seconds: on this many cores")
    return parser


if __name__ == "__main__":
    sys.exit(main())
