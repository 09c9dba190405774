"""`chronik start` on a slow disk, in a process that ends when its parent ends.

The switches of the disk (`tests.support.slow_disk`) are files beside the data folder of the node.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.support.slow_disk import SlowDisk, SlowRaftStore

from chronik.cli import start
from chronik.node.config import NodeConfig
from chronik.node.environment import Environment
from chronik.testing.tied_node import tie_to_parent

SLOW_NODE = (sys.executable, "-m", "tests.support.slow_node")
ROOT = Path(__file__).parents[2]


def slow_reads(data_folder: str) -> Path:
    return Path(f"{data_folder}.slow-reads")


def slow_syncs(data_folder: str) -> Path:
    return Path(f"{data_folder}.slow-syncs")


def with_this_launcher(environment: dict[str, str]) -> dict[str, str]:
    """Return the process environment in which SLOW_NODE finds this module."""
    path = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(path)}


def with_slow_disk(config: NodeConfig, environment: Environment) -> Environment:
    disk = SlowDisk(str(slow_reads(config.data_folder)), str(slow_syncs(config.data_folder)))
    # Direct writes would not pass through the slow disk.
    return replace(environment, disk=disk, open_direct=None, open_raft_store=partial(SlowRaftStore, disk))


if __name__ == "__main__":
    sys.exit(start.main(sys.argv[1:], with_slow_disk) if tie_to_parent() else 1)
