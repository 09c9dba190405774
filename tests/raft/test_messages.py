"""Wire messages: they round-trip, messages of a newer version are understood, and invalid ones are refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.raft.harness import store_id

from chronik.raft.membership import Member, Membership
from chronik.raft.messages import (
    FORMAT,
    MESSAGE_BYTES_MAX,
    Append,
    AppendReply,
    Body,
    Heartbeat,
    HeartbeatReply,
    Hello,
    HelloReply,
    Message,
    SnapshotChunk,
    SnapshotReply,
    TimeoutNow,
    VoteReply,
    VoteRequest,
    decode_message,
    encode_message,
)
from chronik.raft.state import RaftSettings
from chronik.raft.store import Entry, EntryKind

numbers = st.integers(0, 2**63 - 1)
members = st.builds(Member, numbers, st.uuids(), st.booleans(), st.text(max_size=10))
stores = st.lists(st.uuids(), max_size=3).map(tuple)
memberships = st.builds(Membership, st.lists(members, max_size=4).map(tuple), stores)


def append(prev_index: int, prev_term: int, terms: list[int], commit: int) -> Append:
    entries = [Entry(at, term, EntryKind.COMMAND, b"x") for at, term in enumerate(terms, start=prev_index + 1)]
    return Append(prev_index, prev_term, tuple(entries), commit)


bodies: st.SearchStrategy[Body] = st.one_of(
    st.builds(VoteRequest, numbers, numbers, st.booleans(), st.booleans()),
    st.builds(VoteReply, st.booleans(), st.booleans()),
    st.builds(append, st.integers(0, 2**62), numbers, st.lists(numbers, max_size=5), numbers),
    st.builds(AppendReply, numbers, st.booleans(), numbers, numbers),
    st.builds(Heartbeat, numbers, numbers),
    st.builds(HeartbeatReply, numbers),
    st.builds(SnapshotChunk, numbers, numbers, memberships, numbers, numbers, st.binary(max_size=50)),
    st.builds(SnapshotReply, numbers, numbers),
    st.just(TimeoutNow()),
    st.builds(Hello, numbers, st.uuids(), st.text(max_size=20), st.booleans()),
    st.builds(HelloReply, st.text(max_size=20)),
)
messages = st.builds(Message, numbers, st.uuids(), numbers, st.none() | st.uuids(), numbers, bodies)

HEARTBEAT = Message(1, store_id(1), 2, store_id(2), 3, Heartbeat(4, 5))


@given(messages)
def test_a_message_round_trips_through_its_encoding(message: Message) -> None:
    assert decode_message(encode_message(message)) == message


def test_unknown_fields_of_a_newer_version_are_ignored() -> None:
    known = msgspec.msgpack.decode(encode_message(HEARTBEAT)[1:])
    known["priority"] = 7
    known["body"]["region"] = "east"
    assert decode_message(bytes((FORMAT,)) + msgspec.msgpack.encode(known)) == HEARTBEAT


def test_an_entry_of_a_newer_version_may_have_more_fields() -> None:
    message = Message(1, store_id(1), 2, store_id(2), 3, append(0, 0, [1], 0))
    known = msgspec.msgpack.decode(encode_message(message)[1:])
    known["body"]["entries"][0].append("more")
    assert decode_message(bytes((FORMAT,)) + msgspec.msgpack.encode(known)) == message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x02" + encode_message(HEARTBEAT)[1:],
        encode_message(HEARTBEAT)[:-1],
        b"\x01\xc0",
        encode_message(HEARTBEAT).replace(b"heartbeat", b"heartbeet"),
        encode_message(Message(1, store_id(1), 2, None, 3, Heartbeat(-4, 5))),
        encode_message(Message(1, store_id(1), 2, None, 3, Append(0, 0, (Entry(2, 1, EntryKind.NO_OP, b""),), 0))),
        bytes(MESSAGE_BYTES_MAX + 1),
    ],
    ids=["empty", "another format", "cut short", "not a map", "an unknown type", "negative", "with a gap", "too large"],
)
def test_invalid_messages_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_message(data)


@given(st.binary(max_size=200))
def test_decoding_arbitrary_bytes_raises_only_value_errors(data: bytes) -> None:
    try:
        decode_message(bytes((FORMAT,)) + data)
    except ValueError:
        return


def test_the_default_settings_keep_messages_within_the_size_limit() -> None:
    settings = RaftSettings()
    largest = max(settings.entry_bytes_max, settings.append_bytes_max, settings.snapshot_chunk_bytes)
    assert largest + 1024 * 1024 < MESSAGE_BYTES_MAX


def test_inconsistent_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="election_timeout_ms"):
        RaftSettings(heartbeat_interval_ms=300, election_timeout_ms=600)
    with pytest.raises(ValueError, match="lease"):
        RaftSettings(heartbeat_interval_ms=200, election_timeout_ms=600, clock_drift_percent=60)
