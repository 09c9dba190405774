"""A follower fetches on while it syncs earlier records; only what is durable counts, for the leader and for itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.node.support_replicas import FETCH_VERSION, TOPIC_ID, Cluster, Node, ServerConnection, on_cluster
from tests.node.test_replication_fetches import written
from tests.node.test_replication_following import is_caught_up
from tests.support.eventually import until

from chronik.node.replicas import replica_fetcher, replica_sessions
from chronik.storage.syncing import SyncJob
from chronik.wire.batch import decode_batch
from chronik.wire.errors import ErrorCode
from chronik.wire.fetch import (
    FetchPartition,
    FetchPartitionResponse,
    FetchRequest,
    FetchTopic,
    ReceivedPosition,
    read_fetch_request,
    read_fetch_response,
    write_fetch_request,
    write_fetch_response,
)

BIG = b"x" * 600_000
"""More than half of what a fetch of one partition may return."""


class HeldSyncs:
    """Holds the syncs of one node's log until `release`, and notes the partition in each fetch that the node sends."""

    def __init__(self, node: Node) -> None:
        self.fetches: list[FetchPartition] = []
        self.started = 0
        self.error: OSError | None = None
        self._may_end = threading.Event()
        self._node = node
        self._log = node.partition.log
        self._job = self._log.sync_job
        self._log.sync_job = self._held  # type: ignore[method-assign]
        self._watch(node.wires[-1])

    def _watch(self, wire: Any) -> None:
        send: Callable[..., asyncio.Future[memoryview]] = wire.send

        def noted(key: int, version: int, body: bytes) -> asyncio.Future[memoryview]:
            fetch = read_fetch_request(version, memoryview(body), 0)
            self.fetches.extend(partition for topic in fetch.topics for partition in topic.partitions)
            return send(key, version, body)

        wire.send = noted

    def _held(self) -> SyncJob | None:
        job = self._job()
        if job is not None:
            self.started += 1
            run = job.run

            def wait() -> None:
                self._may_end.wait(30)
                if self.error is not None:
                    raise self.error
                run()

            job.run = wait  # type: ignore[method-assign]
        return job

    def release(self) -> None:
        self._log.sync_job = self._job  # type: ignore[method-assign]
        self._may_end.set()


async def quiet(cluster: Cluster) -> None:
    await cluster[1].produce(b"first")
    await until(lambda: is_caught_up(cluster))


def durable_end_of(cluster: Cluster, node_id: int) -> int:
    leader = cluster[1].partition.leader
    assert leader is not None
    return leader.durable_end_of(node_id)


@on_cluster()
async def test_a_follower_receives_on_during_a_sync_and_only_its_durable_end_counts(cluster: Cluster) -> None:
    await quiet(cluster)
    held = HeldSyncs(cluster[2])
    done = [cluster[1].produce(BIG) for _ in range(5)]
    await until(lambda: cluster[2].partition.log_end_offset == 6)
    await until(lambda: durable_end_of(cluster, 3) == 6)
    requests = [fetch for fetch in held.fetches if fetch.received is None or fetch.received.wants_records]
    assert len(requests) >= 5, "one sync, several fetches"
    assert held.started == 1
    assert {fetch.fetch_offset for fetch in held.fetches} == {1}
    assert [fetch.read_offset for fetch in requests] == sorted({fetch.read_offset for fetch in requests})
    assert durable_end_of(cluster, 2) == 1
    assert cluster[1].partition.high_watermark == cluster[2].partition.high_watermark == 1
    assert not any(each.done() for each in done)
    held.release()
    await asyncio.wait_for(asyncio.gather(*done), 10)
    await until(lambda: is_caught_up(cluster))
    assert cluster[1].contents() == cluster[2].contents()


