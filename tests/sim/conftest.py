"""Machines for a test, cleaned up after it so that Python does not warn about coroutines of dead processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.sim.machines import Machines


@pytest.fixture
def machines() -> Iterator[Machines]:
    made = Machines()
    yield made
    made.bury()
