"""Layouts of versions of Kafka 4.4 that kio does not have yet.

    ApiVersions 5       request: version 4, then cluster_id string?, node_id int32 (KIP-1242); response: version 4
    TxnOffsetCommit 6   version 5 with topic_id uuid in place of name, in the request and in the response (KIP-1319)
    DeleteGroups 3      request: version 2; response: version 2 with error_message string? after error_code (KIP-1331)

The classes have the shape of kio's, which `schema` reads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, Final
from uuid import UUID

from kio.index import load_request_schema, load_response_schema
from kio.schema.errors import ErrorCode
from kio.schema.types import BrokerId, GroupId, ProducerId, TransactionalId
from kio.static.primitive import i16, i32, i64

_API_VERSIONS: Final = 18
_TXN_OFFSET_COMMIT: Final = 28
_DELETE_GROUPS: Final = 42


class _Flexible:
    __slots__ = ()
    __flexible__: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiVersionsRequest(_Flexible):
    client_software_name: str = field(metadata={"kafka_type": "string"})
    client_software_version: str = field(metadata={"kafka_type": "string"})
    cluster_id: str | None = field(metadata={"kafka_type": "string"}, default=None)
    node_id: BrokerId = field(metadata={"kafka_type": "int32"}, default=BrokerId(-1))


@dataclass(frozen=True, slots=True, kw_only=True)
class TxnOffsetCommitPartition(_Flexible):
    partition_index: i32 = field(metadata={"kafka_type": "int32"})
    committed_offset: i64 = field(metadata={"kafka_type": "int64"})
    committed_leader_epoch: i32 = field(metadata={"kafka_type": "int32"}, default=i32(-1))
    committed_metadata: str | None = field(metadata={"kafka_type": "string"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TxnOffsetCommitTopic(_Flexible):
    topic_id: UUID | None = field(metadata={"kafka_type": "uuid"})
    partitions: tuple[TxnOffsetCommitPartition, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TxnOffsetCommitRequest(_Flexible):
    transactional_id: TransactionalId = field(metadata={"kafka_type": "string"})
    group_id: GroupId = field(metadata={"kafka_type": "string"})
    producer_id: ProducerId = field(metadata={"kafka_type": "int64"})
    producer_epoch: i16 = field(metadata={"kafka_type": "int16"})
    generation_id: i32 = field(metadata={"kafka_type": "int32"}, default=i32(-1))
    """Or the member epoch. Kafka has renamed it; here it has one name in all versions."""
    member_id: str = field(metadata={"kafka_type": "string"}, default="")
    group_instance_id: str | None = field(metadata={"kafka_type": "string"}, default=None)
    topics: tuple[TxnOffsetCommitTopic, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TxnOffsetCommitPartitionResponse(_Flexible):
    partition_index: i32 = field(metadata={"kafka_type": "int32"})
    error_code: ErrorCode = field(metadata={"kafka_type": "error_code"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TxnOffsetCommitTopicResponse(_Flexible):
    topic_id: UUID | None = field(metadata={"kafka_type": "uuid"})
    partitions: tuple[TxnOffsetCommitPartitionResponse, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TxnOffsetCommitResponse(_Flexible):
    throttle_time: timedelta = field(metadata={"kafka_type": "timedelta_i32"})
    topics: tuple[TxnOffsetCommitTopicResponse, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletedGroup(_Flexible):
    group_id: GroupId = field(metadata={"kafka_type": "string"})
    error_code: ErrorCode = field(metadata={"kafka_type": "error_code"})
    error_message: str | None = field(metadata={"kafka_type": "string"}, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteGroupsResponse(_Flexible):
    throttle_time: timedelta = field(metadata={"kafka_type": "timedelta_i32"})
    results: tuple[DeletedGroup, ...]


Load = Callable[[], type[Any]]

NEW_REQUESTS: Final[Mapping[tuple[int, int], Load]] = {
    (_API_VERSIONS, 5): lambda: ApiVersionsRequest,
    (_TXN_OFFSET_COMMIT, 6): lambda: TxnOffsetCommitRequest,
    (_DELETE_GROUPS, 3): lambda: load_request_schema(_DELETE_GROUPS, 2),
}
"""By API key and version. A function loads each: kio's own classes are loaded on first use."""
NEW_RESPONSES: Final[Mapping[tuple[int, int], Load]] = {
    (_API_VERSIONS, 5): lambda: load_response_schema(_API_VERSIONS, 4),
    (_TXN_OFFSET_COMMIT, 6): lambda: TxnOffsetCommitResponse,
    (_DELETE_GROUPS, 3): lambda: DeleteGroupsResponse,
}
