"""A layered map equals, and iterates as, a dict with the same history; old versions do not change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chronik.metadata import layered_map
from chronik.metadata.layered_map import RECENT_MAX, LayeredMap

keys = st.integers(0, 7)
values = st.integers(100, 10_000)
changes = st.lists(st.dictionaries(keys, values, max_size=3) | keys)
"""Entries to add or replace, or a key to remove."""


@given(st.dictionaries(keys, values), changes, st.integers(0, 5))
def test_a_layered_map_equals_a_dict_in_content_and_order(
    entries: dict[int, int], history: list[dict[int, int] | int], recent_max: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layered_map, "RECENT_MAX", recent_max)
        model, layered = dict(entries), LayeredMap.of(entries)
        versions = [(dict(model), layered)]
        for change in history:
            if isinstance(change, dict):
                model.update(change)
                layered = layered.replacing(change)
            elif change in model:
                del model[change]
                layered = layered.without(change)
            versions.append((dict(model), layered))
        for model, layered in versions:
            assert layered == model
            assert len(layered) == len(model)
            assert [*layered] == [*layered.keys()] == [*model]
            assert [*layered.items()] == [*model.items()]
            assert [*layered.values()] == [*model.values()]
            for key in range(9):
                assert layered.get(key) == model.get(key)
                assert layered.get(key, -1) == model.get(key, -1)
                assert (key in layered) == (key in model)
        for old, before in versions:
            for new, after in versions:
                changed = {key for key in {**old, **new} if old.get(key) is not new.get(key)}
                found = after.changed_since(before)
                assert sorted(found) == sorted(changed)


def test_an_absent_or_removed_key_raises_key_error() -> None:
    layered = LayeredMap({"a": 1, "b": 2})
    assert layered["a"] == layered.replacing({"a": 1})["a"] == 1
    for without, absent in ((layered, "c"), (layered.without("a"), "a")):
        with pytest.raises(KeyError):
            without[absent]


def test_a_change_shares_the_base_until_many_entries_are_recent() -> None:
    layered = LayeredMap.of({str(number): number for number in range(1_000)})
    bases: list[dict[str, int]] = []
    for number in range(3 * RECENT_MAX):
        layered = layered.replacing({str(number): -number})
        assert len(layered._recent) <= RECENT_MAX
        if not any(layered._base is base for base in bases):
            bases.append(layered._base)
    assert len(bases) <= 4
