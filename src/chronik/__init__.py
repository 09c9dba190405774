"""Chronik: a Kafka-compatible streaming platform whose promise is that every acknowledged record is read."""

import typing as _typing

if _typing.TYPE_CHECKING:
    from chronik.client.ledger import Ledger

__all__ = ["Ledger", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Loaded when first asked for: a node has no use for it."""
    if name == "Ledger":
        from chronik.client.ledger import Ledger

        globals()[name] = Ledger
        return Ledger
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
