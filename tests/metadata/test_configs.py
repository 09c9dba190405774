"""Configs: which values are accepted, which are refused, and with which message."""

from __future__ import annotations

import pytest

from chronik.metadata.broker_configs import BROKER_CONFIGS, STATIC_BROKER_CONFIGS, check_broker_configs
from chronik.metadata.config_definitions import ConfigDefinition, ConfigType
from chronik.metadata.topic_configs import TOPIC_CONFIGS, check_topic_configs
from chronik.wire.errors import ErrorCode, KafkaError


@pytest.mark.parametrize("definition", TOPIC_CONFIGS.values(), ids=lambda definition: definition.name)
def test_every_default_of_a_topic_config_is_valid(definition: ConfigDefinition) -> None:
    assert definition.default is not None
    definition.parse(definition.default)
    assert definition.documentation.endswith(".")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("retention.ms", "-1"),
        ("retention.ms", " 604800000 "),
        ("cleanup.policy", "compact,delete"),
        ("cleanup.policy", "compact, delete"),
        ("cleanup.policy", ""),
        ("leader.replication.throttled.replicas", "0:1,12:3"),
        ("follower.replication.throttled.replicas", "*"),
        ("min.cleanable.dirty.ratio", "0.25"),
        ("preallocate", "TRUE"),
        ("visibility", "appended"),
        ("flush.messages", "9223372036854775807"),
    ],
)
def test_valid_values_are_accepted(name: str, text: str) -> None:
    check_topic_configs({name: text})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("retention.ms", "-2"),
        ("retention.ms", "soon"),
        ("retention.ms", ""),
        ("retention.ms", "1_000"),
        ("retention.ms", "9223372036854775808"),
        ("retention.ms", "9" * 5000),
        ("max.message.bytes", "2147483648"),
        ("min.insync.replicas", "0"),
        ("cleanup.policy", "shred"),
        ("cleanup.policy", "delete,shred"),
        ("leader.replication.throttled.replicas", "0:1,1"),
        ("follower.replication.throttled.replicas", "none"),
        ("min.cleanable.dirty.ratio", "nan"),
        ("min.cleanable.dirty.ratio", "1.5"),
        ("preallocate", "yes"),
        ("compression.type", "rar"),
        ("message.timestamp.type", "createtime"),
        ("no.such.config", "1"),
    ],
)
def test_the_error_for_an_invalid_value_or_unknown_config_names_the_config(name: str, text: str) -> None:
    with pytest.raises(KafkaError) as raised:
        check_topic_configs({name: text})
    assert raised.value.code == ErrorCode.invalid_config
    assert name in raised.value.message


def test_unsetting_a_config_requires_neither_a_value_nor_a_known_name() -> None:
    check_topic_configs({"retention.ms": None, "leader.replication.throttled.replicas": None})
    check_broker_configs({"log.retention.ms": None, "leader.replication.throttled.rate": None}, "1")


def test_internal_topics_accept_only_compaction_and_committed_visibility() -> None:
    check_topic_configs({"cleanup.policy": "compact", "segment.bytes": "1048576"}, is_internal=True)
    for name, text in (("cleanup.policy", "delete"), ("cleanup.policy", "compact,delete"), ("visibility", "appended")):
        with pytest.raises(KafkaError):
            check_topic_configs({name: text}, is_internal=True)


def test_every_topic_config_synonym_is_a_broker_config_of_the_same_type() -> None:
    for definition in TOPIC_CONFIGS.values():
        if definition.synonym is not None:
            assert BROKER_CONFIGS[definition.synonym].type == definition.type


def test_a_static_broker_config_cannot_be_altered() -> None:
    check_broker_configs({"log.retention.ms": "1000"})
    with pytest.raises(KafkaError) as raised:
        check_broker_configs({"node.id": "7"})
    assert raised.value.code == ErrorCode.invalid_request
    with pytest.raises(KafkaError) as raised:
        check_broker_configs({"retention.ms": "7"})
    assert raised.value.code == ErrorCode.invalid_config
    assert not STATIC_BROKER_CONFIGS["node.id"].is_dynamic


def test_config_values_are_parsed_by_type() -> None:
    assert TOPIC_CONFIGS["cleanup.policy"].parse("compact,delete") == ("compact", "delete")
    assert TOPIC_CONFIGS["preallocate"].parse("true") is True
    assert TOPIC_CONFIGS["segment.bytes"].parse("1048576") == 1048576
    assert TOPIC_CONFIGS["min.cleanable.dirty.ratio"].parse("0.5") == 0.5
    assert TOPIC_CONFIGS["segment.bytes"].type is ConfigType.INT


def test_min_insync_replicas_cannot_be_set_for_a_single_broker() -> None:
    check_broker_configs({"min.insync.replicas": "2"})
    check_broker_configs({"min.insync.replicas": None}, "1")
    with pytest.raises(KafkaError) as raised:
        check_broker_configs({"min.insync.replicas": "2"}, "1")
    assert raised.value.code == ErrorCode.invalid_request
