"""`chronik produce`: lines of standard input, or generated records, with a real client (librdkafka)."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Annotated, Any

import typer

from chronik.cli.confluent import client_settings, partitions_of, refused_client
from chronik.cli.errors import CHECK_FAILED, CliError, say
from chronik.cli.options import DEFAULT_BOOTSTRAP, Acks, Bootstrap, Topic, parse_acks
from chronik.cli.output import open_ledger, progress
from chronik.client.ledger import Ledger

POLL_EVERY_RECORDS = 1000
POLL_EVERY_S = 0.1


def produce(
    topic: Topic,
    acks: Acks = "all",
    key_separator: Annotated[
        str | None, typer.Option(metavar="S", help="The separator of key and value in each line.", show_default=False)
    ] = None,
    count: Annotated[int | None, typer.Option(min=0, help="Generate this many records instead.")] = None,
    size: Annotated[int, typer.Option(min=1, help="Size of each generated value in bytes.")] = 100,
    ledger: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write acknowledged records to FILE as JSON lines.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds until a record's delivery fails.")] = 60.0,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Produce the lines of standard input, or generated records."""
    from confluent_kafka import KafkaException, Producer

    acks = parse_acks(acks)
    records = generated(count, size) if count is not None else lines(sys.stdin.buffer, key_separator)
    producer = Producer(
        client_settings(
            bootstrap, acks=acks, enable_idempotence=acks == "all", message_timeout_ms=int(timeout * 1000), linger_ms=5
        )
    )
    partitions_of(producer, topic, bootstrap)
    sent = 0
    with open_ledger(ledger, "--ledger") or nullcontext() as ledger_file, progress(f"produce {topic}", count) as show:
        account = DeliveryAccount(ledger_file)
        started = polled_s = time.monotonic()
        try:
            for key, value in records:
                send(producer, topic, key, value, account)
                sent += 1
                if sent % POLL_EVERY_RECORDS == 0 or time.monotonic() - polled_s > POLL_EVERY_S:
                    producer.poll(0)
                    polled_s = time.monotonic()
                    account.batch_done()
                    show(sent, f"{sent} records")
            while producer.flush(1.0):
                account.batch_done()
        except KeyboardInterrupt:
            producer.flush(5.0)  # the ledger must include every acknowledged record
            raise
        except (KafkaException, SystemError) as error:
            raise refused_client(error) or error from None
    account.summarise(topic, sent, time.monotonic() - started)
    if account.failed:
        raise CliError(f"{account.failed} of {sent} records were not delivered: {account.first_error}", CHECK_FAILED)


def send(producer: Any, topic: str, key: bytes | None, value: bytes | None, account: DeliveryAccount) -> None:
    """Queue one record; wait while the client's queue is full, which bounds memory use."""
    from confluent_kafka import KafkaException

    while True:
        try:
            producer.produce(topic, value, key, on_delivery=account.delivered)
            return
        except BufferError:
            producer.poll(0.1)
            account.batch_done()
        except KafkaException as error:
            account.refused(error.args[0].str())
            return


class DeliveryAccount:
    """Counts delivery reports, and writes acknowledged records to a ledger."""

    def __init__(self, ledger: Ledger | None) -> None:
        self.acknowledged: Counter[int] = Counter()
        self.failed = 0
        self.first_error = ""
        self._ledger = ledger

    def delivered(self, error: Any, message: Any) -> None:
        if error is not None:
            self.refused(error.str())
            return
        self.acknowledged[message.partition()] += 1
        if self._ledger is not None:
            self._ledger.confluent(None, message)

    def refused(self, reason: str) -> None:
        self.failed += 1
        self.first_error = self.first_error or reason

    def batch_done(self) -> None:
        if self._ledger is not None:
            self._ledger.flush()

    def summarise(self, topic: str, sent: int, seconds: float) -> None:
        total = sum(self.acknowledged.values())
        spread = ", ".join(f"{partition}: {number}" for partition, number in sorted(self.acknowledged.items()))
        rate = total / seconds if seconds > 0 else 0.0
        by_partition = f"; by partition {spread}" if spread else ""
        say(f"{total} of {sent} records delivered to {topic} in {seconds:.2f} s ({rate:,.0f}/s){by_partition}")


def generated(count: int, size_bytes: int) -> Iterator[tuple[bytes | None, bytes | None]]:
    """Yield records; record i has the key i and a value that starts with i, so that a reader can find missing ones."""
    for index in range(count):
        number = str(index).encode()
        yield number, number.ljust(size_bytes, b".")[:size_bytes]


def lines(stream: Any, key_separator: str | None) -> Iterator[tuple[bytes | None, bytes | None]]:
    """Yield each line without its line ending; a line without the separator has no key."""
    separator = key_separator.encode() if key_separator else None
    for line in stream:
        value = line.rstrip(b"\r\n")
        if separator is not None and separator in value:
            key, _, value = value.partition(separator)
            yield key, value
        else:
            yield None, value
