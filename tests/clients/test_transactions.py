"""Transactions of each client: all or nothing for readers with isolation level read_committed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import cast

import pytest
from tests.clients.conftest import GetClient, NewName
from tests.clients.drivers.base import TRANSACTIONAL, Client, Sent, TransactionalClient

PARTITIONS = (0, 1, 2)


def records(name: str, count: int = 4) -> list[Sent]:
    """Return `count` records for each partition."""
    return [Sent(b"%s-%d" % (name.encode(), n), b"k", partition=p) for n in range(count) for p in PARTITIONS]


@pytest.mark.parametrize("client", TRANSACTIONAL, indirect=True)
def test_readers_of_committed_records_see_whole_transactions_only(
    client: Client,
    get_client: GetClient,
    bootstrap: str,
    topic: str,
    new_name: NewName,
    create_topic: Callable[[str, int], None],
) -> None:
    create_topic(topic, len(PARTITIONS))
    writer = cast(TransactionalClient, client)
    transactions = [(records(f"{number}"), number % 3 != 1) for number in range(6)]
    writer.transact(bootstrap, topic, new_name("writer"), transactions)
    # Only records without a transaction follow: whoever reads them has passed all markers.
    get_client("kafka-python").produce(bootstrap, topic, records("last", 1))
    committed = [
        record for sent, is_commit in [*transactions, (records("last", 1), True)] if is_commit for record in sent
    ]
    expected = Counter((record.partition, record.value) for record in committed)
    got = writer.read(bootstrap, topic, len(committed), partitions=PARTITIONS, isolation_level="read_committed")
    assert Counter((record.partition, record.value) for record in got) == expected
    for partition in PARTITIONS:
        offsets = [record.offset for record in got if record.partition == partition]
        assert offsets == sorted(set(offsets))
    everything = sum(len(sent) for sent, _ in transactions) + len(PARTITIONS)
    assert len(get_client("kafka-python").read(bootstrap, topic, everything, partitions=PARTITIONS)) == everything


@pytest.mark.parametrize("client", TRANSACTIONAL, indirect=True)
def test_a_client_reads_what_another_one_committed_and_not_what_it_aborted(
    client: Client,
    get_client: GetClient,
    bootstrap: str,
    topic: str,
    new_name: NewName,
    create_topic: Callable[[str, int], None],
) -> None:
    create_topic(topic, 1)
    writer = cast(TransactionalClient, get_client("confluent-kafka"))
    transactional_id = new_name("writer")
    sent = [([Sent(b"%d" % number)], number % 2 == 0) for number in range(10)]
    writer.transact(bootstrap, topic, transactional_id, sent[:5])
    # A second producer with the same transactional id, in a new epoch.
    writer.transact(bootstrap, topic, transactional_id, sent[5:])
    got = cast(TransactionalClient, client).read(bootstrap, topic, 5, isolation_level="read_committed")
    assert [record.value for record in got] == [b"0", b"2", b"4", b"6", b"8"]
