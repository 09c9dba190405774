"""The versions of Kafka 4.4 that kio lacks, byte by byte."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from chronik.wire.api import ApiKey
from chronik.wire.messages import read_request, read_response, write_request, write_response

TOPIC_ID = UUID("00112233-4455-6677-8899-aabbccddeeff")
NO_TAGS = b"\x00"


def test_api_versions_5_names_the_cluster_and_the_node() -> None:
    software = {"client_software_name": "c", "client_software_version": "1"}
    both = write_request(ApiKey.API_VERSIONS, 5, {**software, "cluster_id": "k", "node_id": 7})
    assert both == b"\x02c\x021" + b"\x02k" + b"\x00\x00\x00\x07" + NO_TAGS
    neither = write_request(ApiKey.API_VERSIONS, 5, software)
    assert neither == b"\x02c\x021" + b"\x00" + b"\xff\xff\xff\xff" + NO_TAGS
    read = read_request(ApiKey.API_VERSIONS, 5, both)
    assert (read.cluster_id, read.node_id) == ("k", 7)


def test_txn_offset_commit_6_names_topics_by_id() -> None:
    partition: dict[str, Any] = {"partition_index": 1, "committed_offset": 2, "committed_metadata": None}
    values = {
        "transactional_id": "t",
        "group_id": "g",
        "producer_id": 3,
        "producer_epoch": 4,
        "generation_id": 5,
        "member_id": "m",
        "topics": [{"topic_id": TOPIC_ID, "partitions": [partition]}],
    }
    body = write_request(ApiKey.TXN_OFFSET_COMMIT, 6, values)
    sender = b"\x02t\x02g" + (3).to_bytes(8, "big") + b"\x00\x04" + b"\x00\x00\x00\x05" + b"\x02m" + b"\x00"
    offset = b"\x00\x00\x00\x01" + (2).to_bytes(8, "big") + b"\xff\xff\xff\xff" + b"\x00" + NO_TAGS
    assert body == sender + b"\x02" + TOPIC_ID.bytes + b"\x02" + offset + NO_TAGS + NO_TAGS
    assert read_request(ApiKey.TXN_OFFSET_COMMIT, 6, body).topics[0].topic_id == TOPIC_ID
    answer = {"topics": [{"topic_id": TOPIC_ID, "partitions": [{"partition_index": 1, "error_code": 100}]}]}
    body = write_response(ApiKey.TXN_OFFSET_COMMIT, 6, answer)
    result = b"\x02" + b"\x00\x00\x00\x01" + b"\x00\x64" + NO_TAGS
    assert body == bytes(4) + b"\x02" + TOPIC_ID.bytes + result + NO_TAGS + NO_TAGS


@pytest.mark.parametrize(("message", "written"), [("x", b"\x02x"), (None, b"\x00")])
def test_delete_groups_3_has_an_error_message(message: str | None, written: bytes) -> None:
    result = {"group_id": "g", "error_code": 68, "error_message": message}
    body = write_response(ApiKey.DELETE_GROUPS, 3, {"throttle_time": timedelta(0), "results": [result]})
    assert body == bytes(4) + b"\x02" + b"\x02g" + b"\x00\x44" + written + NO_TAGS + NO_TAGS
    assert read_response(ApiKey.DELETE_GROUPS, 3, body).results[0].error_message == message
