"""Enforces the quotas of clients on this node (KIP-13, 124, 219, 599).

A client over a quota gets its response at once, with the throttle time in it; its connection is muted for that time.

What is counted
- `producer_byte_rate`: the bytes of Produce requests, when they arrive, on the node that the client is connected to. A
  batch that is forwarded to its leader is not counted again there.
- `consumer_byte_rate`: the bytes of records in Fetch responses. A response that would exceed the quota is replaced by
  an empty one, and its bytes are not counted. Replicas are exempt.
- `request_percentage`: the CPU time that the loop spends in the request's handler and, for all APIs but Produce and
  Fetch, in the steps of its task. Waits are not counted, nor threads, nor the tasks and other nodes that do a part of
  the work. 100 is one core. A client is throttled for at most one window at a time.
- `controller_mutation_rate`: the partitions that CreateTopics, CreatePartitions and DeleteTopics create and delete, and
  those of topics that Metadata creates, on the controller.

Requests of other nodes are exempt, as are those that authenticate a client: they do not have its name yet.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, NamedTuple, Protocol, TypeVar

from chronik.metadata.image import ClusterImage
from chronik.node.runtime import Runtime
from chronik.node.serving.connection import Reply, Request
from chronik.quotas.entities import Limit, QuotaKey, QuotaTable
from chronik.quotas.rates import THROTTLE_MS_MAX, SampledRate, TokenBucket, Tracked, Windows
from chronik.wire.api import ApiKey
from chronik.wire.errors import ErrorCode, KafkaError

T = TypeVar("T")

BUCKETS_MAX = 10_000
"""The most buckets whose usage is tracked for each kind of quota; beyond it the least recently used one is dropped."""
CLIENTS_MAX = 10_000
"""The most clients whose limits are remembered, instead of looked up for each request."""
LOG_INTERVAL_S = 60.0
LOGGED_BUCKETS_MAX = 1_000
SASL_KEYS = frozenset({17, 36})
"""SaslHandshake and SaslAuthenticate."""

KIND_OF = {
    QuotaKey.PRODUCER_BYTE_RATE: "produce",
    QuotaKey.CONSUMER_BYTE_RATE: "fetch",
    QuotaKey.REQUEST_PERCENTAGE: "request",
    QuotaKey.CONTROLLER_MUTATION_RATE: "controller_mutation",
}
"""The quota's name in metrics and logs."""


class ClientLimits(NamedTuple):
    """What applies to one client; None is unlimited."""

    produce: Limit | None
    fetch: Limit | None
    request: Limit | None


UNLIMITED = ClientLimits(None, None, None)


class LimitedServer(Protocol):
    """A server whose requests are limited while `quotas` is set."""

    quotas: ClientQuotas | None


