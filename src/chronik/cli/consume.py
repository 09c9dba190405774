"""`chronik consume`: records to standard output, by group or from all partitions, with a real client (librdkafka)."""

from __future__ import annotations

import json
import signal
import sys
import time
from base64 import b64encode
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Annotated, Any

import typer

from chronik.cli.confluent import client_settings, partitions_of
from chronik.cli.errors import CHECK_FAILED, CliError, say
from chronik.cli.options import DEFAULT_BOOTSTRAP, AsJson, Bootstrap, Topic, with_controller
from chronik.cli.output import open_ledger
from chronik.client.groups import Groups
from chronik.client.ledger import Ledger
from chronik.client.properties import ClientSettings

BATCH_RECORDS_MAX = 1000
POLL_S = 0.2
JOIN_S_MAX = 60.0
COMMIT_S_MAX = 30.0


def consume(
    topic: Topic,
    group: Annotated[str | None, typer.Option(help="Join this group and commit; default: read all partitions.")] = None,
    share: Annotated[
        str | None, typer.Option(metavar="GROUP", help="Join this share group; accept each record that was printed.")
    ] = None,
    from_beginning: Annotated[
        bool,
        typer.Option(
            "--from-beginning",
            help="Start with the oldest record, if the group has no offset yet; of a share group, a config is set.",
        ),
    ] = False,
    count: Annotated[int | None, typer.Option(min=1, help="Stop after this many records.")] = None,
    timeout: Annotated[float | None, typer.Option(min=0.1, help="Stop after S seconds without a record.")] = None,
    receipts: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write delivered records to FILE as JSON lines.")
    ] = None,
    as_json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
) -> None:
    """Print a topic's records until --count, --timeout or Ctrl-C."""
    if group is not None and share is not None:
        raise CliError("--group and --share exclude each other: a group has one type")
    idle = IdleClock(timeout, joined=group is None)
    with open_ledger(receipts, "--receipts") or nullcontext() as receipt_file:
        if share is not None:
            consumer: Any = ShareReader(topic, share, from_beginning, bootstrap)
        else:
            consumer = _consumer(topic, group, from_beginning, bootstrap, idle)
        printer = JsonPrinter(topic, share or group) if as_json else LinePrinter()
        settle = consumer.accept if share is not None else partial(_store, consumer) if group is not None else None
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            _run(consumer, printer, receipt_file, settle, count, idle)
        except KeyboardInterrupt:
            pass
        finally:
            consumer.close()  # commits the stored offsets
            printer.close()


class IdleClock:
    """The time since the last record. The time to join a group is excluded."""

    def __init__(self, timeout_s: float | None, joined: bool) -> None:
        self.timeout_s = timeout_s
        self._joined = joined
        self._since_s = time.monotonic()

    def restart(self) -> None:
        self._since_s = time.monotonic()

    def assigned(self, consumer: object, partitions: object) -> None:
        self._joined = True
        self.restart()

    @property
    def is_expired(self) -> bool:
        if self.timeout_s is None:
            return False
        allowed_s = self.timeout_s if self._joined else max(self.timeout_s, JOIN_S_MAX)
        return time.monotonic() - self._since_s >= allowed_s


def _consumer(topic: str, group: str | None, from_beginning: bool, bootstrap: ClientSettings, idle: IdleClock) -> Any:
    from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, Consumer, TopicPartition

    consumer = Consumer(
        client_settings(
            bootstrap,
            group_id=group or "chronik-consume",
            auto_offset_reset="earliest" if from_beginning else "latest",
            enable_auto_commit=group is not None,
            auto_commit_interval_ms=1000,
            enable_auto_offset_store=False,
            allow_auto_create_topics=False,
            fetch_wait_max_ms=100,
        )
    )
    partitions = partitions_of(consumer, topic, bootstrap)
    if group is not None:
        consumer.subscribe([topic], on_assign=idle.assigned)
    else:
        offset = OFFSET_BEGINNING if from_beginning else OFFSET_END
        consumer.assign([TopicPartition(topic, partition, offset) for partition in partitions])
    return consumer


