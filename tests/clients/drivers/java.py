"""Java's kafka-clients, through the driver in ../java: one JVM for each version of the client.

`Jvm` runs any driver that uses the same line protocol, such as the one for Apache Kafka's tools.
"""

from __future__ import annotations

import base64
import itertools
import shutil
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from tests.clients.drivers.base import (
    FETCH_WAIT_MS,
    HEARTBEAT_INTERVAL_MS,
    READ_TIMEOUT_S,
    SERVER_ASSIGNORS,
    SESSION_TIMEOUT_MS,
    ClientError,
    PollingMember,
    Received,
    Sent,
)

SOURCE = Path(__file__).resolve().parents[1] / "java" / "KafkaDriver.java"
TOOLS = Path(__file__).resolve().parents[3] / ".tools"
COMPILE_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 2 * READ_TIMEOUT_S
COMPILER_FLAGS = ("-J-XX:+UseSerialGC", "-J-XX:TieredStopAtLevel=1")
JVM_FLAGS = (
    "-Xmx256m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=error",
)
ASSIGNORS = {
    "range": "org.apache.kafka.clients.consumer.RangeAssignor",
    "cooperative-sticky": "org.apache.kafka.clients.consumer.CooperativeStickyAssignor",
}

Field = str | bytes | int | None


