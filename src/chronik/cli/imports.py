"""Keeps packages out of a process that has no use for them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def unused_modules(*names: str) -> Iterator[None]:
    """Imports inside find these packages missing.

    structlog and kio load them where they are installed, for pretty tracebacks and for tests: 200 ms and 20 MB that no
    node has a use for.
    """
    hidden = [name for name in names if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
