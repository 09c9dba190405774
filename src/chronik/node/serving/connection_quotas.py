"""Limits the connections of clients: how many each address may have, and how many are accepted per second (KIP-612).

- Above `max.connections.per.ip` a connection is closed at once.
- Above the address's `connection_creation_rate` it is not served, and closed after the throttle time: a client that
  reconnects in a loop is slowed down.
- Above the node's `max.connection.creation.rate` it is served late, as if it had been accepted late.
"""

from __future__ import annotations

from collections.abc import Mapping

from chronik.metadata.broker_configs import MAX_CONNECTION_CREATION_RATE, MAX_CONNECTIONS_PER_IP
from chronik.metadata.image import ClusterImage
from chronik.node.runtime import Runtime
from chronik.node.serving.connection import Connection
from chronik.node.topic_settings import dynamic_values
from chronik.quotas.entities import QuotaTable, normalized_address
from chronik.quotas.rates import SampledRate, TokenBucket, Tracked, Windows

ADDRESSES_MAX = 10_000
"""The most addresses whose connection rate is tracked; beyond it the least recently used one is dropped."""
LATE_CLOSES_MAX = 1_000
"""The most connections that wait for a late close; further ones are closed at once."""
ACCEPT_DELAY_MS_MAX = 30_000
"""A connection that would have to wait longer is refused: most clients have given up by then."""


class ConnectionQuotas:
    """Owned by the loop. Invariant: `_counts` has the number of each address in `_open`, the connections that count."""

    def __init__(self, runtime: Runtime) -> None:
        config = runtime.config
        self._config = config
        self._loop = runtime.loop
        self._metrics = runtime.metrics
        self._windows = Windows(config.quota_window_num, config.quota_window_size_seconds * 1000)
        self._open: dict[Connection, str] = {}
        self._counts: dict[str, int] = {}
        self._per_ip_overrides: Mapping[str, int] = {
            normalized_address(address): count for address, count in config.connections_max_per_ip_overrides.items()
        }
        self._per_ip_max = config.connections_max_per_ip
        self._rate_max: float = config.connection_creation_rate
        self._table = QuotaTable()
        windows = self._windows
        self._rates = Tracked[str, SampledRate](
            lambda: SampledRate(windows), (windows.count + 1) * windows.size_ms, ADDRESSES_MAX
        )
        self._accepted = TokenBucket(windows)
        self._late_closes = 0

    def update(self, image: ClusterImage) -> None:
        """Apply the ip quotas and broker configs of this image to later connections."""
        self._table = QuotaTable((quotas.entity, quotas.values) for quotas in image.client_quotas)
        self._per_ip_max = self._dynamic(MAX_CONNECTIONS_PER_IP, image, self._config.connections_max_per_ip)
        self._rate_max = self._dynamic(MAX_CONNECTION_CREATION_RATE, image, self._config.connection_creation_rate)

    def _dynamic(self, name: str, image: ClusterImage, setting: int) -> int:
        values = dynamic_values(name, self._config.node_id, image)
        return int(values[0].value) if values else setting

    def opened(self, connection: Connection) -> str | None:
        """Admit the connection, now or late; or return why it must be closed."""
        address = normalized_address(connection.client_host)
        count = self._counts.get(address, 0)
        count_max = self._per_ip_overrides.get(address, self._per_ip_max)
        if count >= count_max:
            return f"{address} has {count} connections, and {count_max} are allowed"
        now_ms = self._loop.time() * 1000
        throttle_ms = self._address_throttle_ms(address, now_ms) if self._table.limits_addresses else 0
        if throttle_ms:
            self._metrics.throttled("ip", throttle_ms)
            if self._late_closes >= LATE_CLOSES_MAX:
                return f"{address} opens connections faster than its quota allows"
            self._late_closes += 1
            connection.hold()
            self._loop.call_later(throttle_ms / 1000, self._close_late, connection)
            return None
        delay_ms = self._accept_delay_ms(now_ms)
        if delay_ms > ACCEPT_DELAY_MS_MAX:
            return f"connections arrive faster than {self._rate_max:g} per second"
        self._open[connection] = address
        self._counts[address] = count + 1
        if delay_ms:
            self._metrics.throttled("connection", delay_ms)
            connection.mute(delay_ms / 1000)
        return None

    def closed(self, connection: Connection) -> None:
        address = self._open.pop(connection, None)
        if address is None:
            return
        count = self._counts[address] - 1
        if count:
            self._counts[address] = count
        else:
            del self._counts[address]

    def _address_throttle_ms(self, address: str, now_ms: float) -> int:
        """Count a connection of the address; if that exceeds its rate, return for how long, and do not count it."""
        limit = self._table.connection_rate(address)
        if limit is None:
            return 0
        rate = self._rates.use(address, now_ms)
        rate.record(1, now_ms)
        throttle_ms = min(rate.throttle_ms(limit, now_ms), self._windows.size_ms)
        if throttle_ms:
            rate.record(-1, now_ms)
        return throttle_ms

    def _close_late(self, connection: Connection) -> None:
        self._late_closes -= 1
        connection.close()

    def _accept_delay_ms(self, now_ms: float) -> int:
        """Take the connection's token, unless the wait for it is too long."""
        rate = self._rate_max
        bucket = self._accepted
        waited_ms = bucket.throttle_ms(rate, now_ms)
        if waited_ms > ACCEPT_DELAY_MS_MAX:
            return waited_ms
        bucket.take(1, rate, now_ms)
        return bucket.throttle_ms(rate, now_ms)
