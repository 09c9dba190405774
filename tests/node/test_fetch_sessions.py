"""Fetch sessions: a client names its partitions once, and receives only what is new."""

from random import Random

import pytest

from chronik.node.serving import fetch_sessions
from chronik.node.serving.fetch_sessions import SESSION_IDLE_S, FetchSession, FetchSessions, SessionPartition
from chronik.wire.errors import ErrorCode, KafkaError
from chronik.wire.fetch import FetchPartition, FetchPartitionResponse, FetchRequest, FetchTopic


def wanted(partition: int) -> FetchPartition:
    return FetchPartition(partition, -1, 0, -1, -1, 1000)


def fetch(session_id: int, epoch: int, partitions: dict[str, list[int]], **more: object) -> FetchRequest:
    topics = [FetchTopic(name, None, [wanted(p) for p in indexes]) for name, indexes in partitions.items()]
    return FetchRequest(session_id=session_id, session_epoch=epoch, topics=topics, **more)  # type: ignore[arg-type]


def sessions(sessions_max: int = 10) -> FetchSessions:
    return FetchSessions(Random(1), sessions_max)


def opened(cache: FetchSessions, partitions: dict[str, list[int]], now_s: float = 0) -> FetchSession:
    session, incremental = cache.resolve(fetch(0, 0, partitions), now_s)
    assert session is not None and not incremental
    return session


def names(session: FetchSession) -> list[tuple[str | None, int]]:
    return [(key[0][0], key[1]) for key in session.partitions]


def test_a_fetch_without_a_session_creates_none() -> None:
    cache = sessions()
    assert cache.resolve(fetch(0, -1, {"a": [0]}), 0) == (None, False)
    assert len(cache) == 0


def test_a_session_remembers_its_partitions() -> None:
    cache = sessions()
    session = opened(cache, {"a": [0, 1]})
    again, incremental = cache.resolve(fetch(session.id, 1, {"b": [5]}), 1)
    assert again is session and incremental
    assert names(session) == [("a", 0), ("a", 1), ("b", 5)]


def test_forgotten_partitions_leave_the_session() -> None:
    cache = sessions()
    session = opened(cache, {"a": [0, 1]})
    cache.resolve(fetch(session.id, 1, {}, forgotten=[("a", None, [0])]), 1)
    assert names(session) == [("a", 1)]


def test_an_unknown_session_and_a_wrong_epoch_are_refused() -> None:
    cache = sessions()
    session = opened(cache, {"a": [0]})
    with pytest.raises(KafkaError) as unknown:
        cache.resolve(fetch(session.id + 1, 1, {}), 1)
    assert unknown.value.code == ErrorCode.fetch_session_id_not_found
    with pytest.raises(KafkaError) as wrong:
        cache.resolve(fetch(session.id, 7, {}), 1)
    assert wrong.value.code == ErrorCode.invalid_fetch_session_epoch


def test_closing_a_session_forgets_it() -> None:
    cache = sessions()
    session = opened(cache, {"a": [0]})
    assert cache.resolve(fetch(session.id, -1, {"a": [0]}), 1) == (None, False)
    assert len(cache) == 0


def test_a_full_cache_creates_no_session_until_one_is_idle() -> None:
    cache = sessions(sessions_max=1)
    opened(cache, {"a": [0]})
    assert cache.resolve(fetch(0, 0, {"b": [0]}), 1) == (None, False)
    assert names(opened(cache, {"b": [0]}, now_s=SESSION_IDLE_S + 1)) == [("b", 0)]
    assert len(cache) == 1


def test_a_served_partition_moves_to_the_end_of_the_session() -> None:
    session = opened(sessions(), {"a": [0, 1, 2]})
    session.served(next(iter(session.partitions)))
    assert names(session) == [("a", 1), ("a", 2), ("a", 0)]


def test_an_incremental_response_includes_only_changed_partitions() -> None:
    partition = SessionPartition(wanted(0))

    def response(**fields: object) -> FetchPartitionResponse:
        return FetchPartitionResponse(0, **{"high_watermark": 5, "log_start_offset": 0, **fields})  # type: ignore[arg-type]

    assert partition.news(response())
    assert not partition.news(response())
    assert partition.news(response(high_watermark=6))
    assert partition.news(response(high_watermark=6, log_start_offset=2))
    assert partition.news(response(high_watermark=6, log_start_offset=2, records=b"x"))
    assert partition.news(response(error_code=1))
    assert partition.news(response(error_code=1))
    assert partition.news(response(high_watermark=6, log_start_offset=2))


def test_sessions_hold_a_bounded_number_of_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_sessions, "PARTITIONS_MAX", 5)
    cache = sessions()
    first = opened(cache, {"a": [0, 1, 2]})
    assert cache.resolve(fetch(0, 0, {"b": [0, 1, 2]}), 1) == (None, False)
    assert len(cache) == 1
    second = opened(cache, {"b": [0, 1]})
    with pytest.raises(KafkaError) as full:
        cache.resolve(fetch(second.id, 1, {"b": [2]}), 1)
    assert full.value.code == ErrorCode.fetch_session_id_not_found
    cache.resolve(fetch(first.id, 1, {"c": [0, 1]}), 1)
    assert len(names(first)) == 5
