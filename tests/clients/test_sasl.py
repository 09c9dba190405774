"""Released clients authenticate with every mechanism, and report a wrong password as what it is."""

from __future__ import annotations

import asyncio
import gc
import logging
import shutil
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiokafka
import confluent_kafka
import kafka
import kafka.errors
import pytest
from aiokafka.abc import AbstractTokenProvider as AsyncTokenProvider
from aiokafka.errors import KafkaError as AioKafkaError
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._scram import (
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)
from kafka.net.sasl.oauth import AbstractTokenProvider
from tests.clients.drivers.base import ClientError
from tests.clients.drivers.java import SOURCE, Jvm, settings_of
from tests.conftest import StartNode
from tests.node.support_sasl import ALL_MECHANISMS, PASSWORDS, log_in, write_users
from tests.node.support_wire import connect, unique
from tests.support.node import Node
from tests.support.tokens import AUDIENCE, ISSUER, key_set, token_now

from chronik.wire.errors import ErrorCode

USER = "alice"
REFUSED_WITHIN_S = 15.0
BOOTSTRAP_MS = 3_000
REAUTHENTICATE_MS = 3_000
VALUE = b"a record"


@dataclass(frozen=True)
class Login:
    """What a client authenticates with. `token_path` is a file with the token, for Java."""

    mechanism: str
    password: str
    token: str
    token_path: Path

    @property
    def is_token(self) -> bool:
        return self.mechanism == "OAUTHBEARER"