class ClientQuotas:
    """The usage of all clients of this node. Owned by the loop.

    Invariant: the servers have `quotas` set exactly while any quota applies to requests, so that a node without quotas
    spends nothing on them.
    """

    def __init__(self, runtime: Runtime) -> None:
        config = runtime.config
        self.windows = Windows(config.quota_window_num, config.quota_window_size_seconds * 1000)
        self.cpu_s = runtime.env.cpu_s
        self._clock = runtime.loop.time
        self._metrics = runtime.metrics
        self._log = runtime.log.bind(component="quotas")
        self._servers: list[LimitedServer] = []
        self._table = QuotaTable()
        self._limits: dict[tuple[str, str | None], ClientLimits] = {}
        # By then every sample has expired.
        idle_ms = (self.windows.count + 1) * self.windows.size_ms
        self._rates = {
            key: Tracked[object, SampledRate](lambda: SampledRate(self.windows), idle_ms, BUCKETS_MAX)
            for key in (QuotaKey.PRODUCER_BYTE_RATE, QuotaKey.CONSUMER_BYTE_RATE, QuotaKey.REQUEST_PERCENTAGE)
        }
        self._mutations = Tracked[object, TokenBucket](lambda: TokenBucket(self.windows), THROTTLE_MS_MAX, BUCKETS_MAX)
        self._logged_s: dict[object, float] = {}

    @property
    def now_ms(self) -> float:
        return self._clock() * 1000

    def serve(self, *servers: LimitedServer) -> None:
        """Limit the requests of these servers too."""
        self._servers += servers
        self._attach()

    def update(self, image: ClusterImage) -> None:
        """Apply the quotas of this image from the next request on. A muted connection stays so for its time."""
        self._table = QuotaTable((quotas.entity, quotas.values) for quotas in image.client_quotas)
        self._limits.clear()
        self._attach()

    def _attach(self) -> None:
        for server in self._servers:
            server.quotas = self if self._table.limits_requests else None

    # -- requests ------------------------------------------------------------------------------------------------------

    def limit(self, request: Request) -> LimitedRequest | None:
        """Return what a request needs to be counted, or None if no quota applies to its client."""
        principal, client_id = request.access.principal, request.client_id
        limits = self._limits.get((principal, client_id))
        if limits is None:
            limits = self._look_up(principal, client_id)
        if limits is UNLIMITED or request.api_key in SASL_KEYS:
            return None
        return LimitedRequest(self, request, limits)

    def run_hot(self, handler: Callable[[Request, Reply], None], request: Request, reply: Reply) -> None:
        """Run a handler that answers by itself."""
        limited = request.limits = self.limit(request)
        if limited is None:
            handler(request, reply)
            return
        if request.api_key == ApiKey.PRODUCE:
            limited.produced(len(request.frame))
        limited.run(lambda: handler(request, reply))

    def _look_up(self, principal: str, client_id: str | None) -> ClientLimits:
        table, user, name = self._table, user_of(principal), client_id or ""
        limits = ClientLimits(
            table.limit(QuotaKey.PRODUCER_BYTE_RATE, user, name),
            table.limit(QuotaKey.CONSUMER_BYTE_RATE, user, name),
            table.limit(QuotaKey.REQUEST_PERCENTAGE, user, name),
        )
        if limits == UNLIMITED:
            limits = UNLIMITED
        if len(self._limits) >= CLIENTS_MAX:
            self._limits.clear()
        self._limits[principal, client_id] = limits
        return limits

    def rate(self, key: QuotaKey, limit: Limit) -> SampledRate:
        return self._rates[key].use(limit.bucket, self.now_ms)

    # -- controller mutations ------------------------------------------------------------------------------------------

    def mutations(self, request: Request, strict_from: int) -> MutationQuota | None:
        """Return the quota that a request which creates or deletes partitions is charged to; None without one.

        From version `strict_from` of its API on, a request over the quota is refused; older ones are only throttled.
        """
        is_strict = request.api_version >= strict_from
        return self._mutations_of(request.access.principal, request.client_id or "", request, is_strict=is_strict)

    def charge_creation(self, principal: str, client_id: str, count: Callable[[], int]) -> None:
        """Charge a topic that a Metadata request creates. Raise THROTTLING_QUOTA_EXCEEDED if the quota is used up.

        `count` plans the topic, and returns its number of partitions.
        """
        quota = self._mutations_of(principal, client_id, None, is_strict=True)
        if quota is not None:
            quota.charge(count())

    def _mutations_of(
        self, principal: str, client_id: str, request: Request | None, *, is_strict: bool
    ) -> MutationQuota | None:
        limit = self._table.limit(QuotaKey.CONTROLLER_MUTATION_RATE, user_of(principal), client_id)
        if limit is None:
            return None
        bucket = self._mutations.use(limit.bucket, self.now_ms)
        return MutationQuota(self, request, limit, bucket, is_strict=is_strict)

    # -- throttling ----------------------------------------------------------------------------------------------------

    def throttled(self, key: QuotaKey, limit: Limit, throttle_ms: int) -> None:
        """Count a violation, and log it unless the same bucket was logged less than a minute ago."""
        kind = KIND_OF[key]
        self._metrics.throttled(kind, throttle_ms)
        now_s, logged = self._clock(), self._logged_s
        logged_at = (key, limit.bucket)
        last_s = logged.pop(logged_at, None)
        is_due = last_s is None or now_s - last_s >= LOG_INTERVAL_S
        logged[logged_at] = now_s if last_s is None or is_due else last_s
        if len(logged) > LOGGED_BUCKETS_MAX:
            del logged[next(iter(logged))]
        if is_due:
            user, client_id = limit.bucket
            self._log.info(
                "client_throttled",
                quota=key.value,
                limit=limit.value,
                user=user,
                client=client_id,
                throttle_ms=throttle_ms,
            )


