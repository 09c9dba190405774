"""The transaction APIs, through the wire format of every supported version."""

from __future__ import annotations

from typing import Any

import pytest
from tests.transactions.fake_broker import ID, ORDERS, TransactionBroker, with_transactions

from chronik.metadata.image import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from chronik.node.apis import (
    add_offsets_to_txn,
    add_partitions_to_txn,
    api_versions,
    describe_transactions,
    end_txn,
    find_coordinator,
    init_producer_id,
    list_transactions,
    write_txn_markers,
)
from chronik.node.replicas.partition import TransactionMarker
from chronik.transactions.coordinator import ProducerIdAndEpoch
from chronik.wire.errors import ErrorCode

UNKNOWN = ProducerIdAndEpoch(-1, -1)


def versions(api: Any) -> range:
    return range(api.API.versions[0], api.API.versions[1] + 1)


def init_values(known: ProducerIdAndEpoch = UNKNOWN, timeout_ms: int = 60_000, name: str = ID) -> dict[str, Any]:
    return {
        "transactional_id": name,
        "transaction_timeout": timeout_ms,
        "producer_id": known.producer_id,
        "producer_epoch": known.producer_epoch,
    }


def add_values(producer: ProducerIdAndEpoch, topic: str, *indexes: int, verify_only: bool = False) -> dict[str, Any]:
    """The fields of all versions."""
    topics = [{"name": topic, "partitions": list(indexes)}]
    ids = {"transactional_id": ID, "producer_id": producer.producer_id, "producer_epoch": producer.producer_epoch}
    return {
        **{f"v3_and_below_{name}": value for name, value in ids.items()},
        "v3_and_below_topics": topics,
        "transactions": [{**ids, "verify_only": verify_only, "topics": topics}],
    }


def errors_of(answer: Any, version: int) -> dict[tuple[str, int], ErrorCode]:
    topics = answer.results_by_topic_v3_and_below if version < 4 else answer.results_by_transaction[0].topic_results
    return {
        (topic.name, each.partition_index): each.partition_error_code
        for topic in topics
        for each in topic.results_by_partition
    }


@pytest.mark.parametrize("version", range(1, 7))
@with_transactions()
async def test_find_coordinator_finds_the_coordinator_of_a_transactional_id(
    broker: TransactionBroker, version: int
) -> None:
    answer = await broker.ask(
        find_coordinator.API, version, {"key": ID, "key_type": 1, "coordinator_keys": [ID, "x" * 20_000]}
    )
    found = answer.coordinators[0] if version >= 4 else answer
    assert (found.error_code, found.node_id, found.port) == (ErrorCode.none, 1, 9092)
    assert broker.image.topic(TRANSACTIONS_TOPIC) is not None and broker.image.topic(OFFSETS_TOPIC) is None
    if version >= 4:
        assert answer.coordinators[1].error_code is ErrorCode.invalid_request


@pytest.mark.parametrize("version", versions(init_producer_id))
@with_transactions(transaction_max_timeout_ms=100_000)
async def test_init_producer_id_fences_earlier_producers_in_every_version(
    broker: TransactionBroker, version: int
) -> None:
    first = await broker.ask(init_producer_id.API, version, init_values())
    assert (first.error_code, first.producer_epoch) == (ErrorCode.none, 0)
    second = await broker.ask(init_producer_id.API, version, init_values())
    assert (second.producer_id, second.producer_epoch) == (first.producer_id, 1)
    refused = await broker.ask(init_producer_id.API, version, init_values(timeout_ms=100_001))
    assert (refused.error_code, refused.producer_id) == (ErrorCode.invalid_transaction_timeout, -1)
    assert (await broker.ask(init_producer_id.API, version, init_values(name=""))).error_code is (
        ErrorCode.invalid_request
    )
    if version >= 3:
        zombie = await broker.ask(init_producer_id.API, version, init_values(ProducerIdAndEpoch(first.producer_id, 0)))
        fenced = ErrorCode.producer_fenced if version >= 4 else ErrorCode.invalid_producer_epoch
        assert (zombie.error_code, zombie.producer_id) == (fenced, -1)
        recovered = await broker.ask(
            init_producer_id.API, version, init_values(ProducerIdAndEpoch(first.producer_id, 1))
        )
        assert (recovered.error_code, recovered.producer_epoch) == (ErrorCode.none, 2)
        half = await broker.ask(init_producer_id.API, version, init_values(ProducerIdAndEpoch(first.producer_id, -1)))
        assert half.error_code is ErrorCode.invalid_request


