"""The lease is checked when a response is sent, not only when its request arrives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from tests.node.support_replicas import TOPIC, Cluster, on_cluster

from chronik.node.apis import list_offsets
from chronik.node.serving.access import OPEN_ACCESS
from chronik.wire.errors import ErrorCode

LATEST, BY_TIME = -1, 0


def list_offsets_request(*timestamps: int) -> Any:
    wanted = [SimpleNamespace(partition_index=0, current_leader_epoch=-1, timestamp=time) for time in timestamps]
    message = SimpleNamespace(replica_id=-1, topics=[SimpleNamespace(name=TOPIC, partitions=wanted)])
    return cast(Any, SimpleNamespace(message=message, api_version=7, access=OPEN_ACCESS))


@on_cluster()
async def test_list_offsets_fails_if_the_lease_expires_during_a_timestamp_lookup(cluster: Cluster) -> None:
    leader = cluster[1]
    await leader.produce(b"a")

    async def ends_the_lease(call: Any) -> Any:
        found = await leader.runtime.run_blocking(call)
        leader.has_lease = False
        return found

    request = list_offsets_request(LATEST, BY_TIME)
    services = leader.list_offsets_services
    answer = await list_offsets.handle(services, request)
    assert [each["offset"] for each in answer["topics"][0]["partitions"]] == [1, 0]
    ending = cast(Any, SimpleNamespace(run_blocking=ends_the_lease))
    answer = await list_offsets.handle(services._replace(runtime=ending), request)
    for each in answer["topics"][0]["partitions"]:
        assert (each["error_code"], each["offset"]) == (ErrorCode.not_leader_or_follower, -1)