class ShareReader:
    """A member of a share group. It accepts what was printed; the records beyond a batch are released at once."""

    def __init__(self, topic: str, group: str, from_beginning: bool, bootstrap: ClientSettings) -> None:
        from confluent_kafka import Consumer, ShareConsumer

        self._group = group
        settings = client_settings(bootstrap, group_id=group)
        lookup = Consumer(settings)
        try:
            partitions_of(lookup, topic, bootstrap)
        finally:
            lookup.close()
        if from_beginning:
            configs = {"share.auto.offset.reset": "earliest"}
            with_controller(bootstrap, lambda cluster: Groups(cluster).alter_configs(group, configs))
        self._consumer = ShareConsumer({**settings, "share.acknowledgement.mode": "explicit"})
        self._consumer.subscribe([topic])

    def consume(self, batch_max: int, timeout_s: float) -> list[Any]:
        from confluent_kafka import AcknowledgeType, KafkaException

        try:
            polled: Any = self._consumer.poll(timeout_s)
        except KafkaException as error:
            if error.args[0].name() == "GROUP_ID_NOT_FOUND":
                raise CliError(f"group {self._group} is not a share group: pass the name of another group") from None
            raise CliError(f"cannot continue reading: {error.args[0].str()}") from None
        messages = list(polled)
        for message in messages[batch_max:]:
            if message.error() is None:
                self._consumer.acknowledge(message, AcknowledgeType.RELEASE)
        return messages[:batch_max]

    def accept(self, batch: list[Any]) -> None:
        for message in batch:
            if message.error() is None:
                self._consumer.acknowledge(message)
        outcome: Any = self._consumer.commit_sync(COMMIT_S_MAX)
        for partition, error in outcome.items():
            if error is not None:
                name = f"{partition.topic}-{partition.partition}"
                say(f"records of {name} were printed, but not accepted: they may be delivered again ({error})")

    def close(self) -> None:
        self._consumer.close()


def _run(
    consumer: Any,
    printer: LinePrinter | JsonPrinter,
    receipts: Ledger | None,
    settle: Callable[[list[Any]], None] | None,
    count: int | None,
    idle: IdleClock,
) -> None:
    """Consume; settle records after they were printed and receipted, so that a crash repeats but never skips.

    `settle` stores the offsets of a batch, or accepts its records.
    """
    consumed = 0
    while count is None or consumed < count:
        batch_max = BATCH_RECORDS_MAX if count is None else min(BATCH_RECORDS_MAX, count - consumed)
        batch = consumer.consume(batch_max, POLL_S)
        for message in batch:
            if message.error() is not None:
                _check(message.error())
                continue
            printer.add(message)
            if receipts is not None:
                receipts.confluent(None, message)
            consumed += 1
        if batch:
            idle.restart()
            printer.flush()
            if receipts is not None:
                receipts.flush()
            if settle is not None:
                settle(batch)
        elif idle.is_expired:
            if count is None:
                return
            late = f"{idle.timeout_s:g} s passed without one"
            raise CliError(f"only {consumed} of {count} records arrived: {late}", CHECK_FAILED)


def _store(consumer: Any, batch: list[Any]) -> None:
    from confluent_kafka import KafkaException

    for message in {(m.topic(), m.partition()): m for m in batch if m.error() is None}.values():
        try:
            consumer.store_offsets(message)
        except KafkaException:
            continue  # the partition moved to another member, which will read these records again


def _check(error: Any) -> None:
    from confluent_kafka import KafkaError

    if error.fatal() or error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_AUTHORIZATION_FAILED):
        raise CliError(f"cannot continue reading: {error.str()}")


class LinePrinter:
    """Prints values as lines, byte for byte."""

    def add(self, message: Any) -> None:
        sys.stdout.buffer.write((message.value() or b"") + b"\n")

    def flush(self) -> None:
        sys.stdout.buffer.flush()

    close = flush


class JsonPrinter:
    """Prints one JSON object, written as records arrive, so that memory use does not grow with the topic."""

    def __init__(self, topic: str, group: str | None) -> None:
        self._partitions: dict[int, list[int]] = {}
        self._records = 0
        sys.stdout.write(json.dumps({"topic": topic, "group": group})[:-1] + ', "records": [')

    def add(self, message: Any) -> None:
        partition, offset = message.partition(), message.offset()
        seen = self._partitions.setdefault(partition, [0, offset, offset])
        seen[0] += 1
        seen[2] = offset
        record = {
            "partition": partition,
            "offset": offset,
            "timestamp_ms": message.timestamp()[1],
            **_text("key", message.key()),
            **_text("value", message.value()),
            "headers": [{"name": name, **_text("value", value)} for name, value in message.headers() or ()],
        }
        sys.stdout.write((", " if self._records else "") + json.dumps(record))
        self._records += 1

    def flush(self) -> None:
        sys.stdout.flush()

    def close(self) -> None:
        partitions = [
            {"partition": partition, "records": seen[0], "first_offset": seen[1], "last_offset": seen[2]}
            for partition, seen in sorted(self._partitions.items())
        ]
        sys.stdout.write(f'], "consumed": {self._records}, "partitions": {json.dumps(partitions)}}}\n')
        sys.stdout.flush()


def _text(name: str, content: bytes | None) -> dict[str, str | None]:
    """Return UTF-8 as text; other bytes as base64 under a name with the suffix `_base64`."""
    try:
        return {name: None if content is None else content.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": b64encode(content or b"").decode()}
