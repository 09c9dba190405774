"""The fork server for nodes: has imported what `chronik start` imports, and nothing else."""

from __future__ import annotations

import os
import sys

from tests.support.fork_server import serve

from chronik.cli import unused_modules


def main() -> int:
    with unused_modules("rich", "hypothesis"):
        from tests.support.slow_node import SLOW_NODE, with_slow_disk

        import chronik.node.broker
        import chronik.node.runtime
        import chronik.web.app
        import chronik.web.node_view
        import chronik.web.server  # noqa: F401
        from chronik.cli import start
        from chronik.testing.tied_node import TIED_NODE, TIED_TO
    arguments = serve()
    os.environ.pop(TIED_TO, None)
    for known, adapt in ((TIED_NODE, None), (SLOW_NODE, with_slow_disk)):
        if arguments[: len(known) - 1] == list(known[1:]):
            return start.main(arguments[len(known) - 1 :], adapt)
    raise AssertionError(arguments)


if __name__ == "__main__":
    sys.exit(main())