class LimitedRequest:
    """One request of a client that has a quota. Owned by the loop.

    Invariant: usage is recorded once: `produced` on arrival, the response's bytes and the time so far when the request
    is answered, later time without a check.
    """

    __slots__ = ("_limits", "_quotas", "_request", "_resumed_s", "_settled_ms", "_spent_s", "_throttle_ms")

    def __init__(self, quotas: ClientQuotas, request: Request, limits: ClientLimits) -> None:
        self._quotas = quotas
        self._request = request
        self._limits = limits
        self._throttle_ms = 0
        self._settled_ms: int | None = None
        self._spent_s = 0.0
        self._resumed_s: float | None = None

    # -- the loop's time -----------------------------------------------------------------------------------------------

    def run(self, work: Callable[[], None]) -> None:
        """Run a part of the request, and count the time that it takes."""
        if self._resumed_s is not None:
            work()
            return
        self._resume()
        try:
            work()
        finally:
            self._pause()

    def timed(self, work: Awaitable[T]) -> Awaitable[T]:
        """Return `work` so that the time of its steps is counted."""
        return work if self._limits.request is None else _Timed(self, work)

    def _resume(self) -> None:
        if self._limits.request is not None:
            self._resumed_s = self._quotas.cpu_s()

    def _pause(self) -> None:
        limit = self._limits.request
        if self._resumed_s is None or limit is None:
            return
        self._spent_s += self._quotas.cpu_s() - self._resumed_s
        self._resumed_s = None
        if self._settled_ms is not None:
            self._record_time(limit)

    def _record_time(self, limit: Limit) -> SampledRate:
        rate = self._quotas.rate(QuotaKey.REQUEST_PERCENTAGE, limit)
        rate.record(100 * self._spent_s, self._quotas.now_ms)
        self._spent_s = 0.0
        return rate

    def _time_throttle_ms(self) -> int:
        limit, quotas = self._limits.request, self._quotas
        if limit is None:
            return 0
        if self._resumed_s is not None:
            now_s = quotas.cpu_s()
            self._spent_s += now_s - self._resumed_s
            self._resumed_s = now_s
        throttle_ms = self._record_time(limit).throttle_ms(limit.value, quotas.now_ms)
        return min(throttle_ms, quotas.windows.size_ms)

    # -- answers -------------------------------------------------------------------------------------------------------

    def produced(self, size_bytes: int) -> None:
        """Count a Produce request; over the quota, mute its connection before its next request is read."""
        limit, quotas = self._limits.produce, self._quotas
        if limit is None:
            return
        rate = quotas.rate(QuotaKey.PRODUCER_BYTE_RATE, limit)
        rate.record(size_bytes, quotas.now_ms)
        self._throttle(QuotaKey.PRODUCER_BYTE_RATE, limit, rate.throttle_ms(limit.value, quotas.now_ms))

    def settle(self) -> int:
        """Count the time so far, mute the connection if a quota is violated, and return the throttle time."""
        if self._settled_ms is None:
            limit = self._limits.request
            if limit is not None:
                self._throttle(QuotaKey.REQUEST_PERCENTAGE, limit, self._time_throttle_ms())
            self._settled_ms = self._throttle_ms
        return self._settled_ms

    @property
    def fetch_bytes_max(self) -> int | None:
        """The most bytes that a Fetch response may have: what the quota allows in all windows. None without a quota."""
        limit = self._limits.fetch
        return None if limit is None else max(1, int(limit.value * self._quotas.windows.full_ms / 1000))

    def is_over(self) -> bool:
        """Whether a fetch would be throttled whatever it returns, so that nothing needs to be read for it."""
        now_ms = self._quotas.now_ms
        return any(
            limit is not None and self._quotas.rate(key, limit).rate(now_ms) > limit.value
            for key, limit in (
                (QuotaKey.CONSUMER_BYTE_RATE, self._limits.fetch),
                (QuotaKey.REQUEST_PERCENTAGE, self._limits.request),
            )
        )

    def fetched(self, size_bytes: int) -> tuple[int, bool]:
        """Count a Fetch response. Return the throttle time, and whether the response may carry its records.

        A response that alone exceeds the quota of all windows may, if nothing else was fetched in them: otherwise a
        consumer could never pass a large batch.
        """
        limit, quotas = self._limits.fetch, self._quotas
        bytes_ms, may_pass, rate = 0, True, None
        if limit is not None:
            now_ms = quotas.now_ms
            rate = quotas.rate(QuotaKey.CONSUMER_BYTE_RATE, limit)
            may_pass = rate.rate(now_ms) <= 0
            rate.record(size_bytes, now_ms)
            bytes_ms = rate.throttle_ms(limit.value, now_ms)
            self._throttle(QuotaKey.CONSUMER_BYTE_RATE, limit, bytes_ms)
        throttle_ms = self.settle()
        may_carry = throttle_ms == 0 or (throttle_ms == bytes_ms and may_pass)
        if rate is not None and not may_carry:
            rate.record(-size_bytes, quotas.now_ms)
        return throttle_ms, may_carry

    def _throttle(self, key: QuotaKey, limit: Limit, throttle_ms: int) -> None:
        if throttle_ms > 0:
            self._throttle_ms = max(self._throttle_ms, throttle_ms)
            self._quotas.throttled(key, limit, throttle_ms)
            self._request.connection.mute(throttle_ms / 1000)


