"""Tests as coroutines: each runs on its own loop, with a scene that is opened for it."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeAlias

Story: TypeAlias = Callable[..., Coroutine[Any, Any, None]]


def async_test(
    open_scene: Callable[..., AbstractAsyncContextManager[Any]], *fixtures: str
) -> Callable[[Story], Callable[..., None]]:
    """Make a test of a coroutine whose first parameter is the scene, opened with the values of these fixtures."""

    def decorate(story: Story) -> Callable[..., None]:
        @functools.wraps(story)
        def test(**values: Any) -> None:
            opened_with = [values.pop(name) for name in fixtures]

            async def run() -> None:
                async with open_scene(*opened_with) as scene:
                    await story(scene, **values)

            asyncio.run(run())

        names = [*fixtures, *list(inspect.signature(story).parameters)[1:]]
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return test

    return decorate
