"""Inputs in sequence on one node, and what must hold for each input and for the node throughout.

- The node answers each request of an input with a well-formed response, in order; or it closes the connection, counts
  one refusal and logs it in one line.
- On a listener with SASL, nothing but the APIs of an authentication is answered before it.
- No exception is unexpected: none reaches the event loop, none is logged with a traceback.
- Nothing hangs: a response arrives within a (virtual) second, or within the time that the request itself allows. No
  input takes seconds of real time.
- Memory: no input makes the process grow by more than the decompression of one batch may take.
- A healthy client is served, and every record that was acknowledged to it exists, also after the crash at the end. The
  restart also shows that no input left state behind that keeps the node from starting.
"""

from __future__ import annotations

import resource
import signal
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from types import FrameType

from chronik.node.api_table import APIS
from chronik.node.membership.internal_api import InternalKey, decode_envelope
from chronik.node.membership.internal_server import UNPROVEN_APIS
from chronik.node.serving.authentication import NO_ACCESS, UNAUTHENTICATED_APIS, ClientAuthentication
from chronik.raft.messages import decode_message
from chronik.testing.fuzz import BrokenPromise
from chronik.testing.fuzz.fuzzed_node import FuzzedNode, FuzzTransport
from chronik.testing.fuzz.mutator import split
from chronik.testing.fuzz.responses import (
    UNREADABLE,
    BadResponse,
    SentRequest,
    check_response,
    requests_in,
    responses_in,
)
from chronik.testing.fuzz.samples import FUZZED_TOPIC
from chronik.testing.fuzz.ways import Way
from chronik.wire import messages
from chronik.wire.api import ApiKey
from chronik.wire.frames import RequestHeader

ANSWER_S = 1.0
PATIENCE_S = 40.0
SLACK_S = 5.0
PATIENT_SHARE = 8
"""The session waits for one of this many slow inputs; otherwise the client disconnects, as real clients do."""
REAL_S_MAX = 5.0
HANG_S = 30
GROWTH_BYTES_MAX = 300 * 1024 * 1024
"""Twice the maximum decompressed size of one batch: it is decompressed, and its records are extracted."""
CHECK_EVERY = 50
INPUTS_MAX = 3000
DELETED_SHARE = 32
"""One of this many inputs that delete the topic is sent: it ends the session, and starting a node is expensive."""
PARTITIONS_MAX = 60
PARTITIONS_CHEAP_MAX = 8
"""Requests for more partitions are valid but expensive, and reveal nothing about bad input."""
API_OF = {int(api.key): api for api in APIS}


