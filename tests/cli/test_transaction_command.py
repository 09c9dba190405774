"""`chronik transaction` against a real node: which transactions are open, which hang, and how both are aborted."""

from __future__ import annotations

import asyncio
import os
import sys
from datetime import datetime, timedelta
from pathlib import Path

from tests.cli.run_chronik import Outcome
from tests.node.cluster_harness import LocalNodes
from tests.node.support_transactions import TransactionalClient, create_topic, markers, write_open

from chronik.node.broker import Broker
from chronik.wire.errors import ErrorCode

ALONE = {"default_replication_factor": 1, "transaction_state_topic_partitions": 3}
ID = "payments"


async def chronik(broker: Broker, *arguments: str) -> Outcome:
    """Run the command without blocking the node, which runs on this loop."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "chronik.cli",
        "transaction",
        *arguments,
        "-b",
        f"127.0.0.1:{broker.server.port}",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=dict(os.environ),
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return Outcome(process.returncode, out.decode(), err.decode())


async def open_transaction(nodes: LocalNodes, timeout_ms: int = 60_000) -> TransactionalClient:
    client = TransactionalClient(nodes, ID)
    assert await client.init(timeout_ms) is ErrorCode.none
    assert await client.add(("orders", 0), ("orders", 2)) is ErrorCode.none
    return client


async def test_list_and_describe_show_an_open_transaction(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, 1, **ALONE) as nodes:
        (broker,) = await nodes.start_all()
        await create_topic(nodes, "orders", 3, replicas=1)
        client = await open_transaction(nodes)
        idle = TransactionalClient(nodes, "idle")
        await idle.init()
        listed = (await chronik(broker, "list", "--json")).json()["transactions"]
        assert [(each["transactional_id"], each["state"], each["coordinator"]) for each in listed] == [
            ("idle", "Empty", 1),
            (ID, "Ongoing", 1),
        ]
        only = (await chronik(broker, "list", "--state", "Ongoing", "--json")).json()["transactions"]
        assert [each["producer_id"] for each in only] == [client.producer.producer_id]
        described = (await chronik(broker, "describe", ID, "--json")).json()
        assert (described["producer_id"], described["producer_epoch"]) == client.producer
        assert (described["state"], described["timeout_ms"]) == ("Ongoing", 60_000)
        assert 0 <= described["open_s"] < 60
        began, ends = (datetime.fromisoformat(described[name]) for name in ("started", "times_out"))
        assert ends - began == timedelta(minutes=1)
        assert described["partitions"] == [{"topic": "orders", "partition": 0}, {"topic": "orders", "partition": 2}]
        shown = await chronik(broker, "describe", ID)
        assert shown.code == 0 and "Ongoing" in shown.out
        unknown = await chronik(broker, "describe", "nobody")
        assert unknown.code == 2 and "nobody does not exist" in unknown.error_line
        assert "see chronik transaction list" in unknown.error_line
        empty = await chronik(broker, "describe", "")
        assert empty.code == 2 and "a transactional id is not empty" in empty.error_line
        wrong = await chronik(broker, "list", "--state", "Lost")
        assert wrong.code == 2 and "Lost, use Empty, Ongoing" in wrong.error_line
        client.close()
        idle.close()


async def test_abort_of_an_open_transaction_fences_its_producer(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, 1, **ALONE, transaction_max_timeout_ms=30_000) as nodes:
        (broker,) = await nodes.start_all()
        await create_topic(nodes, "orders", 3, replicas=1)
        client = await open_transaction(nodes, timeout_ms=20_000)
        aborted = await chronik(broker, "abort", ID)
        assert aborted.code == 0 and "fenced" in aborted.error_line
        assert [each.is_commit for each in markers(broker, "orders", 0)] == [False]
        assert await client.end() is ErrorCode.producer_fenced
        described = (await chronik(broker, "describe", ID, "--json")).json()
        assert described["timeout_ms"] == 20_000, "the id keeps its timeout"
        again = await chronik(broker, "abort", ID)
        assert again.code == 2 and "no open transaction" in again.error_line
        neither = await chronik(broker, "abort")
        assert neither.code == 2 and "--start-offset" in neither.error_line
        client.close()


async def test_hanging_transaction_is_found_and_aborted_but_an_open_one_is_not(tmp_path: Path) -> None:
    async with LocalNodes(tmp_path, 1, **ALONE) as nodes:
        (broker,) = await nodes.start_all()
        await create_topic(nodes, "orders", 3, replicas=1)
        client = await open_transaction(nodes)
        write_open(broker, "orders", 0, client.producer.producer_id)
        # In this partition, the same producer's transaction has no end in sight: the coordinator does not know of it.
        offset = write_open(broker, "orders", 1, client.producer.producer_id, age_ms=10_000)
        stranger = write_open(broker, "orders", 2, 999, age_ms=10_000)
        nothing = await chronik(broker, "hanging", "--json")
        assert nothing.code == 0 and nothing.json()["transactions"] == [], "none is older than the highest timeout"
        found = await chronik(broker, "hanging", "--older-than", "0", "--json")
        assert found.code == 1
        assert f"--topic orders --partition 1 --start-offset {offset}" in found.error_line
        listed = Outcome(0, found.out, "").json()["transactions"]
        assert [(each["partition"], each["start_offset"], each["producer_id"]) for each in listed] == [
            (1, offset, client.producer.producer_id),
            (2, stranger, 999),
        ]
        older = await chronik(broker, "hanging", "--older-than", "5", "--topic", "orders", "--partition", "2", "--json")
        assert [each["partition"] for each in Outcome(0, older.out, "").json()["transactions"]] == [2]
        nowhere = await chronik(broker, "hanging", "--topic", "orders", "--partition", "3")
        assert nowhere.code == 2 and "orders has no partition 3" in nowhere.error_line
        at = ("abort", "--topic", "orders", "--partition")
        refused = await chronik(broker, *at, "0", "--start-offset", "0")
        assert refused.code == 2 and f"chronik transaction abort {ID}" in refused.error_line
        missing = await chronik(broker, *at, "1", "--start-offset", str(offset + 1))
        assert missing.code == 2 and "no open transaction begins" in missing.error_line
        for index, start in ((1, offset), (2, stranger)):
            aborted = await chronik(broker, *at, str(index), "--start-offset", str(start), "--json")
            assert aborted.json()["aborted"]
            assert [each.is_commit for each in markers(broker, "orders", index)] == [False]
        left = await chronik(broker, "hanging", "--older-than", "0")
        assert left.code == 0 and "no transaction hangs" in left.error_line
        client.close()
