"""`chronik start` in a process that ends when its parent ends, however the parent ends.

For nodes that belong to a test run: a run that is killed has no chance to stop them. Linux notifies a process of its
parent's death; on other systems this is plain `chronik start`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
TIED_TO = "CHRONIK_TIED_TO"
"""The variable that holds the parent's process id."""
TIED_NODE = (sys.executable, "-m", "chronik.testing.tied_node", "start")


def tied_environment() -> dict[str, str]:
    """Return the environment of nodes that end with this process."""
    from chronik.local.cluster import clean_environment

    return {**clean_environment(), TIED_TO: str(os.getpid())}


def tie_to_parent() -> bool:
    """End this process with its parent; return False if the parent has died already."""
    parent = int(os.environ.pop(TIED_TO, "0"))
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return not parent or os.getppid() == parent


def main() -> int:
    if not tie_to_parent():
        return 1
    from chronik.cli import main as chronik

    return chronik()


if __name__ == "__main__":
    sys.exit(main())