class Refused(Exception):
    """The client reports that it could not authenticate."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sasl-clients")


@pytest.fixture(scope="module")
def sasl_node(start_shared_node: StartNode, folder: Path) -> Node:
    (folder / "keys.json").write_bytes(key_set())
    return start_shared_node(
        security={"protocol": "SASL_PLAINTEXT"},
        sasl={
            "mechanisms": list(ALL_MECHANISMS),
            "users_file": write_users(folder / "users"),
            "failure_delay_ms": 0,
            "jwks": str(folder / "keys.json"),
            "jwt_issuer": ISSUER,
            "jwt_audience": [AUDIENCE],
        },
    )


def login(folder: Path, mechanism: str, *, is_right: bool = True) -> Login:
    token = token_now(USER, 300 if is_right else -100)
    path = folder / f"token-{is_right}"
    path.write_text(token)
    return Login(mechanism, PASSWORDS[USER] if is_right else "wrong", token, path)


# -- one round trip with each client: produce a record, read it --------------------------------------------------------


def confluent_settings(bootstrap: str, with_login: Login) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "bootstrap.servers": bootstrap,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": with_login.mechanism,
        "log_level": 0,
    }
    if with_login.is_token:
        # librdkafka does not send a token that it believes to be expired.
        return {**settings, "oauth_cb": lambda _: (with_login.token, time.time() + 300)}
    return {**settings, "sasl.username": USER, "sasl.password": with_login.password}


def confluent_round_trip(bootstrap: str, topic: str, with_login: Login) -> bytes | None:
    failures: list[confluent_kafka.KafkaError] = []
    settings = {**confluent_settings(bootstrap, with_login), "error_cb": failures.append}
    producer = confluent_kafka.Producer(settings)
    producer.produce(topic, VALUE)
    deadline_s = time.monotonic() + REFUSED_WITHIN_S
    while len(producer) and time.monotonic() < deadline_s:
        producer.poll(0.1)
        for failure in failures:
            if failure.code() == confluent_kafka.KafkaError._AUTHENTICATION:
                producer.purge()
                raise Refused(failure.str())
    consumer = confluent_kafka.Consumer({**settings, "group.id": unique("group"), "auto.offset.reset": "earliest"})
    try:
        consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
        message = consumer.poll(REFUSED_WITHIN_S)
        return None if message is None else message.value()
    finally:
        consumer.close()


class Tokens(AbstractTokenProvider):  # type: ignore[misc]
    def __init__(self, token: str) -> None:
        self._token = token

    def token(self) -> str:
        return self._token


def kafka_python_round_trip(bootstrap: str, topic: str, with_login: Login) -> bytes | None:
    settings: dict[str, Any] = {
        "bootstrap_servers": bootstrap,
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": with_login.mechanism,
    }
    if with_login.is_token:
        settings["sasl_oauth_token_provider"] = Tokens(with_login.token)
    else:
        settings |= {"sasl_plain_username": USER, "sasl_plain_password": with_login.password}
    try:
        producer = kafka.KafkaProducer(**settings, max_block_ms=10_000, bootstrap_timeout_ms=BOOTSTRAP_MS)
        try:
            producer.send(topic, VALUE).get(REFUSED_WITHIN_S)
        finally:
            producer.close(1)
        consumer = kafka.KafkaConsumer(**settings, consumer_timeout_ms=10_000)
        try:
            partition = kafka.TopicPartition(topic, 0)
            consumer.assign([partition])
            consumer.seek_to_beginning(partition)
            return next((bytes(record.value) for record in consumer), None)
        finally:
            consumer.close()
    except kafka.errors.KafkaTimeoutError as error:
        # It logs why each attempt failed, and tries again until the time is over.
        reason = str(error)
    # Not in the `except` block: the context of the exception would keep the client's sockets.
    raise kafka.errors.KafkaTimeoutError(reason)


def drop_kafka_python(caplog: pytest.LogCaptureFixture) -> None:
    """Collect a client whose constructor failed: nothing else closes its sockets. Log records keep it alive."""
    for record in caplog.records:
        record.exc_info, record.args = None, ()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


class AsyncTokens(AsyncTokenProvider):  # type: ignore[misc]
    def __init__(self, token: str) -> None:
        self._token = token

    async def token(self) -> str:
        return self._token


def aiokafka_round_trip(bootstrap: str, topic: str, with_login: Login) -> bytes | None:
    settings: dict[str, Any] = {
        "bootstrap_servers": bootstrap,
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": with_login.mechanism,
    }
    if with_login.is_token:
        settings["sasl_oauth_token_provider"] = AsyncTokens(with_login.token)
    else:
        settings |= {"sasl_plain_username": USER, "sasl_plain_password": with_login.password}

    async def run() -> bytes | None:
        producer = aiokafka.AIOKafkaProducer(**settings)
        try:
            await producer.start()
            await producer.send_and_wait(topic, VALUE)
        finally:
            await producer.stop()
        consumer = aiokafka.AIOKafkaConsumer(topic, **settings, auto_offset_reset="earliest")
        try:
            await consumer.start()
            record = await asyncio.wait_for(consumer.getone(), REFUSED_WITHIN_S)
            return bytes(record.value)
        finally:
            await consumer.stop()

    try:
        return asyncio.run(run())
    except AioKafkaError as error:
        # It reports a refused bootstrap connection as that, and logs the reason.
        raise Refused(str(error)) from None


def kcat_round_trip(bootstrap: str, topic: str, with_login: Login) -> bytes | None:
    if shutil.which("kcat") is None:
        pytest.skip("kcat is not on the PATH: install the package kcat")
    if with_login.is_token:
        pytest.skip("kcat has no callback for tokens")
    command = ["kcat", "-b", bootstrap, "-X", "security.protocol=SASL_PLAINTEXT"]
    command += ["-X", f"sasl.mechanism={with_login.mechanism}", "-X", f"sasl.username={USER}"]
    command += ["-X", f"sasl.password={with_login.password}", "-t", topic]

    def run(*more: str, data: bytes = b"") -> bytes:
        done = subprocess.run([*command, *more], input=data, capture_output=True, timeout=3 * REFUSED_WITHIN_S)
        if b"Authentication failed" in done.stderr:
            raise Refused(done.stderr.decode())
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("-P", "-X", "message.timeout.ms=5000", data=VALUE)
    return run("-C", "-o", "beginning", "-e", "-q").strip()


@pytest.fixture(scope="module")
def jvm(folder: Path) -> Iterator[Jvm]:
    """A JVM with the libraries of OAUTHBEARER, which may read the token's files."""
    paths = ",".join(f"file://{folder / f'token-{is_right}'}" for is_right in (True, False))
    prefix = "-Dorg.apache.kafka.sasl.oauthbearer.allowed."
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAVA_TOOL_OPTIONS", f"{prefix}urls={paths} {prefix}files={paths.replace('file://', '')}")
        try:
            jvm = Jvm("kafka-broker-4.3", SOURCE, folder)
        except FileNotFoundError as missing:
            pytest.skip(str(missing))
    yield jvm
    jvm.close()


