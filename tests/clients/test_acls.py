"""ACLs through confluent-kafka: the admin calls, and what producers and consumers notice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import confluent_kafka.admin
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from tests.conftest import StartNode

cka: Any = confluent_kafka.admin
"""Its type hints do not export all of its classes."""
WAIT_S = 15.0
ANONYMOUS = "User:ANONYMOUS"


def acl(operation: Any, name: str = "orders", **fields: Any) -> Any:
    values = {
        "restype": cka.ResourceType.TOPIC,
        "resource_pattern_type": cka.ResourcePatternType.LITERAL,
        "principal": "User:alice",
        "host": "*",
        "permission_type": cka.AclPermissionType.ALLOW,
        **fields,
    }
    return cka.AclBinding(name=name, operation=operation, **values)


def everything(**fields: Any) -> Any:
    values = {
        "restype": cka.ResourceType.ANY,
        "name": None,
        "resource_pattern_type": cka.ResourcePatternType.ANY,
        "principal": None,
        "host": None,
        "operation": cka.AclOperation.ANY,
        "permission_type": cka.AclPermissionType.ANY,
        **fields,
    }
    return cka.AclBindingFilter(**values)


def create(admin: Any, acls: Sequence[Any]) -> None:
    for outcome in admin.create_acls(list(acls)).values():
        outcome.result(WAIT_S)


def described(admin: Any, acl_filter: Any) -> set[Any]:
    return set(admin.describe_acls(acl_filter).result(WAIT_S))


def test_confluent_creates_describes_and_deletes_acls(start_node: StartNode) -> None:
    node = start_node(authorization={"enabled": True, "super_users": [ANONYMOUS]})
    admin = cka.AdminClient({"bootstrap.servers": node.bootstrap})
    read, write = acl(cka.AclOperation.READ), acl(cka.AclOperation.WRITE)
    prefixed = acl(
        cka.AclOperation.READ, "ord", resource_pattern_type=cka.ResourcePatternType.PREFIXED, host="10.0.0.0/8"
    )
    group = acl(cka.AclOperation.READ, "g", restype=cka.ResourceType.GROUP, permission_type=cka.AclPermissionType.DENY)
    create(admin, [read, write, prefixed, group])
    assert described(admin, everything()) == {read, write, prefixed, group}
    assert described(admin, everything(name="orders", resource_pattern_type=cka.ResourcePatternType.MATCH)) == {
        read,
        write,
        prefixed,
    }
    assert described(admin, everything(permission_type=cka.AclPermissionType.DENY)) == {group}
    (deleted,) = admin.delete_acls([everything(operation=cka.AclOperation.READ)]).values()
    assert set(deleted.result(WAIT_S)) == {read, prefixed, group}
    assert described(admin, everything()) == {write}


def test_confluent_is_told_that_a_node_does_not_authorize(start_node: StartNode) -> None:
    admin = cka.AdminClient({"bootstrap.servers": start_node().bootstrap})
    with pytest.raises(KafkaException) as refused:
        create(admin, [acl(cka.AclOperation.READ)])
    assert refused.value.args[0].code() == KafkaError.SECURITY_DISABLED


def test_producer_and_consumer_need_rights_and_use_those_they_get(start_node: StartNode) -> None:
    node = start_node(authorization={"enabled": True, "allow_everyone_if_no_acl_found": True})
    settings = {"bootstrap.servers": node.bootstrap}
    admin = cka.AdminClient(settings)
    admin.create_topics([cka.NewTopic("orders", 1, 1)])["orders"].result(WAIT_S)
    create(admin, [acl(cka.AclOperation.READ)])
    outcomes: list[KafkaError | None] = []

    def send() -> KafkaError | None:
        producer = Producer({**settings, "enable.idempotence": True, "message.timeout.ms": 10_000})
        producer.produce("orders", b"value", on_delivery=lambda error, _: outcomes.append(error))
        producer.flush(WAIT_S)
        return outcomes.pop()

    refused = send()
    assert refused is not None
    assert refused.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    create(admin, [acl(cka.AclOperation.WRITE, principal=ANONYMOUS)])
    assert send() is None
    consumer = Consumer({**settings, "group.id": "g", "auto.offset.reset": "earliest"})
    consumer.subscribe(["orders"])
    try:
        message = consumer.poll(WAIT_S)
        assert message is not None
        error = message.error()
        assert error is not None
        assert error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
        create(admin, [acl(cka.AclOperation.READ, principal=ANONYMOUS)])
        polled = (consumer.poll(1.0) for _ in range(int(WAIT_S)))
        assert next(each.value() for each in polled if each is not None and each.error() is None) == b"value"
    finally:
        consumer.close()
