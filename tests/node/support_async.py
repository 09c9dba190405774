"""Tests whose first parameter is a scene, which is opened for each of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeAlias

Story: TypeAlias = Callable[..., Coroutine[Any, Any, None]]


def async_test(open_scene: Callable[..., AbstractAsyncContextManager[Any]], *fixtures: str) -> Callable[[Story], Story]:
    """Make a test of a coroutine whose first parameter is the scene, opened with the values of these fixtures."""

    def decorate(story: Story) -> Story:
        @functools.wraps(story)
        async def test(**values: Any) -> None:
            opened_with = [values.pop(name) for name in fixtures]
            async with open_scene(*opened_with) as scene:
                await story(scene, **values)

        names = [*fixtures, *list(inspect.signature(story).parameters)[1:]]
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return test

    return decorate
