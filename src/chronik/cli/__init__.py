"""The `chronik` command. `start` takes a way of its own, so that a node does not load what it never uses."""

import sys


def main() -> int:
    """The entry point. Returns the exit code; never lets a traceback through to a user."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["start"]:
        from chronik.cli import start

        return start.main(arguments[1:])
    from chronik.cli.imports import unused_modules

    with unused_modules("hypothesis"):
        from chronik.cli import app
    return app.main(arguments)
