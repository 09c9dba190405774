"""The `chronik` command. `start` has its own path, so that a node does not load modules that it never uses."""

import sys


def main() -> int:
    """The entry point. Return the exit code; never show a user a traceback."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["start"]:
        from chronik.cli import start

        return start.main(arguments[1:])
    from chronik.cli.imports import unused_modules

    with unused_modules("hypothesis"):
        from chronik.cli import app
    return app.main(arguments)