class Jvm:
    """The driver's process. Any thread may call it: calls are lines with an id, a reader thread dispatches answers.

    `jars` is a folder of .tools, `source` the driver, `folder` the target of its compilation.
    """

    def __init__(self, jars: str, source: Path, folder: Path) -> None:
        if shutil.which("javac") is None:
            raise FileNotFoundError("there is no javac on the PATH: install a JDK of 17 or newer")
        if not any((TOOLS / jars).glob("*.jar")):
            raise FileNotFoundError(f"the jars of {jars} are not in .tools: make test fetches them")
        class_path = f"{TOOLS / jars}/*:{folder}"
        subprocess.run(
            ["javac", *COMPILER_FLAGS, "-d", str(folder), "-cp", class_path, str(source)],
            check=True,
            timeout=COMPILE_TIMEOUT_S,
        )
        self._log = (folder / "driver.log").open("wb")
        self._process = subprocess.Popen(
            ["java", *JVM_FLAGS, "-cp", class_path, source.stem],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        self._ids = itertools.count(1)
        self._waiting: dict[str, Future[Answer]] = {}
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, name=f"java {jars}", daemon=True)
        self._reader.start()

    def call(self, verb: str, *fields: Field) -> Answer:
        answer: Future[Answer] = Future()
        with self._lock:
            call_id = str(next(self._ids))
            self._waiting[call_id] = answer
            stdin = self._process.stdin
            assert stdin is not None
            stdin.write("\t".join([call_id, verb, *map(_encode, fields)]).encode() + b"\n")
            stdin.flush()
        return answer.result(ANSWER_TIMEOUT_S)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(READ_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        finally:
            self._reader.join(READ_TIMEOUT_S)
            self._process.stdout.close()
            self._log.close()

    def kill(self) -> None:
        """Kill the process, with all its clients: they say nothing to the broker."""
        self._process.kill()
        self._process.wait()
        self._reader.join(READ_TIMEOUT_S)
        for stream in (self._process.stdin, self._process.stdout, self._log):
            assert stream is not None
            stream.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            call_id, status, *fields = line.decode().rstrip("\n").split("\t")
            with self._lock:
                waiting = self._waiting.pop(call_id)
            answer = Answer(fields)
            if status == "ok":
                waiting.set_result(answer)
            else:
                code = answer.number()
                waiting.set_exception(ClientError(None if code == -1 else code, answer.text() or ""))
        with self._lock:
            for waiting in self._waiting.values():
                waiting.set_exception(ClientError(None, "the Java driver has exited"))


class Answer:
    """The fields of one answer, read in order."""

    def __init__(self, fields: Sequence[str]) -> None:
        self._fields = iter(fields)

    def data(self) -> bytes | None:
        field = next(self._fields)
        return None if field == "-" else base64.b64decode(field[1:])

    def text(self) -> str | None:
        data = self.data()
        return None if data is None else data.decode()

    def name(self) -> str:
        return self.text() or ""

    def number(self) -> int:
        return int(self.name())

    def texts(self) -> list[str | None]:
        return [self.text() for _ in range(self.number())]

    def records(self) -> list[Received]:
        return [
            Received(
                partition=self.number(),
                offset=self.number(),
                timestamp_ms=self.number(),
                key=self.data(),
                value=self.data(),
                headers=tuple((self.name(), self.data()) for _ in range(self.number())),
            )
            for _ in range(self.number())
        ]


class Java:
    sets_timestamps = True

    def __init__(self, version: str, folder: Path) -> None:
        self.name = f"java-{version}"
        self.jvm = Jvm(f"kafka-clients-{version}", SOURCE, folder)

    def produce(
        self, bootstrap: str, topic: str, records: Sequence[Sent], *, codec: str = "none", idempotent: bool = False
    ) -> None:
        settings = {
            "bootstrap.servers": bootstrap,
            "compression.type": codec,
            "enable.idempotence": str(idempotent).lower(),
            "acks": "all",
            "linger.ms": "20",
            "max.block.ms": "3000",
            "delivery.timeout.ms": "15000",
            "request.timeout.ms": "10000",
            "max.request.size": str(4 << 20),
        }
        fields: list[Field] = [*settings_of(settings), topic, len(records)]
        for record in records:
            fields += [record.partition, -1, record.timestamp_ms, record.key, record.value, len(record.headers)]
            fields += [field for header in record.headers for field in header]
        self.jvm.call("produce", *fields)

    def transact(
        self, bootstrap: str, topic: str, transactional_id: str, transactions: Sequence[tuple[Sequence[Sent], bool]]
    ) -> None:
        settings = {"bootstrap.servers": bootstrap, "transactional.id": transactional_id, "max.block.ms": "15000"}
        fields: list[Field] = [*settings_of(settings), topic, len(transactions)]
        for records, is_commit in transactions:
            fields += ["commit" if is_commit else "abort", len(records)]
            fields += [field for record in records for field in (record.partition, record.key, record.value)]
        self.jvm.call("transact", *fields)

    def read(
        self,
        bootstrap: str,
        topic: str,
        count: int,
        *,
        partitions: Sequence[int] = (0,),
        isolation_level: str = "read_uncommitted",
    ) -> list[Received]:
        settings = settings_of(
            {
                "bootstrap.servers": bootstrap,
                "fetch.max.wait.ms": str(FETCH_WAIT_MS),
                "isolation.level": isolation_level,
            }
        )
        got = self.jvm.call("read", *settings, topic, count, len(partitions), *partitions).records()
        if len(got) < count:
            raise ClientError(None, f"{self.name} read {len(got)} of {count} records of {topic}")
        return got

    def join(self, bootstrap: str, topic: str, group: str, *, assignor: str = "range") -> PollingMember:
        member = JavaMember(self.jvm, bootstrap, topic, group, assignor)
        member.start()
        return member

    def offset_at(self, bootstrap: str, topic: str, timestamp_ms: int) -> int | None:
        found = self.jvm.call("offset-at", *settings_of({"bootstrap.servers": bootstrap}), topic, timestamp_ms).text()
        return None if found is None else int(found)


class JavaMember(PollingMember):
    def __init__(self, jvm: Jvm, bootstrap: str, topic: str, group: str, assignor: str) -> None:
        super().__init__(f"java member {id(self)} of {group}")
        self._jvm = jvm
        self._topic = topic
        self._settings = {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": "false",
        }
        if assignor in SERVER_ASSIGNORS:
            self._settings |= {"group.protocol": "consumer", "group.remote.assignor": SERVER_ASSIGNORS[assignor]}
        else:
            self._settings |= {
                "heartbeat.interval.ms": str(HEARTBEAT_INTERVAL_MS),
                "session.timeout.ms": str(SESSION_TIMEOUT_MS),
                "partition.assignment.strategy": ASSIGNORS[assignor],
            }

    def open(self) -> None:
        self._jvm.call("member-open", self.name, *settings_of(self._settings), self._topic)

    def step(self) -> tuple[list[Received], frozenset[int]]:
        answer = self._jvm.call("member-step", self.name)
        owned = frozenset(int(partition or "") for partition in answer.texts())
        return answer.records(), owned

    def close(self) -> None:
        self._jvm.call("member-close", self.name)


class JavaAdmin:
    def __init__(self, jvm: Jvm, bootstrap: str) -> None:
        self._jvm = jvm
        self._bootstrap = bootstrap

    def _call(self, verb: str, *fields: Field) -> Answer:
        return self._jvm.call(verb, self._bootstrap, *fields)

    def create_topic(self, topic: str, partitions: int, configs: Mapping[str, str] | None = None) -> None:
        self._call("create-topic", topic, partitions, *settings_of(configs or {}))

    def delete_topic(self, topic: str) -> None:
        self._call("delete-topic", topic)

    def topics(self) -> list[str]:
        return [name or "" for name in self._call("topics", None).texts()]

    def partition_count(self, topic: str) -> int:
        return self._call("partition-count", topic).number()

    def create_partitions(self, topic: str, total: int) -> None:
        self._call("create-partitions", topic, total)

    def configs(self, topic: str) -> dict[str, str | None]:
        pairs = self._call("configs", topic).texts()
        return {name or "": value for name, value in zip(pairs[::2], pairs[1::2], strict=True)}

    def set_config(self, topic: str, name: str, value: str) -> None:
        self._call("set-config", topic, name, value)

    def delete_records(self, topic: str, before_offset: int) -> int:
        return self._call("delete-records", topic, before_offset).number()

    def groups(self) -> list[str]:
        return [name or "" for name in self._call("groups", None).texts()]

    def describe_group(self, group: str) -> tuple[str, int]:
        answer = self._call("describe-group", group)
        return answer.name(), answer.number()

    def committed(self, group: str, topic: str) -> dict[int, int]:
        found = self._call("committed", group).texts()
        rows = zip(found[::3], found[1::3], found[2::3], strict=True)
        return {int(partition or ""): int(offset or "") for name, partition, offset in rows if name == topic}

    def delete_group(self, group: str) -> None:
        self._call("delete-group", group)

    def list_offset(self, topic: str, spec: str) -> int:
        return self._call("list-offset", topic, spec).number()

    def close(self) -> None:
        """Keep the admin client open: the JVM keeps one for each address until it ends."""


def _encode(field: Field) -> str:
    if field is None:
        return "-"
    data = field if isinstance(field, bytes) else str(field).encode()
    return "=" + base64.b64encode(data).decode()


def settings_of(settings: Mapping[str, str]) -> list[Field]:
    return [2 * len(settings), *(part for pair in settings.items() for part in pair)]
