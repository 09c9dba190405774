"""When to try again after a failure, and when to stop. Pure: the caller hands in the time."""

from __future__ import annotations

from collections.abc import Callable

FIRST_S = 1.0
LONGEST_S = 30.0


class Retries:
    """The failures of one job since it last made progress. The pause doubles with each, up to a bound."""

    def __init__(
        self, retry_for_s: float, longest_s: float = LONGEST_S, chance: Callable[[], float] = lambda: 0.0
    ) -> None:
        """`chance`: a number from 0 to 1, which shortens a pause by up to a half. Jobs that fail together then part."""
        self.retry_for_s = retry_for_s
        self._longest_s = longest_s
        self._chance = chance
        self._failing_since_s: float | None = None
        self._pause_s = FIRST_S

    @property
    def is_failing(self) -> bool:
        return self._failing_since_s is not None

    def failed(self, now_s: float) -> float | None:
        """Return the time of the next attempt, or None if the job has failed for too long."""
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        left_s = self._failing_since_s + self.retry_for_s - now_s
        if left_s <= 0:
            return None
        pause_s, self._pause_s = min(self._pause_s, left_s), min(2 * self._pause_s, self._longest_s)
        return now_s + pause_s * (1 - self._chance() / 2)

    def succeeded(self, now_s: float) -> float | None:
        """Return how long the job had failed, or None if it had not."""
        since_s, self._failing_since_s, self._pause_s = self._failing_since_s, None, FIRST_S
        return None if since_s is None else now_s - since_s
