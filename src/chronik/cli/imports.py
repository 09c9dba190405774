"""Keep packages out of a process that does not need them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


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
