"""Topic names, and what a snapshot holds."""

from __future__ import annotations

import msgspec
import pytest

from chronik.metadata.apply import apply
from chronik.metadata.commands import AlterClientQuotas
from chronik.metadata.events import ClientQuotasChanged, events_between
from chronik.metadata.image import (
    ClientQuotas,
    ClusterImage,
    check_topic_name,
    decode_image,
    encode_image,
    is_internal,
)
from chronik.quotas.entities import make_entity
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


def test_an_image_without_quotas_from_an_older_version_is_read() -> None:
    fields = msgspec.msgpack.decode(encode_image(ClusterImage(cluster_id="c", version=7)))
    del fields["client_quotas"]
    assert decode_image(msgspec.msgpack.encode(fields)) == ClusterImage(cluster_id="c", version=7)


def test_quotas_are_set_changed_and_removed_one_by_one() -> None:
    alice, default = make_entity([("user", "alice")]), make_entity([("user", None)])
    image, _ = apply(ClusterImage(), AlterClientQuotas(default, {"request_percentage": 50.0}))
    image, _ = apply(image, AlterClientQuotas(alice, {"producer_byte_rate": 1.0, "consumer_byte_rate": 2.0}))
    image, events = apply(image, AlterClientQuotas(alice, {"producer_byte_rate": None, "consumer_byte_rate": 3.0}))
    assert events == [ClientQuotasChanged(alice, {"consumer_byte_rate": 3.0})]
    assert image.client_quotas == (
        ClientQuotas(alice, {"consumer_byte_rate": 3.0}),
        ClientQuotas(default, {"request_percentage": 50.0}),
    )
    assert decode_image(encode_image(image)) == image
    empty, events = apply(image, AlterClientQuotas(alice, {"consumer_byte_rate": None}))
    assert events == [ClientQuotasChanged(alice, {})]
    assert empty.quotas_of(alice) == {}
    # A node that receives an image instead of the commands learns of the same changes.
    assert events_between(image, empty) == events
