"""How fast one address may guess passwords: failed attempts are delayed, longer with each failure, and few at a time.

A failure is pending until its delay has passed, also if the client disconnects before. An address with as many pending
failures as it may have waits before its next password is checked. SASL permits several, so a client with a wrong
password does not delay the right ones beside it, which may share its address. The page permits one.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address

UNCHANGED_FAILURES = 3
"""This many failures have the same delay: typing errors. Then it doubles."""
FORGET_S = 600.0
"""Failures of an address count until it has had none for this time. A right password does not clear them: an attacker
may have an account."""
ADDRESSES_MAX = 10_000
"""Beyond this, the address whose last failure is oldest is dropped."""
CHECKS_PER_ADDRESS_MAX = 8
"""Passwords of an address without failures that are checked at a time, unless more failures may be pending."""
BUSY_WAIT_S = 1.0
"""How long an address waits whose passwords are all being checked."""
NETWORK_BITS = 64
"""A client usually has a whole IPv6 network of this prefix, so all its addresses count as one."""


@dataclass(slots=True)
class _Failures:
    """The failures of an address. `pending` has the times at which their delays end."""

    count: int = 0
    last_s: float = 0.0
    pending: tuple[float, ...] = ()


class FailureDelays:
    """Failures by address. Owned by the loop.

    Invariant: `_failures` is ordered by the time of the last failure, oldest first. An address has at most
    `pending_max` passwords that are checked or whose failures are pending, except for calls of `failed` alone.
    """

    def __init__(self, delay_ms: int, delay_ms_max: int, pending_max: int) -> None:
        self._delay_ms = delay_ms
        self._delay_ms_max = max(delay_ms, delay_ms_max)
        self._pending_max = pending_max
        self._failures: dict[str, _Failures] = {}
        self._checking: dict[str, int] = {}

    @property
    def delay_s_max(self) -> float:
        return self._delay_ms_max / 1000

    def __len__(self) -> int:
        return len(self._failures)

    def begin(self, address: str, now_s: float) -> float:
        """Begin a check, which `end` ends, and return 0; or return how many seconds the client has to wait."""
        key = _network(address)
        known, running = self._failures.get(key), self._checking.get(key, 0)
        pending: tuple[float, ...] = ()
        at_once_max = max(self._pending_max, CHECKS_PER_ADDRESS_MAX)
        if known is not None and now_s - known.last_s < FORGET_S:
            pending = known.pending = tuple(until_s for until_s in known.pending if until_s > now_s)
            at_once_max = self._pending_max
        if running + len(pending) >= at_once_max:
            return min(pending) - now_s if pending else BUSY_WAIT_S
        self._checking[key] = running + 1
        return 0.0

    def end(self, address: str, now_s: float, *, has_failed: bool) -> float:
        """End a check. Return the delay of a failure in seconds, otherwise 0."""
        key = _network(address)
        running = self._checking.pop(key) - 1
        if running:
            self._checking[key] = running
        return self.failed(address, now_s) if has_failed else 0.0

    def failed(self, address: str, now_s: float) -> float:
        """Record a failure; return its delay in seconds."""
        key = _network(address)
        known = self._failures.pop(key, None)
        if known is None or now_s - known.last_s >= FORGET_S:
            known = _Failures()
        known.count += 1
        known.last_s = now_s
        doublings = min(max(0, known.count - UNCHANGED_FAILURES), 16)
        delay_s = min(self._delay_ms_max, self._delay_ms << doublings) / 1000
        # The newest ones: calls of `failed` alone have no check that limits them.
        known.pending = (*known.pending, now_s + delay_s)[-self._pending_max :]
        if len(self._failures) >= ADDRESSES_MAX:
            del self._failures[next(iter(self._failures))]
        self._failures[key] = known
        return delay_s


def _network(host: str) -> str:
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if not isinstance(address, IPv6Address) or address.ipv4_mapped is not None:
        return host
    return str(IPv6Address(int(address) >> NETWORK_BITS << NETWORK_BITS))
