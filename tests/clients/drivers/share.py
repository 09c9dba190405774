"""Share consumers of Java's kafka-clients and of confluent-kafka."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from confluent_kafka import AcknowledgeType, ShareConsumer
from tests.clients.drivers.java import Jvm, settings_of

JARS = "kafka-clients-4.3"
SOURCE = Path(__file__).resolve().parents[1] / "java" / "ShareDriver.java"
POLL_MS = 200


class Delivered(NamedTuple):
    """A record that a member has acquired; the delivery count is None if the client does not report it."""

    partition: int
    offset: int
    value: str
    delivery_count: int | None


class ShareMember(Protocol):
    def poll(self) -> list[Delivered]: ...

    def acknowledge(self, record: Delivered, kind: str) -> None:
        """Accept, release or reject a record of the last poll; needs an explicit member."""

    def commit(self) -> None:
        """Send the acknowledgements; raise if one fails."""

    def close(self) -> None: ...


class JavaShares:
    """One JVM with share consumers. Raises FileNotFoundError if they are unavailable."""

    name = "java"

    def __init__(self, folder: Path) -> None:
        self.jvm = Jvm(JARS, SOURCE, folder)
        self._names = itertools.count(1)

    def join(self, bootstrap: str, group: str, topic: str, *, explicit: bool = False) -> ShareMember:
        name = f"member-{next(self._names)}"
        settings = {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "share.acknowledgement.mode": "explicit" if explicit else "implicit",
        }
        self.jvm.call("open", name, *settings_of(settings), topic)
        return JavaShareMember(self.jvm, name)


class JavaShareMember:
    def __init__(self, jvm: Jvm, name: str) -> None:
        self._jvm = jvm
        self._name = name

    def poll(self) -> list[Delivered]:
        answer = self._jvm.call("poll", self._name, POLL_MS)
        records = []
        for _ in range(answer.number()):
            records.append(Delivered(answer.number(), answer.number(), answer.name(), answer.number()))
        return records

    def acknowledge(self, record: Delivered, kind: str) -> None:
        self._jvm.call("ack", self._name, record.partition, record.offset, kind.upper())

    def commit(self) -> None:
        answer = self._jvm.call("commit", self._name)
        errors = [answer.number() for _ in range(answer.number())]
        assert not any(errors), errors

    def close(self) -> None:
        self._jvm.call("close", self._name)


class ConfluentShares:
    name = "confluent-kafka"

    def join(self, bootstrap: str, group: str, topic: str, *, explicit: bool = False) -> ShareMember:
        settings = {"bootstrap.servers": bootstrap, "group.id": group, "log_level": 0}
        if explicit:
            settings["share.acknowledgement.mode"] = "explicit"
        consumer = ShareConsumer(settings)
        consumer.subscribe([topic])
        return ConfluentShareMember(consumer)


class ConfluentShareMember:
    def __init__(self, consumer: ShareConsumer) -> None:
        self._consumer = consumer
        self._messages: dict[tuple[int, int], Any] = {}

    def poll(self) -> list[Delivered]:
        messages: Any = self._consumer.poll(POLL_MS / 1000)
        records = []
        for message in messages:
            assert message.error() is None, message.error()
            partition, offset = message.partition(), message.offset()
            self._messages[partition, offset] = message
            records.append(Delivered(partition, offset, message.value().decode(), None))
        return records

    def acknowledge(self, record: Delivered, kind: str) -> None:
        self._consumer.acknowledge(self._messages[record.partition, record.offset], AcknowledgeType[kind.upper()])

    def commit(self) -> None:
        for partition, error in (self._consumer.commit_sync() or {}).items():
            assert error is None, (partition, error)

    def close(self) -> None:
        self._consumer.close()
