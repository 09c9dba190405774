"""How Kafka measures usage: rates over sampled windows, token buckets, and the throttle time that follows.

Times are milliseconds of any clock that does not go backwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

THROTTLE_MS_MAX = 3_600_000
"""Nothing is throttled for longer. Kafka has no such bound: one large request under a tiny quota lasts for months."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Windows:
    """`quota.window.num` samples of `quota.window.size.seconds` each."""

    count: int = 11
    size_ms: int = 1_000

    @property
    def full_ms(self) -> int:
        """The time over which a client that was idle may use its whole quota at once."""
        return (self.count - 1) * self.size_ms


@dataclass(slots=True)
class _Sample:
    start_ms: float
    last_ms: float
    value: float = 0.0


class SampledRate:
    """A rate per second, as Kafka's `Rate` measures it.

    The rate is the sum of the samples divided by the time since the oldest one began, but by no less than all windows
    except one: a client that was idle is not throttled for its first burst. A sample expires `count` windows after its
    last event.

    Invariant: at most `count + 1` samples, oldest first.
    """

    __slots__ = ("_samples", "_windows")

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        self._samples: deque[_Sample] = deque(maxlen=windows.count + 1)

    def record(self, value: float, now_ms: float) -> None:
        """Add to the usage; a negative value takes back what was recorded at the same time."""
        samples = self._samples
        if not samples or now_ms - samples[-1].start_ms >= self._windows.size_ms:
            samples.append(_Sample(now_ms, now_ms))
        sample = samples[-1]
        sample.value += value
        sample.last_ms = now_ms

    def rate(self, now_ms: float) -> float:
        window_ms = self._measured_ms(now_ms)
        return sum(sample.value for sample in self._samples) * 1000 / window_ms

    def _measured_ms(self, now_ms: float) -> float:
        samples, windows = self._samples, self._windows
        expiry_ms = windows.count * windows.size_ms
        while samples and now_ms - samples[0].last_ms >= expiry_ms:
            samples.popleft()
        elapsed_ms = now_ms - samples[0].start_ms if samples else 0.0
        missing = windows.count - 1 - int(elapsed_ms // windows.size_ms)
        return max(1.0, elapsed_ms + max(0, missing) * windows.size_ms)

    def throttle_ms(self, limit: float, now_ms: float) -> int:
        """Return how long the client must pause until its rate is within the limit; 0 if it is."""
        rate = self.rate(now_ms)
        if rate <= limit:
            return 0
        if limit <= 0:
            return THROTTLE_MS_MAX
        # (rate - limit) / limit of the measured time: after that pause the same usage is spread to the limit.
        return min(THROTTLE_MS_MAX, max(1, round((rate - limit) / limit * self._measured_ms(now_ms))))


class TokenBucket:
    """As Kafka's `TokenBucket`: `limit` tokens per second flow in, up to all windows' worth; debts are allowed.

    A new bucket is full.
    """

    __slots__ = ("_tokens", "_updated_ms", "_windows")

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        self._tokens: float | None = None
        self._updated_ms = 0.0

    def _refill(self, limit: float, now_ms: float) -> float:
        full = limit * self._windows.count * self._windows.size_ms / 1000
        tokens = full if self._tokens is None else self._tokens + limit * (now_ms - self._updated_ms) / 1000
        self._updated_ms = now_ms
        self._tokens = min(full, tokens)
        return self._tokens

    def take(self, count: float, limit: float, now_ms: float) -> None:
        self._tokens = self._refill(limit, now_ms) - count

    def throttle_ms(self, limit: float, now_ms: float) -> int:
        """Return how long it takes until the debt is paid; 0 if there is none."""
        tokens = self._refill(limit, now_ms)
        return 0 if tokens >= 0 else min(THROTTLE_MS_MAX, max(1, round(-tokens / limit * 1000)))


class Tracked(Generic[K, V]):
    """The usage of each bucket, created on first use.

    Invariant: at most `tracked_max` buckets, least recently used first. A bucket that was idle for `idle_ms` is
    dropped: by then a new one measures the same.
    """

    def __init__(self, make: Callable[[], V], idle_ms: float, tracked_max: int) -> None:
        self._make = make
        self._idle_ms = idle_ms
        self._tracked_max = tracked_max
        self._used: dict[K, tuple[V, float]] = {}

    def __len__(self) -> int:
        return len(self._used)

    def use(self, key: K, now_ms: float) -> V:
        entry = self._used.pop(key, None)
        usage = self._make() if entry is None else entry[0]
        self._used[key] = (usage, now_ms)
        if entry is None:
            self._drop_old(now_ms)
        return usage

    def _drop_old(self, now_ms: float) -> None:
        used = self._used
        while len(used) > 1:
            key = next(iter(used))
            if len(used) <= self._tracked_max and now_ms - used[key][1] < self._idle_ms:
                return
            del used[key]
