"""The messages between Raft nodes, and their encoding.

    version  1 byte       FORMAT; any other value is refused
    message  msgpack map  source, source_store, target, target_store, term, body; the body's `type` is the message type

Readers skip unknown fields and use defaults for missing ones, so a field with a default may be added. An unknown type
is refused; the sender must not rely on it being understood. Entries are msgpack arrays (index, term, kind, data);
fields may be added at the end.
"""

from __future__ import annotations

from typing import TypeAlias
from uuid import UUID

import msgspec

from chronik.raft.membership import Membership
from chronik.raft.store import Entry, Natural

FORMAT = 1
MESSAGE_BYTES_MAX = 16 * 1024 * 1024
"""The upper bound of a message: an append holds `append_bytes_max` or one entry, a chunk `snapshot_chunk_bytes`."""


class VoteRequest(msgspec.Struct, frozen=True, tag="vote_request"):
    """Request a vote in the message's term, or with `is_pre_vote` ask whether it would be granted.

    `is_transfer`: the leader itself requested this election, so hearing from it is no reason to refuse.
    """

    last_index: Natural
    last_term: Natural
    is_pre_vote: bool = False
    is_transfer: bool = False


class VoteReply(msgspec.Struct, frozen=True, tag="vote_reply"):
    """The message's term is the requested one if granted, the voter's own if not."""

    is_granted: bool
    is_pre_vote: bool = False


class Append(msgspec.Struct, frozen=True, tag="append"):
    """The entries that follow the entry at `prev_index`, which has `prev_term`."""

    prev_index: Natural
    prev_term: Natural
    entries: tuple[Entry, ...]
    commit: Natural


class AppendReply(msgspec.Struct, frozen=True, tag="append_reply"):
    """Accepted: the log is durable and equal to the leader's up to `index`.

    Rejected: `index` repeats the append's `prev_index`, at which the logs differ. They may agree up to `hint_index`,
    which has `hint_term` in the follower's log.
    """

    index: Natural
    is_rejected: bool = False
    hint_index: Natural = 0
    hint_term: Natural = 0


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """`round` numbers the leader's heartbeat broadcasts; a reply proves that it still led after the round started.

    `commit_term` is the term of the entry at `commit`: a peer that runs on an older copy of its store may hold another
    entry there.
    """

    commit: Natural
    round: Natural
    commit_term: Natural = 0


class HeartbeatReply(msgspec.Struct, frozen=True, tag="heartbeat_reply"):
    round: Natural


class SnapshotChunk(msgspec.Struct, frozen=True, tag="snapshot_chunk"):
    """The bytes from `offset` on of the snapshot after entry `index`, which has `size_bytes` in total."""

    index: Natural
    index_term: Natural
    membership: Membership
    size_bytes: Natural
    offset: Natural
    data: bytes


class SnapshotReply(msgspec.Struct, frozen=True, tag="snapshot_reply"):
    """The next chunk must start at `next_offset`. AppendReply acknowledges a snapshot that is complete and durable."""

    index: Natural
    next_offset: Natural


class TimeoutNow(msgspec.Struct, frozen=True, tag="timeout_now"):
    """The leader hands over: start an election at once."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A node that belongs to no cluster announces itself; a node that does not lead forwards this to the leader."""

    node_id: Natural
    store: UUID
    address: str = ""
    is_relayed: bool = False


class HelloReply(msgspec.Struct, frozen=True, tag="hello_reply"):
    """The sender's store is empty too."""

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
    """One message between two stores. `target_store` is None only if the sender cannot know it yet."""

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
    """Decode a message; ValueError if the bytes are invalid, too many, or of another format version."""
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