class Session:
    """One node from its start to its crash. `outcomes` counts the results of inputs, `kinds` the requests in them."""

    def __init__(self, seed: int, outcomes: Counter[str], kinds: Counter[tuple[int, int]]) -> None:
        self.seed = seed
        self.inputs: list[bytes] = []
        self.fuzzed = FuzzedNode(seed)
        self._outcomes = outcomes
        self._kinds = kinds
        self._is_disturbed = False

    @property
    def is_over(self) -> bool:
        """Whether to continue on another node: this one has run enough, or lost the topic that inputs refer to."""
        broker = self.fuzzed.broker
        return (
            len(self.inputs) >= INPUTS_MAX
            or self._is_disturbed
            or self.fuzzed.topic_id(FUZZED_TOPIC) != self.fuzzed.fuzzed_id
            or len(broker.host.partitions) > PARTITIONS_MAX
        )

    def run(self, data: bytes) -> None:
        """Run one input. Raise `BrokenPromise` if it breaks a promise."""
        self.inputs.append(data)
        started_s, peak_bytes = perf_counter(), _peak_bytes()
        with _alarm():
            self._run(data)
            if len(self.inputs) % CHECK_EVERY == 0 and not self._is_disturbed:
                self._check()
        taken_s, grown_bytes = perf_counter() - started_s, _peak_bytes() - peak_bytes
        if taken_s > REAL_S_MAX:
            raise BrokenPromise(f"an input of {len(data)} bytes took {taken_s:.1f} s")
        if grown_bytes > GROWTH_BYTES_MAX:
            raise BrokenPromise(f"an input of {len(data)} bytes took {grown_bytes / 1e6:.0f} MB")

    def end(self) -> None:
        """Crash, restart, and check for every acknowledged record."""
        with _alarm():
            self._check(whole=True)
            self.fuzzed.node.power_off()
            self.fuzzed.start()
            self.fuzzed.check_kept()
            self.fuzzed.check_fuzzed()

    def release(self) -> None:
        self.fuzzed.release()

    def _run(self, data: bytes) -> None:
        way, stream = (Way.of(data[0]), data[1:]) if data else (Way(), b"")
        internal = way.is_internal
        fuzzed = self.fuzzed
        requests = list(requests_in(stream, fuzzed.broker.server.frame_bytes_max))
        has_tokens = False
        if way.is_raw:
            stream, requests = b"".join(split(stream)), []
        elif way.uses_sasl and not way.is_proven:
            # After SaslHandshake 0, frames have no headers.
            has_tokens = len(requests) > (count := _requests_before_tokens(requests))
            requests = requests[:count]
        if not all(_is_cheap(each, internal) for each in requests):
            self._outcomes["not sent: valid and merely expensive, or a peer's Raft message"] += 1
            return
        if zlib.crc32(data) % DELETED_SHARE and any(self._deletes(each) for each in requests):
            self._outcomes["not sent: deletes the topic that all speak of"] += 1
            return
        for each in requests:
            if each.header is not None and self._is_served(each.header, way):
                self._kinds[(each.header.api_key, each.header.api_version)] += 1
        metrics = fuzzed.broker.metrics
        refused_before = metrics.malformed_requests
        lines_before = fuzzed.node.events["connection_refused"]
        transport = fuzzed.connect(stream, way)
        is_settled = fuzzed.until(lambda: transport.is_settled, ANSWER_S)
        try:
            answers = b"" if way.is_raw else transport.take()
            left = _match(requests, answers, in_order=not internal, has_tokens=has_tokens)
        except BadResponse as error:
            raise BrokenPromise(str(error)) from None
        self._count_way(way)
        if way.uses_sasl and not way.is_proven and not _is_authenticated(transport):
            self._require_unauthenticated(requests, left)
        refused = metrics.malformed_requests - refused_before
        if fuzzed.node.events["connection_refused"] - lines_before > refused or refused > 1:
            raise BrokenPromise(f"{refused} refusals for one connection")
        if not is_settled:
            self._outcomes["waits"] += 1
            if not has_tokens:
                # Otherwise the node refused SaslHandshake 0, and a request that was not looked at may wait.
                self._wait(transport, left, zlib.crc32(data))
        elif transport.was_closed and not transport.end_was_seen:
            self._outcomes["closed"] += 1
            if refused != 1 and not _may_close_silently(left, internal) and not _was_refused(transport):
                raise BrokenPromise("the connection was closed without a word in the log")
        else:
            self._outcomes["answered" if requests else "nothing whole sent"] += 1
            missing = [each for each in left if not each.is_unanswered_by_design]
            is_explained = refused or _may_close_silently(left, internal) or _was_refused(transport)
            if missing and not is_explained:
                raise BrokenPromise(f"no answer to {_describe(missing[0])}, and nothing said why")
        if not transport.is_lost:
            # Disconnect before the next input, which would otherwise be blamed for the late effects of this one.
            transport.lose()
            fuzzed.until(lambda: transport.is_lost, ANSWER_S)
        if internal and not fuzzed.node.is_ready:
            # A peer is trusted: it may remove the node from the cluster.
            self._is_disturbed = True

    def _count_way(self, way: Way) -> None:
        if way.uses_tls:
            self._outcomes[f"way: {'raw ' if way.is_raw else ''}TLS"] += 1
        if way.uses_sasl:
            self._outcomes[f"way: {'' if way.is_proven else 'before '}SASL"] += 1

    def _require_unauthenticated(self, requests: Sequence[SentRequest], left: Sequence[SentRequest]) -> None:
        for each in requests:
            if each not in left and each.header is not None and each.header.api_key not in UNAUTHENTICATED_APIS:
                raise BrokenPromise(f"{_describe(each)} is answered before authentication")

    def _is_served(self, header: RequestHeader, way: Way) -> bool:
        internal = way.is_internal
        if internal and not way.is_proven and header.api_key not in UNPROVEN_APIS:
            return False
        if way.uses_sasl and not way.is_proven and header.api_key not in UNAUTHENTICATED_APIS:
            return False
        if internal and header.api_key >= InternalKey.HELLO:
            return header.api_key <= max(InternalKey) and header.api_version == 0
        api = API_OF.get(header.api_key)
        return api is not None and api.parsed_versions[0] <= header.api_version <= api.parsed_versions[1]

    def _deletes(self, request: SentRequest) -> bool:
        header = request.header
        if header is None or header.api_key != ApiKey.DELETE_TOPICS:
            return False
        named = bytes(request.frame[header.body_at :])
        return FUZZED_TOPIC.encode() in named or self.fuzzed.fuzzed_id.bytes in named

    def _wait(self, transport: FuzzTransport, left: Sequence[SentRequest], chance: int) -> None:
        """Check that a slow request is allowed to be slow, and that it ends."""
        first = next((each for each in left if not each.is_unanswered_by_design), None)
        if first is None:
            raise BrokenPromise("everything is answered, and still the connection is busy")
        wait_s = first.wait_s()
        if wait_s is None:
            raise BrokenPromise(f"no answer to {_describe(first)} within {ANSWER_S} s")
        if chance % PATIENT_SHARE == 0:
            answered_before = len(transport.written)
            over = self.fuzzed.until(
                lambda: transport.is_settled or len(transport.written) > answered_before, PATIENCE_S
            )
            if not over and wait_s < PATIENCE_S - SLACK_S:
                raise BrokenPromise(f"no answer to {_describe(first)} within {PATIENCE_S} s; it allows {wait_s} s")

    def _check(self, whole: bool = False) -> None:
        self.fuzzed.keep_one()
        self.fuzzed.check_kept(0 if whole else max(0, len(self.fuzzed.kept) - 3))
        if whole and self.fuzzed.topic_id(FUZZED_TOPIC) is not None:
            self.fuzzed.check_fuzzed()


