"""Reports of failed tests have the logs of their nodes, as for the tests of whole clusters."""

from __future__ import annotations

from tests.cluster.support_fixtures import pytest_runtest_makereport

__all__ = ["pytest_runtest_makereport"]
