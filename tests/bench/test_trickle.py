"""The trickle of a day in small: `bench/trickle.py` plays all of it."""

from __future__ import annotations

import pytest

from bench import trickle


@pytest.mark.parametrize("form", ["delta", "iceberg"])
def test_a_trickle_is_written_at_most_three_times(form: str) -> None:
    played = trickle.run(form, commits=112, rows=100, bounded=True)
    assert 1.5 < played["data_write_amplification"] <= 3
    assert played["metadata_bytes_written"] >= played["metadata_bytes_on_disk"]
    if form == "iceberg":
        assert played["snapshots"] < 112, "all of 10 minutes, and what a maintenance run leaves"
