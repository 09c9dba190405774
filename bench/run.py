"""`make bench`: Chronik against its own goals and side by side with Apache Kafka; writes bench/results/.

    python bench/run.py                                       everything, 5 repetitions
    python bench/run.py --only produce latency --repetitions 3
    python bench/run.py --only failover --nodes 3 --add       more repetitions of what is there already
    python bench/run.py --quick                               that everything works; nothing is written
    python bench/run.py --report                              tables and plots again from what was measured

latest.json holds the judged rows: {workload, metric, unit, chronik, peer, peer_name, ratio, goal, met, limit}; `limit`
is written by hand: the reason why a goal is missed, which a new run keeps while it is missed. side_by_side.json holds
every repetition, side_by_side.md the tables, *.svg the plots. docs/benchmarks.md shows both files between markers.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    # Only here: each client process of a run imports this file again, and does not need the imports below.
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
    from bench.command import main

    # Like Ctrl-C: stop the servers and remove the folders before exiting.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(__doc__))
