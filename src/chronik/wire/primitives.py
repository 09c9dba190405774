"""Types that the hand-written codecs share: varints, strings, tagged fields, topics.

    uvarint          seven bits per byte, least significant first, the high bit set on all but the last
    string           int16 length (-1 is null), UTF-8; compact: uvarint length + 1 (0 is null)
    bytes, records   int32 length (-1 is null); compact: uvarint length + 1 (0 is null)
    array            int32 count (-1 is null); compact: uvarint count + 1 (0 is null)
    tagged fields    uvarint count, then each: uvarint tag, uvarint size, that many bytes
    uuid             16 bytes, zero is "none"

Produce and Fetch also share their topics, and the current leader and endpoints that they return with
NOT_LEADER_OR_FOLLOWER (KIP-951):

    topic            name string (later versions: topic_id uuid), partitions array
    current_leader   tagged field of a partition: leader_id int32, leader_epoch int32, tagged fields
    node_endpoints   tagged field 0 of the response: compact array of
                     node_id int32, host compact string, port int32, rack compact nullable string, tagged fields

Readers take (buffer, at) and return (value, next at). They raise MalformedRequest for lengths that exceed the buffer.
Reading a fixed-size number past the end raises struct.error or IndexError, which the callers convert.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from struct import Struct
from typing import Final, NamedTuple, TypeVar
from uuid import UUID

from chronik.wire.errors import MalformedRequest

ELEMENTS_MAX: Final = 1_000_000
"""The maximum of array elements in one message, over all levels, and the same for its tagged fields. Kafka 4.4 allows
as many in each array. A Python object costs up to a hundred times an element's few bytes on the wire, so the frame size
alone would not bound memory, and a frame full of empty tagged fields would block the loop for seconds."""

TAGS_MAX: Final = 10_000
"""The maximum of tagged fields in one structure, as in Kafka 4.4."""

NODE_ENDPOINT_BYTES_MIN: Final = 11

ZERO_UUID: Final = UUID(int=0)
LEADER: Final = Struct(">ii")

_T = TypeVar("_T")
_INT16: Final = Struct(">h")
_INT32: Final = Struct(">i")
_ONE_BYTE: Final = tuple(bytes((n,)) for n in range(0x80))


def read_uvarint(buffer: bytes | memoryview, at: int) -> tuple[int, int]:
    byte = buffer[at]
    if byte < 0x80:
        return byte, at + 1
    value = byte & 0x7F
    shift = 7
    while True:
        at += 1
        byte = buffer[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
        if shift > 28:
            raise MalformedRequest("varint longer than five bytes")


def uvarint(value: int) -> bytes:
    if value < 0x80:
        return _ONE_BYTE[value]
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_string(buffer: memoryview, at: int, flexible: bool) -> tuple[str | None, int]:
    if flexible:
        length, at = read_uvarint(buffer, at)
        length -= 1
    else:
        (length,) = _INT16.unpack_from(buffer, at)
        at += 2
    if length < 0:
        if length != -1:
            raise MalformedRequest(f"string of {length} bytes")
        return None, at
    end = at + length
    if end > len(buffer):
        raise MalformedRequest(f"string of {length} bytes, {len(buffer) - at} left")
    try:
        return str(buffer[at:end], "utf-8"), end
    except UnicodeDecodeError as e:
        raise MalformedRequest("string is not UTF-8") from e


def write_string(value: str | None, flexible: bool) -> bytes:
    if value is None:
        return b"\x00" if flexible else b"\xff\xff"
    data = value.encode()
    return (uvarint(len(data) + 1) if flexible else _INT16.pack(len(data))) + data


def read_array_count(buffer: memoryview, at: int, flexible: bool, element_bytes_min: int) -> tuple[int, int]:
    """Read the count of an array (-1 for null) and check it against the bytes left for its elements."""
    if flexible:
        count, at = read_uvarint(buffer, at)
        count -= 1
    else:
        (count,) = _INT32.unpack_from(buffer, at)
        at += 4
    if count > 0:
        if count * element_bytes_min > len(buffer) - at or count > ELEMENTS_MAX:
            raise MalformedRequest(f"array of {count} elements, {len(buffer) - at} bytes left")
    elif count < -1:
        raise MalformedRequest(f"array of {count} elements")
    return count, at


def check_tag_count(count: int, left_bytes: int) -> None:
    """Raise for more tagged fields in a structure than are allowed, or than the remaining bytes can hold."""
    if count > TAGS_MAX or 2 * count > left_bytes:
        raise MalformedRequest(f"{count} tagged fields in {left_bytes} bytes")


def read_tags(buffer: memoryview, at: int, budget: list[int] | None = None) -> tuple[dict[int, memoryview], int]:
    """Return tagged fields by tag, each as a slice of exactly its own bytes.

    `budget` is a list of one: how many tagged fields the message may still have.
    """
    count, at = read_uvarint(buffer, at)
    check_tag_count(count, len(buffer) - at)
    if budget is not None:
        budget[0] -= count
        if budget[0] < 0:
            raise MalformedRequest(f"a message with more than {ELEMENTS_MAX} tagged fields")
    tags: dict[int, memoryview] = {}
    for _ in range(count):
        tag, at = read_uvarint(buffer, at)
        size, at = read_uvarint(buffer, at)
        end = at + size
        if end > len(buffer):
            raise MalformedRequest(f"tagged field of {size} bytes, {len(buffer) - at} left")
        tags[tag] = buffer[at:end]
        at = end
    return tags, at


def skip_tags(buffer: memoryview, at: int, budget: list[int] | None = None) -> int:
    try:
        if buffer[at] == 0:
            return at + 1
        return read_tags(buffer, at, budget)[1]
    except IndexError as e:
        raise MalformedRequest("tagged fields cut short") from e


@lru_cache(maxsize=4096)
def uuid_of(data: bytes) -> UUID:
    """Return the same object for the same id: topic ids are in every request, and making a UUID is slow."""
    return UUID(bytes=data)


def read_uuid(buffer: memoryview, at: int) -> tuple[UUID, int]:
    end = at + 16
    if end > len(buffer):
        raise MalformedRequest("uuid cut short")
    return uuid_of(bytes(buffer[at:end])), end


def write_topic(name: str | None, topic_id: UUID | None, by_id: bool, flexible: bool) -> bytes:
    """Write what identifies a topic: its id, or its name."""
    return (topic_id or ZERO_UUID).bytes if by_id else write_string(name or "", flexible)


def read_topics(
    version: int,
    body: memoryview,
    at: int,
    flexible: bool,
    by_id: bool,
    partition_bytes_min: int,
    read_partition: Callable[[int, memoryview, int], tuple[_T, int]],
) -> tuple[list[tuple[str | None, UUID | None, list[_T]]], int]:
    """Read the topics of a response: name or id, array of partitions, tagged fields."""
    topics: list[tuple[str | None, UUID | None, list[_T]]] = []
    topic_count, at = read_array_count(body, at, flexible, 3)
    elements_left = ELEMENTS_MAX - topic_count
    tags_left = [ELEMENTS_MAX]
    for _ in range(topic_count):
        name: str | None = None
        topic_id: UUID | None = None
        if by_id:
            topic_id, at = read_uuid(body, at)
        else:
            name, at = read_string(body, at, flexible)
        partition_count, at = read_array_count(body, at, flexible, partition_bytes_min)
        elements_left -= partition_count
        if elements_left < 0:
            raise MalformedRequest("response with too many partitions")
        partitions: list[_T] = []
        for _ in range(partition_count):
            partition, at = read_partition(version, body, at)
            partitions.append(partition)
        if flexible:
            at = skip_tags(body, at, tags_left)
        topics.append((name, topic_id, partitions))
    return topics, at


class LeaderIdAndEpoch(NamedTuple):
    leader_id: int
    leader_epoch: int


class NodeEndpoint(NamedTuple):
    node_id: int
    host: str
    port: int
    rack: str | None = None


def node_endpoints_tags(endpoints: Sequence[tuple[int, str, int, str | None]]) -> bytes:
    """Write the tagged fields that end a response: node_endpoints, or none."""
    if not endpoints:
        return b"\x00"
    parts = [uvarint(len(endpoints) + 1)]
    for node_id, host, port, rack in endpoints:
        parts += (_INT32.pack(node_id), write_string(host, True), _INT32.pack(port), write_string(rack, True), b"\x00")
    content = b"".join(parts)
    return b"\x01\x00" + uvarint(len(content)) + content


def read_node_endpoints(buffer: memoryview) -> list[NodeEndpoint]:
    count, at = read_array_count(buffer, 0, True, NODE_ENDPOINT_BYTES_MIN)
    endpoints: list[NodeEndpoint] = []
    for _ in range(count):
        (node_id,) = _INT32.unpack_from(buffer, at)
        host, at = read_string(buffer, at + 4, True)
        if host is None:
            raise MalformedRequest("node endpoint without a host")
        (port,) = _INT32.unpack_from(buffer, at)
        rack, at = read_string(buffer, at + 4, True)
        at = skip_tags(buffer, at)
        endpoints.append(NodeEndpoint(node_id, host, port, rack))
    return endpoints


def read_leader(buffer: memoryview) -> LeaderIdAndEpoch | None:
    """Return None for the schema's default, which means that the leader is unknown."""
    leader = LeaderIdAndEpoch(*LEADER.unpack_from(buffer))
    return None if leader == (-1, -1) else leader
