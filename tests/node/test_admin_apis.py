"""The admin APIs over a real metadata log, through the wire format of every supported version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import msgspec
import pytest
from tests.node.support_raft import lone_log
from tests.support.handlers import handlers_of

from chronik.metadata.commands import ChangePartition, CreateTopic, RegisterBroker
from chronik.metadata.elections import BrokerStates
from chronik.metadata.hand_overs import preferred_hand_over
from chronik.metadata.image import DEFAULT_LISTENER, ClusterImage, TopicImage
from chronik.metadata.topic_configs import TOPIC_CONFIGS
from chronik.node.apis import (
    alter_configs,
    create_partitions,
    create_topics,
    delete_records,
    delete_topics,
    describe_cluster,
    describe_configs,
    describe_log_dirs,
    incremental_alter_configs,
    list_config_resources,
)
from chronik.node.config import NodeConfig
from chronik.node.environment import Environment
from chronik.node.membership.metadata_log import MetadataLog
from chronik.node.membership.raft_store import SqliteRaftStore
from chronik.node.membership.topic_plans import NewTopic, plan_topic
from chronik.node.runtime import Runtime
from chronik.node.serving.access import OPEN_ACCESS
from chronik.node.serving.api import Api
from chronik.node.serving.connection import Request
from chronik.node.topic_settings import topic_defaults, topic_settings
from chronik.observe.logging import make_logger
from chronik.observe.metrics import Metrics
from chronik.storage.disk import RealDisk
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.messages import read_request, read_response, write_request, write_response

TOPIC, BROKER, LOGGER, CLIENT_METRICS, GROUP = 2, 4, 8, 16, 32
SET, DELETE, APPEND, SUBTRACT = 0, 1, 2, 3
DYNAMIC_TOPIC, DYNAMIC_BROKER, DYNAMIC_DEFAULT, STATIC, DEFAULT = 1, 2, 3, 4, 5
DYNAMIC_GROUP = 8


class FakePartition:
    def __init__(self, topic: str, index: int, settings: Any) -> None:
        self.topic, self.index, self.settings = topic, index, settings
        self.log = SimpleNamespace(size_bytes=1234)
        self.high_watermark = self.log_end_offset = 10

    async def delete_records(self, offset: int, wait_s: float) -> int:
        if offset > self.high_watermark:
            raise KafkaError(ErrorCode.offset_out_of_range, "too far")
        return self.high_watermark if offset == -1 else offset


class WillingLeaders:
    """The controller's part in elections, with leaders that transfer leadership immediately."""

    def __init__(self, metadata: MetadataLog) -> None:
        self._metadata = metadata

    async def applied_everywhere(self) -> None:
        """Return immediately: the leaders follow at once."""

    async def elect_preferred(self, wanted: Sequence[tuple[str, int]], wait_s: float) -> list[KafkaError | None]:
        outcomes: list[KafkaError | None] = []
        for name, index in wanted:
            image = self._metadata.image
            try:
                asked = preferred_hand_over(image, BrokerStates.of(image), (name, index))
            except KafkaError as error:
                outcomes.append(error)
                continue
            known = image.topics[name].partitions[index]
            change = ChangePartition(asked.topic_id, index, known.partition_epoch, asked.to, known.isr)
            await self._metadata.propose(change)
            outcomes.append(None)
        return outcomes


class FakeBroker:
    """The part of a broker that the handlers use, with a real metadata log."""

    def __init__(self, config: NodeConfig, env: Environment, metadata: MetadataLog) -> None:
        self.config, self.metadata = config, metadata
        self.runtime = Runtime.make(config, env, Metrics(), make_logger(lambda line: None, env.wall_ms, config.levels))
        self.controller = WillingLeaders(metadata)
        self.node_id = config.node_id
        self.stuck: asyncio.Event | None = None
        self.partitions = self
        self.handlers = handlers_of(self)

    @property
    def image(self) -> ClusterImage:
        return self.metadata.image

    async def applied(self) -> None:
        if self.stuck is not None:
            await self.stuck.wait()

    async def create(self, new: NewTopic | str, *, by_broker: bool = False) -> TopicImage:
        topic = msgspec.structs.replace(NewTopic(new) if isinstance(new, str) else new, by_broker=by_broker)
        await self.metadata.propose(lambda image: plan_topic(image, self.config, self.runtime.env, topic))
        await self.applied()
        return self.image.require_topic(topic.name)

    def get(self, key: tuple[str, int]) -> FakePartition | None:
        topic, index = key
        if self.image.partition(topic, index) is None:
            return None
        settings = topic_settings(self.image.topics[topic], topic_defaults(self.config, self.image))
        return FakePartition(topic, index, settings)

    def require_leader(self, topic: str, index: int) -> FakePartition:
        found = self.get((topic, index))
        if found is None:
            raise KafkaError(ErrorCode.unknown_topic_or_partition, "missing")
        return found


