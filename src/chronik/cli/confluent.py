"""confluent-kafka as the commands use it: quiet, with bounded waits, each failure as one line."""

from __future__ import annotations

import logging
from typing import Any

from chronik.cli.client_properties import librdkafka_settings
from chronik.cli.errors import CHECK_FAILED, CliError
from chronik.cli.options import with_cluster
from chronik.client.cluster import Cluster
from chronik.client.errors import ClientError, LostAtFirstRequest, SecurityError
from chronik.client.properties import Target
from chronik.wire.errors import KafkaError


def client_settings(target: Target, **more: Any) -> dict[str, Any]:
    """Return the settings that all clients share; `more` uses underscores for the dots of librdkafka's names.

    Properties of the user's file that librdkafka knows come between our defaults and `more`.
    """
    return {
        "client.id": "chronik-cli",
        "broker.address.family": "any",
        **librdkafka_settings(target),
        "logger": silent("chronik.confluent"),
        "error_cb": lambda error: None,  # errors that matter are returned with the affected record or call
        **{name.replace("_", "."): value for name, value in more.items()},
    }


def partitions_of(client: Any, topic: str, bootstrap: Target) -> list[int]:
    """Return the topic's partitions; raise if no broker answers or the topic cannot be used."""
    from confluent_kafka import KafkaException

    try:
        metadata = client.list_topics(topic, timeout=10.0).topics[topic]
    except KafkaException as error:
        explain_security(bootstrap)
        raise CliError(
            f"no broker answers at {bootstrap} ({error.args[0].str()}): start one, or pass -b HOST:PORT"
        ) from None
    if metadata.error is not None:
        way_out = _rights_way_out(metadata.error) or f": create it with chronik topic create {topic}"
        raise CliError(f"topic {topic}: {metadata.error.str()}{way_out}")
    return sorted(metadata.partitions)


def refused_client(error: BaseException) -> CliError | None:
    """Return why the client cannot continue; None if `error` is not its own.

    An idempotent producer without rights fails as a whole. confluent-kafka then raises KafkaException, or SystemError
    with that as its cause if it was calling back.
    """
    from confluent_kafka import KafkaException

    found = error if isinstance(error, KafkaException) else error.__cause__
    if not isinstance(found, KafkaException):
        return None
    return CliError(f"{found.args[0].str()}{_rights_way_out(found.args[0])}", CHECK_FAILED)


def _rights_way_out(error: Any) -> str:
    """Return what to do if the client lacks a right, else nothing."""
    if "authorization failed" not in error.str().lower():
        return ""
    return ": an administrator grants rights with chronik acl add; connect as another user with --properties"


def explain_security(target: Target) -> None:
    """Raise what our own client reports, if security is the reason: librdkafka reports a lost transport for all."""

    async def connect(cluster: Cluster) -> None:
        await cluster.layout([])

    try:
        with_cluster(target, connect, timeout_s=5.0)
    except (SecurityError, LostAtFirstRequest):
        raise
    except (ClientError, KafkaError):
        return


def silent(name: str) -> logging.Logger:
    """Silence a logger: clients log each lost connection to standard error, where we promise one line."""
    logger = logging.getLogger(name)
    logger.propagate = False
    logger.setLevel(logging.CRITICAL + 1)
    return logger
