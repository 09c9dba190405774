"""Any bad input gets an error or a closed connection, other clients are served, and memory stays flat."""

from __future__ import annotations

import random
import socket
import struct
from collections import Counter

import pytest
from tests.conftest import StartNode
from tests.faults.support_load import MB, HealthyClient, memory_bytes, no_surprises
from tests.faults.support_mutants import every_place, is_tame, mutant
from tests.node.support_wire import connect
from tests.support.node import Node

from chronik.testing.fuzz.samples import CORRELATION_ID, FUZZED_TOPIC, Sample, samples
from chronik.wire import frames, messages
from chronik.wire.api import ApiKey, is_flexible, response_header_is_flexible
from chronik.wire.errors import MalformedRequest
from chronik.wire.fetch import read_fetch_response
from chronik.wire.primitives import skip_tags
from chronik.wire.produce import read_produce_response

ANSWER_TIMEOUT_S = 10.0
GROWTH_MAX_BYTES = 30 * MB
SHORT_RUN = 2_000
FULL_RUN = 100_000
PRODUCE_FROM = 3
ABSURD_COUNTS = {False: b"\x7f\xff\xff\xff", True: b"\xff\xff\xff\xff\x07"}


@pytest.fixture(scope="module")
def fuzzed(start_shared_node: StartNode) -> Node:
    """A node whose settings keep valid mutants cheap: no automatic topics, no group that waits for another member."""
    node = start_shared_node(
        auto_create_topics=False,
        group_initial_rebalance_delay_ms=0,
        group_min_session_timeout_ms=1,
        group_max_size=1,
    )
    with connect(node) as client:
        client.create_topic(FUZZED_TOPIC)
        client.append(FUZZED_TOPIC, b"something to fetch")
    return node


@pytest.fixture(scope="module")
def corpus(fuzzed: Node) -> list[Sample]:
    with connect(fuzzed) as client:
        apis = {
            api.api_key: (api.min_version, api.max_version) for api in client.call(ApiKey.API_VERSIONS, 3, {}).api_keys
        }
        topic_id = client.topic_id(FUZZED_TOPIC)
    return samples(apis, topic_id)


def exchange(node: Node, frame: bytes) -> bytes:
    """Send `frame`, half-close the connection, and return everything the node sends before it closes."""
    answer = b""
    with socket.create_connection(("127.0.0.1", node.kafka_port), ANSWER_TIMEOUT_S) as connection:
        try:
            connection.sendall(frame)
            connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(1 << 16):
                answer += data
        except (ConnectionResetError, BrokenPipeError):
            pass
    return answer


def check_answer(frame: bytes, answer: bytes) -> str:
    """Return the kind of outcome; raise if the node sent bytes that are no well-formed answer to the frame's header."""
    if not answer:
        return "closed"
    (size,) = struct.unpack_from(">i", answer)
    assert size == len(answer) - 4, "more or less than one frame"
    header = frames.read_request_header(memoryview(frame)[4:])
    assert int.from_bytes(answer[4:8], "big", signed=True) == header.correlation_id
    key, version = header.api_key, header.api_version
    body = memoryview(answer)[8:]
    if key == ApiKey.API_VERSIONS and struct.unpack_from(">h", body)[0] == 35:
        return "unsupported version"
    if response_header_is_flexible(key, version):
        body = body[skip_tags(body, 0) :]
    if key == ApiKey.PRODUCE:
        read_produce_response(version, body)
    elif key == ApiKey.FETCH:
        read_fetch_response(version, body)
    else:
        messages.read_response(key, version, bytes(body))
    return "answered"


def fuzz(node: Node, corpus: list[Sample], count: int, seed: int) -> Counter[str]:
    random_ = random.Random(seed)
    outcomes: Counter[str] = Counter()
    for number in range(count):
        sample = random_.choice(corpus)
        frame = mutant(random_, sample)
        if not is_tame(frame):
            outcomes["not sent"] += 1
            continue
        try:
            outcomes[check_answer(frame, exchange(node, frame))] += 1
        except (TimeoutError, AssertionError, MalformedRequest, struct.error, IndexError) as failure:
            pytest.fail(f"mutant {number} of seed {seed} ({sample}): {failure!r}\n{frame.hex()}")
    return outcomes