@asynccontextmanager
async def running(tmp_path: Path, **settings: Any) -> AsyncIterator[FakeBroker]:
    with ThreadPoolExecutor(1) as executor:
        env = Environment(RealDisk(), Random(1), executor, lambda: 0)
        metadata = await lone_log(env, SqliteRaftStore(str(tmp_path / "metadata.db"), env.new_uuid))
        await metadata.propose(RegisterBroker(1, UUID(int=1), "127.0.0.1", 9092))
        yield FakeBroker(NodeConfig(data_dir=str(tmp_path), **settings), env, metadata)
        await metadata.close()


async def call(broker: FakeBroker, api: Api, values: Mapping[str, Any], version: int | None = None) -> Any:
    """Return the response as a client of that version reads it, by default the newest version."""
    version = api.versions[1] if version is None else version
    message = read_request(api.key, version, write_request(api.key, version, values))
    more = {"message": message, "listener": DEFAULT_LISTENER, "access": OPEN_ACCESS}
    request = cast(Request, SimpleNamespace(api_key=api.key, api_version=version, **more))
    handle = broker.handlers[api.key].cold
    assert handle is not None
    answer = await handle(request)
    assert isinstance(answer, dict)
    return read_response(api.key, version, write_response(api.key, version, answer))


def wanted(name: str, partitions: int = -1, factor: int = -1, **configs: str) -> dict[str, Any]:
    return {
        "name": name,
        "num_partitions": partitions,
        "replication_factor": factor,
        "assignments": [],
        "configs": [{"name": key.replace("_", "."), "value": value} for key, value in configs.items()],
    }


async def create(broker: FakeBroker, *topics: dict[str, Any], validate_only: bool = False) -> list[Any]:
    values = {"topics": topics, "timeout": 5000, "validate_only": validate_only}
    return list((await call(broker, create_topics.API, values)).topics)


def versions(api: Api) -> list[int]:
    return list(range(api.versions[0], api.versions[1] + 1))


@pytest.mark.parametrize("version", versions(create_topics.API))
async def test_a_topic_is_created_in_every_version(tmp_path: Path, version: int) -> None:
    async with running(tmp_path, num_partitions=4) as broker:
        values = {"topics": [wanted("orders", retention_ms="5")], "timeout": 5000, "validate_only": False}
        (topic,) = (await call(broker, create_topics.API, values, version)).topics
        assert (topic.name, topic.error_code) == ("orders", ErrorCode.none)
        made = broker.image.topics["orders"]
        assert len(made.partitions) == 4
        assert made.configs == {"retention.ms": "5"}
        if version >= 5:
            assert (topic.num_partitions, topic.replication_factor) == (4, 1)
            assert {config.name for config in topic.configs} == set(TOPIC_CONFIGS)
            sources = {config.name: config.config_source for config in topic.configs}
            assert sources["retention.ms"] == DYNAMIC_TOPIC
            assert -1 not in sources.values()
        if version >= 7:
            assert topic.topic_id == made.id


