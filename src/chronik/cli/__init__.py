"""The `chronik` command. `start` has its own path, so that a node does not load modules that it never uses."""

import contextlib
import sys
from collections.abc import Iterator


def main() -> int:
    """The entry point. Return the exit code; never show a user a traceback."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["start"]:
        from chronik.cli import start

        return start.main(arguments[1:])
    with unused_modules("hypothesis"):
        from chronik.cli import app
    return app.main(arguments)


@contextlib.contextmanager
def unused_modules(*names: str) -> Iterator[None]:
    """Make imports inside the block fail for these packages.

    structlog and kio load them if they are installed, for pretty tracebacks and for tests: 200 ms and 20 MB that a node
    does not need.
    """
    hidden = [name for name in names if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
