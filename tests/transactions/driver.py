"""Plays events into a `TransactionCoordinator`, commits its appends, and keeps the log and the answers."""

from __future__ import annotations

from typing import Any

from chronik.groups.step import Append, Moment, Reply
from chronik.transactions.actions import Action, Ended, Settled, WriteMarkers
from chronik.transactions.coordinator import (
    EndRequest,
    InitProducerRequest,
    ProducerIdAndEpoch,
    TransactionCoordinator,
    TransactionSettings,
)
from chronik.transactions.transaction import TopicPartition, TransactionMetadata
from chronik.wire.errors import ErrorCode

ID = "payments"
TIMEOUT_MS = 60_000
PARTITIONS = 4


class Driver:
    """One coordinator of all partitions, whose appends succeed at once unless `holds_appends` is set."""

    def __init__(self, settings: TransactionSettings | None = None, log: dict[int, list[Any]] | None = None) -> None:
        self.coordinator = TransactionCoordinator(settings or TransactionSettings())
        self.coordinator.partition_count = PARTITIONS
        self.now_ms = 1_000
        self.log: dict[int, list[Any]] = log if log is not None else {each: [] for each in range(PARTITIONS)}
        self.replies: dict[int, dict[str, Any]] = {}
        self.markers: list[WriteMarkers] = []
        self.ended: list[Ended] = []
        self.settled: list[str] = []
        self.held: list[Append] = []
        self.holds_appends = False
        self._token = 0
        self._next_producer_id = 100 * (1 + sum(map(len, self.log.values())))
        for partition, records in self.log.items():
            self.coordinator.start_loading(partition)
            self.coordinator.replay(partition, records)
            self._run(self.coordinator.finish_loading(partition, 7, self.at))

    @property
    def at(self) -> Moment:
        return Moment(self.now_ms, 1_700_000_000_000 + self.now_ms)

    def _run(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Reply():
                    assert action.token not in self.replies, "a token is answered once"
                    self.replies[action.token] = action.values
                case Append():
                    self.held.append(action)
                case WriteMarkers():
                    self.markers.append(action)
                case Ended():
                    self.ended.append(action)
                case Settled():
                    self.settled.append(action.transactional_id)
        if not self.holds_appends:
            self.settle()

    def settle(self, error: ErrorCode = ErrorCode.none, *, is_written: bool = True) -> None:
        """Give the held appends this outcome."""
        held, self.held = self.held, []
        for append in held:
            if is_written:
                self.log[append.partition] += append.records
            self._run(self.coordinator.appended(append.token, error, self.at))

    def fresh_id(self) -> int:
        self._next_producer_id += 1
        return self._next_producer_id

    def init(self, expected: ProducerIdAndEpoch | None = None, timeout_ms: int = TIMEOUT_MS, name: str = ID) -> int:
        self._token += 1
        request = InitProducerRequest(name, timeout_ms, expected, self.fresh_id())
        self._run(self.coordinator.init_producer(request, self._token, self.at))
        return self._token

    def add(self, producer: ProducerIdAndEpoch, *partitions: TopicPartition, name: str = ID) -> int:
        self._token += 1
        self._run(self.coordinator.add_partitions(name, producer, frozenset(partitions), self._token, self.at))
        return self._token

    def end(self, producer: ProducerIdAndEpoch, *, commit: bool = True, version: int = 0, name: str = ID) -> int:
        self._token += 1
        request = EndRequest(name, *producer, commit, version, self.fresh_id())
        self._run(self.coordinator.end(request, self._token, self.at))
        return self._token

    def write_markers(self) -> list[WriteMarkers]:
        """Have every leader write the markers that are waiting; return them."""
        written, self.markers = self.markers, []
        for marker in written:
            producer = ProducerIdAndEpoch(marker.producer_id, marker.producer_epoch)
            for partition in marker.partitions:
                self._run(self.coordinator.marker_written(marker.transactional_id, producer, partition, self.at))
        return written

    def tick(self, elapsed_ms: int) -> None:
        self.now_ms += elapsed_ms
        self._run(self.coordinator.tick(self.at))

    def expire(self) -> None:
        self._run(self.coordinator.expire_ids(self.at))

    def unload(self, partition: int) -> None:
        self._run(self.coordinator.unload(partition, self.at))

    def error(self, token: int) -> ErrorCode:
        error = self.replies[token]["error_code"]
        assert isinstance(error, ErrorCode)
        return error

    def producer(self, token: int) -> ProducerIdAndEpoch:
        values = self.replies[token]
        assert values["error_code"] is ErrorCode.none, values
        return ProducerIdAndEpoch(values["producer_id"], values["producer_epoch"])

    def state(self, name: str = ID) -> TransactionMetadata:
        error, metadata = self.coordinator.describe(name)
        assert error is ErrorCode.none and metadata is not None, error
        return metadata

    def failed_over(self) -> Driver:
        """Return a new coordinator that has loaded the log of this one."""
        other = Driver(self.coordinator.settings, self.log)
        other.now_ms = self.now_ms
        return other
