"""The version of Spark's own connector that `--source kafka` requests, and the error if Maven does not have it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from tests.support.eventually import eventually

from chronik.cli.pipeline_spark import CONNECTOR, bound_log, connector_fault, with_connector

LOG = """
:: problems summary ::
\t\tmodule not found: org.apache.spark#spark-sql-kafka-0-10_2.13;4.3.0
\t\t::          UNRESOLVED DEPENDENCIES         ::
\t\t:: org.apache.spark#spark-sql-kafka-0-10_2.13;4.3.0: not found
Exception in thread "main" java.lang.RuntimeException: [unresolved dependency: \
org.apache.spark#spark-sql-kafka-0-10_2.13;4.3.0: not found, unresolved dependency: \
org.apache.kafka#kafka-clients;3.9.1: not found]
"""


@pytest.mark.parametrize(
    ("spark", "asked"), [("4.3.0", "4.2.0"), ("4.2.0", "4.2.0"), ("4.0.1", "4.0.1"), ("4.10.0.dev1", "4.2.0")]
)
def test_the_connector_is_the_newest_published_version_up_to_that_of_spark(spark: str, asked: str) -> None:
    assert with_connector({"a": "b"}, spark) == {"a": "b", "spark.jars.packages": f"{CONNECTOR}:{asked}"}


@pytest.mark.parametrize("name", ["spark.jars", "spark.jars.packages"])
def test_configured_jars_replace_the_default_connector(name: str) -> None:
    assert with_connector({name: "x"}, "4.3.0") == {name: "x"}


def test_the_error_names_packages_that_maven_lacks_and_the_option_to_pass() -> None:
    told = connector_fault(LOG) or ""
    assert told.startswith(
        f"Spark cannot get {CONNECTOR}:4.3.0, org.apache.kafka:kafka-clients:3.9.1 from Maven: pass --conf spark.jars="
    )
    assert connector_fault("something else") is None


def test_sparks_log_is_cut_at_a_size_while_the_jvm_writes_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chronik.cli.pipeline_spark.LOG_CHECK_S", 0.01)
    path = tmp_path / "spark.log"
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND)
    inherited, has_ended = os.dup(descriptor), threading.Event()
    os.write(inherited, b"x" * 1000)
    keeper = threading.Thread(target=bound_log, args=(descriptor, has_ended, 500))
    keeper.start()
    try:
        eventually(lambda: path.stat().st_size == 0, 10, "the log is cut")
        os.write(inherited, b"next")
        assert path.read_bytes() == b"next"
    finally:
        has_ended.set()
        keeper.join()
        os.close(inherited)