@pytest.mark.parametrize("version", versions(add_partitions_to_txn))
@with_transactions()
async def test_add_partitions_adds_all_or_none_in_every_version(broker: TransactionBroker, version: int) -> None:
    producer = await broker.begin(ORDERS)
    ask = add_partitions_to_txn.API
    answer = await broker.ask(ask, version, add_values(producer, "orders", 1, 2))
    assert errors_of(answer, version) == {("orders", 1): ErrorCode.none, ("orders", 2): ErrorCode.none}
    answer = await broker.ask(ask, version, add_values(producer, "orders", 1, 8))
    assert errors_of(answer, version) == {
        ("orders", 1): ErrorCode.operation_not_attempted,
        ("orders", 8): ErrorCode.unknown_topic_or_partition,
    }
    old = producer._replace(producer_epoch=producer.producer_epoch + 1)
    answer = await broker.ask(ask, version, add_values(old, "orders", 1))
    fenced = ErrorCode.producer_fenced if version >= 2 else ErrorCode.invalid_producer_epoch
    assert errors_of(answer, version) == {("orders", 1): fenced}
    await broker.groups.topic.ensure_exists()
    answer = await broker.ask(ask, version, add_values(producer, OFFSETS_TOPIC, 0))
    internal = ErrorCode.topic_authorization_failed if version < 4 else ErrorCode.none
    assert errors_of(answer, version) == {(OFFSETS_TOPIC, 0): internal}
    await broker.transactions.stop()
    answer = await broker.ask(ask, version, add_values(producer, "orders", 1))
    assert errors_of(answer, version) == {("orders", 1): ErrorCode.not_coordinator}


@pytest.mark.parametrize("version", [4, 5])
@with_transactions()
async def test_verify_only_adds_nothing(broker: TransactionBroker, version: int) -> None:
    producer = await broker.begin(ORDERS)
    values = add_values(producer, "orders", 0, 1, verify_only=True)
    unknown = {**values["transactions"][0], "transactional_id": "unknown"}
    answer = await broker.ask(
        add_partitions_to_txn.API, version, {"transactions": [values["transactions"][0], unknown]}
    )
    abortable = ErrorCode.transaction_abortable if version >= 5 else ErrorCode.invalid_txn_state
    assert errors_of(answer, version) == {ORDERS: ErrorCode.none, ("orders", 1): abortable}
    (topic,) = answer.results_by_transaction[1].topic_results
    assert {each.partition_error_code for each in topic.results_by_partition} == {ErrorCode.invalid_producer_id_mapping}
    _, state = broker.transactions.describe(ID)
    assert state is not None and state.partitions == {ORDERS}


