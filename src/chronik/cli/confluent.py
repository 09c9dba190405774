"""confluent-kafka as the commands use it: quiet, with bounded waits, each failure as one line."""

from __future__ import annotations

import logging
from typing import Any

from chronik.cli.errors import CliError
from chronik.client.endpoint import parse_bootstrap


def client_settings(bootstrap: str, **more: Any) -> dict[str, Any]:
    """Return the settings that all clients share; `more` uses underscores for the dots of librdkafka's names."""
    return {
        "bootstrap.servers": ",".join(str(endpoint) for endpoint in parse_bootstrap(bootstrap)),
        "client.id": "chronik-cli",
        "logger": silent("chronik.confluent"),
        "error_cb": lambda error: None,  # errors that matter are returned with the affected record or call
        "broker.address.family": "any",
        **{name.replace("_", "."): value for name, value in more.items()},
    }


def partitions_of(client: Any, topic: str, bootstrap: str) -> list[int]:
    """Return the topic's partitions; raise if no broker answers or the topic cannot be used."""
    from confluent_kafka import KafkaException

    try:
        metadata = client.list_topics(topic, timeout=10.0).topics[topic]
    except KafkaException as error:
        raise CliError(
            f"no broker answers at {bootstrap} ({error.args[0].str()}): start one, or pass -b HOST:PORT"
        ) from None
    if metadata.error is not None:
        raise CliError(f"topic {topic}: {metadata.error.str()}: create it with chronik topic create {topic}")
    return sorted(metadata.partitions)


def silent(name: str) -> logging.Logger:
    """Silence a logger: clients log each lost connection to standard error, where we promise one line."""
    logger = logging.getLogger(name)
    logger.propagate = False
    logger.setLevel(logging.CRITICAL + 1)
    return logger
