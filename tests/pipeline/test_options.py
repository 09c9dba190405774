"""The source's options, which are those of Spark's Kafka source."""

from __future__ import annotations

import pytest

from chronik.client.topics import EARLIEST, LATEST
from chronik.pipeline.errors import PipelineError
from chronik.pipeline.source.options import Edge, SourceOptions

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
        (False, {"kafka__sasl.mechanism": "PLAIN"}, "Spark's own connector"),
        (False, {"kafka__security.protocol": "SSL"}, "Spark's own connector"),
        (False, {"kafka__bootstrap.servers": " , "}, "kafka.bootstrap.servers is missing"),
        (True, {"endingOffsets": "latest"}, "a stream has no end"),
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
