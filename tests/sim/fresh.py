"""Seeds that nobody has run before: they follow from the product's source.

Every change of the source gets seeds of its own, and whoever tests that source gets the same ones: a failure on another
machine is seen again here, by the seed in the test's name. Seeds from nowhere run in `make soak`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import chronik

SOURCE = Path(chronik.__file__).parent


def fresh_seeds(scenario: str, count: int) -> range:
    content = hashlib.blake2b(scenario.encode(), digest_size=4)
    for path in sorted(SOURCE.rglob("*.py")):
        content.update(path.read_bytes())
    first = int.from_bytes(content.digest(), "big")
    return range(first, first + count)