class _Timed(Awaitable[T]):
    """Runs an awaitable step by step, to count the time of each step and not of the waits between them."""

    __slots__ = ("_limited", "_work")

    def __init__(self, limited: LimitedRequest, work: Awaitable[T]) -> None:
        self._limited = limited
        self._work = work

    def __await__(self) -> Generator[Any, Any, T]:
        limited, steps = self._limited, self._work.__await__()
        error: BaseException | None = None
        while True:
            limited._resume()
            try:
                waits_for = next(steps) if error is None else steps.throw(error)
            except StopIteration as finished:
                result: T = finished.value
                return result
            finally:
                limited._pause()
            error = None
            try:
                yield waits_for
            except BaseException as thrown:
                # A cancellation, for example; the work itself decides what it means.
                error = thrown


class MutationQuota:
    """The quota of one request that creates or deletes partitions (KIP-599).

    Without a `request` another node has it, and throttles nothing: its client retries by itself.
    """

    def __init__(
        self, quotas: ClientQuotas, request: Request | None, limit: Limit, bucket: TokenBucket, *, is_strict: bool
    ) -> None:
        self._quotas = quotas
        self._request = request
        self._limit = limit
        self._bucket = bucket
        self._is_strict = is_strict

    def charge(self, partitions: int) -> None:
        """Charge the quota, or raise THROTTLING_QUOTA_EXCEEDED if it is strict and already used up."""
        now_ms, rate, bucket = self._quotas.now_ms, self._limit.value, self._bucket
        if self._is_strict:
            throttle_ms = bucket.throttle_ms(rate, now_ms)
            if throttle_ms:
                self._throttled(throttle_ms)
                raise KafkaError(ErrorCode.throttling_quota_exceeded, "The throttling quota has been exceeded.")
            bucket.take(partitions, rate, now_ms)
            return
        bucket.take(partitions, rate, now_ms)
        throttle_ms = bucket.throttle_ms(rate, now_ms)
        if throttle_ms:
            self._throttled(throttle_ms)

    def _throttled(self, throttle_ms: int) -> None:
        self._quotas.throttled(QuotaKey.CONTROLLER_MUTATION_RATE, self._limit, throttle_ms)
        if self._request is not None:
            self._request.throttle_ms = max(self._request.throttle_ms, throttle_ms)


def user_of(principal: str) -> str:
    """Return the name of a principal such as User:alice; quotas name users without the type."""
    kind, found, name = principal.partition(":")
    return name if found else kind
