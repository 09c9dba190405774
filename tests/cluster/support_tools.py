"""Apache Kafka's own command line tools, from its jars: one JVM runs them one after another, as a shell would."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.clients.drivers.java import JVM_FLAGS, Jvm
from tests.clients.drivers.java import TOOLS as JARS_FOLDER
from tests.support.eventually import eventually

JARS = "kafka-broker-4.3"
ALONE_TIMEOUT_S = CHANGE_TIMEOUT_S = 30.0
RUNNER = Path(__file__).resolve().parents[1] / "clients" / "java" / "ToolRunner.java"

TOOLS = {
    "kafka-acls": "org.apache.kafka.tools.AclCommand",
    "kafka-broker-api-versions": "org.apache.kafka.tools.BrokerApiVersionsCommand",
    "kafka-client-metrics": "org.apache.kafka.tools.ClientMetricsCommand",
    "kafka-cluster": "org.apache.kafka.tools.ClusterTool",
    "kafka-configs": "kafka.admin.ConfigCommand",
    "kafka-console-consumer": "org.apache.kafka.tools.consumer.ConsoleConsumer",
    "kafka-console-share-consumer": "org.apache.kafka.tools.consumer.ConsoleShareConsumer",
    "kafka-consumer-groups": "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
    "kafka-consumer-perf-test": "org.apache.kafka.tools.ConsumerPerformance",
    "kafka-delete-records": "org.apache.kafka.tools.DeleteRecordsCommand",
    "kafka-dump-log": "org.apache.kafka.tools.DumpLogSegments",
    "kafka-get-offsets": "org.apache.kafka.tools.GetOffsetShell",
    "kafka-groups": "org.apache.kafka.tools.GroupsCommand",
    "kafka-leader-election": "org.apache.kafka.tools.LeaderElectionCommand",
    "kafka-log-dirs": "org.apache.kafka.tools.LogDirsCommand",
    "kafka-metadata-quorum": "org.apache.kafka.tools.MetadataQuorumCommand",
    "kafka-producer-perf-test": "org.apache.kafka.tools.ProducerPerformance",
    "kafka-reassign-partitions": "org.apache.kafka.tools.reassign.ReassignPartitionsCommand",
    "kafka-share-groups": "org.apache.kafka.tools.consumer.group.ShareGroupCommand",
    "kafka-topics": "org.apache.kafka.tools.TopicCommand",
    "kafka-transactions": "org.apache.kafka.tools.TransactionsCommand",
    "kafka-verifiable-consumer": "org.apache.kafka.tools.VerifiableConsumer",
    "kafka-verifiable-producer": "org.apache.kafka.tools.VerifiableProducer",
}


class Ran(NamedTuple):
    """The exit status and the output of a tool."""

    status: int
    out: str
    err: str


class KafkaTools:
    """The tools, by the names of their scripts. Raises FileNotFoundError if they are unavailable."""

    def __init__(self, folder: Path) -> None:
        self._jvm = Jvm(JARS, RUNNER, folder)

    def run(self, tool: str, *arguments: str) -> Ran:
        answer = self._jvm.call(TOOLS[tool], *arguments)
        return Ran(answer.number(), answer.name(), answer.name())

    def ok(self, tool: str, *arguments: str) -> str:
        """Run a tool that must succeed, and return its standard output."""
        ran = self.run(tool, *arguments)
        # kafka-consumer-groups always exits with 0.
        is_good = ran.status == 0 and "\nError: " not in ran.out
        assert is_good, f"{tool} {' '.join(arguments)}: exit {ran.status}\n{ran.out}\n{ran.err}"
        return ran.out

    def until(self, is_expected: Callable[[str], bool], tool: str, *arguments: str, status: int = 0) -> str:
        """Run a tool until it exits with this status and prints what is expected, and return that.

        One node may answer before it has applied the change that another one has confirmed.
        """

        def expected() -> Ran:
            ran = self.run(tool, *arguments)
            assert ran.status == status and is_expected(ran.out), ran
            return ran  # A tuple is always true, the output may be empty.

        return eventually(expected, CHANGE_TIMEOUT_S, f"{tool} {' '.join(arguments)} shows the change").out

    def alone(self, tool: str, *arguments: str) -> str:
        """As `ok`, in a separate JVM: for a tool that finishes its work only when its JVM exits."""
        command = ["java", *JVM_FLAGS, "-cp", f"{JARS_FOLDER / JARS}/*", TOOLS[tool], *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=ALONE_TIMEOUT_S).stdout

    def close(self) -> None:
        self._jvm.close()


def table(out: str) -> list[dict[str, str]]:
    """Parse a table with a header line; skip rows that lack a cell. No cell contains a space."""
    lines = [line.split() for line in out.splitlines() if line.strip()]
    head = next(number for number, words in enumerate(lines) if words[0].isupper() and len(words) > 1)
    names = lines[head]
    return [dict(zip(names, words, strict=True)) for words in lines[head + 1 :] if len(words) == len(names)]


def json_lines(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]
