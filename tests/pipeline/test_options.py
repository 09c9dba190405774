"""The source's options, which are those of Spark's Kafka source."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from chronik.client.properties import ClientSettings, load_settings
from chronik.client.topics import EARLIEST, LATEST
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.session import ALWAYS
from chronik.pipeline.source.options import Edge, SourceOptions, connection_options
from chronik.pipeline.source.planner import Position
from chronik.pipeline.source.spark_source import StreamReader

WHERE = {"kafka.bootstrap.servers": "a:1, b:2", "subscribe": "t"}


def parse(streaming: bool = False, **given: str) -> SourceOptions:
    return SourceOptions.parse(
        {**WHERE, **{name.replace("__", "."): value for name, value in given.items()}}, streaming=streaming
    )


def test_option_names_ignore_case_and_defaults_are_those_of_spark() -> None:
    batch = SourceOptions.parse({"KAFKA.bootstrap.servers": "a:1", "Subscribe": "t, u,t"}, streaming=False)
    assert (batch.bootstrap, batch.topics) == ("a:1", ("t", "u"))
    assert (batch.starting, batch.ending) == (Edge(EARLIEST, latest_if_none=True), Edge(LATEST))
    assert batch.fail_on_data_loss and not batch.with_headers and not batch.committed_only
    assert parse(streaming=True).starting.everywhere == LATEST


def test_offsets_and_timestamps_are_parsed_by_partition() -> None:
    assert parse(startingOffsets='{"t": {"0": 5, "1": -2}}').starting.offsets == {("t", 0): 5, ("t", 1): EARLIEST}
    assert parse(startingTimestamp="7", startingOffsets="latest").starting.time_ms == 7
    by_time = parse(startingOffsetsByTimestamp='{"t": {"0": 9}}', startingOffsetsByTimestampStrategy="latest").starting
    assert (by_time.times_ms, by_time.latest_if_none) == ({("t", 0): 9}, True)
    assert not parse(startingTimestamp="7").starting.latest_if_none


def test_options_of_sparks_own_source_are_accepted() -> None:
    options = parse(
        streaming=True,
        minOffsetsPerTrigger="10",
        maxTriggerDelay="2m",
        kafkaConsumer__pollTimeoutMs="1500",
        fetchOffset__numRetries="3",
        fetchOffset__retryIntervalMs="10",
    )
    assert (options.rows_per_trigger_min, options.trigger_delay_s_max, options.stalled_s_max) == (10, 120, 1.5)
    assert [parse(maxTriggerDelay=text).trigger_delay_s_max for text in ("250", "3s", "1 h")] == [0.25, 3, 3600]
    with pytest.raises(PipelineError, match="option subscibe is unknown") as raised:
        parse(subscibe="t")
    assert "rangesOnly" not in str(raised.value)


def test_assign_selects_partitions() -> None:
    options = SourceOptions.parse({"kafka.bootstrap.servers": "a:1", "assign": '{"t": [0, 2]}'}, streaming=False)
    assert options.topics == ("t",)
    assert options.assigned == frozenset({("t", 0), ("t", 2)})


@pytest.mark.parametrize(
    ("streaming", "given", "said"),
    [
        (False, {"subscribePattern": "t.*"}, "one of subscribe, subscribePattern and assign"),
        (False, {"startingOffset": "earliest"}, "startingoffset is unknown"),
        (False, {"startingOffsets": "latest"}, "would be empty"),
        (False, {"startingOffsets": '{"t": {"0": -1}}'}, "would be empty"),
        (False, {"endingOffsets": "earliest"}, "would be empty"),
        (False, {"startingOffsets": "erliest"}, "neither a known word nor a JSON object"),
        (False, {"startingOffsets": '{"t": 5}'}, 'write {"t": {"0": NUMBER, ...}}'),
        (False, {"startingOffsets": '{"t": {"x": 5}}'}, "'x' is not a whole number"),
        (False, {"minPartitions": "0"}, "minPartitions must be 1 or more"),
        (False, {"failOnDataLoss": "maybe"}, "failOnDataLoss must be one of true, false"),
        (False, {"kafka__security.protocol": "TLS"}, "security.protocol=TLS is unknown"),
        (False, {"kafka__security.protocol": "SASL_SSL"}, "sasl.mechanism is missing"),
        (False, {"kafka__properties.file": "/nowhere"}, "cannot read /nowhere"),
        (False, {"kafka__bootstrap.servers": " , "}, "kafka.bootstrap.servers is missing"),
        (True, {"endingOffsets": "latest"}, "a stream has no end"),
        (True, {"minOffsetsPerTrigger": "9", "maxOffsetsPerTrigger": "8"}, "more than maxOffsetsPerTrigger (8)"),
        (True, {"maxTriggerDelay": "soon"}, "write it as in 500ms, 30s or 15m"),
        (True, {"fetchOffset__numRetries": "x"}, "'x' is not a whole number"),
    ],
)
def test_an_invalid_option_is_a_one_line_error(streaming: bool, given: dict[str, str], said: str) -> None:
    with pytest.raises(PipelineError) as raised:
        parse(streaming, **given)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_options_that_only_tune_a_client_are_ignored() -> None:
    tuned = {"kafka.fetch.max.bytes": "1", "kafka.security.protocol": "plaintext"}
    assert SourceOptions.parse(WHERE | tuned, streaming=False) == SourceOptions.parse(WHERE, streaming=False)


SECURED = {
    "kafka.security.protocol": "SASL_SSL",
    "kafka.sasl.mechanism": "SCRAM-SHA-512",
    "kafka.sasl.jaas.config": (
        'org.apache.kafka.common.security.scram.ScramLoginModule required username="alice" password="sesame";'
    ),
    "kafka.ssl.truststore.type": "PEM",
    "kafka.ssl.truststore.location": "/certs/ca.pem",
}


def test_security_options_have_the_names_of_sparks_own_source() -> None:
    settings = ClientSettings.of(SourceOptions.parse(WHERE | SECURED, streaming=False).bootstrap)
    assert (settings.security.username, settings.security.password) == ("alice", "sesame")
    assert settings.security.authorities == "/certs/ca.pem"
    assert "sesame" not in repr(SourceOptions.parse(WHERE | SECURED, streaming=False))


def client_file(folder: Path) -> str:
    path = folder / "client.properties"
    path.write_text(
        "bootstrap.servers=b:2\nsecurity.protocol=SASL_SSL\nsasl.mechanism=PLAIN\nsasl.username=alice\n"
        "sasl.password=sesame\n"
    )
    path.chmod(0o600)
    return str(path)


def test_a_properties_file_keeps_its_secrets_out_of_pickles_and_positions(tmp_path: Path) -> None:
    path = client_file(tmp_path)
    given = {"subscribe": "t", "kafka.properties.file": path, "kafka.group.id": "g"}
    options = SourceOptions.parse(given, streaming=True)
    assert str(options.bootstrap) == "b:2"
    pickled = pickle.dumps(options)
    assert b"sesame" not in pickled
    assert pickle.loads(pickled) == options
    position = StreamReader(options, True)._to_json(Position({("t", 0): 1}))
    assert (position["group"], position["properties"]) == ("g", path)
    assert "sesame" not in str(position)


def test_positions_of_a_query_with_secret_options_name_no_group() -> None:
    options = SourceOptions.parse(WHERE | SECURED | {"kafka.group.id": "g"}, streaming=True)
    assert "group" not in StreamReader(options, True)._to_json(Position({("t", 0): 1}))


def test_security_is_given_in_a_file_or_in_options_not_both(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="not both"):
        SourceOptions.parse(WHERE | SECURED | {"kafka.properties.file": client_file(tmp_path)}, streaming=True)


def test_jobs_pass_the_path_to_our_source_and_hidden_options_to_sparks_own(tmp_path: Path) -> None:
    settings = load_settings(client_file(tmp_path))
    own = connection_options(settings)
    assert own == {"kafka.bootstrap.servers": "b:2", "kafka.properties.file": settings.path}
    sparks = connection_options(settings, own=False)
    secrets = [name for name, value in sparks.items() if "sesame" in value]
    assert secrets == ["kafka.sasl.jaas.config"]
    assert all(re.search(ALWAYS["spark.sql.redaction.options.regex"], name) for name in secrets)
    assert ClientSettings.of(SourceOptions.parse(sparks | {"subscribe": "t"}, streaming=True).bootstrap).security == (
        settings.security
    )