def java_settings(bootstrap: str, with_login: Login) -> dict[str, str]:
    settings = {
        "bootstrap.servers": bootstrap,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": with_login.mechanism,
    }
    package = "org.apache.kafka.common.security"
    if with_login.is_token:
        return {
            **settings,
            "sasl.login.callback.handler.class": f"{package}.oauthbearer.OAuthBearerLoginCallbackHandler",
            "sasl.oauthbearer.token.endpoint.url": f"file://{with_login.token_path}",
            "sasl.jaas.config": f"{package}.oauthbearer.OAuthBearerLoginModule required;",
        }
    module = "plain.PlainLoginModule" if with_login.mechanism == "PLAIN" else "scram.ScramLoginModule"
    jaas = f'{package}.{module} required username="{USER}" password="{with_login.password}";'
    return {**settings, "sasl.jaas.config": jaas}


def java_round_trip(jvm: Jvm, settings: Mapping[str, str], topic: str) -> bytes | None:
    try:
        limits = {"max.block.ms": "10000", "delivery.timeout.ms": "10000", "request.timeout.ms": "5000"}
        record = [None, -1, None, None, VALUE, 0]
        jvm.call("produce", *settings_of({**settings, **limits, "linger.ms": "0"}), topic, 1, 0, *record[1:])
        return jvm.call("read", *settings_of(settings), topic, 1, 1, 0).records()[0].value
    except ClientError as error:
        if "uthentication" in str(error) or "invalid_token" in str(error):
            raise Refused(str(error)) from None
        raise


RoundTrip = Callable[[str, str, Login], bytes | None]
PYTHON: dict[str, RoundTrip] = {
    "confluent-kafka": confluent_round_trip,
    "kafka-python": kafka_python_round_trip,
    "aiokafka": aiokafka_round_trip,
    "kcat": kcat_round_trip,
}


@pytest.fixture
def topic(sasl_node: Node) -> str:
    with connect(sasl_node) as client:
        assert log_in(client).error_code is ErrorCode.none
        return client.new_topic()


@pytest.fixture(params=[*PYTHON, "java"])
def round_trip(request: pytest.FixtureRequest) -> RoundTrip:
    if request.param != "java":
        return PYTHON[request.param]
    jvm: Jvm = request.getfixturevalue("jvm")
    return lambda bootstrap, topic, with_login: java_round_trip(jvm, java_settings(bootstrap, with_login), topic)


@pytest.mark.parametrize("mechanism", ALL_MECHANISMS)
def test_client_authenticates_and_reads_its_record(
    round_trip: RoundTrip, sasl_node: Node, topic: str, folder: Path, mechanism: str
) -> None:
    assert round_trip(sasl_node.bootstrap, topic, login(folder, mechanism)) == VALUE


@pytest.fixture
def kafka_log() -> Iterator[None]:
    """Have kafka-python log again: `chronik verify`, if it ran in this process, has silenced it."""
    logger = logging.getLogger("kafka")
    before = logger.propagate, logger.level
    logger.propagate = True
    logger.setLevel(logging.NOTSET)
    yield
    logger.propagate = before[0]
    logger.setLevel(before[1])


