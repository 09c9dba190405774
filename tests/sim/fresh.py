"""New seeds, derived from the product's source.

Every change of the source yields new seeds, and every test of the same source uses the same ones. So a failure on
another machine is reproduced here by the seed in the test's name. Random seeds run in `make soak`.
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
