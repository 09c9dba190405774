"""Real clients on a node's SSL listener, with and without a client certificate, while certificates change."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import kafka
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from tests.support import apache_kafka
from tests.support.certificates import Certificates
from tests.support.eventually import eventually
from tests.support.node import Node
from tests.support.ports import free_ports

RECORDS = [f"record-{number}".encode() for number in range(50)]
TIMEOUT_S = 30.0

Exchange = Callable[[str, str, Certificates, "str | None"], list[bytes]]
"""Produce RECORDS to a topic at a bootstrap address with the named certificate, and return what is read back."""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    made = Certificates(tmp_path_factory.mktemp("certificates"))
    certificate, key = made.issue("alice")
    (made.folder / "alice-both.pem").write_bytes(key.read_bytes() + certificate.read_bytes())
    return made


@pytest.fixture(scope="module")
def node(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node whose first listener accepts any client, and whose second, MUTUAL, is the same with another address."""
    (second,) = free_ports(1)
    listener = {
        "name": "MUTUAL",
        "listen": f"127.0.0.1:{second}",
        "protocol": "SSL",
        "advertise": f"localhost:{second}",
    }
    settings = {
        "security": {"protocol": "SSL"},
        "tls": {**certificates.settings, "client_auth": "requested"},
        "listeners": [listener],
    }
    started = Node(tmp_path_factory.mktemp("node"), settings).start()
    yield started
    started.terminate()


def with_kafka_python(bootstrap: str, topic: str, certificates: Certificates, name: str | None) -> list[bytes]:
    settings: dict[str, Any] = {
        "bootstrap_servers": bootstrap,
        "security_protocol": "SSL",
        "ssl_context": certificates.client(name),
    }
    producer = kafka.KafkaProducer(**settings)
    for record in RECORDS:
        producer.send(topic, record)
    producer.flush(TIMEOUT_S)
    producer.close()
    consumer = kafka.KafkaConsumer(topic, group_id=topic, auto_offset_reset="earliest", **settings)
    values = [next(consumer).value for _ in RECORDS]
    consumer.close()
    return values


def librdkafka(bootstrap: str, certificates: Certificates, name: str | None) -> dict[str, str]:
    settings = {
        "bootstrap.servers": bootstrap,
        "security.protocol": "ssl",
        "ssl.ca.location": str(certificates.authorities),
    }
    if name is not None:
        settings["ssl.certificate.location"] = str(certificates.folder / f"{name}.pem")
        settings["ssl.key.location"] = str(certificates.folder / f"{name}.key")
    return settings