@pytest.mark.parametrize("version", versions(add_offsets_to_txn))
@with_transactions()
async def test_add_offsets_adds_the_partition_of_the_group(broker: TransactionBroker, version: int) -> None:
    producer = await broker.begin()
    ids = {"transactional_id": ID, "producer_id": producer.producer_id, "group_id": "readers"}
    answer = await broker.ask(add_offsets_to_txn.API, version, {**ids, "producer_epoch": 0})
    assert answer.error_code is ErrorCode.none
    _, state = broker.transactions.describe(ID)
    assert state is not None and state.partitions == {(OFFSETS_TOPIC, broker.groups.partition_of("readers"))}
    answer = await broker.ask(add_offsets_to_txn.API, version, {**ids, "producer_epoch": 9})
    assert answer.error_code is (ErrorCode.producer_fenced if version >= 2 else ErrorCode.invalid_producer_epoch)


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("version", versions(end_txn))
@with_transactions()
async def test_end_txn_ends_the_transaction_in_every_version(
    broker: TransactionBroker, version: int, commit: bool
) -> None:
    producer = await broker.begin(ORDERS)
    ids = {"transactional_id": ID, "producer_id": producer.producer_id, "committed": commit}
    answer = await broker.ask(end_txn.API, version, {**ids, "producer_epoch": 0})
    assert answer.error_code is ErrorCode.none
    epoch = 1 if version >= 5 else 0
    if version >= 5:
        assert (answer.producer_id, answer.producer_epoch) == (producer.producer_id, 1)
    await broker.until_state("CompleteCommit" if commit else "CompleteAbort")
    assert broker.markers == [(*ORDERS, TransactionMarker(producer.producer_id, epoch, commit, 0))]
    repeated = await broker.ask(end_txn.API, version, {**ids, "producer_epoch": 0})
    assert repeated == answer, "the client did not receive the first answer"
    other = await broker.ask(end_txn.API, version, {**ids, "producer_epoch": 0, "committed": not commit})
    assert other.error_code is ErrorCode.invalid_txn_state
    zombie = await broker.ask(end_txn.API, version, {**ids, "producer_epoch": 5})
    assert zombie.error_code is (ErrorCode.producer_fenced if version >= 2 else ErrorCode.invalid_producer_epoch)


@with_transactions()
async def test_write_txn_markers_answers_for_each_partition(broker: TransactionBroker) -> None:
    broker.marker_errors[("orders", 1)] = [ErrorCode.transaction_coordinator_fenced]

    def marker(producer_id: int, *indexes: int) -> dict[str, Any]:
        return {
            "producer_id": producer_id,
            "producer_epoch": 3,
            "transaction_result": producer_id == 1,
            "topics": [{"name": "orders", "partition_indexes": list(indexes)}],
            "coordinator_epoch": 4,
        }

    answer = await broker.ask(write_txn_markers.API, 1, {"markers": [marker(1, 0, 1), marker(2, 2)]}, peer_id=2)
    found = {
        (each.producer_id, topic.name, partition.partition_index): partition.error_code
        for each in answer.markers
        for topic in each.topics
        for partition in topic.partitions
    }
    assert found == {
        (1, "orders", 0): ErrorCode.none,
        (1, "orders", 1): ErrorCode.transaction_coordinator_fenced,
        (2, "orders", 2): ErrorCode.none,
    }
    assert broker.markers == [
        ("orders", 0, TransactionMarker(1, 3, True, 4)),
        ("orders", 2, TransactionMarker(2, 3, False, 4)),
    ]