def run_fuzzer(node: Node, corpus: list[Sample], count: int) -> None:
    # Send every sample once, and a round of mutants, so that lazily loaded code is loaded now.
    for sample in corpus:
        exchange(node, sample.frame)
    fuzz(node, corpus, 500, seed=1)
    before = memory_bytes(node)
    with HealthyClient(node) as healthy:
        outcomes = fuzz(node, corpus, count, seed=2)
    grown = memory_bytes(node) - before
    assert grown < GROWTH_MAX_BYTES, f"{grown / MB:.0f} MB more after {count} mutants"
    assert healthy.rounds > count / 200
    assert outcomes["closed"] > count / 20, outcomes
    assert outcomes["answered"] > count / 20, outcomes
    no_surprises(node)


def test_the_node_answers_every_valid_request_of_the_corpus(fuzzed: Node, corpus: list[Sample]) -> None:
    assert len({sample.key for sample in corpus}) > 25
    for sample in corpus:
        assert check_answer(sample.frame, exchange(fuzzed, sample.frame)) == "answered", str(sample)
    no_surprises(fuzzed)


def test_mutated_requests_get_an_error_or_a_closed_connection(fuzzed: Node, corpus: list[Sample]) -> None:
    run_fuzzer(fuzzed, corpus, SHORT_RUN)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_mutated_requests_get_an_error_or_a_closed_connection(
    fuzzed: Node, corpus: list[Sample]
) -> None:
    run_fuzzer(fuzzed, corpus, FULL_RUN)


def test_a_huge_array_count_anywhere_in_a_request_does_not_exhaust_memory(fuzzed: Node, corpus: list[Sample]) -> None:
    """Put the largest count at every position of the newest flexible and the newest plain version of each API."""
    newest = {(sample.key, is_flexible(sample.key, sample.version)): sample for sample in corpus}
    before = memory_bytes(fuzzed)
    with HealthyClient(fuzzed):
        for (_, flexible), sample in newest.items():
            for frame in every_place(sample, ABSURD_COUNTS[flexible]):
                if is_tame(frame):
                    check_answer(frame, exchange(fuzzed, frame))
    assert memory_bytes(fuzzed) - before < GROWTH_MAX_BYTES
    no_surprises(fuzzed)


def test_text_that_is_not_utf_8_is_refused(fuzzed: Node, corpus: list[Sample]) -> None:
    for sample in corpus:
        for text in (b"fuzz", FUZZED_TOPIC.encode(), b"text", b"new-topic", b"retention.ms"):
            if text in sample.frame and sample.key not in (ApiKey.PRODUCE, ApiKey.FETCH):
                frame = sample.frame.replace(text, b"\xff\xfe" + text[2:])
                assert exchange(fuzzed, frame) == b"", f"{sample} with {text!r} spoilt"
    for sample in corpus:
        if sample.key in (ApiKey.PRODUCE, ApiKey.FETCH) and FUZZED_TOPIC.encode() in sample.frame:
            frame = sample.frame.replace(FUZZED_TOPIC.encode(), b"\xc3\x28zzed")
            check_answer(frame, exchange(fuzzed, frame))
    no_surprises(fuzzed)


@pytest.mark.parametrize("size", [0, 1, 7, -1, -(2**31), 2**31 - 1, 100 * MB + 1], ids=lambda size: f"{size} bytes")
def test_an_invalid_frame_length_closes_the_connection_immediately(fuzzed: Node, size: int) -> None:
    with HealthyClient(fuzzed), connect(fuzzed) as client:
        # The connection is not even half-closed: the four size bytes alone must suffice.
        client.send_bytes(struct.pack(">i", size) + b"\x00" * 8)
        assert client.ended_without_a_byte()


def test_a_frame_shorter_than_its_request_does_not_use_bytes_of_the_next_frame(fuzzed: Node) -> None:
    body = messages.write_request(ApiKey.METADATA, 1, {"topics": [{"name": FUZZED_TOPIC}]})
    whole = frames.write_request(ApiKey.METADATA, 1, CORRELATION_ID, "fuzz", body)
    cut = struct.pack(">i", len(whole) - 4 - 3) + whole[4:]
    assert exchange(fuzzed, cut + whole) == b""


def test_trailing_bytes_after_a_request_are_ignored_as_in_kafka(fuzzed: Node, corpus: list[Sample]) -> None:
    for sample in {(sample.key, sample.version): sample for sample in corpus}.values():
        longer = sample.frame[4:] + b"\x00"
        frame = struct.pack(">i", len(longer)) + longer
        outcome = check_answer(frame, exchange(fuzzed, frame))
        assert outcome == "answered" or sample.key in (ApiKey.PRODUCE, ApiKey.FETCH), str(sample)


def test_a_client_of_another_protocol_is_disconnected(fuzzed: Node) -> None:
    for greeting in (
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\xff" * 1000,
    ):
        assert exchange(fuzzed, greeting) == b"", greeting