def with_confluent(bootstrap: str, topic: str, certificates: Certificates, name: str | None) -> list[bytes]:
    settings = librdkafka(bootstrap, certificates, name)
    producer = confluent_kafka.Producer(settings)
    for record in RECORDS:
        producer.produce(topic, record)
    assert producer.flush(TIMEOUT_S) == 0
    consumer = confluent_kafka.Consumer({**settings, "group.id": topic, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    values: list[bytes] = []
    while len(values) < len(RECORDS):
        values += [message.value() or b"" for message in consumer.consume(len(RECORDS), TIMEOUT_S)]
    consumer.close()
    return values


def with_aiokafka(bootstrap: str, topic: str, certificates: Certificates, name: str | None) -> list[bytes]:
    async def exchange() -> list[bytes]:
        settings: dict[str, Any] = {
            "bootstrap_servers": bootstrap,
            "security_protocol": "SSL",
            "ssl_context": certificates.client(name),
        }
        async with AIOKafkaProducer(**settings) as producer:
            for record in RECORDS:
                await producer.send_and_wait(topic, record)
        async with AIOKafkaConsumer(topic, group_id=topic, auto_offset_reset="earliest", **settings) as consumer:
            return [(await consumer.getone()).value for _ in RECORDS]

    return asyncio.run(exchange())


def with_kcat(bootstrap: str, topic: str, certificates: Certificates, name: str | None) -> list[bytes]:
    if shutil.which("kcat") is None:
        pytest.skip("kcat is not on the PATH: install the package kcat")
    settings = librdkafka(bootstrap, certificates, name)
    del settings["bootstrap.servers"]
    flags = [flag for key, value in settings.items() for flag in ("-X", f"{key}={value}")]
    command = ["kcat", "-b", bootstrap, "-t", topic, *flags]
    subprocess.run([*command, "-P"], input=b"\n".join(RECORDS), check=True, timeout=TIMEOUT_S)
    read = subprocess.run([*command, "-C", "-e", "-q"], capture_output=True, check=True, timeout=TIMEOUT_S)
    return read.stdout.splitlines()


def with_java(bootstrap: str, topic: str, certificates: Certificates, name: str | None) -> list[bytes]:
    if (reason := apache_kafka.missing()) is not None:
        pytest.skip(reason)
    lines = [
        "security.protocol=SSL",
        "ssl.truststore.type=PEM",
        f"ssl.truststore.location={certificates.authorities}",
        "group.id=" + topic,
        "auto.offset.reset=earliest",
    ]
    if name is not None:
        lines += ["ssl.keystore.type=PEM", f"ssl.keystore.location={certificates.folder / f'{name}-both.pem'}"]
    file = certificates.folder / f"{topic}.properties"
    file.write_text("\n".join(lines))
    java = ["java", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", f"{apache_kafka.JARS}/*"]
    common = ["--bootstrap-server", bootstrap, "--topic", topic]
    tool = "org.apache.kafka.tools.ConsoleProducer"
    flags = ["--command-config", str(file)]
    subprocess.run(
        [*java, tool, *common, *flags], input=b"\n".join(RECORDS), check=True, timeout=60, capture_output=True
    )
    tool = "org.apache.kafka.tools.consumer.ConsoleConsumer"
    flags = ["--command-config", str(file), "--max-messages", str(len(RECORDS))]
    read = subprocess.run([*java, tool, *common, *flags], capture_output=True, check=True, timeout=60)
    return read.stdout.splitlines()


CLIENTS: dict[str, Exchange] = {
    "kafka-python": with_kafka_python,
    "confluent-kafka": with_confluent,
    "aiokafka": with_aiokafka,
    "kcat": with_kcat,
    "java": with_java,
}


@pytest.mark.parametrize("name", [None, "alice"], ids=["without-certificate", "with-certificate"])
@pytest.mark.parametrize("client", CLIENTS)
def test_client_produces_and_consumes_by_tls(
    node: Node, certificates: Certificates, client: str, name: str | None
) -> None:
    topic = f"{client}-{name}"
    assert sorted(CLIENTS[client](node.bootstrap, topic, certificates, name)) == sorted(RECORDS)


@pytest.mark.parametrize("client", ["confluent-kafka", "java"])
def test_client_of_the_second_listener_stays_on_it(node: Node, certificates: Certificates, client: str) -> None:
    """The first listener's port is closed to this client: it must never be told that address."""
    second = node.settings["listeners"][0]["advertise"]
    assert sorted(CLIENTS[client](second, f"second-{client}", certificates, None)) == sorted(RECORDS)
    listed = confluent_kafka.Consumer({**librdkafka(second, certificates, None), "group.id": "g"}).list_topics(
        timeout=10
    )
    assert [(broker.host, broker.port) for broker in listed.brokers.values()] == [
        ("localhost", int(second.split(":")[1]))
    ]


def test_plaintext_client_fails_and_the_log_says_why(node: Node) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": node.bootstrap, "message.timeout.ms": 2_000})
    producer.produce("nothing", b"x")
    producer.flush(10)
    eventually(lambda: "speaks plaintext to a TLS listener" in node.log_text(), 10, "the node logs the reason")


@pytest.mark.timeout(120)
def test_certificates_rotate_under_load_without_a_lost_record(node: Node, certificates: Certificates) -> None:
    """Clients connect and produce while the node's certificate is replaced three times; all of it is read."""
    topic, stop = "rotated", threading.Event()
    sent: list[bytes] = []
    errors: list[str] = []

    def load(number: int) -> None:
        turn = 0
        while not stop.is_set():
            producer = confluent_kafka.Producer(librdkafka(node.bootstrap, certificates, None))
            for _ in range(20):
                value = f"{number}-{turn}".encode()
                turn += 1

                def delivered(error: Any, message: Any, value: bytes = value) -> None:
                    errors.append(str(error)) if error is not None else sent.append(value)

                producer.produce(topic, value, on_delivery=delivered)
            if producer.flush(TIMEOUT_S):
                errors.append("not delivered")

    threads = [threading.Thread(target=load, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        for rotation in range(1, 4):
            before = len(sent)
            certificates.issue("node", "127.0.0.1", "localhost")
            eventually(
                lambda count=rotation: node.log_text().count('"certificates_reloaded"') == count,  # type: ignore[misc]
                20,
                "the node loads the certificate",
            )
            eventually(lambda before=before: len(sent) > before + 40, 20, "clients make progress")  # type: ignore[misc]
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []
    consumer = kafka.KafkaConsumer(
        topic,
        bootstrap_servers=node.bootstrap,
        security_protocol="SSL",
        ssl_context=certificates.client(),
        auto_offset_reset="earliest",
    )
    read = {next(consumer).value for _ in range(len(sent))}
    consumer.close()
    assert read == set(sent)
    assert "certificates_not_reloaded" not in node.log_text()


def test_http_speaks_tls_only(certificates: Certificates, tmp_path: Path) -> None:
    settings = {"security": {"http_tls": True}, "tls": certificates.settings}
    node = HttpsNode(tmp_path, settings, certificates.client())
    node.start()
    try:
        assert "chronik_certificate_expiry_seconds" in node.get("/metrics")
        assert f"http https://127.0.0.1:{node.http_port}" in node.log_text()
        plain = Node(tmp_path / "plain")
        plain.http_port = node.http_port
        with pytest.raises(OSError):
            plain.get("/metrics")
        eventually(lambda: "speaks plaintext to a TLS listener" in node.log_text(), 10, "the log says why")
    finally:
        node.terminate()


class HttpsNode(Node):
    def __init__(self, folder: Path, settings: dict[str, Any], context: ssl.SSLContext) -> None:
        super().__init__(folder, settings)
        self._context = context

    def get(self, path: str, timeout_s: float = 5.0) -> str:
        from urllib.request import urlopen

        with urlopen(f"https://127.0.0.1:{self.http_port}{path}", timeout=timeout_s, context=self._context) as answer:
            return str(answer.read().decode())