@on_cluster()
async def test_the_end_of_a_sync_is_reported_while_later_records_are_on_their_way(cluster: Cluster) -> None:
    await quiet(cluster)
    held = HeldSyncs(cluster[2])
    first = cluster[1].produce(BIG)
    await until(lambda: held.started == 1 and any(fetch.received is not None for fetch in held.fetches))
    # The leader has nothing more: the request stays open, and a report follows it.
    held.release()
    await asyncio.wait_for(first, 10)
    reports = [fetch for fetch in held.fetches if fetch.received is not None and not fetch.received.wants_records]
    assert [(fetch.fetch_offset, fetch.received) for fetch in reports] == [(2, ReceivedPosition(2, 0, False))]
    # The open request still gets the next records, although the follower has not requested them again.
    before = len(held.fetches)
    second = cluster[1].produce(b"second")
    await until(lambda: cluster[2].partition.log_end_offset == 3)
    await asyncio.wait_for(second, 10)
    assert [fetch.read_offset for fetch in held.fetches[before:]] == [3]


@on_cluster()
async def test_quick_syncs_cost_one_fetch_for_each_batch(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    await quiet(cluster)
    monkeypatch.setattr(replica_fetcher, "SYNC_WAIT_S", 10.0)
    fetches = HeldSyncs(cluster[2])
    fetches.release()
    for _ in range(10):
        await cluster[1].produce(b"x")
    await until(lambda: is_caught_up(cluster))
    assert [fetch.fetch_offset for fetch in fetches.fetches] == list(range(2, 12))
    assert {fetch.received for fetch in fetches.fetches} == {None}


@on_cluster()
async def test_a_follower_with_little_to_receive_waits_for_its_sync(cluster: Cluster) -> None:
    await quiet(cluster)
    held = HeldSyncs(cluster[2])
    done = [cluster[1].produce(b"second")]
    await until(lambda: held.started == 1)
    done.append(cluster[1].produce(b"third"))
    await until(lambda: durable_end_of(cluster, 3) == 3)
    assert held.fetches == []
    held.release()
    await asyncio.wait_for(asyncio.gather(*done), 10)
    assert [fetch.fetch_offset for fetch in held.fetches][:1] == [2]
    assert {fetch.received for fetch in held.fetches} == {None}


@on_cluster(durability="replicated")
async def test_replicated_records_are_never_fetched_ahead(cluster: Cluster) -> None:
    await quiet(cluster)
    held = HeldSyncs(cluster[2])
    await asyncio.wait_for(asyncio.gather(*(cluster[1].produce(BIG) for _ in range(4))), 10)
    assert {fetch.received for fetch in held.fetches} == {None}
    held.release()


async def test_a_leader_of_an_older_release_is_not_fetched_ahead(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def older(*args: Any, **new: Any) -> Any:
        return write_fetch_response(*args)

    monkeypatch.setattr(replica_sessions, "write_fetch_response", older)
    async with Cluster(tmp_path) as cluster:
        await quiet(cluster)
        held = HeldSyncs(cluster[2])
        done = cluster[1].produce(BIG)
        await until(lambda: held.started == 1)
        later = cluster[1].produce(BIG)
        await until(lambda: durable_end_of(cluster, 3) == 3)
        assert cluster[2].partition.log_end_offset == 2
        held.release()
        await asyncio.wait_for(asyncio.gather(done, later), 10)
        assert {fetch.received for fetch in held.fetches} == {None}


@on_cluster()
async def test_unsynced_bytes_are_bounded(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    await quiet(cluster)
    monkeypatch.setattr(replica_fetcher, "UNSYNCED_BYTES_MAX", 2 * len(BIG))
    held = HeldSyncs(cluster[2])
    done = [cluster[1].produce(BIG) for _ in range(6)]
    await until(lambda: durable_end_of(cluster, 3) == 7)
    await until(lambda: cluster[2].partition.log_end_offset == 3)
    assert all(fetch.read_offset < 3 for fetch in held.fetches), "nothing is requested beyond the bound"
    held.release()
    await asyncio.wait_for(asyncio.gather(*done), 10)
    await until(lambda: is_caught_up(cluster))


@on_cluster()
async def test_nothing_received_counts_after_a_failed_sync(cluster: Cluster) -> None:
    await quiet(cluster)
    held = HeldSyncs(cluster[2])
    done = [cluster[1].produce(BIG) for _ in range(3)]
    await until(lambda: any(fetch.read_offset == 4 for fetch in held.fetches))
    before = len(held.fetches)
    held.error = OSError(5, "Input/output error")
    held.release()
    await until(lambda: cluster[2].partition.log.read_only_forever)
    await until(lambda: durable_end_of(cluster, 3) == 4)
    cluster[1].append(b"later")
    await until(lambda: durable_end_of(cluster, 3) == 5)
    assert held.fetches[before:] == []
    assert durable_end_of(cluster, 2) == 1
    assert cluster[1].partition.high_watermark == 1
    assert not any(each.done() for each in done)
    cluster.change(isr=(1, 3))
    await asyncio.wait_for(asyncio.gather(*done), 10)


@on_cluster()
async def test_a_new_session_begins_with_durable_positions(cluster: Cluster) -> None:
    await quiet(cluster)
    held = HeldSyncs(cluster[2])
    done = cluster[1].produce(BIG)
    await until(lambda: any(fetch.received is not None for fetch in held.fetches))
    connections = len(cluster[2].wires)
    asked: list[FetchPartition] = []
    original = cluster[1].request

    def noted(connection: ServerConnection, version: int, body: bytes) -> asyncio.Future[bytes]:
        if connection.peer_id == 2:
            fetch = read_fetch_request(version, memoryview(body), 0)
            asked.extend(partition for topic in fetch.topics for partition in topic.partitions)
        return original(connection, version, body)

    cluster[1].request = noted  # type: ignore[method-assign]
    cluster[2].wires[-1].close()
    await until(lambda: len(cluster[2].wires) > connections)
    held.release()
    await asyncio.wait_for(done, 10)
    assert asked[0].received is None
    assert asked[0].fetch_offset == 2


@on_cluster()
async def test_received_records_that_the_new_leader_lacks_are_truncated(cluster: Cluster) -> None:
    await quiet(cluster)
    cluster.cut(1, 3)
    held = HeldSyncs(cluster[2])
    for _ in range(3):
        cluster[1].append(BIG)
    await until(lambda: cluster[2].partition.log_end_offset == 4)
    assert durable_end_of(cluster, 2) == 1
    cluster.cut(1, 2)
    cluster.change(leader=3)
    await cluster[3].run_blocking(lambda: None)
    cluster[3].append(b"other")
    held.release()
    await until(lambda: cluster[2].contents() == cluster[3].contents())
    cluster.heal()
    await until(lambda: is_caught_up(cluster))
    assert cluster[1].contents() == cluster[2].contents() == cluster[3].contents()


@on_cluster()
async def test_leadership_is_handed_over_when_the_successor_is_durable(cluster: Cluster) -> None:
    await quiet(cluster)
    held = HeldSyncs(cluster[2])
    done = cluster[1].produce(BIG)
    await until(lambda: cluster[2].partition.log_end_offset == 2 and durable_end_of(cluster, 3) == 2)
    cluster[1].host.replication.hand_over(cluster[1].partition, cluster[1].partition.leader_epoch, 2)
    cluster[1].host.replication.check_isr(cluster[1].partition)
    assert cluster.state.leader == 1
    held.release()
    await until(lambda: cluster.state.leader == 2)
    await asyncio.wait_for(done, 10)


# -- the leader, step by step ------------------------------------------------------------------------------------------


class Session:
    """Replica 3's fetch session with node 1, whose log ends at 3. Node 3 itself is cut off."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.connection = ServerConnection(3)
        self.id, self.epoch = 0, 0
        self.takes_received = False

    def send(
        self, offset: int | None = None, received: ReceivedPosition | None = None, max_wait_ms: int = 60_000
    ) -> asyncio.Future[bytes]:
        wanted = [] if offset is None else [FetchPartition(0, 0, offset, 0, 0, 1 << 20, 3, received)]
        fetch = FetchRequest(
            replica_id=3,
            replica_epoch=self.cluster.broker(3).epoch,
            max_wait_ms=max_wait_ms,
            min_bytes=1,
            session_id=self.id,
            session_epoch=self.epoch,
            topics=[FetchTopic(None, TOPIC_ID, wanted)] if wanted else [],
        )
        self.epoch += 1
        return self.cluster[1].request(self.connection, FETCH_VERSION, write_fetch_request(FETCH_VERSION, fetch))

    async def answer(self, sent: asyncio.Future[bytes]) -> list[FetchPartitionResponse]:
        response = read_fetch_response(FETCH_VERSION, memoryview(await asyncio.wait_for(sent, 10)))
        assert response.error_code == 0, ErrorCode(response.error_code)
        self.id = response.session_id
        self.takes_received = response.takes_received
        return [partition for _, _, partitions in response.topics for partition in partitions]


def values(response: FetchPartitionResponse) -> list[bytes | None]:
    return [record.value for record in decode_batch(response.records)]


@on_cluster()
async def test_the_first_response_of_a_session_says_that_received_positions_are_understood(cluster: Cluster) -> None:
    await written(cluster)
    session = Session(cluster)
    await session.answer(session.send(3, max_wait_ms=0))
    assert session.takes_received
    await session.answer(session.send(max_wait_ms=0))
    assert not session.takes_received


@on_cluster()
async def test_a_leader_sends_from_the_received_position_and_counts_the_durable_one(cluster: Cluster) -> None:
    await written(cluster)
    session = Session(cluster)
    await session.answer(session.send(1, max_wait_ms=0))
    cluster[1].append(b"d")
    (sent,) = await session.answer(session.send(1, ReceivedPosition(3, 0, True)))
    assert values(sent) == [b"d"]
    assert durable_end_of(cluster, 3) == 1
    waiting = session.send(1, ReceivedPosition(4, 0, True))
    # The report leaves the request for records open, and does not make the leader send anything twice.
    report = session.send(3, ReceivedPosition(4, 0, False))
    assert await session.answer(waiting) == []
    assert durable_end_of(cluster, 3) == 3
    cluster[1].append(b"e")
    (sent,) = await session.answer(report)
    assert values(sent) == [b"e"]
    again = session.send(4, ReceivedPosition(4, 0, False))
    cluster[1].append(b"f")
    (only,) = await session.answer(again)
    assert (only.high_watermark, len(only.records)) == (4, 0)


@on_cluster()
async def test_a_leader_refuses_received_positions_that_do_not_fit_its_log(cluster: Cluster) -> None:
    await written(cluster)
    session = Session(cluster)
    await session.answer(session.send(1, max_wait_ms=0))
    (beyond,) = await session.answer(session.send(2, ReceivedPosition(9, 0, True)))
    assert (beyond.diverging_epoch, len(beyond.records)) == ((0, 3), 0)
    (reported,) = await session.answer(session.send(2, ReceivedPosition(9, 0, False)))
    assert reported.diverging_epoch == (0, 3)
    (below,) = await session.answer(session.send(3, ReceivedPosition(2, 0, True)))
    assert below.error_code == ErrorCode.invalid_request
    assert durable_end_of(cluster, 3) == 1


@on_cluster()
async def test_a_cold_read_for_a_follower_holds_at_least_one_batch(cluster: Cluster) -> None:
    """Found by the simulator: if a response was nearly full, the read returned nothing, which counted as a failure."""
    await written(cluster)
    session = Session(cluster)
    await session.answer(session.send(1, max_wait_ms=0))
    leading = cluster[1].host.replica_sessions._sessions[3]
    (entry,) = leading._entries.values()
    log = cluster[1].partition.log
    log.read = lambda *args, **more: None  # type: ignore[method-assign]
    cold: list[Any] = []
    leading._read(entry, FetchPartitionResponse(0), cold, 10, is_first=False)
    (read,) = cold
    assert [record.value for record in decode_batch(read.job())] == [b"b", b"c"]
    cluster[1].partition.jobs.end()
