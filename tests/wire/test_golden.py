"""Requests from released clients, recorded from a socket and stored as hex in golden/.

Each client produced the same three records with fixed timestamps to partition 0 of `golden`, then fetched from it.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from chronik.wire.api import ApiKey
from chronik.wire.batch import check_batches, decode_batch, encode_batch
from chronik.wire.fetch import read_fetch_request, write_fetch_request
from chronik.wire.frames import read_request_header, write_request
from chronik.wire.messages import read_request
from chronik.wire.messages import write_request as write_body
from chronik.wire.produce import read_produce_request, write_produce_request
from chronik.wire.records import NewRecord

GOLDEN = Path(__file__).parent / "golden"
RECORDED = [
    (recording["client"], request)
    for recording in (json.loads(path.read_text()) for path in sorted(GOLDEN.glob("*.json")))
    for request in recording["requests"]
]
SENT: list[NewRecord] = [
    (b"key-0", b"value-0 " * 25, [("trace", b"\x01\x02"), ("empty", b"")], 1_700_000_000_000),
    (None, b"value-1 " * 25, [], 1_700_000_000_005),
    (b"key-2", None, [], 1_700_000_000_007),
]
CODECS = {"gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}


def of(key: ApiKey) -> list[Any]:
    return [
        pytest.param(request, id=f"{client}-v{request['api_version']}-{'-'.join(request['settings'].values())}")
        for client, request in RECORDED
        if request["api_key"] == key
    ]


@pytest.mark.parametrize("request_", [pytest.param(r, id=f"{c}-{ApiKey(r['api_key']).name}") for c, r in RECORDED])
def test_recorded_headers_survive_a_round_trip(request_: dict[str, Any]) -> None:
    frame = bytes.fromhex(request_["frame"])
    header = read_request_header(memoryview(frame))
    assert (header.api_key, header.api_version) == (request_["api_key"], request_["api_version"])
    assert header.client_id is not None
    assert header.client_id.startswith("golden")
    assert write_request(*header[:4], frame[header.body_at :])[4:] == frame


@pytest.mark.parametrize("request_", of(ApiKey.PRODUCE))
def test_recorded_produce_requests_survive_a_round_trip(request_: dict[str, Any]) -> None:
    frame = memoryview(bytes.fromhex(request_["frame"]))
    header = read_request_header(frame)
    request = read_produce_request(header.api_version, frame, header.body_at)
    assert write_produce_request(header.api_version, request) == frame[header.body_at :]
    (topic,) = request.topics
    ((index, records),) = topic.partitions
    assert (topic.name, index) == ("golden", 0)
    assert records is not None

    ((_, batch),) = check_batches(records, 1 << 20)
    codec = next((code for name, code in CODECS.items() if name in request_["settings"].values()), 0)
    assert batch.codec == codec
    decoded = [(r.key, r.value, r.headers, r.timestamp_ms) for r in decode_batch(records)]
    assert decoded == SENT
    if codec == 0:
        again = encode_batch(
            decoded,
            producer_id=batch.producer_id,
            producer_epoch=batch.producer_epoch,
            base_sequence=batch.base_sequence,
            leader_epoch=batch.partition_leader_epoch,
        )
        assert again == records


@pytest.mark.parametrize("request_", of(ApiKey.FETCH))
def test_recorded_fetch_requests_survive_a_round_trip(request_: dict[str, Any]) -> None:
    frame = memoryview(bytes.fromhex(request_["frame"]))
    header = read_request_header(frame)
    request = read_fetch_request(header.api_version, frame, header.body_at)
    assert write_fetch_request(header.api_version, request) == frame[header.body_at :]
    (topic,) = request.topics
    assert (topic.name == "golden") is (topic.topic_id is None)
    assert [(partition.partition, partition.fetch_offset) for partition in topic.partitions] == [(0, 0)]


@pytest.mark.parametrize("request_", of(ApiKey.METADATA))
def test_recorded_metadata_requests_survive_a_round_trip(request_: dict[str, Any]) -> None:
    frame = bytes.fromhex(request_["frame"])
    header = read_request_header(memoryview(frame))
    body = frame[header.body_at :]
    request = read_request(ApiKey.METADATA, header.api_version, body)
    assert [topic.name for topic in request.topics] in ([], ["golden"])
    values = {
        "topics": [{"name": topic.name} for topic in request.topics],
        "allow_auto_topic_creation": request.allow_auto_topic_creation,
    }
    assert write_body(ApiKey.METADATA, header.api_version, values) == body


@pytest.mark.parametrize("request_", of(ApiKey.API_VERSIONS))
def test_recorded_api_versions_requests_survive_a_round_trip(request_: dict[str, Any]) -> None:
    frame = bytes.fromhex(request_["frame"])
    header = read_request_header(memoryview(frame))
    body = frame[header.body_at :]
    request = read_request(ApiKey.API_VERSIONS, header.api_version, body)
    names = {name: getattr(request, name, "") for name in ("client_software_name", "client_software_version")}
    assert write_body(ApiKey.API_VERSIONS, header.api_version, names) == body


def test_requests_of_all_three_clients_are_recorded() -> None:
    assert {client for client, _ in RECORDED} == {"aiokafka", "confluent-kafka", "kafka-python"}
    for key in (ApiKey.API_VERSIONS, ApiKey.METADATA, ApiKey.PRODUCE, ApiKey.FETCH):
        assert {client for client, request in RECORDED if request["api_key"] == key} == {
            "aiokafka",
            "confluent-kafka",
            "kafka-python",
        }
