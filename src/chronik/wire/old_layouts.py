"""Layouts of versions that Kafka 4 and kio have dropped, but that tools in use still request.

ListOffsets v0, which Burrow requests whatever version it is configured for:

    request     replica_id int32, topics: int32 count of (name string, partitions: int32 count of
                (partition_index int32, timestamp int64, max_num_offsets int32))
    response    topics: int32 count of (name string, partitions: int32 count of
                (partition_index int32, error_code int16, old_style_offsets: int32 count of int64))

The classes have the shape of kio's, which `schema` reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from kio.schema.errors import ErrorCode
from kio.schema.types import BrokerId, TopicName
from kio.static.primitive import i32, i64

_LIST_OFFSETS: Final = 2


class _Version0:
    __slots__ = ()
    __flexible__: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOffsetsPartition(_Version0):
    partition_index: i32 = field(metadata={"kafka_type": "int32"})
    timestamp: i64 = field(metadata={"kafka_type": "int64"})
    max_num_offsets: i32 = field(metadata={"kafka_type": "int32"}, default=i32(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOffsetsTopic(_Version0):
    name: TopicName = field(metadata={"kafka_type": "string"})
    partitions: tuple[ListOffsetsPartition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOffsetsRequest(_Version0):
    replica_id: BrokerId = field(metadata={"kafka_type": "int32"})
    topics: tuple[ListOffsetsTopic, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOffsetsPartitionResponse(_Version0):
    partition_index: i32 = field(metadata={"kafka_type": "int32"})
    error_code: ErrorCode = field(metadata={"kafka_type": "error_code"})
    old_style_offsets: tuple[i64, ...] = field(metadata={"kafka_type": "int64"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOffsetsTopicResponse(_Version0):
    name: TopicName = field(metadata={"kafka_type": "string"})
    partitions: tuple[ListOffsetsPartitionResponse, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOffsetsResponse(_Version0):
    topics: tuple[ListOffsetsTopicResponse, ...]


OLD_REQUESTS: Final[Mapping[tuple[int, int], type[Any]]] = {(_LIST_OFFSETS, 0): ListOffsetsRequest}
"""By API key and version."""
OLD_RESPONSES: Final[Mapping[tuple[int, int], type[Any]]] = {(_LIST_OFFSETS, 0): ListOffsetsResponse}
