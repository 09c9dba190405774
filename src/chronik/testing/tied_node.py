"""`chronik start` in a process that ends with the one that started it, however that one ends.

For nodes that belong to a test run: a run that is killed has no chance to stop them. Linux tells a process of its
parent's death; elsewhere this is plain `chronik start`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
TIED_TO = "CHRONIK_TIED_TO"
"""The variable that names the parent."""


def main() -> int:
    parent = int(os.environ.pop(TIED_TO, "0"))
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.getppid() != parent:
        return 1  # it died before the line above
    from chronik.cli import main as chronik

    return chronik()


if __name__ == "__main__":
    sys.exit(main())