@pytest.mark.parametrize("version", versions(list_transactions))
@with_transactions()
async def test_list_transactions_filters_by_state_producer_and_duration(
    broker: TransactionBroker, version: int
) -> None:
    await broker.begin(name="new")
    old = await broker.begin(ORDERS, name="old")
    broker.wall_now_ms += 10_000
    await broker.begin(ORDERS, name="new")
    await broker.begin(name="idle")

    ongoing = {"state_filters": ["Ongoing"], "producer_id_filters": [], "duration_filter": -1}
    oldest_first = (await broker.ask(list_transactions.API, version, ongoing)).transaction_states
    assert [each.transactional_id for each in oldest_first] == ["old", "new"]

    async def listed(**filters: Any) -> set[tuple[str, str]]:
        values = {"state_filters": [], "producer_id_filters": [], "duration_filter": -1, **filters}
        answer = await broker.ask(list_transactions.API, version, values)
        assert answer.error_code is ErrorCode.none
        assert answer.unknown_state_filters == (("Lost",) if "Lost" in values["state_filters"] else ())
        return {(each.transactional_id, each.transaction_state) for each in answer.transaction_states}

    assert await listed() == {("old", "Ongoing"), ("new", "Ongoing"), ("idle", "Empty")}
    assert await listed(state_filters=["Empty", "Lost"]) == {("idle", "Empty")}
    assert await listed(state_filters=["Lost"]) == set()
    assert await listed(producer_id_filters=[old.producer_id]) == {("old", "Ongoing")}
    if version >= 1:
        assert await listed(duration_filter=5_000, state_filters=["Ongoing"]) == {("old", "Ongoing")}
    if version >= 2:
        assert await listed(transactional_id_pattern="o.*|.*w") == {("old", "Ongoing"), ("new", "Ongoing")}
        assert await listed(transactional_id_pattern="o") == set(), "the whole id must match"
        assert len(await listed(transactional_id_pattern="")) == 3
    broker.transactions._coordinator.start_loading(1)
    answer = await broker.ask(list_transactions.API, version, {"state_filters": [], "producer_id_filters": []})
    assert answer.error_code is ErrorCode.coordinator_load_in_progress


@pytest.mark.parametrize("pattern", ["(", "(?=look)", "(a)\\1", "x{1001}", "x" * 2000, "((((x{50}){50}){50}){50})"])
@with_transactions()
async def test_list_transactions_refuses_a_wrong_expression(broker: TransactionBroker, pattern: str) -> None:
    await broker.begin(ORDERS, name="old")
    values = {
        "state_filters": [],
        "producer_id_filters": [],
        "duration_filter": -1,
        "transactional_id_pattern": pattern,
    }
    answer = await broker.ask(list_transactions.API, 2, values)
    assert answer.error_code is ErrorCode.invalid_regular_expression
    assert answer.transaction_states == ()


@with_transactions()
async def test_describe_transactions_shows_each_id(broker: TransactionBroker) -> None:
    producer = await broker.begin(("orders", 2), ORDERS, ("audit", 1), timeout_ms=1_234)
    answer = await broker.ask(describe_transactions.API, 0, {"transactional_ids": [ID, "unknown", ""]})
    found, unknown, empty = answer.transaction_states
    assert (found.error_code, found.transactional_id, found.transaction_state) == (ErrorCode.none, ID, "Ongoing")
    assert (found.producer_id, found.producer_epoch) == producer
    assert found.transaction_timeout.total_seconds() == 1.234
    assert found.transaction_start_time.timestamp() * 1000 == broker.wall_now_ms
    assert [(topic.topic, topic.partitions) for topic in found.topics] == [("audit", (1,)), ("orders", (0, 2))]
    assert (unknown.error_code, unknown.transactional_id) == (ErrorCode.transactional_id_not_found, "unknown")
    assert empty.error_code is ErrorCode.invalid_request
    await broker.transactions.stop()
    answer = await broker.ask(describe_transactions.API, 0, {"transactional_ids": [ID]})
    assert answer.transaction_states[0].error_code is ErrorCode.not_coordinator


@pytest.mark.parametrize("version", [3, 4])
@with_transactions()
async def test_api_versions_announces_the_versions_of_features(broker: TransactionBroker, version: int) -> None:
    answer = await broker.ask(api_versions.API, version, {})
    finalized = [(each.name, each.min_version_level, each.max_version_level) for each in answer.finalized_features]
    assert finalized == [("group.version", 1, 1), ("share.version", 1, 1), ("transaction.version", 2, 2)]
    assert answer.finalized_features_epoch >= 0
    supported = [(each.name, each.min_version, each.max_version) for each in answer.supported_features]
    all_features = [("group.version", 0, 1), ("share.version", 0, 1), ("transaction.version", 0, 2)]
    assert supported == (all_features if version >= 4 else []), "older clients refuse a minimum of 0"
