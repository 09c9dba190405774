"""Decisions equal those of a reference that examines every ACL, as the rules are written."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chronik.authorization import authorizer as module
from chronik.authorization.acls import (
    CLUSTER_NAME,
    EVERY_PRINCIPAL,
    AclBinding,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from chronik.authorization.authorizer import Authorizer

TOPIC, GROUP, CLUSTER = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.CLUSTER
LITERAL, PREFIXED = PatternType.LITERAL, PatternType.PREFIXED
ALLOW, DENY = Permission.ALLOW, Permission.DENY
ALICE = "User:alice"
HOST = "10.1.2.3"
DESCRIBES = {Operation.DESCRIBE, Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER}


def acl(
    operation: Operation,
    name: str = "orders",
    pattern_type: PatternType = LITERAL,
    *,
    principal: str = ALICE,
    host: str = "*",
    permission: Permission = ALLOW,
    resource_type: ResourceType = TOPIC,
) -> AclBinding:
    return AclBinding(resource_type, name, pattern_type, principal, host, operation, permission)


def allows(acls: Iterable[AclBinding], operation: Operation, name: str = "orders", host: str = HOST) -> bool:
    authorizer = Authorizer()
    authorizer.add(acls)
    return authorizer.allows(ALICE, host, operation, TOPIC, name)


# -- rules -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("acls", "operation", "name", "expected"),
    [
        ([], Operation.READ, "orders", False),
        ([acl(Operation.READ)], Operation.READ, "orders", True),
        ([acl(Operation.READ)], Operation.READ, "orders2", False),
        ([acl(Operation.READ)], Operation.WRITE, "orders", False),
        ([acl(Operation.READ, "ord", PREFIXED)], Operation.READ, "orders", True),
        ([acl(Operation.READ, "orders", PREFIXED)], Operation.READ, "orders", True),
        ([acl(Operation.READ, "orders-", PREFIXED)], Operation.READ, "orders", False),
        ([acl(Operation.READ, "*")], Operation.READ, "orders", True),
        ([acl(Operation.READ, "*", PREFIXED)], Operation.READ, "orders", False),
        ([acl(Operation.ALL)], Operation.ALTER_CONFIGS, "orders", True),
        ([acl(Operation.READ, principal=EVERY_PRINCIPAL)], Operation.READ, "orders", True),
        ([acl(Operation.READ, principal="Group:*")], Operation.READ, "orders", False),
        ([acl(Operation.READ, principal="User:bob")], Operation.READ, "orders", False),
        ([acl(Operation.READ, resource_type=GROUP)], Operation.READ, "orders", False),
        ([acl(Operation.READ, "*"), acl(Operation.READ, permission=DENY)], Operation.READ, "orders", False),
        ([acl(Operation.READ), acl(Operation.READ, "*", permission=DENY)], Operation.READ, "orders", False),
        ([acl(Operation.READ), acl(Operation.ALL, "o", PREFIXED, permission=DENY)], Operation.READ, "orders", False),
        (
            [acl(Operation.READ), acl(Operation.READ, principal=EVERY_PRINCIPAL, permission=DENY)],
            Operation.READ,
            "orders",
            False,
        ),
        # A DENY of READ does not deny DESCRIBE, which the ALLOW of WRITE implies.
        ([acl(Operation.WRITE), acl(Operation.READ, permission=DENY)], Operation.DESCRIBE, "orders", True),
        ([acl(Operation.WRITE), acl(Operation.DESCRIBE, permission=DENY)], Operation.DESCRIBE, "orders", False),
        ([acl(Operation.WRITE), acl(Operation.DESCRIBE, permission=DENY)], Operation.WRITE, "orders", True),
        ([acl(Operation.ALTER_CONFIGS)], Operation.DESCRIBE_CONFIGS, "orders", True),
        ([acl(Operation.ALTER_CONFIGS)], Operation.DESCRIBE, "orders", False),
        ([acl(Operation.CREATE)], Operation.DESCRIBE, "orders", False),
        ([acl(Operation.DESCRIBE)], Operation.READ, "orders", False),
    ],
)
def test_a_decision_follows_the_rules_of_kafka(
    acls: list[AclBinding], operation: Operation, name: str, expected: bool
) -> None:
    assert allows(acls, operation, name) is expected


@pytest.mark.parametrize("operation", sorted(DESCRIBES))
def test_an_allowed_operation_implies_describe(operation: Operation) -> None:
    assert allows([acl(operation)], Operation.DESCRIBE)


@pytest.mark.parametrize(
    ("host", "client", "expected"),
    [
        ("*", "10.1.2.3", True),
        ("10.1.2.3", "10.1.2.3", True),
        ("10.1.2.3", "10.1.2.4", False),
        ("10.1.0.0/16", "10.1.255.255", True),
        ("10.1.0.0/16", "10.2.0.0", False),
        ("10.1.2.3/16", "10.1.9.9", True),
        ("10.1.0.0/16", "::1", False),
        ("10.1.0.0/16", "", False),
        ("::1", "0:0:0:0:0:0:0:1", True),
        ("2001:db8::/32", "2001:db8:1::5", True),
        ("10.1.2.3", "::ffff:10.1.2.3", True),
        ("10.1.0.0/16", "::ffff:10.1.2.3", True),
        ("::ffff:10.1.0.0/112", "10.1.2.3", True),
        ("::ffff:10.1.0.0/112", "10.2.2.3", False),
        ("::/0", "10.1.2.3", False),
        ("10.1.0.0/99", "10.1.2.3", False),
        ("host.example", "host.example", True),
    ],
)
def test_a_host_is_an_address_a_range_or_all(host: str, client: str, expected: bool) -> None:
    assert allows([acl(Operation.READ, host=host)], Operation.READ, host=client) is expected


def test_a_denied_range_beats_an_allowed_address() -> None:
    acls = [acl(Operation.READ, host=HOST), acl(Operation.READ, host="10.0.0.0/8", permission=DENY)]
    assert not allows(acls, Operation.READ)


def test_a_super_user_may_do_everything_that_is_denied_to_all() -> None:
    authorizer = Authorizer([ALICE])
    authorizer.add([acl(Operation.ALL, "*", principal=EVERY_PRINCIPAL, permission=DENY)])
    assert authorizer.allows(ALICE, HOST, Operation.ALTER, CLUSTER, CLUSTER_NAME)
    assert authorizer.allows_any(ALICE, HOST, Operation.WRITE, TOPIC)
    assert not authorizer.allows("User:alice2", HOST, Operation.READ, TOPIC, "orders")


def test_a_resource_without_any_acl_is_open_if_the_node_allows_it() -> None:
    authorizer = Authorizer(allow_everyone_if_no_acl_found=True)
    assert authorizer.allows(ALICE, HOST, Operation.READ, TOPIC, "orders")
    authorizer.add([acl(Operation.READ, principal="User:bob")])
    # Bob's ACL applies to the topic: from now on everyone needs one.
    assert not authorizer.allows(ALICE, HOST, Operation.READ, TOPIC, "orders")
    assert authorizer.allows(ALICE, HOST, Operation.READ, TOPIC, "payments")
    assert authorizer.allows_any(ALICE, HOST, Operation.WRITE, TOPIC)
    authorizer.add([acl(Operation.READ, "*", principal="User:bob")])
    assert not authorizer.allows_any(ALICE, HOST, Operation.WRITE, TOPIC)


@pytest.mark.parametrize(
    ("acls", "expected"),
    [
        ([], False),
        ([acl(Operation.WRITE)], True),
        ([acl(Operation.READ)], False),
        ([acl(Operation.ALL, "a", PREFIXED)], True),
        ([acl(Operation.WRITE, principal="User:bob")], False),
        ([acl(Operation.WRITE, host="1.1.1.1")], False),
        ([acl(Operation.WRITE), acl(Operation.WRITE, permission=DENY)], False),
        ([acl(Operation.WRITE), acl(Operation.WRITE, "ord", PREFIXED, permission=DENY)], False),
        ([acl(Operation.WRITE, "ord", PREFIXED), acl(Operation.WRITE, "o", PREFIXED, permission=DENY)], False),
        ([acl(Operation.WRITE, "o", PREFIXED), acl(Operation.WRITE, "ord", PREFIXED, permission=DENY)], True),
        ([acl(Operation.WRITE, "o", PREFIXED), acl(Operation.WRITE, "o", permission=DENY)], True),
        ([acl(Operation.WRITE, "*"), acl(Operation.WRITE, "o", PREFIXED, permission=DENY)], True),
        ([acl(Operation.WRITE, "*"), acl(Operation.WRITE, "*", permission=DENY)], False),
        ([acl(Operation.WRITE), acl(Operation.ALL, "*", principal=EVERY_PRINCIPAL, permission=DENY)], False),
    ],
)
def test_a_right_on_any_resource_is_one_that_no_deny_covers(acls: list[AclBinding], expected: bool) -> None:
    authorizer = Authorizer()
    authorizer.add(acls)
    assert authorizer.allows_any(ALICE, HOST, Operation.WRITE, TOPIC) is expected


# -- the reference -----------------------------------------------------------------------------------------------------


def matches_host(host: str, client: str) -> bool:
    if host == "*" or host == client:
        return True
    return "/" in host and ip_address(client) in ip_network(host)


def matches_resource(each: AclBinding, resource_type: ResourceType, name: str) -> bool:
    if each.resource_type != resource_type:
        return False
    return name.startswith(each.name) if each.pattern_type is PREFIXED else each.name in (name, "*")


def matches_operation(each: AclBinding, operation: Operation) -> bool:
    if each.operation in (Operation.ALL, operation):
        return True
    if each.permission is DENY:
        return False
    if operation is Operation.DESCRIBE:
        return each.operation in DESCRIBES
    return operation is Operation.DESCRIBE_CONFIGS and each.operation is Operation.ALTER_CONFIGS


def reference(
    acls: Iterable[AclBinding],
    principal: str,
    host: str,
    operation: Operation,
    resource_type: ResourceType,
    name: str,
    default: bool,
) -> bool:
    on_resource = [each for each in acls if matches_resource(each, resource_type, name)]
    matching = [
        each.permission
        for each in on_resource
        if each.principal in (principal, "User:*")
        and matches_host(each.host, host)
        and matches_operation(each, operation)
    ]
    if not on_resource:
        return default
    return DENY not in matching and ALLOW in matching


NAMES = st.sampled_from(["a", "ab", "abc", "abd", "b", "*", "ba"])
PRINCIPALS = st.sampled_from([ALICE, "User:bob", EVERY_PRINCIPAL])
HOSTS = st.sampled_from(["10.1.2.3", "10.1.9.9", "192.168.0.1"])
OPERATIONS = st.sampled_from([each for each in Operation if each >= Operation.READ])
TYPES = st.sampled_from([TOPIC, GROUP])
ACLS = st.builds(
    AclBinding,
    TYPES,
    NAMES,
    st.sampled_from([LITERAL, PREFIXED]),
    PRINCIPALS,
    st.sampled_from(["*", "10.1.2.3", "10.1.0.0/16", "10.0.0.0/8"]),
    st.sampled_from([each for each in Operation if each >= Operation.ALL]),
    st.sampled_from([ALLOW, ALLOW, DENY]),
)
CHANGES = st.lists(st.tuples(st.booleans(), st.lists(ACLS, max_size=6)), max_size=6)
QUESTIONS = st.lists(
    st.tuples(st.sampled_from([ALICE, "User:bob", "User:eve"]), HOSTS, OPERATIONS, TYPES, NAMES), min_size=1, max_size=8
)


@settings(max_examples=300, deadline=None)
@given(changes=CHANGES, questions=QUESTIONS, default=st.booleans())
def test_decisions_equal_the_reference_after_every_change(
    changes: list[tuple[bool, list[AclBinding]]],
    questions: list[tuple[str, str, Operation, ResourceType, str]],
    default: bool,
) -> None:
    authorizer = Authorizer(allow_everyone_if_no_acl_found=default)
    acls: set[AclBinding] = set()
    for is_removal, changed in [*changes, (True, [])]:
        if is_removal:
            # Also some that were added before, so that entries are emptied.
            removed = [*changed, *sorted(acls, key=repr)[::2]]
            authorizer.remove(removed)
            acls.difference_update(removed)
        else:
            authorizer.add(changed)
            acls.update(changed)
        for question in questions:
            assert authorizer.allows(*question) is reference(acls, *question, default), (question, acls)
            assert authorizer.allows(*question) is reference(acls, *question, default), "from the cache"
            assert authorizer.allows_any(*question[:4]) >= any(
                reference(acls, *question[:4], name, False) for name in ("a", "ab", "abc", "zz")
            )
    authorizer.remove(acls)
    assert not (authorizer._literals or authorizer._patterns or any(authorizer._prefixes.values()))


def test_the_cache_is_bounded_for_each_client_and_in_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLIENT_DECISIONS_MAX", 10)
    monkeypatch.setattr(module, "DECISIONS_MAX", 50)
    authorizer = Authorizer()
    authorizer.add([acl(Operation.READ, "t7")])
    for client in range(20):
        for topic in range(25):
            for _ in range(2):
                allowed = authorizer.allows(ALICE, f"10.0.0.{client}", Operation.READ, TOPIC, f"t{topic}")
                assert allowed is (topic == 7)
            cached = [len(decisions) for decisions in authorizer._decisions.values()]
            assert max(cached) <= 10
            assert sum(cached) == authorizer._decision_count <= 50


def test_a_removed_acl_ends_cached_decisions() -> None:
    authorizer = Authorizer()
    allow = acl(Operation.READ)
    authorizer.add([allow])
    assert authorizer.allows(ALICE, HOST, Operation.READ, TOPIC, "orders")
    authorizer.remove([allow])
    assert not authorizer.allows(ALICE, HOST, Operation.READ, TOPIC, "orders")
    deny = acl(Operation.READ, "ord", PREFIXED, permission=DENY)
    authorizer.add([allow, deny])
    assert not authorizer.allows(ALICE, HOST, Operation.READ, TOPIC, "orders")
    authorizer.remove([deny])
    assert authorizer.allows(ALICE, HOST, Operation.READ, TOPIC, "orders")


def test_known_decisions_are_true_after_a_change_and_after_an_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DECISIONS_MAX", 3)
    authorizer = Authorizer()
    allow = acl(Operation.READ)
    key = (Operation.READ << 8 | TOPIC, "orders")
    authorizer.add([allow])
    known = authorizer.known(ALICE, HOST)
    assert authorizer.allows(ALICE, HOST, Operation.READ, TOPIC, "orders")
    assert known.get(key)
    for topic in range(5):
        authorizer.allows("User:bob", HOST, Operation.READ, TOPIC, f"t{topic}")
    authorizer.remove([allow])
    assert not known
    authorizer.add([allow])
    known = authorizer.known(ALICE, HOST)
    assert authorizer.allows(ALICE, HOST, Operation.READ, TOPIC, "orders")
    authorizer.remove([allow])
    assert not known.get(key)
