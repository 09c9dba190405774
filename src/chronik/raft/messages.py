"""What Raft nodes say to each other, and its bytes.

    version  1 byte       FORMAT; another one is refused
    message  msgpack map  source, source_store, target, target_store, term, body; the body's `type` says what it is

Readers pass over fields that they do not know and give missing ones their default, so a field may be added with a
default. An unknown type is refused; the sender must not rely on it being understood. Entries are msgpack arrays
(index, term, kind, data), to which fields may be added at the end.
"""

from __future__ import annotations

from typing import TypeAlias
from uuid import UUID

import msgspec

from chronik.raft.entries import Entry, Natural
from chronik.raft.membership import Membership

FORMAT = 1
MESSAGE_BYTES_MAX = 16 * 1024 * 1024
"""No message is larger: an append holds `append_bytes_max` or one entry, a chunk `snapshot_chunk_bytes`."""


class VoteRequest(msgspec.Struct, frozen=True, tag="vote_request"):
    """Asks for a vote in the message's term, or with `is_pre_vote` whether there would be one.

    `is_transfer`: the leader itself asked for this election, so that hearing from it is no reason to refuse.
    """

    last_index: Natural
    last_term: Natural
    is_pre_vote: bool = False
    is_transfer: bool = False


class VoteReply(msgspec.Struct, frozen=True, tag="vote_reply"):
    """The message's term is the one asked for where granted, the voter's own where not."""

    is_granted: bool
    is_pre_vote: bool = False


class Append(msgspec.Struct, frozen=True, tag="append"):
    """The entries that follow the one named by `prev_index` and `prev_term`."""

    prev_index: Natural
    prev_term: Natural
    entries: tuple[Entry, ...]
    commit: Natural


class AppendReply(msgspec.Struct, frozen=True, tag="append_reply"):
    """Taken: the log is durable and equal to the leader's up to `index`.

    Rejected: `index` repeats the append's `prev_index`, where the logs differ; they may agree up to `hint_index`, whose
    term here is `hint_term`.
    """

    index: Natural
    is_rejected: bool = False
    hint_index: Natural = 0
    hint_term: Natural = 0


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """`round` counts the leader's broadcasts; its answer proves who led after the round began.

    `commit_term` is the term of the entry at `commit`: a peer that runs on an older copy of its store may hold another
    entry there.
    """

    commit: Natural
    round: Natural
    commit_term: Natural = 0


class HeartbeatReply(msgspec.Struct, frozen=True, tag="heartbeat_reply"):
    round: Natural


class SnapshotChunk(msgspec.Struct, frozen=True, tag="snapshot_chunk"):
    """Bytes `offset` and on of the snapshot after entry `index`, which is `size_bytes` in all."""

    index: Natural
    index_term: Natural
    membership: Membership
    size_bytes: Natural
    offset: Natural
    data: bytes


class SnapshotReply(msgspec.Struct, frozen=True, tag="snapshot_reply"):
    """The next chunk is to start at `next_offset`. A snapshot that is whole and durable is answered by AppendReply."""

    index: Natural
    next_offset: Natural


class TimeoutNow(msgspec.Struct, frozen=True, tag="timeout_now"):
    """The leader hands over: hold an election at once."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A node that belongs to no cluster says that it is there; who does not lead passes it on to who does."""

    node_id: Natural
    store: UUID
    address: str = ""
    is_relayed: bool = False


class HelloReply(msgspec.Struct, frozen=True, tag="hello_reply"):
    """My store is empty too."""

    address: str = ""


Body: TypeAlias = (
    VoteRequest
    | VoteReply
    | Append
    | AppendReply
    | Heartbeat
    | HeartbeatReply
    | SnapshotChunk
    | SnapshotReply
    | TimeoutNow
    | Hello
    | HelloReply
)


class Message(msgspec.Struct, frozen=True):
    """One message between two stores. `target_store` is None only where the sender cannot know it yet."""

    source: Natural
    source_store: UUID
    target: Natural
    target_store: UUID | None
    term: Natural
    body: Body


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode_message(message: Message) -> bytes:
    return bytes((FORMAT,)) + _encoder.encode(message)


def decode_message(data: bytes) -> Message:
    """The message of `encode_message`; ValueError when the bytes are none, too many, or of a newer version."""
    if len(data) > MESSAGE_BYTES_MAX:
        raise ValueError(f"a Raft message of {len(data)} bytes is too large")
    if not data or data[0] != FORMAT:
        raise ValueError(f"a Raft message of format {data[0] if data else 'none'}, this version reads {FORMAT}")
    message = _decoder.decode(memoryview(data)[1:])
    if isinstance(message.body, Append):
        for index, entry in enumerate(message.body.entries, message.body.prev_index + 1):
            if entry.index != index:
                raise ValueError(f"an append with entry {entry.index} where {index} should be")
    return message
