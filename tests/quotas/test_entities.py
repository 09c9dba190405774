"""Which entities quotas can be set on, which values they take, and which quota applies to a client."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chronik.quotas.entities import (
    Bucket,
    Limit,
    Part,
    QuotaEntity,
    QuotaKey,
    QuotaTable,
    check_changes,
    make_entity,
    normalized_address,
)
from chronik.wire.errors import ErrorCode, KafkaError

PRODUCE = QuotaKey.PRODUCER_BYTE_RATE
BOTH, OF_USER, OF_CLIENT = Bucket("alice", "app"), Bucket("alice", None), Bucket(None, "app")
ORDER: Sequence[tuple[tuple[Part, ...], Bucket]] = (
    ((("user", "alice"), ("client-id", "app")), BOTH),
    ((("user", "alice"), ("client-id", None)), BOTH),
    ((("user", "alice"),), OF_USER),
    ((("user", None), ("client-id", "app")), BOTH),
    ((("user", None), ("client-id", None)), BOTH),
    ((("user", None),), OF_USER),
    ((("client-id", "app"),), OF_CLIENT),
    ((("client-id", None),), OF_CLIENT),
)
"""Kafka's precedence, strongest first, and the bucket that each kind of entity counts in."""


def table_of(entries: Sequence[tuple[tuple[Part, ...], float]]) -> QuotaTable:
    return QuotaTable((make_entity(parts), {PRODUCE: value}) for parts, value in entries)


@pytest.mark.parametrize("stronger, weaker", list(combinations(range(len(ORDER)), 2)))
def test_the_stronger_entity_of_two_applies_and_decides_the_bucket(stronger: int, weaker: int) -> None:
    table = table_of([(ORDER[weaker][0], 7.0), (ORDER[stronger][0], 3.0)])
    assert table.limit(PRODUCE, "alice", "app") == Limit(3.0, ORDER[stronger][1])


@given(st.sets(st.integers(0, len(ORDER) - 1)), st.sampled_from(["alice", "bob"]), st.sampled_from(["app", "other"]))
def test_a_client_gets_the_first_entity_in_order_that_names_it(chosen: set[int], user: str, client: str) -> None:
    names = {"user": user, "client-id": client}
    matching = [index for index in sorted(chosen) if all(name in (None, names[kind]) for kind, name in ORDER[index][0])]
    limit = table_of([(ORDER[index][0], float(index + 1)) for index in chosen]).limit(PRODUCE, user, client)
    assert (None if limit is None else limit.value) == (matching[0] + 1 if matching else None)


def test_the_default_user_gives_each_user_a_bucket_of_its_own() -> None:
    table = table_of([((("user", None),), 5.0)])
    alice, bob = table.limit(PRODUCE, "alice", "app"), table.limit(PRODUCE, "bob", "app")
    assert alice is not None and bob is not None
    assert (alice.bucket, bob.bucket) == (Bucket("alice", None), Bucket("bob", None))
    assert table.limit(PRODUCE, "alice", "another") == alice, "all clients of a user share its bucket"


def test_a_quota_of_one_kind_says_nothing_about_another() -> None:
    table = table_of([((("user", "alice"),), 5.0)])
    assert table.limit(QuotaKey.CONSUMER_BYTE_RATE, "alice", "app") is None
    assert table.limits_requests and not table.limits_addresses
    mutations = QuotaTable([(make_entity([("user", None)]), {"controller_mutation_rate": 1.0})])
    assert not mutations.limits_requests


def test_an_address_has_its_own_connection_rate_or_the_default() -> None:
    rates = [((("ip", "10.0.0.1"),), 3.0), ((("ip", None),), 9.0)]
    table = QuotaTable((make_entity(parts), {QuotaKey.CONNECTION_CREATION_RATE: value}) for parts, value in rates)
    assert (table.connection_rate("10.0.0.1"), table.connection_rate("10.0.0.2")) == (3.0, 9.0)
    assert QuotaTable().connection_rate("10.0.0.1") is None


def test_entities_are_equal_whatever_the_order_of_their_parts() -> None:
    parts: list[Part] = [("client-id", "app"), ("user", None)]
    assert make_entity(parts) == make_entity(reversed(parts)) == QuotaEntity((("user", None), ("client-id", "app")))
    assert str(make_entity(parts)) == "user=<default>, client-id=app"


def test_an_address_has_one_form() -> None:
    assert make_entity([("ip", "::ffff:10.0.0.1")]) == make_entity([("ip", "10.0.0.1")])
    assert normalized_address("2001:DB8::0:1") == "2001:db8::1"
    assert normalized_address("") == ""


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [("user", "")],
        [("group", "g")],
        [("user", "a"), ("user", "b")],
        [("ip", "10.0.0.1"), ("user", "a")],
        [("ip", "host.example")],
        [("user", "a" * 1025)],
    ],
    ids=str,
)
def test_an_entity_that_cannot_have_quotas_is_refused(parts: list[Part]) -> None:
    with pytest.raises(KafkaError) as raised:
        make_entity(parts)
    assert raised.value.code is ErrorCode.invalid_request


@pytest.mark.parametrize(
    "parts, key, value",
    [
        ([("user", "a")], "producer_byte_rate", 0),
        ([("user", "a")], "producer_byte_rate", 1.5),
        ([("user", "a")], "consumer_byte_rate", -1),
        ([("user", "a")], "request_percentage", float("nan")),
        ([("user", "a")], "request_percentage", float("inf")),
        ([("user", "a")], "connection_creation_rate", 5),
        ([("user", "a")], "retention.ms", 5),
        ([("ip", None)], "producer_byte_rate", 5),
        ([("ip", None)], "connection_creation_rate", -1),
    ],
    ids=str,
)
def test_a_value_that_makes_no_sense_is_refused(parts: list[Part], key: str, value: float) -> None:
    with pytest.raises(KafkaError) as raised:
        check_changes(make_entity(parts), {key: value})
    assert raised.value.code is ErrorCode.invalid_request


def test_every_quota_can_be_set_on_its_kind_of_entity_and_removed() -> None:
    values = {"producer_byte_rate": 1, "consumer_byte_rate": 2, "request_percentage": 0.5}
    check_changes(make_entity([("user", "a"), ("client-id", None)]), {**values, "controller_mutation_rate": 0.1})
    check_changes(make_entity([("ip", "::1")]), {"connection_creation_rate": 0})
    check_changes(make_entity([("ip", None)]), {"connection_creation_rate": None, "anything": None})
