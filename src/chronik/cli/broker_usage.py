"""What the brokers cost during a benchmark, read from their /metrics; None if no broker serves them."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass

HTTP_PORT_BELOW_KAFKA = 3000
TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class BrokerUsage:
    """Sums over the brokers that answered."""

    cpu_s: float
    resident_bytes: int


def http_addresses(brokers: Iterable[tuple[str, int]], override: str | None) -> list[str]:
    """Return the addresses to query: the override, or 3000 below each Kafka port."""
    if override is not None:
        return [override]
    return [f"{host}:{port - HTTP_PORT_BELOW_KAFKA}" for host, port in brokers if port > HTTP_PORT_BELOW_KAFKA]


def read_usage(addresses: Iterable[str]) -> BrokerUsage | None:
    found = [usage for address in addresses if (usage := _read_one(address)) is not None]
    if not found:
        return None
    return BrokerUsage(sum(usage.cpu_s for usage in found), sum(usage.resident_bytes for usage in found))


def _read_one(address: str) -> BrokerUsage | None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{address}/metrics", timeout=TIMEOUT_S) as response:
            text = response.read().decode()
    except (OSError, ValueError, urllib.error.URLError):
        return None
    if "chronik_" not in text:
        return None
    values = dict(line.split(" ", 1) for line in text.splitlines() if line.startswith("process_"))
    try:
        resident = float(values.get("process_resident_memory_bytes", 0))
        return BrokerUsage(float(values["process_cpu_seconds_total"]), int(resident))
    except (KeyError, ValueError):
        return None
