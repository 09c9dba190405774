"""Delays after wrong passwords, by client address. They grow with each failure, and the table is bounded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

DELAY_S_MAX = 30.0
FORGET_S = 600.0
"""Failures of an address count until it has had none for this time. A right password does not clear them: an attacker
may have an account of his own."""
ADDRESSES_MAX = 10_000
"""Beyond this, the address whose last failure is oldest is dropped."""
CHECKS_PER_ADDRESS_MAX = 8
"""Passwords of one address that are checked at the same time. An address with failures gets one at a time."""
NETWORK_BITS = 64
"""A client usually has a whole IPv6 network of this prefix, so all its addresses count as one."""


@dataclass(slots=True)
class _Failures:
    count: int
    last_s: float
    until_s: float


class LoginDelays:
    """Owned by the event loop. Invariant: `_failures` is ordered by the time of the last failure."""

    def __init__(self, clock: Callable[[], float], first_s: float) -> None:
        self._clock = clock
        self._first_s = first_s
        self._failures: dict[str, _Failures] = {}
        self._checking: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._failures)

    def begin(self, host: str) -> float:
        """Begin a check, which `end` ends, and return 0; or return how many seconds the client has to wait."""
        key, now_s = _network(host), self._clock()
        known, running = self._failures.get(key), self._checking.get(key, 0)
        if known is not None and now_s - known.last_s >= FORGET_S:
            del self._failures[key]
            known = None
        if known is not None and now_s < known.until_s:
            return known.until_s - now_s
        if running >= (CHECKS_PER_ADDRESS_MAX if known is None else 1):
            return max(self._first_s, 1.0)
        self._checking[key] = running + 1
        return 0.0

    def end(self, host: str, *, has_failed: bool) -> None:
        key, now_s = _network(host), self._clock()
        running = self._checking.pop(key) - 1
        if running:
            self._checking[key] = running
        if not has_failed:
            return
        before = self._failures.pop(key, None)
        count = 1 if before is None else before.count + 1
        delay_s = min(DELAY_S_MAX, self._first_s * 2 ** min(count - 1, 30))
        self._failures[key] = _Failures(count, now_s, now_s + delay_s)
        if len(self._failures) > ADDRESSES_MAX:
            del self._failures[next(iter(self._failures))]


def _network(host: str) -> str:
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if not isinstance(address, IPv6Address) or address.ipv4_mapped is not None:
        return host
    return str(IPv6Address(int(address) >> NETWORK_BITS << NETWORK_BITS))
