"""An immutable map whose next version costs little: the image replaces one topic among thousands with each command."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

RECENT_MAX = 128
"""Each version copies the recent entries. After more changed keys, the next version copies all entries, once."""


class LayeredMap(Mapping[K, V]):
    """An immutable map; None is not a value. It equals, and iterates as, a dict with the same history of changes.

    Versions share `_base`, a dict. `_recent` holds the entries that changed since, with None for removed keys.
    Invariant: a key of `_base` that was removed returns only in a new base, because a dict would list it last. So the
    order does not depend on when a base was made, and is the same on all nodes.
    """

    __slots__ = ("_base", "_entries", "_recent")

    def __init__(self, base: dict[K, V], recent: dict[K, V | None] | None = None) -> None:
        """Neither dict may change from now on."""
        self._base = base
        self._recent = recent or {}
        self._entries = None if recent else base

    @classmethod
    def of(cls, entries: Mapping[K, V]) -> LayeredMap[K, V]:
        return entries if isinstance(entries, LayeredMap) else cls(dict(entries))

    def replacing(self, entries: Mapping[K, V]) -> LayeredMap[K, V]:
        """Return the map with these entries added or replaced."""
        returns = any(key in self._recent and self._recent[key] is None for key in entries)
        if returns or len(self._recent) + len(entries) > RECENT_MAX:
            return LayeredMap({**self.as_dict(), **entries})
        return LayeredMap(self._base, {**self._recent, **entries})

    def without(self, key: K) -> LayeredMap[K, V]:
        """Return the map without the key, which must be in it."""
        recent = {each: value for each, value in self._recent.items() if each != key}
        if key in self._base:
            recent[key] = None
        after = LayeredMap(self._base, recent)
        return after if len(recent) <= RECENT_MAX else LayeredMap(after.as_dict())

    def changed_since(self, before: LayeredMap[K, V]) -> list[K]:
        """Return the keys that are new, removed, or map to another object than before. Cheap if few changed."""
        if before._base is self._base:
            keys = {**self._recent, **before._recent}
            return [key for key in keys if self.get(key) is not before.get(key)]
        old, new = before.as_dict(), self.as_dict()
        changed = [key for key, value in new.items() if old.get(key) is not value]
        return changed + [key for key in old if key not in new]

    def as_dict(self) -> dict[K, V]:
        """Return all entries in a dict, which the caller must not change."""
        if self._entries is None:
            entries = {**self._base, **self._recent}
            self._entries = {key: value for key, value in entries.items() if value is not None}
        return self._entries

    def __getitem__(self, key: K) -> V:
        value = self._recent[key] if key in self._recent else self._base[key]
        if value is None:
            raise KeyError(key)
        return value

    def get(self, key: K, default: V | None = None) -> V | None:  # type: ignore[override]  # without Mapping's overloads
        value = self._recent[key] if key in self._recent else self._base.get(key)
        return default if value is None else value

    def __contains__(self, key: object) -> bool:
        return self.get(key) is not None  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.as_dict())

    def __iter__(self) -> Iterator[K]:
        return iter(self.as_dict())

    def keys(self) -> KeysView[K]:
        return self.as_dict().keys()

    def values(self) -> ValuesView[V]:
        return self.as_dict().values()

    def items(self) -> ItemsView[K, V]:
        return self.as_dict().items()

    def __repr__(self) -> str:
        return f"LayeredMap({self.as_dict()!r})"
