"""Several nodes from the settings of one machine: ids, ports, folders, peers and the first voters."""

from __future__ import annotations

import pytest

from chronik.node.config import ConfigError, NodeConfig, load
from chronik.node.membership.cluster_member import founders
from chronik.node.process_config import process_config


def nodes(config: NodeConfig) -> list[NodeConfig]:
    return [process_config(config, number, "host-a") for number in range(config.processes)]


def test_nodes_of_a_machine_have_consecutive_ids_and_ports_and_one_rack() -> None:
    made = nodes(load(flags={"processes": 3, "node_id": 4, "data_dir": "d", "listen.http": "127.0.0.1:8000"}))
    assert [each.node_id for each in made] == [4, 5, 6]
    assert [each.kafka_endpoint.port for each in made] == [9092, 9093, 9094]
    assert [each.http_endpoint.port for each in made] == [8000, 8001, 8002]
    assert [each.internal_endpoint.port for each in made] == [5092, 5093, 5094]
    assert [each.data_folder for each in made] == ["d/node-4", "d/node-5", "d/node-6"]
    assert {each.rack for each in made} == {"host-a"}
    assert {each.cluster_secret_file for each in made} == {"d/cluster-secret"}
    assert all([peer.id for peer in each.peers] == [4, 5, 6] and each.processes == 1 for each in made)


def machines(processes: int) -> list[NodeConfig]:
    found = []
    for own in range(3):
        flags = {
            "processes": processes,
            "node_id": 1 + own * processes,
            "listen.kafka": f"127.0.0.{own + 1}:9092",
            "peers": [
                {"id": 1 + other * processes, "internal": f"127.0.0.{other + 1}:5092", "processes": processes}
                for other in range(3)
                if other != own
            ],
        }
        found.append(load(flags=flags))
    return found


def test_all_nodes_of_all_machines_agree_on_the_peers() -> None:
    made = [each for config in machines(4) for each in nodes(config)]
    assert [each.node_id for each in made] == list(range(1, 13))
    known = [{peer.id: peer.internal for peer in each.peers} for each in made]
    assert all(each == known[0] for each in known)
    assert known[0][6] == "127.0.0.2:5093"


def test_the_first_voters_are_spread_over_the_machines() -> None:
    made = [each for config in machines(8) for each in nodes(config)]
    assert {founders(each) for each in made} == {(1, 2, 9, 10, 17)}


def test_a_single_node_and_plain_peers_have_the_voters_that_they_had() -> None:
    peers = [{"id": number, "internal": f"127.0.0.1:{5000 + number}"} for number in range(2, 8)]
    assert founders(load(flags={"peers": peers})) == (1, 2, 3, 4, 5)
    assert founders(load(flags={"peers": peers[:3]})) == (1, 2, 3)
    assert founders(load()) == (1,)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="processes = 0 is not between 1 and 64"):
        load(flags={"processes": 0})
    with pytest.raises(ConfigError, match=r"processes = 2 needs a port in listen\.kafka"):
        nodes(load(flags={"processes": 2, "listen.kafka": "127.0.0.1:0"}))
