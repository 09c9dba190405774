"""The settings of each node on a machine that runs several (`processes = N`), from the machine's one file.

Node ids and ports are consecutive, each node has its folder in the machine's data folder, and all have one rack: the
machine. An entry of `peers` with `processes` stands for as many nodes of another machine.

    node_id = 1          nodes 1 to 4: Kafka at 9092 to 9095, internal at 5092 to 5095, in data_dir/node-1 to node-4
    processes = 4
    [[peers]]
    id = 5               nodes 5 to 8, internal at 5092 to 5095
    internal = "10.0.0.2:5092"
    processes = 4
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from chronik.client.endpoint import Endpoint
from chronik.node.config import ConfigError, NodeConfig, Peer, check

SECRET_NAME = "cluster-secret"  # noqa: S105 - the name of a file


def machine_folder(config: NodeConfig) -> str:
    return config.data_dir or "chronik-data"


def machine_secret_file(config: NodeConfig) -> str:
    """Return the file with the secret of all nodes on the machine."""
    return config.cluster_secret_file or f"{machine_folder(config)}/{SECRET_NAME}"


def process_config(config: NodeConfig, number: int, machine: str) -> NodeConfig:
    """Return the settings of one of the machine's nodes, the first of which has the number 0.

    `machine` is the name of the machine, the rack if the settings name none. Raises ConfigError.
    """
    if config.kafka_endpoint.port == 0:
        raise ConfigError(f"processes = {config.processes} needs a port in listen.kafka: the nodes use the next ones")
    listen, advertise, node_id = config.listen, config.advertise, config.node_id + number
    made = msgspec.structs.replace(
        config,
        node_id=node_id,
        processes=1,
        data_dir=f"{machine_folder(config)}/node-{node_id}",
        rack=config.rack or machine,
        cluster_secret_file=machine_secret_file(config),
        listen=msgspec.structs.replace(
            listen,
            kafka=_shifted(listen.kafka, number),
            http=None if listen.http is None else _shifted(listen.http, number),
            internal=_shifted(str(config.internal_endpoint), number),
        ),
        advertise=msgspec.structs.replace(
            advertise,
            **{
                name: _shifted(text, number)
                for name in ("kafka", "http", "internal")
                if (text := getattr(advertise, name)) is not None
            },
        ),
        listeners=tuple(
            msgspec.structs.replace(
                each,
                listen=_shifted(each.listen, number),
                advertise=None if each.advertise is None else _shifted(each.advertise, number),
            )
            for each in config.listeners
        ),
        peers=tuple(_nodes_of(config)),
    )
    check(made)
    return made


def _nodes_of(config: NodeConfig) -> Iterator[Peer]:
    """Yield all nodes of the cluster, those of this machine included."""
    own = Peer(config.node_id, str(config.advertised_internal()), config.processes)
    for machine in (own, *(peer for peer in config.peers if peer.id != config.node_id)):
        for number in range(machine.processes):
            yield Peer(machine.id + number, _shifted(machine.internal, number), 1, machine.id)


def _shifted(text: str, number: int) -> str:
    endpoint = Endpoint.parse(text)
    return str(endpoint if endpoint.port == 0 else endpoint._replace(port=endpoint.port + number))
