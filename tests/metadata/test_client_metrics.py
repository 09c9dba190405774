"""Subscriptions to metrics of clients: which configs are valid, and which clients match."""

from __future__ import annotations

import pytest

from chronik.metadata.apply import apply
from chronik.metadata.client_metrics import (
    CLIENT_METRICS_CONFIGS,
    SUBSCRIPTIONS_MAX,
    check_client_metrics_configs,
    subscription,
)
from chronik.metadata.commands import AlterConfigs
from chronik.metadata.events import ConfigChanged, events_between
from chronik.metadata.image import ClusterImage, decode_image, encode_image
from chronik.wire.errors import ErrorCode, KafkaError

JAVA = {"client_id": "orders-1", "client_software_name": "apache-kafka-java", "client_software_version": "4.3.1"}


def test_a_subscription_matches_if_every_expression_matches_the_whole_value() -> None:
    assert subscription({}).matches(JAVA)
    assert subscription({"match": "client_id=orders-.*,client_software_version=4\\..*"}).matches(JAVA)
    assert not subscription({"match": "client_id=orders"}).matches(JAVA)
    assert not subscription({"match": "client_id=orders-.*,client_software_name=librdkafka"}).matches(JAVA)
    assert not subscription({"match": "client_source_port=9+"}).matches(JAVA)


def test_metrics_and_interval_have_kafkas_defaults() -> None:
    assert subscription({})[:2] == ((), 300_000)
    assert subscription({"metrics": "a., b.", "interval.ms": "100"})[:2] == (("a.", "b."), 100)
    assert all(definition.documentation.endswith(".") for definition in CLIENT_METRICS_CONFIGS.values())


@pytest.mark.parametrize(
    ("name", "configs", "code"),
    [
        ("", {"metrics": "*"}, ErrorCode.invalid_request),
        ("a\nb", {"metrics": "*"}, ErrorCode.invalid_request),
        ("s", {"metric": "*"}, ErrorCode.invalid_request),
        ("s", {"interval.ms": "99"}, ErrorCode.invalid_request),
        ("s", {"interval.ms": "3600001"}, ErrorCode.invalid_request),
        ("s", {"interval.ms": "soon"}, ErrorCode.invalid_config),
        ("s", {"match": "client_id"}, ErrorCode.invalid_config),
        ("s", {"match": "user=alice"}, ErrorCode.invalid_config),
        ("s", {"match": "client_id=("}, ErrorCode.invalid_config),
        ("s", {"metrics": "x" * 10_001}, ErrorCode.invalid_config),
    ],
)
def test_an_invalid_subscription_is_refused(name: str, configs: dict[str, str], code: ErrorCode) -> None:
    with pytest.raises(KafkaError) as refused:
        check_client_metrics_configs(ClusterImage(), name, configs)
    assert refused.value.code == code


def test_a_cluster_has_a_bounded_number_of_subscriptions() -> None:
    image = ClusterImage(client_metrics={str(number): {"metrics": "*"} for number in range(SUBSCRIPTIONS_MAX)})
    check_client_metrics_configs(image, "7", {"interval.ms": "1000"})
    with pytest.raises(KafkaError) as refused:
        check_client_metrics_configs(image, "new", {"metrics": "*"})
    assert refused.value.code == ErrorCode.policy_violation


def test_a_subscription_exists_while_it_has_a_config() -> None:
    image = ClusterImage()
    changed, events = apply(image, AlterConfigs("client_metrics", "s", {"metrics": "*", "interval.ms": "100"}))
    assert changed.client_metrics == {"s": {"metrics": "*", "interval.ms": "100"}}
    assert events == [
        ConfigChanged("client_metrics", "s", {"metrics": "*", "interval.ms": "100"}, ("interval.ms", "metrics"))
    ]
    assert events_between(image, changed) == events
    assert decode_image(encode_image(changed)) == changed
    gone, _ = apply(changed, AlterConfigs("client_metrics", "s", {"metrics": None, "interval.ms": None}))
    assert gone.client_metrics == {}