@pytest.mark.usefixtures("kafka_log")
@pytest.mark.parametrize("mechanism", ALL_MECHANISMS)
def test_client_reports_wrong_credentials(
    round_trip: RoundTrip,
    sasl_node: Node,
    topic: str,
    folder: Path,
    mechanism: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    refused = kafka.errors.KafkaTimeoutError if round_trip is kafka_python_round_trip else Refused
    with pytest.raises(refused):
        round_trip(sasl_node.bootstrap, topic, login(folder, mechanism, is_right=False))
    if round_trip is kafka_python_round_trip:
        assert "SaslAuthenticationFailedError: Authentication failed during authentication" in caplog.text
        drop_kafka_python(caplog)
    with connect(sasl_node) as client:
        log_in(client)
        assert client.records(topic) == []


def test_token_without_a_signature_of_the_java_client_is_refused(jvm: Jvm, sasl_node: Node, topic: str) -> None:
    """Kafka's default login module makes such tokens; its brokers accept them unless they are configured."""
    settings = {
        "bootstrap.servers": sasl_node.bootstrap,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.jaas.config": "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required "
        f'unsecuredLoginStringClaim_sub="{USER}";',
    }
    with pytest.raises(Refused):
        java_round_trip(jvm, settings, topic)


# -- SCRAM users, with the admin clients -------------------------------------------------------------------------------


def test_confluent_admin_creates_describes_and_deletes_a_user(sasl_node: Node, folder: Path) -> None:
    admin = AdminClient(confluent_settings(sasl_node.bootstrap, login(folder, "SCRAM-SHA-512")))
    user = unique("user")
    info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 8192)
    upsertion = UserScramCredentialUpsertion(user, info, b"secret")
    for future in admin.alter_user_scram_credentials([upsertion]).values():
        future.result(REFUSED_WITHIN_S)
    futures = admin.describe_user_scram_credentials([user])
    assert isinstance(futures, dict)
    described = futures[user].result(REFUSED_WITHIN_S)
    assert [(each.mechanism.name, each.iterations) for each in described.scram_credential_infos] == [
        ("SCRAM_SHA_512", 8192)
    ]
    with connect(sasl_node) as client:
        assert log_in(client, user=user, password="secret").error_code is ErrorCode.none
    deletion = UserScramCredentialDeletion(user, ScramMechanism.SCRAM_SHA_512)
    for future in admin.alter_user_scram_credentials([deletion]).values():
        future.result(REFUSED_WITHIN_S)
    with connect(sasl_node) as client:
        assert log_in(client, user=user, password="secret").error_code is ErrorCode.sasl_authentication_failed


# -- re-authentication -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["confluent-kafka", "java"])
def test_client_authenticates_again_without_an_error(
    request: pytest.FixtureRequest, start_node: StartNode, folder: Path, tmp_path: Path, name: str
) -> None:
    """A producer sends through several sessions. It must neither fail nor be disconnected."""
    node = start_node(
        security={"protocol": "SASL_PLAINTEXT"},
        sasl={
            "mechanisms": ["SCRAM-SHA-512"],
            "users_file": write_users(tmp_path / "users"),
            "reauthenticate_ms": REAUTHENTICATE_MS,
        },
    )
    with connect(node) as client:
        log_in(client)
        topic = client.new_topic()
    with_login = login(folder, "SCRAM-SHA-512")
    ends_s = time.monotonic() + 3 * REAUTHENTICATE_MS / 1000
    if name == "java":
        jvm: Jvm = request.getfixturevalue("jvm")
        settings = java_settings(node.bootstrap, with_login)
        # One consumer waits for a record that does not come, then gives up: its connection lives through the sessions.
        with pytest.raises(IndexError):
            jvm.call("read", *settings_of(settings), topic, 1, 1, 0).records()[0]
    else:
        failures: list[object] = []
        settings_ = {**confluent_settings(node.bootstrap, with_login), "error_cb": failures.append}
        producer = confluent_kafka.Producer({**settings_, "on_delivery": lambda error, _: failures.append(error)})
        count = 0
        while time.monotonic() < ends_s:
            producer.produce(topic, VALUE)
            count += 1
            producer.poll(0.05)
        assert producer.flush(REFUSED_WITHIN_S) == 0
        assert failures == [None] * count
    metrics = node.get("/metrics")
    assert 'chronik_reauthentications_total{mechanism="SCRAM-SHA-512"}' in metrics
    assert "chronik_sessions_expired_total 0.0" in metrics
