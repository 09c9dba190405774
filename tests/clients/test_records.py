"""Every client reads what any client wrote: content, order, keys, headers and timestamps, in every codec."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from tests.clients.conftest import GetClient, NewName
from tests.clients.drivers.base import CLIENTS, CODECS, FIRST_TIMESTAMP_MS, Headers, Received, Sent

PARTITIONS = (0, 1)
# Long enough for each codec to pay off in one batch: some clients send a batch uncompressed if that is smaller.
FILLER = b"chronik " * 64

Written = tuple[str, Sequence[Sent]]
Write = Callable[[str, str], Written]


def records_for(writer: str) -> list[Sent]:
    """Return two partitions of records, in order, in every shape that the writer can express."""
    empty = b"none" if writer == "kafka-python" else None  # it rejects a header without a value
    words: list[Headers] = [(), (("trace", b"abc"),), (("trace", b"abc"), ("trace", b"again"), ("none", empty))]
    records: list[Sent] = []
    for partition in PARTITIONS:
        for number in range(12):
            text = b"value %d of partition %d " % (number, partition) + FILLER
            headers = words[number // 4]
            key = None if number % 3 == 0 else b"key-%d" % (number % 5)
            value = None if number % 5 == 4 and key is not None else text
            records.append(Sent(value, key, headers, FIRST_TIMESTAMP_MS + 10 * number, partition))
        if writer != "kcat":
            records.append(Sent(b"", b"", (), FIRST_TIMESTAMP_MS + 500, partition))
            records.append(Sent(bytes(range(256)), b"\x00\xff\n|", (), FIRST_TIMESTAMP_MS + 500, partition))
    return records


@pytest.fixture(scope="module")
def write(get_client: GetClient, bootstrap: str, new_name: NewName, create_topic: Callable[[str, int], None]) -> Write:
    """Write the records once for each client and codec, for all clients that read them."""
    written: dict[tuple[str, str], Written] = {}

    def write_once(writer: str, codec: str) -> Written:
        if (writer, codec) not in written:
            topic = new_name(f"records-{writer}-{codec}")
            create_topic(topic, len(PARTITIONS))
            records = records_for(writer)
            get_client(writer).produce(bootstrap, topic, records, codec=codec)
            written[writer, codec] = topic, records
        return written[writer, codec]

    return write_once


@pytest.mark.parametrize("reader", CLIENTS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("writer", CLIENTS)
def test_every_client_reads_the_records_of_every_other_client_unchanged(
    writer: str, codec: str, reader: str, write: Write, get_client: GetClient, bootstrap: str
) -> None:
    reading = get_client(reader)
    topic, records = write(writer, codec)
    got = reading.read(bootstrap, topic, len(records), partitions=PARTITIONS)
    for partition in PARTITIONS:
        sent = [record for record in records if record.partition == partition]
        read = [record for record in got if record.partition == partition]
        assert [record.offset for record in read] == list(range(len(sent)))
        assert [as_sent(record) for record in read] == [as_sent(record) for record in sent]
        if get_client(writer).sets_timestamps:
            assert [record.timestamp_ms for record in read] == [record.timestamp_ms for record in sent]


def as_sent(record: Sent | Received) -> tuple[bytes | None, bytes | None, Headers]:
    return record.key, record.value, record.headers
