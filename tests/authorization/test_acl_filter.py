"""Filters of DescribeAcls and DeleteAcls, and what a new ACL must satisfy."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from chronik.authorization.acl_filter import AclFilter
from chronik.authorization.acls import AclBinding, Operation, PatternType, Permission, ResourceType
from chronik.authorization.new_acls import FIELD_CHARS_MAX, check_new_acl
from chronik.wire.errors import ErrorCode, KafkaError

TOPIC = ResourceType.TOPIC
LITERAL, PREFIXED = PatternType.LITERAL, PatternType.PREFIXED
ALICE = "User:alice"


def acl(name: str, pattern_type: PatternType = LITERAL) -> AclBinding:
    return AclBinding(TOPIC, name, pattern_type, ALICE, "*", Operation.READ, Permission.ALLOW)


ACLS = [acl("orders"), acl("*"), acl("ord", PREFIXED), acl("orders", PREFIXED), acl("other"), acl("x", PREFIXED)]


@pytest.mark.parametrize(
    ("pattern_type", "name", "expected"),
    [
        (PatternType.ANY, None, ACLS),
        (PatternType.ANY, "orders", [acl("orders"), acl("orders", PREFIXED)]),
        (LITERAL, None, [acl("orders"), acl("*"), acl("other")]),
        (LITERAL, "orders", [acl("orders")]),
        (LITERAL, "*", [acl("*")]),
        (PREFIXED, "orders", [acl("orders", PREFIXED)]),
        (PREFIXED, None, [acl("ord", PREFIXED), acl("orders", PREFIXED), acl("x", PREFIXED)]),
        (PatternType.MATCH, "orders", [acl("orders"), acl("*"), acl("ord", PREFIXED), acl("orders", PREFIXED)]),
        (PatternType.MATCH, "o", [acl("*")]),
        (PatternType.MATCH, None, ACLS),
    ],
)
def test_the_pattern_type_decides_how_names_match(
    pattern_type: PatternType, name: str | None, expected: list[AclBinding]
) -> None:
    matching = AclFilter(TOPIC, name, pattern_type).matches
    assert [each for each in ACLS if matching(each)] == expected


@pytest.mark.parametrize(
    "other",
    [
        {"resource_type": ResourceType.GROUP},
        {"principal": "User:bob"},
        {"host": "10.0.0.1"},
        {"operation": Operation.WRITE},
        {"permission": Permission.DENY},
    ],
)
def test_every_field_that_is_set_must_be_equal(other: dict[str, object]) -> None:
    exact = AclFilter(TOPIC, "orders", LITERAL, ALICE, "*", Operation.READ, Permission.ALLOW)
    assert exact.matches(acl("orders"))
    assert not replace(exact, **other).matches(acl("orders"))
    assert AclFilter().matches(acl("orders"))


def test_a_filter_with_an_unknown_value_says_which() -> None:
    assert AclFilter().unknown_field is None
    assert AclFilter(operation=Operation.UNKNOWN).unknown_field == "operation"


@pytest.mark.parametrize(
    "wrong",
    [
        {"resource_type": ResourceType.ANY},
        {"resource_type": ResourceType.UNKNOWN},
        {"resource_type": ResourceType.CLUSTER},
        {"pattern_type": PatternType.ANY},
        {"pattern_type": PatternType.MATCH},
        {"pattern_type": PatternType.UNKNOWN},
        {"operation": Operation.ANY},
        {"operation": Operation.UNKNOWN},
        {"permission": Permission.ANY},
        {"permission": Permission.UNKNOWN},
        {"name": ""},
        {"principal": ""},
        {"principal": "alice"},
        {"principal": "User:"},
        {"principal": ":alice"},
        {"host": ""},
        {"host": "10.0.0.0/33"},
        {"host": "here/8"},
        {"name": "a" * (FIELD_CHARS_MAX + 1)},
    ],
)
def test_an_acl_that_kafka_refuses_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(KafkaError) as refused:
        check_new_acl(replace(acl("orders"), **wrong))
    assert refused.value.code is ErrorCode.invalid_request
    assert refused.value.message


@pytest.mark.parametrize(
    "right",
    [
        {},
        {"name": "*"},
        {"host": "10.0.0.0/8"},
        {"host": "2001:db8::/32"},
        {"principal": "User:CN=alice,O=a:b"},
        {"resource_type": ResourceType.CLUSTER, "name": "kafka-cluster"},
        {"resource_type": ResourceType.USER, "operation": Operation.CREATE_TOKENS},
        # No topic has this operation. Kafka accepts it, and it has no effect.
        {"operation": Operation.IDEMPOTENT_WRITE},
    ],
)
def test_an_acl_that_kafka_creates_is_accepted(right: dict[str, object]) -> None:
    check_new_acl(replace(acl("orders"), **right))


@pytest.mark.parametrize("host", ["localhost", " 10.1.2.3", "10.1.2.03", "host.example"])
def test_a_denied_host_that_is_no_address_is_refused_because_it_would_deny_nothing(host: str) -> None:
    with pytest.raises(KafkaError, match="is not an address"):
        check_new_acl(replace(acl("orders"), host=host, permission=Permission.DENY))
    check_new_acl(replace(acl("orders"), host=host, permission=Permission.ALLOW))
    for address in ("10.1.2.3", "::1", "10.0.0.0/8", "*"):
        check_new_acl(replace(acl("orders"), host=address, permission=Permission.DENY))
