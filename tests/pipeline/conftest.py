"""Apache Kafka, for what must work there too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.apache_kafka import ApacheKafka, missing


@pytest.fixture(scope="session")
def apache_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApacheKafka]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    kafka = ApacheKafka(tmp_path_factory.mktemp("apache-kafka"))
    try:
        yield kafka.start()
    finally:
        kafka.stop()
