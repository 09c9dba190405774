"""The helpers of the cluster tests work: links are cut, differing replicas are detected, results are written."""

from __future__ import annotations

import json
import os
import socket
from functools import partial
from pathlib import Path

import pytest
from tests.cluster.support_cluster import Nodes
from tests.cluster.support_links import Links
from tests.cluster.support_logs import replicas_agree
from tests.cluster.support_recorder import RecordedConsumer, content, value_of
from tests.cluster.support_soak import SoakResults
from tests.cluster.support_workload import PROGRESS, Workload
from tests.node.support_wire import batch
from tests.support.eventually import eventually

from chronik.testing.history import check
from chronik.testing.operations import Polled
from chronik.wire.batch import stamp


def echo_server() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def test_a_cut_link_delivers_nothing_until_it_is_healed() -> None:
    links = Links()
    with echo_server() as server:
        host, _, port = links.add(1, 2, server.getsockname()[1]).partition(":")
        with socket.create_connection((host, int(port)), 5) as near:
            near.sendall(b"one")
            far, _ = server.accept()
            with far:
                far.settimeout(5)
                assert far.recv(10) == b"one"
                links.cut(2)
                near.sendall(b"two")
                far.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    far.recv(10)
                with socket.create_connection((host, int(port)), 5):  # accepted, and silent
                    server.settimeout(0.2)
                    with pytest.raises(TimeoutError):
                        server.accept()
                links.heal()
                far.settimeout(5)
                assert far.recv(10) == b"two"
    links.close()


def test_a_link_to_a_closed_port_resets_its_connections() -> None:
    links = Links()
    with echo_server() as server:
        port_of_nobody = server.getsockname()[1]
    host, _, port = links.add(1, 2, port_of_nobody).partition(":")
    with pytest.raises(ConnectionResetError), socket.create_connection((host, int(port)), 5) as near:
        near.settimeout(5)
        near.recv(1)
    links.close()


def test_nodes_start_on_other_ports_if_theirs_are_taken(tmp_path: Path) -> None:
    with Nodes(tmp_path, 1) as nodes:
        taken = nodes.node(1).http.port
        with socket.create_server(("127.0.0.1", taken)):
            nodes.start_all()
            assert nodes.node(1).http.port != taken
            assert nodes.node(1).is_ready


def stored(folder: Path, *batches: tuple[int, bytes]) -> None:
    log = folder / "logs" / "t-0"
    log.mkdir(parents=True)
    data = bytearray()
    for offset, value in batches:
        one = bytearray(batch(value))
        stamp(one, 0, offset, 1)
        data += one
    (log / f"{0:020d}.log").write_bytes(data + bytes(1000))


def test_replicas_are_compared_only_below_the_watermark(tmp_path: Path) -> None:
    folders = {node_id: tmp_path / str(node_id) for node_id in (1, 2)}
    stored(folders[1], (0, b"a"), (1, b"b"), (2, b"c"))
    stored(folders[2], (0, b"a"), (1, b"b"))
    replicas_agree(folders, "t-0", 2)
    with pytest.raises(AssertionError, match="3 batches below 3 on node 1, 2 on node 2"):
        replicas_agree(folders, "t-0", 3)
    with pytest.raises(AssertionError, match="ends at 3 on node 1, clients received 4"):
        replicas_agree(folders, "t-0", 4)


def test_replicas_that_differ_in_a_byte_do_not_agree(tmp_path: Path) -> None:
    folders = {node_id: tmp_path / str(node_id) for node_id in (1, 2)}
    stored(folders[1], (0, b"a"))
    stored(folders[2], (0, b"b"))
    with pytest.raises(AssertionError, match="differs between node 1 and node 2"):
        replicas_agree(folders, "t-0", 1)


def test_a_record_with_changed_content_has_no_known_value() -> None:
    assert value_of(content("p/0/123")) == "p/0/123"
    assert value_of(content("p/0/123")[:-1]) != "p/0/123"
    assert value_of(None) == "b''"


def test_a_workload_that_does_not_end_reports_the_client_state_of_the_partition(
    shared_nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = shared_nodes.new_topic(partitions=1)
    leader = shared_nodes.leader(topic)
    monkeypatch.setattr(Workload, "ends", lambda _: {f"{topic}-0": 1_000_000})
    monkeypatch.setattr("tests.cluster.support_workload.DRAIN_TIMEOUT_S", 0.1)
    with Workload(shared_nodes, topic, 1, members=1) as workload:
        workload.proceed(PROGRESS)
        member = workload.members[0]
        for client in (workload.reader, member):
            eventually(partial(says, client, f"{topic}-0", "'fetch_state': 'active'"))
            says(client, f"{topic}-0", f"'broker': {leader}, 'leader': {leader}")
            says(client, f"{topic}-0", f"{leader}: 'UP'")
        with pytest.raises(
            AssertionError, match=r"the reader is behind: .*\nreader at \d+ of .*'fetch_state': 'active'"
        ):
            workload.conclude(tmp_path / "history.jsonl")


def says(client: RecordedConsumer, where: str, what: str) -> bool:
    described = client.describe(where)
    assert what in described, described
    return True


def test_soak_results_of_one_test_keep_the_results_of_other_tests(tmp_path: Path) -> None:
    path = tmp_path / "results" / "soak.json"
    first = SoakResults("first")
    first.history(check([Polled(1.0, 0.5, "c", (("t-0", 0, "nobody's"),))]))
    first.fault("kill-leader")
    first.unavailable("kill-leader", 700.0)
    first.unavailable("kill-leader", 300.0)
    first.measure("start", 2.0, "s", 3.0)
    first.measure("start", 4.0, "s", 3.0)
    first.write(passed=False, path=path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "seeds": 77}))
    for _ in range(2):  # a second run of a test replaces the first
        second = SoakResults("second")
        second.fault("kill-leader")
        second.unavailable("kill-leader", 500.0)
        second.write(passed=True, path=path)
    found = json.loads(path.read_text())
    assert (found["seeds"], found["faults"]) == (77, {"kill-leader": 2})
    assert (found["anomalies"]["unknown-value"], found["anomalies"]["lost-write"]) == (1, 0)
    assert found["longest_unavailability_ms"] == {"kill-leader": 700}
    assert found["measured"]["start"] == {"unit": "s", "value": 4.0, "count": 2, "goal": "<= 3", "met": False}
    assert {name: run["passed"] for name, run in found["runs"].items()} == {"first": False, "second": True}
    assert found["runs"]["second"]["machine"]["cores"] == os.cpu_count()