def _match(requests: Sequence[SentRequest], written: bytes, *, in_order: bool, has_tokens: bool) -> list[SentRequest]:
    """Match each response with its request; return the requests without a response.

    With `has_tokens`, frames without a header may follow the last response.
    """
    left = list(requests)
    for answer in responses_in(written):
        if in_order:
            while left and left[0].is_unanswered_by_design:
                left.pop(0)
            if not left:
                raise BadResponse("an answer without a request")
            check_response(left.pop(0), answer)
            if has_tokens and not left:
                break
            continue
        for each in left:
            try:
                check_response(each, answer)
            except BadResponse:
                continue
            left.remove(each)
            break
        else:
            raise BadResponse("an answer that belongs to no request")
    return left


def _may_close_silently(left: Sequence[SentRequest], internal: bool) -> bool:
    """Whether a close needs no log line: it reports an error to an acks=0 producer; a refused peer got a reason."""
    return internal or any(each.acks == 0 for each in left)


def _is_authenticated(transport: FuzzTransport) -> bool:
    return transport.connection is not None and transport.connection.access is not NO_ACCESS


def _was_refused(transport: FuzzTransport) -> bool:
    """Whether the client failed to authenticate: it got the reason, and nothing else is served."""
    gate = None if transport.connection is None else transport.connection.gate
    return isinstance(gate, ClientAuthentication) and gate.has_failed


def _requests_before_tokens(requests: Sequence[SentRequest]) -> int:
    for number, request in enumerate(requests, 1):
        header = request.header
        if header is not None and (header.api_key, header.api_version) == (ApiKey.SASL_HANDSHAKE, 0):
            return number
    return len(requests)


def _describe(request: SentRequest) -> str:
    header = request.header
    return "a request" if header is None else f"API {header.api_key} v{header.api_version}"


def _is_cheap(request: SentRequest, internal: bool) -> bool:
    header = request.header
    if header is None:
        return True
    key, version, body = header.api_key, header.api_version, bytes(request.frame[header.body_at :])
    try:
        if internal and key == InternalKey.RAFT:
            # Members keep to the protocol, and the node trusts them. Only a message that does not parse is bad input.
            decode_message(body)
            return False
        if internal and key == InternalKey.ENVELOPE:
            envelope = decode_envelope(memoryview(body))
            key, version, body = envelope.api_key, envelope.api_version, envelope.body
        if key == ApiKey.CREATE_TOPICS:
            topics = messages.read_request(key, version, body).topics
            return all(max(topic.num_partitions, len(topic.assignments)) <= PARTITIONS_CHEAP_MAX for topic in topics)
        if key == ApiKey.CREATE_PARTITIONS:
            topics = messages.read_request(key, version, body).topics
            return all(topic.count <= PARTITIONS_CHEAP_MAX for topic in topics)
    except UNREADABLE:
        return True
    return True


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def _alarm() -> Iterator[None]:
    """Interrupt a block that hangs."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise BrokenPromise(f"still busy after {HANG_S} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(HANG_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
