"""Share consumers of librdkafka (confluent-kafka's ShareConsumer), each in a process of its own."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Literal

from confluent_kafka import ShareConsumer

from bench.clients import NotMeasured, Topic
from chronik.cli.client_properties import librdkafka_settings

READY_S_MAX = 60.0
STOP_S_MAX = 30.0
POLL_S = 0.1
CHECK_S = 0.01

Acknowledging = Literal["implicit", "explicit", "committed"]
"""By the next poll; each record by a call, sent with the next poll; or each by a call and a commit_sync of its own."""


class ShareConsumers:
    """Consumers of one share group. They poll until each has a record, wait for `go`, and poll until `stop`."""

    def __init__(self, topic: Topic, count: int, acknowledging: Acknowledging) -> None:
        settings = {
            **librdkafka_settings(topic.bootstrap),
            "group.id": topic.name,
            "share.acknowledgement.mode": "implicit" if acknowledging == "implicit" else "explicit",
            "log_level": 0,
        }
        context = multiprocessing.get_context("spawn")
        self._taken = [context.Value("q", 0) for _ in range(count)]
        self._pipes: list[Connection] = []
        self._processes = []
        for taken in self._taken:
            ours, theirs = context.Pipe()
            arguments = (settings, topic.name, acknowledging, taken, theirs)
            process = context.Process(target=_consume, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def taken(self) -> int:
        """The records that all consumers have acknowledged so far; implicit ones with the next poll."""
        return sum(taken.value for taken in self._taken)

    def wait_until_ready(self, write: Callable[[], None]) -> None:
        """Call `write` again and again, until each consumer has received a record."""
        deadline_s = time.monotonic() + READY_S_MAX
        waiting = list(self._pipes)
        while waiting:
            write()
            for pipe in [pipe for pipe in waiting if pipe.poll(POLL_S)]:
                _receive(pipe)
                waiting.remove(pipe)
            if time.monotonic() > deadline_s:
                raise NotMeasured(f"{len(waiting)} share consumers got no record within {READY_S_MAX:g} s")

    def go(self) -> None:
        for pipe in self._pipes:
            pipe.send("go")

    def stop(self) -> None:
        """Stop all consumers; raise if one has failed."""
        for pipe in self._pipes:
            pipe.send("stop")
        for pipe in self._pipes:
            if not pipe.poll(STOP_S_MAX):
                raise NotMeasured(f"a share consumer did not stop within {STOP_S_MAX:g} s")
            _receive(pipe)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()


def _receive(pipe: Connection) -> None:
    try:
        failure: str | None = pipe.recv()
    except EOFError:
        raise NotMeasured("a share consumer ended early") from None
    if failure is not None:
        raise NotMeasured(f"a share consumer failed: {failure}")


def _consume(settings: dict[str, Any], topic: str, acknowledging: Acknowledging, taken: Any, pipe: Connection) -> None:
    """The entry point of a consumer: answer None when it is ready and when it has stopped, else what has failed."""
    try:
        consumer = ShareConsumer(settings)
        try:
            consumer.subscribe([topic])
            while not _take(consumer, acknowledging, taken):
                pass
            pipe.send(None)
            pipe.recv()
            while not pipe.poll():
                _take(consumer, acknowledging, taken)
        finally:
            consumer.close()
        pipe.send(None)
    except (EOFError, OSError):
        return
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def _take(consumer: ShareConsumer, acknowledging: Acknowledging, taken: Any) -> int:
    """Poll once, acknowledge what came, and return its number."""
    messages: Any = consumer.poll(POLL_S)
    for message in messages:
        if message.error() is not None:
            raise RuntimeError(message.error())
        if acknowledging != "implicit":
            consumer.acknowledge(message)
        if acknowledging == "committed":
            for error in (consumer.commit_sync() or {}).values():
                if error is not None:
                    raise RuntimeError(error)
            taken.value += 1
    if acknowledging != "committed":
        taken.value += len(messages)
    return len(messages)
