"""The doctor's verdicts on access: the rules, and an examination that cannot connect or may not look."""

from __future__ import annotations

import datetime
from pathlib import Path
from types import SimpleNamespace

from tests.client.fake_broker import FakeBroker, metadata
from tests.client.secure_broker import SecureBroker, server_context
from tests.doctor.test_rules import healthy

from chronik.client.security import ClientSecurity
from chronik.doctor import Means, diagnose
from chronik.doctor.observations import ConnectionFault, Refusal, Throttle
from chronik.doctor.rules import judge
from chronik.observe.traces import PartitionTrace, TraceRing
from chronik.wire.api import ApiKey


def test_an_expired_certificate_comes_before_everything_else() -> None:
    seen = healthy()
    seen.connection_faults = (
        ConnectionFault("wrong-listener", "speaks TLS", 2),
        ConnectionFault("expired-certificate", "the certificate of a:1 is not valid now", 1),
    )
    seen.refusals = [Refusal("READ", "topic orders", "TOPIC_AUTHORIZATION_FAILED")]
    diagnosis = judge(seen)
    assert diagnosis.verdict == "expired-certificate"
    assert diagnosis.also == ("wrong-listener", "not-authorized")
    assert diagnosis.evidence[0].node == 1
    assert "without a restart" in diagnosis.next_step


def test_advertised_addresses_that_nobody_reaches_are_a_wrong_listener() -> None:
    seen = healthy()
    seen.unreachable_advertised = {1: ("10.9.9.9:9092", "cannot connect")}
    diagnosis = judge(seen)
    assert diagnosis.verdict == "wrong-listener"
    assert "10.9.9.9:9092" in diagnosis.evidence[0].text
    assert "advertise.kafka" in diagnosis.next_step


def test_missing_rights_name_the_principal_and_the_command_that_grants_them() -> None:
    seen = healthy()
    seen.who = "User:alice"
    seen.refusals = [Refusal("READ", "topic orders", "TOPIC_AUTHORIZATION_FAILED")]
    diagnosis = judge(seen)
    assert diagnosis.verdict == "not-authorized"
    assert diagnosis.evidence[0].text == "User:alice may not READ topic orders: TOPIC_AUTHORIZATION_FAILED"
    assert "chronik acl add --principal User:alice --operation READ --topic orders" in diagnosis.next_step


def test_repeated_delays_of_a_quota_are_throttled_and_one_delay_is_not() -> None:
    seen = healthy()
    seen.who = "User:alice"
    seen.throttles = [Throttle(1.0, 2, 40.0)]
    assert judge(seen).verdict == "healthy"
    seen.throttles.append(Throttle(2.0, 2, 900.0))
    diagnosis = judge(seen)
    assert diagnosis.verdict == "throttled"
    assert diagnosis.evidence[0].numbers == {"requests": 2, "throttle_ms": 900.0}


def no_time() -> int:
    return 0


async def test_an_examination_of_an_expired_certificate_ends_with_the_verdict(tmp_path: Path) -> None:
    since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=10)
    context = server_context(tmp_path, days=9, since=since)
    async with SecureBroker({"alice": "sesame"}, context=context) as broker:
        security = ClientSecurity("SASL_SSL", "SCRAM-SHA-512", "alice", "sesame", authorities=str(tmp_path / "ca.pem"))
        diagnosis = await diagnose([broker.address], "orders", wall_ms=no_time, means=Means.of(security))
    assert diagnosis.verdict == "expired-certificate"
    assert diagnosis.partitions == ()


async def test_an_examination_over_tls_of_a_plaintext_listener_is_a_wrong_listener(tmp_path: Path) -> None:
    server_context(tmp_path)
    async with FakeBroker() as broker:
        security = ClientSecurity("SSL", authorities=str(tmp_path / "ca.pem"))
        diagnosis = await diagnose([broker.address], "orders", wall_ms=no_time, means=Means.of(security))
    assert diagnosis.verdict == "wrong-listener"


async def test_an_examination_without_rights_on_the_topic_is_not_authorized() -> None:
    async with SecureBroker({"alice": "sesame"}) as broker:

        def refuse(request: object) -> object:
            topic = {"error_code": 29, "name": "orders", "partitions": []}
            return {**metadata(broker), "topics": [topic]}

        broker.handlers[ApiKey.METADATA] = refuse  # type: ignore[assignment]
        security = ClientSecurity("SASL_PLAINTEXT", "SCRAM-SHA-512", "alice", "sesame")
        diagnosis = await diagnose([broker.address], "orders", wall_ms=no_time, means=Means.of(security))
    assert diagnosis.verdict == "not-authorized"
    assert "User:alice may not DESCRIBE topic orders" in diagnosis.evidence[0].text


def test_traced_refusals_of_a_client_are_evidence() -> None:
    ring = TraceRing(1, 10, lambda: 0.0, SimpleNamespace(traces_dropped=0))
    for _ in range(2):
        PartitionTrace(ring, "orders", 0).rejected("writer", "TOPIC_AUTHORIZATION_FAILED", "no rights")
    seen = healthy()
    seen.traces = ring.read(0, 10)[0]
    diagnosis = judge(seen)
    assert diagnosis.verdict == "not-authorized"
    assert diagnosis.evidence[0].text == "writer was refused WRITE on topic orders 2 times"
