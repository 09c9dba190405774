"""Offset lookups by timestamp, and kcat's own listing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.clients.conftest import GetClient
from tests.clients.drivers.base import CLIENTS, FIRST_TIMESTAMP_MS, Client, Sent
from tests.clients.drivers.kcat import Kcat


@pytest.mark.parametrize("client", CLIENTS, indirect=True)
def test_offset_for_a_timestamp_is_the_first_record_at_or_after_it(
    client: Client,
    get_client: GetClient,
    bootstrap: str,
    topic: str,
    create_topic: Callable[[str, int], None],
) -> None:
    create_topic(topic, 1)
    writer = get_client("kafka-python")
    for batch in range(3):
        first = batch * 10
        records = [
            Sent(b"%d" % number, timestamp_ms=FIRST_TIMESTAMP_MS + 100 * number) for number in range(first, first + 10)
        ]
        writer.produce(bootstrap, topic, records)
    assert client.offset_at(bootstrap, topic, FIRST_TIMESTAMP_MS) == 0
    assert client.offset_at(bootstrap, topic, FIRST_TIMESTAMP_MS + 1_301) == 14
    assert client.offset_at(bootstrap, topic, FIRST_TIMESTAMP_MS + 1_400) == 14
    if client.name not in ("confluent-kafka", "kcat"):
        # librdkafka returns the end offset for a time after the last record, with no way to tell the two apart.
        assert client.offset_at(bootstrap, topic, FIRST_TIMESTAMP_MS + 10_000) is None


def test_kcat_lists_brokers_and_topics(
    get_client: GetClient, bootstrap: str, topic: str, create_topic: Callable[[str, int], None]
) -> None:
    create_topic(topic, 3)
    kcat = get_client("kcat")
    assert isinstance(kcat, Kcat)
    listed = kcat.run(bootstrap, ["-L"]).decode()
    assert "1 brokers" in listed
    assert f"at {bootstrap}" in listed
    assert f'topic "{topic}" with 3 partitions' in listed
