"""Metrics that clients push (KIP-714): which client is to push what, and the last values that it has pushed.

A client requests its subscription (GetTelemetrySubscriptions), then pushes its metrics at the interval (PushTelemetry).
Any node may receive them: the id of a subscription depends only on the configs and the client's instance id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final
from uuid import UUID

from crc32c import crc32c

from chronik.metadata.client_metrics import ALL_METRICS, INTERVAL_MS_DEFAULT, Subscription, subscription
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.runtime import Runtime
from chronik.node.serving.api import Request
from chronik.observe.metrics import ClientMetric
from chronik.wire.compression import CODECS, GZIP, LZ4, SNAPPY, ZSTD, decompress
from chronik.wire.errors import ErrorCode, KafkaError, MalformedRequest
from chronik.wire.otlp import Attributes, Point, read_points

COMPRESSION_TYPES: Final = (ZSTD, LZ4, GZIP, SNAPPY)
"""The preferred one first."""
INSTANCES_MAX = 10_000
INSTANCE_EXPIRY_S = 60.0
"""A client that is silent for longer, and for three intervals, is forgotten with its metrics."""
EXPIRY_CHECK_S = 10.0
SERIES_MAX = 20_000
SERIES_PER_CLIENT_MAX = 500
NAME_CHARS_MAX = 200
ATTRIBUTES_CHARS_MAX = 400
CLIENT_ID_CHARS_MAX = 200
"""How much of a client id is shown. A match compares all of it."""
DECOMPRESSED_BYTES_PER_BYTE_MAX = 4
DECODING_MAX = 1
"""Pushes are decoded one after another, in a thread: decoding is work of the interpreter, and so delays the loop."""
WAITING_MAX = 64
"""Further pushes are throttled."""

_ANSWERED_AGAIN: Final = (ErrorCode.unknown_subscription_id, ErrorCode.unsupported_compression_type)
"""After these errors a client requests its subscription at once."""

Series = dict[tuple[str, Attributes], Point]


@dataclass(slots=True, eq=False)
class ClientInstance:
    """One client, and the last values that it pushed here. A client is known by its principal and instance id."""

    id: UUID
    principal: str
    attributes: Mapping[str, str]
    """The values that a subscription can match."""
    source: object = None
    """The configs from which the next three were derived."""
    metrics: tuple[str, ...] = ()
    interval_ms: int = INTERVAL_MS_DEFAULT
    subscription_id: int = 0
    got_s: float | None = None
    pushed_s: float | None = None
    pushed_ms: int = 0
    is_terminating: bool = False
    last_error: ErrorCode = ErrorCode.none
    expires_s: float = 0.0
    series: Series = field(default_factory=dict)

    @property
    def client_id(self) -> str:
        return self.attributes["client_id"][:CLIENT_ID_CHARS_MAX]

    def subscribes_to(self, name: str) -> bool:
        return self.metrics == (ALL_METRICS,) or name.startswith(self.metrics)


class ClientTelemetry:
    """Owned by the loop.

    Invariants: at most INSTANCES_MAX instances, least recently heard first; `_series` is the sum of their series, at
    most SERIES_MAX.
    """

    def __init__(self, runtime: Runtime, metadata: MetadataLog) -> None:
        self._runtime = runtime
        self._metadata = metadata
        self._clock = runtime.loop.time
        self._metrics = runtime.metrics
        self._log = runtime.log.bind(component="telemetry")
        self._instances: dict[tuple[str, UUID], ClientInstance] = {}
        self._series = 0
        self._source: object = None
        self._subscriptions: list[Subscription] = []
        self._expired_s = self._clock()
        self._decoding = asyncio.Semaphore(DECODING_MAX)
        self._waiting = 0

    @property
    def max_bytes(self) -> int:
        return self._runtime.config.telemetry_max_bytes

    def instances(self) -> list[ClientInstance]:
        """The known clients, the one that was heard last comes last."""
        self._expire()
        return list(self._instances.values())

    def gauges(self) -> Iterator[ClientMetric]:
        for instance in self.instances():
            attributes, client_id = instance.attributes, instance.client_id
            software = f"{attributes['client_software_name']} {attributes['client_software_version']}".strip()
            for (name, pairs), point in instance.series.items():
                shown = ",".join(f"{key}={value}" for key, value in pairs)
                yield ClientMetric(client_id, str(instance.id), software, name, shown, point.value)

    # -- requests ------------------------------------------------------------------------------------------------------

    def get(self, request: Request) -> ClientInstance:
        """Return the subscription of a client. THROTTLING_QUOTA_EXCEEDED if it requests it too often."""
        instance = self._instance(request, request.message.client_instance_id or self._runtime.env.new_uuid())
        now_s = self._clock()
        last_s = max((at for at in (instance.got_s, instance.pushed_s) if at is not None), default=None)
        is_early = last_s is not None and (now_s - last_s) * 1000 < instance.interval_ms
        if is_early and instance.last_error not in _ANSWERED_AGAIN:
            raise self._throttled()
        instance.got_s = now_s
        instance.last_error = ErrorCode.none
        return instance

    async def push(self, request: Request) -> None:
        """Keep the metrics that a client pushes. KafkaError if they are invalid, too large or too early."""
        message = request.message
        if message.client_instance_id is None:
            raise self._refused(ErrorCode.invalid_request, "a push without a client instance id")
        instance = self._instance(request, message.client_instance_id)
        try:
            self._check(instance, message.subscription_id, message.compression_type, message.terminating)
            data = message.metrics or b""
            if len(data) > self.max_bytes:
                raise self._refused(ErrorCode.telemetry_too_large, f"{len(data)} bytes, at most {self.max_bytes}")
            points, dropped = await self._decode(data, message.compression_type)
        except KafkaError as error:
            instance.last_error = error.code
            raise
        finally:
            instance.is_terminating = message.terminating
        instance.last_error = ErrorCode.none
        instance.pushed_ms = self._runtime.env.wall_ms()
        self._metrics.client_pushes["accepted"] += 1
        self._metrics.client_metrics_dropped += dropped
        if self._instances.get((instance.principal, instance.id)) is instance:
            self._keep(instance, points)

    def _check(self, instance: ClientInstance, subscription_id: int, codec: int, is_terminating: bool) -> None:
        if instance.is_terminating:
            raise self._refused(ErrorCode.invalid_request, "the client has terminated")
        now_s, got_s, pushed_s = self._clock(), instance.got_s, instance.pushed_s
        # A push may follow the request for the subscription at once: clients add jitter to the interval.
        is_first = pushed_s is None or (got_s is not None and got_s > pushed_s)
        if not is_first and pushed_s is not None and (now_s - pushed_s) * 1000 < instance.interval_ms:
            if not is_terminating:
                raise self._throttled()
        else:
            instance.pushed_s = now_s
        if subscription_id != instance.subscription_id:
            raise self._refused(ErrorCode.unknown_subscription_id, "the subscriptions have changed")
        if not 0 <= codec < len(CODECS):
            raise self._refused(ErrorCode.unsupported_compression_type, f"compression type {codec} is unknown")

    async def _decode(self, data: bytes, codec: int) -> tuple[list[Point], int]:
        if not data:
            return [], 0
        if self._waiting >= WAITING_MAX:
            raise self._throttled()
        self._waiting += 1
        try:
            async with self._decoding:
                work = partial(_read, bytes(data), codec, DECOMPRESSED_BYTES_PER_BYTE_MAX * self.max_bytes)
                return await self._runtime.run_blocking(work)
        except (KafkaError, MalformedRequest) as error:
            raise self._refused(ErrorCode.invalid_record, str(error)) from None
        finally:
            self._waiting -= 1

    def _throttled(self) -> KafkaError:
        self._metrics.client_pushes["throttled"] += 1
        return KafkaError(ErrorCode.throttling_quota_exceeded, "the push interval has not passed")

    def _refused(self, code: ErrorCode, reason: str) -> KafkaError:
        self._metrics.client_pushes["refused"] += 1
        self._log.debug("client_metrics_refused", error=code.name, reason=reason)
        return KafkaError(code, reason)

    # -- instances -----------------------------------------------------------------------------------------------------

    def _instance(self, request: Request, instance_id: UUID) -> ClientInstance:
        """Return the client, with its current subscription."""
        self._expire()
        key = (request.access.principal, instance_id)
        instance = self._instances.pop(key, None)
        if instance is None:
            instance = ClientInstance(instance_id, key[0], _attributes(request, instance_id))
            while len(self._instances) >= INSTANCES_MAX:
                self._forget(next(iter(self._instances)))
        self._instances[key] = instance
        self._subscribe(instance)
        instance.expires_s = self._clock() + max(INSTANCE_EXPIRY_S, 3 * instance.interval_ms / 1000)
        self._metrics.client_instances = len(self._instances)
        return instance

    def _subscribe(self, instance: ClientInstance) -> None:
        configs = self._metadata.image.client_metrics
        if configs is not self._source:
            self._source = configs
            self._subscriptions = [each for _, text in sorted(configs.items()) if (each := _parsed(text)) is not None]
        if instance.source is configs:
            return
        instance.source = configs
        matching = [each for each in self._subscriptions if each.matches(instance.attributes)]
        metrics = sorted({name for each in matching for name in each.metrics})
        instance.metrics = (ALL_METRICS,) if ALL_METRICS in metrics else tuple(metrics)
        instance.interval_ms = min((each.interval_ms for each in matching), default=INTERVAL_MS_DEFAULT)
        text = f"{','.join(instance.metrics)} {instance.interval_ms}"
        before = instance.subscription_id
        instance.subscription_id = _signed(crc32c(text.encode() + instance.id.bytes))
        if before != instance.subscription_id:
            # A client with another subscription need not wait for the interval of the last one.
            instance.got_s = instance.pushed_s = None

    def _forget(self, key: tuple[str, UUID]) -> None:
        instance = self._instances.pop(key)
        self._series -= len(instance.series)
        instance.series = {}
        self._metrics.client_instances = len(self._instances)

    def _expire(self) -> None:
        now_s = self._clock()
        if now_s - self._expired_s < EXPIRY_CHECK_S:
            return
        self._expired_s = now_s
        for key in [key for key, instance in self._instances.items() if instance.expires_s <= now_s]:
            self._forget(key)

    def _keep(self, instance: ClientInstance, points: list[Point]) -> None:
        """Keep the last value of each series, within the bounds."""
        series = instance.series
        for point in points:
            key = (point.name, point.attributes)
            known = series.get(key)
            if not instance.subscribes_to(point.name):
                continue
            if known is None:
                chars = sum(len(name) + len(value) for name, value in point.attributes)
                is_full = len(series) >= SERIES_PER_CLIENT_MAX or self._series >= SERIES_MAX
                if is_full or len(point.name) > NAME_CHARS_MAX or chars > ATTRIBUTES_CHARS_MAX:
                    self._metrics.client_metrics_dropped += 1
                    continue
                self._series += 1
            elif point.is_delta:
                point = point._replace(value=known.value + point.value)
            series[key] = point


def _attributes(request: Request, instance_id: UUID) -> dict[str, str]:
    connection = request.connection
    name, version = connection.software
    return {
        "client_instance_id": str(instance_id),
        "client_id": request.client_id or "",
        "client_software_name": name,
        "client_software_version": version,
        "client_source_address": connection.client_host,
        "client_source_port": str(connection.client_port),
    }


def _parsed(configs: Mapping[str, str]) -> Subscription | None:
    try:
        return subscription(configs)
    except KafkaError:
        # Another version accepted these configs.
        return None


def _read(data: bytes, codec: int, max_bytes: int) -> tuple[list[Point], int]:
    return read_points(decompress(codec, data, max_bytes), SERIES_PER_CLIENT_MAX)


def _signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value
