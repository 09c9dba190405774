"""One interface for all clients, so that one test body runs with each of them."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

Headers = tuple[tuple[str, bytes | None], ...]

CLIENTS = ("kafka-python", "confluent-kafka", "aiokafka", "kcat", "java-4.3", "java-3.9")
TRANSACTIONAL = ("kafka-python", "confluent-kafka", "aiokafka", "java-4.3", "java-3.9")
ADMINS = ("kafka-python", "confluent-kafka", "aiokafka", "java-4.3", "java-3.9")
GROUP_ADMINS = ("kafka-python", "confluent-kafka", "java-4.3", "java-3.9")
COOPERATIVE = ("kafka-python", "confluent-kafka", "java-4.3", "java-3.9")
CONSUMER_PROTOCOL = ("confluent-kafka", "java-4.3")
# The assignor of a member of the new group protocol (KIP-848), by the name that a test passes to `join`.
SERVER_ASSIGNORS = {"server-uniform": "uniform", "server-range": "range"}
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")

# A reader that closes, or that waits for the end of a partition, waits for its last fetch.
FETCH_WAIT_MS = 20
# Short, so that a test sees a rebalance soon; the sessions stay long, so that a slow machine does not lose members.
HEARTBEAT_INTERVAL_MS = 250
SESSION_TIMEOUT_MS = 15_000
READ_TIMEOUT_S = 20.0
# Recent: records older than a topic's retention.ms are deleted by the next check, which happens within a long test run.
FIRST_TIMESTAMP_MS = int(time.time()) * 1000 - 60 * 60 * 1000


@dataclass(frozen=True, slots=True)
class Sent:
    """A record as passed to a producer."""

    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()
    timestamp_ms: int | None = None
    partition: int = 0


@dataclass(frozen=True, slots=True)
class Received:
    """A record as a consumer received it."""

    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers


class ClientError(Exception):
    """An error that a client reported, with Kafka's error code if the client names one."""

    def __init__(self, code: int | None, text: str) -> None:
        super().__init__(f"{text} (error code {code})")
        self.code = code


class Member(Protocol):
    """A consumer in a group that reads and commits by itself until it leaves.

    `done` holds the records whose commit succeeded. Records revoked by a rebalance before their commit are not in it,
    because the next owner reads them again. `partitions` is the member's current assignment.
    """

    @property
    def done(self) -> Sequence[Received]: ...

    @property
    def partitions(self) -> frozenset[int]: ...

    def leave(self) -> None: ...


class Client(Protocol):
    """Producing and consuming."""

    name: str
    sets_timestamps: bool

    def produce(
        self, bootstrap: str, topic: str, records: Sequence[Sent], *, codec: str = "none", idempotent: bool = False
    ) -> None: ...

    def read(self, bootstrap: str, topic: str, count: int, *, partitions: Sequence[int] = (0,)) -> list[Received]:
        """Read the first `count` records of the partitions together, by assign; return fewer only at the deadline."""
        ...

    def join(self, bootstrap: str, topic: str, group: str, *, assignor: str = "range") -> Member: ...

    def offset_at(self, bootstrap: str, topic: str, timestamp_ms: int) -> int | None:
        """Return the first offset of partition 0 with this timestamp or a later one."""
        ...


class TransactionalClient(Client, Protocol):
    """A client that has transactions."""

    def transact(
        self, bootstrap: str, topic: str, transactional_id: str, transactions: Sequence[tuple[Sequence[Sent], bool]]
    ) -> None:
        """Send each transaction's records with one producer; commit the transaction if its flag is set, else abort."""
        ...

    def read(
        self, bootstrap: str, topic: str, count: int, *, partitions: Sequence[int] = (0,), isolation_level: str = ...
    ) -> list[Received]: ...


class Admin(Protocol):
    """Administration, for the clients that have it. Failures are ClientErrors."""

    def create_topic(self, topic: str, partitions: int, configs: Mapping[str, str] | None = None) -> None: ...
    def delete_topic(self, topic: str) -> None: ...
    def topics(self) -> list[str]: ...
    def partition_count(self, topic: str) -> int: ...
    def create_partitions(self, topic: str, total: int) -> None: ...
    def configs(self, topic: str) -> dict[str, str | None]: ...
    def set_config(self, topic: str, name: str, value: str) -> None: ...
    def delete_records(self, topic: str, before_offset: int) -> int: ...
    def groups(self) -> list[str]: ...
    def describe_group(self, group: str) -> tuple[str, int]:
        """Return the state and the number of members."""
        ...

    def committed(self, group: str, topic: str) -> dict[int, int]: ...
    def close(self) -> None: ...


class GroupAdmin(Admin, Protocol):
    """The calls that aiokafka's admin client lacks."""

    def delete_group(self, group: str) -> None: ...

    def list_offset(self, topic: str, spec: str) -> int:
        """Return partition 0's offset for `spec`: earliest, latest or max-timestamp."""
        ...


class PollingMember(threading.Thread):
    """A member that polls in its own thread, which is the only one to touch its consumer.

    A subclass opens its consumer in `open` and polls it in `step`, which returns the records read and committed.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._leaving = threading.Event()
        self._done: list[Received] = []
        self._partitions: frozenset[int] = frozenset()
        self._failure: BaseException | None = None

    @property
    def done(self) -> Sequence[Received]:
        self._raise_failure()
        return self._done

    @property
    def partitions(self) -> frozenset[int]:
        self._raise_failure()
        return self._partitions

    def leave(self) -> None:
        self._leaving.set()
        self.join(READ_TIMEOUT_S)
        if self.is_alive():
            raise ClientError(None, f"{self.name} did not leave within {READ_TIMEOUT_S} s")
        self._raise_failure()

    def run(self) -> None:
        try:
            self.open()
            try:
                while not self._leaving.is_set():
                    records, self._partitions = self.step()
                    self._done.extend(records)
            finally:
                self._partitions = frozenset()
                self.close()
        except BaseException as failure:
            self._failure = failure

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise ClientError(None, f"{self.name} failed: {self._failure!r}") from self._failure

    @abstractmethod
    def open(self) -> None: ...

    @abstractmethod
    def step(self) -> tuple[list[Received], frozenset[int]]:
        """Poll once briefly and commit; return the committed records and the current assignment."""

    @abstractmethod
    def close(self) -> None: ...
