"""Warnings about strangers, at a limited rate: they decide how many there are."""

from __future__ import annotations

from typing import Any

from chronik.node.runtime import Runtime

LOGGED_MAX, LOGGED_S = 10, 5.0
"""This many lines are logged in this time."""


class LimitedLog:
    """Logs an event of one kind; of those beyond the limit, their number with the next line. Owned by the loop."""

    def __init__(self, runtime: Runtime, event: str, event_of_many: str) -> None:
        self._loop = runtime.loop
        self._log = runtime.log.bind(component="node")
        self._event = event
        self._event_of_many = event_of_many
        self._since_s = 0.0
        self._count = 0

    def __call__(self, **fields: Any) -> None:
        now_s = self._loop.time()
        if now_s - self._since_s >= LOGGED_S:
            if self._count > LOGGED_MAX:
                self._log.warning(self._event_of_many, count=self._count)
            self._since_s, self._count = now_s, 0
        self._count += 1
        if self._count <= LOGGED_MAX:
            self._log.warning(self._event, **fields)
