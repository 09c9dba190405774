"""Topic names."""

from __future__ import annotations

import pytest

from chronik.metadata.image import check_topic_name, is_internal
from chronik.wire.errors import ErrorCode, KafkaError


@pytest.mark.parametrize("name", ["a", "orders.v1", "A-Z_09", "a" * 249, "...", "__consumer_offsets"])
def test_names_that_kafka_allows_are_allowed(name: str) -> None:
    check_topic_name(name)


@pytest.mark.parametrize("name", ["", ".", "..", "a" * 250, "a b", "a/b", "ä", "a\n", "a\x00", "a:b"])
def test_names_that_kafka_refuses_are_refused(name: str) -> None:
    with pytest.raises(KafkaError) as raised:
        check_topic_name(name)
    assert raised.value.code == ErrorCode.invalid_topic_exception
    assert len(raised.value.message) < 400


def test_the_brokers_own_topics_are_internal() -> None:
    assert is_internal("__consumer_offsets")
    assert not is_internal("__mine")