async def test_each_invalid_topic_gets_its_own_error_and_valid_topics_are_created(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        await create(broker, wanted("there"))
        manual = wanted("manual")
        manual["assignments"] = [
            {"partition_index": 0, "broker_ids": [1]},
            {"partition_index": 1, "broker_ids": [1]},
        ]
        both = wanted("both", partitions=2)
        both["assignments"] = manual["assignments"]
        unknown = wanted("unknown")
        unknown["assignments"] = [{"partition_index": 0, "broker_ids": [7]}]
        gap = wanted("gap")
        gap["assignments"] = [{"partition_index": 1, "broker_ids": [1]}]
        results = await create(
            broker,
            wanted("twice"),
            wanted("there"),
            wanted("a/b"),
            wanted("zero", partitions=0),
            wanted("wide", factor=2),
            wanted("none", factor=0),
            wanted("odd", no_such="1"),
            wanted("bad", retention_ms="soon"),
            wanted("__consumer_offsets"),
            wanted("good", partitions=3),
            manual,
            both,
            unknown,
            gap,
            wanted("twice"),
        )
        assert {result.name: result.error_code for result in results} == {
            "twice": ErrorCode.invalid_request,
            "there": ErrorCode.topic_already_exists,
            "a/b": ErrorCode.invalid_topic_exception,
            "zero": ErrorCode.invalid_partitions,
            "wide": ErrorCode.invalid_replication_factor,
            "none": ErrorCode.invalid_replication_factor,
            "odd": ErrorCode.invalid_config,
            "bad": ErrorCode.invalid_config,
            "__consumer_offsets": ErrorCode.invalid_topic_exception,
            "good": ErrorCode.none,
            "manual": ErrorCode.none,
            "both": ErrorCode.invalid_request,
            "unknown": ErrorCode.invalid_replica_assignment,
            "gap": ErrorCode.invalid_replica_assignment,
        }
        assert all(result.error_message for result in results if result.error_code != ErrorCode.none)
        assert sorted(broker.image.topics) == ["good", "manual", "there"]


async def test_a_request_above_the_partition_limit_is_a_policy_violation(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        results = await create(broker, wanted("a", partitions=2**31 - 1), wanted("b", partitions=1))
        assert {result.error_code for result in results} == {ErrorCode.policy_violation}
        results = await create(broker, wanted("c", partitions=6_000), wanted("d", partitions=6_000))
        assert {result.error_code for result in results} == {ErrorCode.policy_violation}
        assert broker.image.topics == {}


async def test_validate_only_returns_the_real_response_and_changes_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        version = broker.image.version
        good, bad = await create(broker, wanted("good", partitions=2), wanted("a b"), validate_only=True)
        assert (good.error_code, good.num_partitions) == (ErrorCode.none, 2)
        assert bad.error_code == ErrorCode.invalid_topic_exception
        assert broker.image.version == version


async def test_a_creation_that_is_not_applied_in_time_returns_request_timed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chronik.node.serving.deadlines.WAIT_MS_MIN", 20)

    async with running(tmp_path) as broker:
        broker.stuck = asyncio.Event()
        values = {"topics": [wanted("orders")], "timeout": 20, "validate_only": False}
        (topic,) = (await call(broker, create_topics.API, values)).topics
        assert topic.error_code == ErrorCode.request_timed_out
        assert "orders" in broker.image.topics
        broker.stuck.set()


async def test_an_unexpected_failure_is_never_reported_as_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as broker:

        async def fail() -> None:
            raise RuntimeError("bug")

        monkeypatch.setattr(broker, "applied", fail)
        (topic,) = await create(broker, wanted("orders"))
        assert topic.error_code == ErrorCode.unknown_server_error


async def test_only_the_broker_creates_internal_topics(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        new = NewTopic("__consumer_offsets", 16, configs={"cleanup.policy": "compact"})
        topic = await broker.create(new, by_broker=True)
        assert topic.is_internal and len(topic.partitions) == 16
        with pytest.raises(KafkaError):
            await broker.create("__transaction_state")


@pytest.mark.parametrize("version", versions(delete_topics.API))
async def test_topics_are_deleted_in_every_version(tmp_path: Path, version: int) -> None:
    async with running(tmp_path) as broker:
        await create(broker, wanted("orders"))
        new = NewTopic("__consumer_offsets", 1)
        await broker.create(new, by_broker=True)
        names = ["orders", "missing", "__consumer_offsets"]
        values: dict[str, Any] = {"topic_names": names, "timeout": 5000}
        if version >= 6:
            values = {"topics": [{"name": name, "topic_id": None} for name in names], "timeout": 5000}
        answer = await call(broker, delete_topics.API, values, version)
        assert [result.error_code for result in answer.responses] == [
            ErrorCode.none,
            ErrorCode.unknown_topic_or_partition,
            ErrorCode.invalid_topic_exception,
        ]
        assert sorted(broker.image.topics) == ["__consumer_offsets"]


async def test_topics_are_deleted_by_id(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        await create(broker, wanted("orders"), wanted("payments"))
        ids = {name: topic.id for name, topic in broker.image.topics.items()}
        values = {
            "topics": [
                {"name": None, "topic_id": ids["orders"]},
                {"name": None, "topic_id": UUID(int=99)},
                {"name": "payments", "topic_id": None},
                {"name": None, "topic_id": ids["payments"]},
                {"name": None, "topic_id": None},
            ],
            "timeout": 5000,
        }
        first, unknown, *twice, neither = (await call(broker, delete_topics.API, values)).responses
        assert (first.error_code, first.name) == (ErrorCode.none, "orders")
        assert unknown.error_code == ErrorCode.unknown_topic_id
        assert {result.error_code for result in (*twice, neither)} == {ErrorCode.invalid_request}
        assert sorted(broker.image.topics) == ["payments"]


@pytest.mark.parametrize("version", versions(create_partitions.API))
async def test_partitions_are_added_in_every_version(tmp_path: Path, version: int) -> None:
    async with running(tmp_path) as broker:
        await create(broker, wanted("a", 2), wanted("b", 2), wanted("c", 2), wanted("d", 2))
        await broker.create(NewTopic("__consumer_offsets", 1), by_broker=True)
        one = [{"broker_ids": [1]}]
        topics = [
            {"name": "a", "count": 5, "assignments": None},
            {"name": "b", "count": 2, "assignments": None},
            {"name": "c", "count": 3, "assignments": one},
            {"name": "d", "count": 4, "assignments": one},
            {"name": "missing", "count": 4, "assignments": None},
            {"name": "__consumer_offsets", "count": 4, "assignments": None},
        ]
        values = {"topics": topics, "timeout": 5000, "validate_only": False}
        answer = await call(broker, create_partitions.API, values, version)
        assert {result.name: result.error_code for result in answer.results} == {
            "a": ErrorCode.none,
            "b": ErrorCode.invalid_partitions,
            "c": ErrorCode.none,
            "d": ErrorCode.invalid_replica_assignment,
            "missing": ErrorCode.unknown_topic_or_partition,
            "__consumer_offsets": ErrorCode.invalid_topic_exception,
        }
        assert [len(broker.image.topics[name].partitions) for name in "abcd"] == [5, 2, 3, 2]


@pytest.mark.parametrize("version", versions(delete_records.API))
async def test_delete_records_works_only_if_the_cleanup_policy_allows_it(tmp_path: Path, version: int) -> None:
    async with running(tmp_path) as broker:
        await create(broker, wanted("orders", 2), wanted("kept", cleanup_policy="compact"))
        await create(broker, wanted("forever", cleanup_policy=""))
        partitions = [{"partition_index": index, "offset": offset} for index, offset in ((0, 3), (1, -1), (9, 1))]
        values = {
            "topics": [
                {"name": "orders", "partitions": partitions},
                {"name": "kept", "partitions": [{"partition_index": 0, "offset": 1}]},
                {"name": "__consumer_offsets", "partitions": [{"partition_index": 0, "offset": 1}]},
                {"name": "forever", "partitions": [{"partition_index": 0, "offset": 1}]},
            ],
            "timeout": 5000,
        }
        answer = await call(broker, delete_records.API, values, version)
        found = [
            (partition.low_watermark, partition.error_code) for topic in answer.topics for partition in topic.partitions
        ]
        assert found == [
            (3, ErrorCode.none),
            (10, ErrorCode.none),
            (-1, ErrorCode.unknown_topic_or_partition),
            (-1, ErrorCode.policy_violation),
            (-1, ErrorCode.invalid_topic_exception),
            (1, ErrorCode.none),
        ]


async def describe(broker: FakeBroker, kind: int, name: str, version: int = 4, keys: Any = None) -> Any:
    values = {
        "resources": [{"resource_type": kind, "resource_name": name, "configuration_keys": keys}],
        "include_synonyms": True,
        "include_documentation": True,
    }
    (result,) = (await call(broker, describe_configs.API, values, version)).results
    return result


@pytest.mark.parametrize("version", versions(describe_configs.API))
async def test_a_topics_configs_are_described_with_their_sources(tmp_path: Path, version: int) -> None:
    async with running(tmp_path, topic_defaults={"retention.ms": 9000, "preallocate": True}) as broker:
        await create(broker, wanted("orders", retention_ms="5"))
        result = await describe(broker, TOPIC, "orders", version)
        assert result.error_code == ErrorCode.none
        configs = {config.name: config for config in result.configs}
        assert set(configs) == set(TOPIC_CONFIGS)
        retention = configs["retention.ms"]
        assert (retention.value, retention.config_source) == ("5", DYNAMIC_TOPIC)
        assert [(synonym.name, synonym.value, synonym.source) for synonym in retention.synonyms] == [
            ("retention.ms", "5", DYNAMIC_TOPIC),
            ("log.retention.ms", "9000", STATIC),
            ("log.retention.ms", "604800000", DEFAULT),
        ]
        assert (configs["preallocate"].value, configs["preallocate"].config_source) == ("true", STATIC)
        assert (configs["segment.ms"].value, configs["segment.ms"].config_source) == ("604800000", DEFAULT)
        if version >= 3:
            assert retention.config_type == 5
            assert retention.documentation
        some = await describe(broker, TOPIC, "orders", version, ["segment.ms", "no.such"])
        assert [config.name for config in some.configs] == ["segment.ms"]


async def test_describe_configs_explains_what_it_cannot_describe(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        for kind, name, code in (
            (TOPIC, "missing", ErrorCode.unknown_topic_or_partition),
            (BROKER, "7", ErrorCode.invalid_request),
            (GROUP, "", ErrorCode.invalid_request),
            (CLIENT_METRICS, "", ErrorCode.invalid_request),
        ):
            result = await describe(broker, kind, name)
            assert result.error_code == code
            assert result.error_message and result.configs == ()
        assert (await describe(broker, CLIENT_METRICS, "missing")).configs == ()


async def test_a_group_has_configs_before_it_exists(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        await change(broker, GROUP, "g", ("consumer.session.timeout.ms", SET, "50000"))
        configs = {config.name: config for config in (await describe(broker, GROUP, "g")).configs}
        session, interval = configs["consumer.session.timeout.ms"], configs["consumer.heartbeat.interval.ms"]
        assert (session.value, session.config_source, session.read_only) == ("50000", DYNAMIC_GROUP, False)
        assert [(each.name, each.value) for each in session.synonyms] == [
            ("consumer.session.timeout.ms", "50000"),
            ("group.consumer.session.timeout.ms", "45000"),
        ]
        assert (interval.value, interval.config_source) == ("5000", STATIC)
        for kind in ("consumer", "share"):
            name = f"{kind}.assignment.interval.ms"
            await change(
                broker, GROUP, "other", (name, SET, "15000"), (f"{kind}.assignor.offload.enable", SET, "false")
            )
            assert [(each.name, each.value) for each in configs[name].synonyms] == [(f"group.{name}", "0")]
            assert configs[f"{kind}.assignor.offload.enable"].value == "true"
        await change(broker, GROUP, "other", *((each.name, DELETE, None) for each in configs.values()))

        async def listed(*types: int) -> list[tuple[int, str]]:
            answer = await call(broker, list_config_resources.API, {"resource_types": list(types)})
            assert answer.error_code is ErrorCode.none
            return [(each.resource_type, each.resource_name) for each in answer.config_resources]

        assert await listed(GROUP) == [(GROUP, "g")]
        assert (BROKER, "1") in await listed()
        answer = await call(broker, list_config_resources.API, {"resource_types": [3]})
        assert answer.error_code is ErrorCode.unsupported_version
        await change(broker, GROUP, "g", ("consumer.session.timeout.ms", DELETE, None))
        assert await listed(GROUP) == []


async def test_a_broker_describes_its_static_and_dynamic_configs(tmp_path: Path) -> None:
    async with running(tmp_path, topic_defaults={"retention.ms": 9000}) as broker:
        await change(broker, BROKER, "1", ("log.retention.ms", SET, "7"))
        await change(broker, BROKER, "", ("log.retention.ms", SET, "8"), ("log.segment.bytes", SET, "2000000"))
        configs = {config.name: config for config in (await describe(broker, BROKER, "1")).configs}
        assert (configs["node.id"].value, configs["node.id"].read_only) == ("1", True)
        assert [(synonym.value, synonym.source) for synonym in configs["log.retention.ms"].synonyms] == [
            ("7", DYNAMIC_BROKER),
            ("8", DYNAMIC_DEFAULT),
            ("9000", STATIC),
            ("604800000", DEFAULT),
        ]
        assert not configs["log.retention.ms"].read_only
        defaults = (await describe(broker, BROKER, "")).configs
        assert {config.name: config.value for config in defaults} == {
            "log.retention.ms": "8",
            "log.segment.bytes": "2000000",
        }
        await create(broker, wanted("orders"))
        settings = broker.require_leader("orders", 0).settings
        assert settings.log_config.retention_ms == 7
        assert settings.log_config.segment_bytes == 2000000


async def test_the_loggers_of_a_broker_are_listed_with_their_levels(tmp_path: Path) -> None:
    async with running(tmp_path, log_levels={"groups": "debug", "default": "warning"}) as broker:
        configs = {config.name: config.value for config in (await describe(broker, LOGGER, "1")).configs}
        assert configs["groups"] == "DEBUG"
        assert configs["root"] == configs["storage"] == "WARN"


async def test_the_levels_of_loggers_are_altered_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    async with running(tmp_path, log_levels={"groups": "debug"}) as broker:

        async def levels() -> dict[str, str]:
            return {config.name: config.value for config in (await describe(broker, LOGGER, "1")).configs}

        before = await levels()
        for name, changes, code in (
            ("1", [("raft", SET, "DEBUG"), ("no.such", SET, "DEBUG")], ErrorCode.invalid_config),
            ("1", [("raft", SET, "DEBUG"), ("storage", SET, "LOUD")], ErrorCode.invalid_config),
            ("1", [("raft", SET, "DEBUG"), ("root", DELETE, None)], ErrorCode.invalid_request),
            ("1", [("raft", APPEND, "DEBUG")], ErrorCode.invalid_request),
            ("2", [("raft", SET, "DEBUG")], ErrorCode.invalid_request),
            ("", [("raft", SET, "DEBUG")], ErrorCode.invalid_request),
        ):
            assert (await change(broker, LOGGER, name, *changes)).error_code == code
        await change(broker, LOGGER, "1", ("raft", SET, "ERROR"), validate_only=True)
        assert await levels() == before
        changed = await change(
            broker, LOGGER, "1", ("raft", SET, "TRACE"), ("groups", DELETE, None), ("root", SET, "warn")
        )
        assert changed.error_code == ErrorCode.none
        after = await levels()
        assert (after["raft"], after["groups"], after["storage"], after["root"]) == ("DEBUG", "WARN", "WARN", "WARN")
        assert broker.image.broker_configs == {}


async def change(
    broker: FakeBroker, kind: int, name: str, *changes: tuple[str, int, str | None], validate_only: bool = False
) -> Any:
    values = {
        "resources": [
            {
                "resource_type": kind,
                "resource_name": name,
                "configs": [
                    {"name": key, "config_operation": operation, "value": value} for key, operation, value in changes
                ],
            }
        ],
        "validate_only": validate_only,
    }
    answers = [(await call(broker, incremental_alter_configs.API, values, version)).responses[0] for version in (0, 1)]
    assert answers[0].error_code == answers[1].error_code
    return answers[1]


async def test_incremental_alter_configs_changes_single_configs(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        await create(broker, wanted("orders", flush_ms="1", segment_ms="2"))

        def configs() -> Mapping[str, str]:
            return broker.image.topics["orders"].configs

        assert (
            await change(broker, TOPIC, "orders", ("flush.ms", SET, "3"), ("segment.ms", DELETE, None))
        ).error_code == 0
        assert configs() == {"flush.ms": "3"}
        await change(broker, TOPIC, "orders", ("cleanup.policy", APPEND, "compact"))
        assert configs()["cleanup.policy"] == "delete,compact"
        await change(broker, TOPIC, "orders", ("cleanup.policy", SUBTRACT, "delete"))
        assert configs()["cleanup.policy"] == "compact"
        settings = broker.require_leader("orders", 0).settings
        assert settings.log_config.cleanup_compact and not settings.log_config.cleanup_delete
        await change(broker, TOPIC, "orders", ("cleanup.policy", SUBTRACT, "compact"))
        assert configs()["cleanup.policy"] == ""
        settings = broker.require_leader("orders", 0).settings
        assert not settings.log_config.cleanup_compact and not settings.log_config.cleanup_delete


@pytest.mark.parametrize(
    ("kind", "name", "changes", "code"),
    [
        (TOPIC, "missing", [("offset.metadata.max.bytes", SET, "1")], ErrorCode.unknown_topic_or_partition),
        (TOPIC, "orders", [("no.such", SET, "1")], ErrorCode.invalid_config),
        (TOPIC, "orders", [("no.such", APPEND, "1")], ErrorCode.invalid_config),
        (TOPIC, "orders", [("flush.ms", SET, "soon")], ErrorCode.invalid_config),
        (TOPIC, "orders", [("flush.ms", APPEND, "1")], ErrorCode.invalid_config),
        (TOPIC, "orders", [("cleanup.policy", APPEND, "shred")], ErrorCode.invalid_config),
        (TOPIC, "orders", [("flush.ms", SET, None)], ErrorCode.invalid_request),
        (TOPIC, "orders", [("flush.ms", 9, "1")], ErrorCode.invalid_request),
        (TOPIC, "orders", [("flush.ms", SET, "1"), ("flush.ms", SET, "2")], ErrorCode.invalid_request),
        (BROKER, "1", [("node.id", SET, "2")], ErrorCode.invalid_request),
        (BROKER, "1", [("no.such", SET, "2")], ErrorCode.invalid_config),
        (BROKER, "2", [("log.retention.ms", SET, "2")], ErrorCode.invalid_request),
        (GROUP, "", [("consumer.session.timeout.ms", SET, "45000")], ErrorCode.invalid_request),
        (GROUP, "g", [("consumer.session.timeout.ms", SET, "2")], ErrorCode.invalid_config),
        (GROUP, "g", [("consumer.heartbeat.interval.ms", SET, "99999")], ErrorCode.invalid_config),
        (GROUP, "g", [("consumer.assignment.interval.ms", SET, "15001")], ErrorCode.invalid_config),
        (GROUP, "g", [("share.assignment.interval.ms", SET, "-1")], ErrorCode.invalid_config),
        (GROUP, "g", [("consumer.assignor.offload.enable", SET, "1")], ErrorCode.invalid_config),
        (GROUP, "g", [("retention.ms", SET, "1")], ErrorCode.invalid_config),
        (CLIENT_METRICS, "g", [("interval.ms", SET, "1000")], ErrorCode.invalid_request),
    ],
)
async def test_an_invalid_config_change_is_refused_as_a_whole(
    tmp_path: Path, kind: int, name: str, changes: list[tuple[str, int, str | None]], code: ErrorCode
) -> None:
    async with running(tmp_path) as broker:
        await create(broker, wanted("orders"))
        version = broker.image.version
        good = ("log.roll.ms" if kind == BROKER else "segment.ms", SET, "5")
        result = await change(broker, kind, name, good, *changes)
        assert (result.error_code, result.resource_name) == (code, name)
        assert result.error_message
        assert broker.image.version == version


async def test_deleting_an_unknown_config_succeeds_and_changes_nothing(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        await create(broker, wanted("orders", flush_ms="1"))
        for kind, name in ((TOPIC, "orders"), (BROKER, "1"), (BROKER, "")):
            result = await change(broker, kind, name, ("leader.replication.throttled.rate", DELETE, None))
            assert result.error_code == 0, result.error_message
        assert broker.image.topics["orders"].configs == {"flush.ms": "1"}
        assert all(not configs for configs in broker.image.broker_configs.values())


async def test_a_validate_only_config_change_is_not_applied(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        await create(broker, wanted("orders"))
        assert (await change(broker, TOPIC, "orders", ("flush.ms", SET, "1"), validate_only=True)).error_code == 0
        assert broker.image.topics["orders"].configs == {}


@pytest.mark.parametrize("version", versions(alter_configs.API))
async def test_alter_configs_replaces_all_configs_and_returns_a_result_per_resource(
    tmp_path: Path, version: int
) -> None:
    async with running(tmp_path) as broker:
        await create(broker, wanted("orders", flush_ms="1", segment_ms="2"), wanted("twice"))
        resources = [
            (TOPIC, "orders", {"compression.type": "gzip", "flush.ms": "12345678"}),
            (BROKER, "1", {"sasl.kerberos.min.time.before.relogin": "58000"}),
            (TOPIC, "missing", {"compression.type": "lz4"}),
            (TOPIC, "twice", {}),
            (TOPIC, "twice", {}),
        ]
        values = {
            "resources": [
                {
                    "resource_type": kind,
                    "resource_name": name,
                    "configs": [{"name": key, "value": value} for key, value in configs.items()],
                }
                for kind, name, configs in resources
            ],
            "validate_only": False,
        }
        answer = await call(broker, alter_configs.API, values, version)
        assert [result.error_code for result in answer.responses] == [
            ErrorCode.none,
            ErrorCode.none,
            ErrorCode.unknown_topic_or_partition,
            ErrorCode.invalid_request,
            ErrorCode.invalid_request,
        ]
        assert broker.image.topics["orders"].configs == {"compression.type": "gzip", "flush.ms": "12345678"}


@pytest.mark.parametrize("version", versions(describe_cluster.API))
async def test_the_cluster_is_described(tmp_path: Path, version: int) -> None:
    async with running(tmp_path) as broker:
        values = {"include_cluster_authorized_operations": version == 1}
        answer = await call(broker, describe_cluster.API, values, version)
        assert answer.cluster_id == broker.image.cluster_id
        assert answer.controller_id == 1
        assert [(member.broker_id, member.host, member.port) for member in answer.brokers] == [(1, "127.0.0.1", 9092)]
        assert (answer.cluster_authorized_operations > 0) == (version == 1)
        with pytest.raises(KafkaError):
            await call(broker, describe_cluster.API, {**values, "endpoint_type": 2}, 1)


@pytest.mark.parametrize("version", versions(describe_log_dirs.API))
async def test_describe_log_dirs_returns_the_sizes_of_hosted_partitions(tmp_path: Path, version: int) -> None:
    async with running(tmp_path) as broker:
        await create(broker, wanted("orders", 2), wanted("payments"))
        (folder,) = (await call(broker, describe_log_dirs.API, {"topics": None}, version)).results
        assert folder.log_dir == str(tmp_path)
        assert sum(len(topic.partitions) for topic in folder.topics) == 3
        asked = {"topics": [{"topic": "orders", "partitions": [1, 9]}, {"topic": "no", "partitions": [0]}]}
        (folder,) = (await call(broker, describe_log_dirs.API, asked, version)).results
        assert [(topic.name, [p.partition_index for p in topic.partitions]) for topic in folder.topics] == [
            ("orders", [1])
        ]
        if version >= 4:
            assert folder.usable_bytes > 0


async def test_min_insync_replicas_defaults_to_two_for_three_or_more_replicas(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        for number in (2, 3):
            await broker.metadata.propose(RegisterBroker(number, UUID(int=number), "h", number))
        await create(broker, wanted("three", factor=3), wanted("one", factor=1))
        defaults = topic_defaults(broker.config, broker.image)
        found = {
            name: topic_settings(topic, defaults).min_insync_replicas for name, topic in broker.image.topics.items()
        }
        assert found == {"three": 2, "one": 1}
        configs = {config.name: config.value for config in (await describe(broker, TOPIC, "three")).configs}
        assert configs["min.insync.replicas"] == "2"


async def test_a_topic_with_a_config_that_is_no_longer_valid_still_opens(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        good = broker.metadata
        await create(broker, wanted("model"))
        model = broker.image.topics["model"]
        old = CreateTopic("old", UUID(int=77), (), {"retention.ms": "for ever", "gone": "1"})
        await good.propose(old)
        settings = topic_settings(broker.image.topics["old"], topic_defaults(broker.config, broker.image))
        assert settings.log_config == topic_settings(model, topic_defaults(broker.config, broker.image)).log_config
