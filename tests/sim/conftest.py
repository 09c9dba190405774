"""Machines for a test, buried after it so that no coroutine of a dead process is complained of."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.sim.machines import Machines


@pytest.fixture
def machines() -> Iterator[Machines]:
    made = Machines()
    yield made
    made.bury()
