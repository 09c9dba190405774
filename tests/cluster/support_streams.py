"""A Kafka Streams application with exactly_once_v2, the lines that it counts, and the counts that it commits."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import threading
from collections import Counter, defaultdict
from pathlib import Path

import confluent_kafka
from tests.clients.drivers.java import COMPILE_TIMEOUT_S, JVM_FLAGS, TOOLS
from tests.support.eventually import eventually

JARS = TOOLS / "kafka-streams-4.3"
SOURCE = Path(__file__).resolve().parents[1] / "clients" / "java" / "WordCount.java"
STOP_TIMEOUT_S = 30.0
FLUSH_TIMEOUT_S = 120.0

VOCABULARY = [f"word-{number}" for number in range(40)]
WORDS_PER_LINE = 5
LINES_PER_S = 100


def missing() -> str | None:
    """Return why the application cannot run here, or None if it can."""
    if shutil.which("javac") is None:
        return "there is no javac on the PATH: install a JDK of 17 or newer"
    if not any(JARS.glob("*.jar")):
        return "the jars of Kafka Streams are not in .tools: make test fetches them"
    return None


class WordCount:
    """One process of the application. Processes with the same application id share the work."""

    def __init__(self, folder: Path, name: str, bootstrap: str, application: str, source: str, target: str) -> None:
        self._folder = folder / name
        self._folder.mkdir()
        class_path = f"{JARS}/*:{self._folder}"
        compile_ = ["javac", "-d", str(self._folder), "-cp", class_path, str(SOURCE)]
        subprocess.run(compile_, check=True, timeout=COMPILE_TIMEOUT_S)
        flags = [*JVM_FLAGS, "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"]
        arguments = [bootstrap, application, source, target, str(self._folder / "state")]
        self._command = ["java", *flags, "-cp", class_path, "WordCount", *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log_text(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    def start(self) -> None:
        # The application ends with this process: the other end of its standard input closes.
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=log, stderr=log)

    def kill(self) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.kill()
        self._process.wait(STOP_TIMEOUT_S)
        self._process.stdin.close()
        self._process = None

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        if self._process is not None:
            self.kill()

    def _signal(self, signal_: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal_)


class Lines:
    """Writes lines of random words until it is stopped; `expected` has the count of each word then."""

    def __init__(self, bootstrap: str, topic: str, seed: int) -> None:
        self.expected: Counter[str] = Counter()
        self._failures: list[str] = []
        self._topic = topic
        self._random = random.Random(seed)
        self._producer = confluent_kafka.Producer(
            {"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 5, "message.timeout.ms": 120_000}
        )
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Wait until all lines are acknowledged; fail if one is not."""
        self._stopping.set()
        self._thread.join(FLUSH_TIMEOUT_S)
        assert not self._thread.is_alive() and self._failures == [], self._failures[:3]

    def close(self) -> None:
        """Give up lines that are not acknowledged yet."""
        self._stopping.set()
        self._producer.purge()
        self._thread.join(FLUSH_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stopping.wait(1 / LINES_PER_S):
            words = self._random.choices(VOCABULARY, k=WORDS_PER_LINE)
            self._producer.produce(self._topic, " ".join(words), on_delivery=self._delivered)
            self.expected.update(words)
            self._producer.poll(0)
        left = self._producer.flush(FLUSH_TIMEOUT_S)
        if left:
            self._failures.append(f"{left} lines are not acknowledged")

    def _delivered(self, error: confluent_kafka.KafkaError | None, message: confluent_kafka.Message) -> None:
        if error is not None:
            self._failures.append(error.str())


class CommittedCounts:
    """The counts that a read_committed consumer reads, in order, for each word."""

    def __init__(self, bootstrap: str, topic: str, partitions: int) -> None:
        self.of: defaultdict[str, list[int]] = defaultdict(list)
        self.total = 0
        self._consumer = confluent_kafka.Consumer(
            {"bootstrap.servers": bootstrap, "group.id": "counts", "isolation.level": "read_committed"}
        )
        self._consumer.assign(
            [
                confluent_kafka.TopicPartition(topic, index, confluent_kafka.OFFSET_BEGINNING)
                for index in range(partitions)
            ]
        )

    def wait_for(self, total: int, timeout_s: float, what: str) -> None:
        """Read until this many counts are committed."""

        def is_read() -> bool:
            self._read()
            assert self.total >= total, f"{self.total} of {total} counts"
            return True

        eventually(is_read, timeout_s, what)

    def check(self, expected: Counter[str]) -> None:
        """Fail unless each word was counted from 1 to its exact number of occurrences, once each and in order."""
        self._read()
        wrong: dict[str, str] = {}
        for word in self.of.keys() | expected.keys():
            counts, right = self.of[word], list(range(1, expected[word] + 1))
            if counts != right:
                at = next((at for at, pair in enumerate(zip(counts, right, strict=False)) if pair[0] != pair[1]), None)
                around = counts[-3:] if at is None else counts[max(0, at - 2) : at + 2]
                wrong[word] = f"{len(counts)} counts of {len(right)}, {around} at {at}"
        assert not wrong, f"{len(wrong)} of {len(expected)} words are not counted exactly once: {wrong}"

    def close(self) -> None:
        self._consumer.close()

    def _read(self) -> None:
        for message in self._consumer.consume(1_000, timeout=0.2):
            error, key, value = message.error(), message.key(), message.value()
            if error is None:
                assert isinstance(key, bytes) and isinstance(value, bytes)
                self.of[key.decode()].append(int(value))
                self.total += 1
