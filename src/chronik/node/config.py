"""A node's settings: from flags, the environment, a TOML file and defaults, in that order of precedence.

    node_id = 1
    data_dir = "chronik-data/node-1"
    durability = "synced"
    [listen]
    kafka = "127.0.0.1:9092"      # http and internal: 3000 and 4000 below, unless set
    [advertise]
    kafka = "broker-1.example:9092"
    [[peers]]
    id = 2
    internal = "127.0.0.1:5093"
    [log_levels]
    default = "info"
    groups = "debug"
    [topic_defaults]
    "retention.ms" = 604800000

`CHRONIK_NODE_ID`, `CHRONIK_LISTEN_KAFKA`, ... mirror every setting; lists and tables there are written with commas
(`CHRONIK_PEERS=2=127.0.0.1:5093,3=127.0.0.1:5094`, `CHRONIK_LOG_LEVELS=info,groups=debug`). An unknown key is an error
that names it. An unknown variable is ignored, because another program may own it.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from chronik.client.endpoint import Endpoint, EndpointError
from chronik.observe.logging import LogLevelError, LogLevels, parse_levels

HTTP_PORT_BELOW_KAFKA = 3000
INTERNAL_PORT_BELOW_KAFKA = 4000
ENVIRONMENT_PREFIX = "CHRONIK_"
REPLICA_LAG_MS_MIN = 1_000
DISK_TIMEOUT_MS_MIN = 500

TopicConfigValue = str | int | float | bool
_A = TypeVar("_A")
_T = TypeVar("_T")


class ConfigError(Exception):
    """An unusable setting; the message says in one line which, why, and what to write instead."""


class Listen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The addresses that the node binds. None means derived from the Kafka port."""

    kafka: str = "127.0.0.1:9092"
    http: str | None = None
    internal: str | None = None


class Advertise(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The addresses that clients and other nodes connect to. None means the listen address."""

    kafka: str | None = None
    http: str | None = None
    internal: str | None = None


class Peer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another node of the cluster and its internal address."""

    id: int
    internal: str


class NodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings of one node, validated. Created by `load`, or directly in tests."""

    node_id: int = 1
    cluster_id: str | None = None
    rack: str | None = None
    data_dir: str = ""
    listen: Listen = msgspec.field(default_factory=Listen)
    advertise: Advertise = msgspec.field(default_factory=Advertise)
    peers: tuple[Peer, ...] = ()
    cluster_secret_file: str | None = None
    loop: Literal["asyncio", "uvloop"] = "asyncio"

    durability: Literal["synced", "replicated"] = "synced"
    forwarding: bool = True
    log_levels: dict[str, str] = msgspec.field(default_factory=dict)

    auto_create_topics: bool = True
    num_partitions: int = 1
    default_replication_factor: int = 1
    topic_defaults: dict[str, TopicConfigValue] = msgspec.field(default_factory=dict)

    offsets_topic_partitions: int = 16
    offsets_retention_minutes: int = 7 * 24 * 60
    transaction_state_topic_partitions: int = 50
    transaction_max_timeout_ms: int = 900_000
    transactional_id_expiration_ms: int = 7 * 24 * 3_600_000
    group_initial_rebalance_delay_ms: int = 100
    group_min_session_timeout_ms: int = 6_000
    group_max_session_timeout_ms: int = 1_800_000
    group_max_size: int = 10_000
    producer_id_expiration_ms: int = 86_400_000
    replica_lag_ms_max: int = 3_000

    connections_max: int = 10_000
    connection_idle_ms_max: int = 600_000
    frame_bytes_max: int = 100 * 1024 * 1024
    in_flight_bytes_max: int = 512 * 1024 * 1024
    forward_bytes_max: int = 64 * 1024 * 1024
    in_flight_requests_max: int = 256
    fetch_bytes_max: int = 8 * 1024 * 1024
    fetch_sessions_max: int = 1_000
    trace_ring_events: int = 20_000
    executor_threads: int = 4
    disk_timeout_ms: int = 5_000
    retention_check_interval_ms: int = 300_000
    compaction_check_interval_ms: int = 15_000
    recovery_point_interval_ms: int = 5_000
    scrub_interval_ms: int = 7 * 86_400_000
    set_aside_retention_ms: int = 14 * 86_400_000
    shutdown_timeout_ms: int = 2_000

    @property
    def data_folder(self) -> str:
        return self.data_dir or f"chronik-data/node-{self.node_id}"

    @property
    def kafka_endpoint(self) -> Endpoint:
        return Endpoint.parse(self.listen.kafka)

    @property
    def http_endpoint(self) -> Endpoint:
        return self._endpoint_below(self.listen.http, HTTP_PORT_BELOW_KAFKA, "http")

    @property
    def internal_endpoint(self) -> Endpoint:
        return self._endpoint_below(self.listen.internal, INTERNAL_PORT_BELOW_KAFKA, "internal")

    def advertised_kafka(self, bound_port: int | None = None) -> Endpoint:
        """Return the address for clients; `bound_port` is the port that the system chose if the setting is 0."""
        endpoint = Endpoint.parse(self.advertise.kafka or self.listen.kafka)
        return endpoint._replace(port=bound_port) if endpoint.port == 0 and bound_port else endpoint

    def advertised_http(self, bound_port: int | None = None) -> Endpoint:
        return self._advertised(self.advertise.http, self.http_endpoint, bound_port)

    def advertised_internal(self, bound_port: int | None = None) -> Endpoint:
        return self._advertised(self.advertise.internal, self.internal_endpoint, bound_port)

    def _advertised(self, text: str | None, listened: Endpoint, bound_port: int | None) -> Endpoint:
        """Replace a wildcard host by the host advertised to clients, and port 0 by `bound_port`."""
        endpoint = listened if text is None else Endpoint.parse(text)
        if endpoint.is_wildcard:
            endpoint = endpoint._replace(host=self.advertised_kafka().host)
        return endpoint._replace(port=bound_port) if endpoint.port == 0 and bound_port else endpoint

    @property
    def levels(self) -> LogLevels:
        return LogLevels.from_names(self.log_levels)

    def warnings(self) -> list[str]:
        exposed = "is reachable from other machines without TLS"
        return [
            f"listen.{name} = {endpoint} {exposed}{detail}"
            for name, endpoint, detail in (
                ("kafka", self.kafka_endpoint, " or passwords"),
                ("http", self.http_endpoint, " or passwords"),
                ("internal", self.internal_endpoint, ": nodes authenticate, but traffic is not encrypted"),
            )
            if not endpoint.is_loopback
        ]

    def _endpoint_below(self, text: str | None, below: int, name: str) -> Endpoint:
        """Derive an address from Kafka's, on loopback if only an explicit setting should open it to other machines.

        HTTP does not authenticate its callers. A node without peers has no node to talk to: opening Kafka to clients
        must not also open the internal listener.
        """
        if text is not None:
            return Endpoint.parse(text)
        kafka = self.kafka_endpoint
        if not kafka.is_loopback and (name == "http" or not self.peers):
            kafka = Endpoint("127.0.0.1", kafka.port)
        if kafka.port == 0:
            return kafka
        if kafka.port <= below:
            raise ConfigError(
                f"listen.{name} cannot be {below} below Kafka's port {kafka.port}: "
                f"set listen.{name} (--{name} {kafka.host}:PORT)"
            )
        return kafka._replace(port=kafka.port - below)


def load(
    file: str | None = None, env: Mapping[str, str] | None = None, flags: Mapping[str, Any] | None = None
) -> NodeConfig:
    """Load a node's settings. `flags` uses dotted names (`listen.kafka`); None there means not given."""
    settings: dict[str, Any] = {}
    if file is not None:
        settings = _read_file(file)
    _merge(settings, _from_environment(env or {}))
    given: dict[str, Any] = {}
    for name, value in (flags or {}).items():
        if value is not None:
            _put(given, name.split("."), value)
    _merge(settings, given)
    try:
        config = msgspec.convert(settings, NodeConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{_place(str(error))}: correct it in {file or 'the flags or the environment'}") from None
    check(config)
    return config


def check(config: NodeConfig) -> None:
    """Raise ConfigError for settings that cannot work, so that a node fails at its start and not later."""
    for name in ("kafka", "http", "internal"):
        listen, advertise = getattr(config.listen, name), getattr(config.advertise, name)
        if listen is not None:
            _in_setting(f"listen.{name}", Endpoint.parse, listen)
        if advertise is not None and _in_setting(f"advertise.{name}", Endpoint.parse, advertise).is_wildcard:
            raise ConfigError(f"advertise.{name} = {advertise} is not an address to connect to: name a host")
    _in_setting("log_levels", LogLevels.from_names, config.log_levels)
    kafka = config.kafka_endpoint
    if kafka.is_wildcard and config.advertise.kafka is None:
        raise ConfigError(
            f"listening on {kafka} needs an address that clients can reach: "
            f"add --advertise HOST:{kafka.port} (advertise.kafka in the file)"
        )
    _ = config.http_endpoint, config.internal_endpoint
    for name in _AT_LEAST_ONE:
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} = {getattr(config, name)} is too small: it must be at least 1")
    if config.scrub_interval_ms < 0:
        raise ConfigError(f"scrub_interval_ms = {config.scrub_interval_ms} is negative: use 0 to turn scrubbing off")
    if config.replica_lag_ms_max < REPLICA_LAG_MS_MIN:
        raise ConfigError(
            f"replica_lag_ms_max = {config.replica_lag_ms_max} is too small: followers fetch every 500 ms, "
            f"so they would leave and rejoin the in-sync replicas forever; use {REPLICA_LAG_MS_MIN} or more"
        )
    if config.disk_timeout_ms < DISK_TIMEOUT_MS_MIN:
        raise ConfigError(
            f"disk_timeout_ms = {config.disk_timeout_ms} is too small: a busy disk sometimes takes longer, and the "
            f"node would lose its leadership each time; use {DISK_TIMEOUT_MS_MIN} or more"
        )
    if config.node_id < 0:
        raise ConfigError(f"node_id = {config.node_id} is negative: use 0 or more")
    _check_peers(config)


def _check_peers(config: NodeConfig) -> None:
    """Check that each peer has its own id and address, so that a majority is well defined."""
    if len({peer.id for peer in config.peers}) != len(config.peers):
        raise ConfigError("two peers have the same id: give each node its own")
    owners: dict[Endpoint, int] = {config.advertised_internal(): config.node_id}
    for peer in config.peers:
        endpoint = _in_setting(f"peers {peer.id}", Endpoint.parse, peer.internal)
        if peer.id < 0:
            raise ConfigError(f"peers {peer.id}: the id is negative: use 0 or more")
        if endpoint.is_wildcard or endpoint.port == 0:
            raise ConfigError(f"peers {peer.id}: {peer.internal} is not an address to connect to: name host and port")
        if peer.id == config.node_id:
            continue
        if endpoint in owners:
            raise ConfigError(
                f"peers {peer.id} and node {owners[endpoint]} have the same address, {peer.internal}: "
                "give each node the address that it listens on (listen.internal)"
            )
        owners[endpoint] = peer.id
    if config.peers and all(peer.id == config.node_id for peer in config.peers):
        raise ConfigError(
            f"peers list only node {config.node_id} itself, so there can be no majority with other nodes: "
            "add a [[peers]] entry for each other node, or remove the entry to run a single node"
        )


_AT_LEAST_ONE = (
    "num_partitions",
    "default_replication_factor",
    "offsets_topic_partitions",
    "offsets_retention_minutes",
    "transaction_state_topic_partitions",
    "transaction_max_timeout_ms",
    "transactional_id_expiration_ms",
    "group_max_size",
    "connections_max",
    "frame_bytes_max",
    "in_flight_bytes_max",
    "forward_bytes_max",
    "in_flight_requests_max",
    "fetch_bytes_max",
    "executor_threads",
    "trace_ring_events",
    "retention_check_interval_ms",
    "compaction_check_interval_ms",
    "recovery_point_interval_ms",
)


def _read_file(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as opened:
            settings = tomllib.load(opened)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}; check --config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    _refuse_unknown(settings, NodeConfig, "", path)
    return settings


def _refuse_unknown(settings: Mapping[str, Any], struct: type[msgspec.Struct], prefix: str, path: str) -> None:
    known = {item.name: item.type for item in msgspec.structs.fields(struct)}
    for key, value in settings.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {prefix}{close[0]}?" if close else "remove it, or see docs/operations.md for all keys"
            raise ConfigError(f"unknown key {prefix}{key} in {path}: {hint}")
        nested = known[key]
        if isinstance(nested, type) and issubclass(nested, msgspec.Struct) and isinstance(value, Mapping):
            _refuse_unknown(value, nested, f"{prefix}{key}.", path)
        elif key == "peers" and isinstance(value, list):
            for peer in value:
                if isinstance(peer, Mapping):
                    _refuse_unknown(peer, Peer, "peers.", path)


def _from_environment(env: Mapping[str, str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for item in msgspec.structs.fields(NodeConfig):
        variable = ENVIRONMENT_PREFIX + item.name.upper()
        if isinstance(item.type, type) and issubclass(item.type, msgspec.Struct):
            for nested in msgspec.structs.fields(item.type):
                text = env.get(f"{variable}_{nested.name.upper()}")
                if text:
                    _put(settings, [item.name, nested.name], text)
        elif env.get(variable):
            read = _TABLES.get(item.name)
            text = env[variable]
            settings[item.name] = text if read is None else _in_setting(variable, read, text)
    return settings


def _pairs(text: str, form: str) -> list[tuple[str, str]]:
    pairs = [part.partition("=") for part in text.split(",")]
    for name, equals, _ in pairs:
        if not equals:
            raise ConfigError(f"{name!r} is not {form}")
    return [(name.strip(), value.strip()) for name, _, value in pairs]


_TABLES: Mapping[str, Callable[[str], Any]] = {
    "peers": lambda text: [{"id": peer, "internal": internal} for peer, internal in _pairs(text, "ID=HOST:PORT")],
    "log_levels": lambda text: parse_levels(text.split(",")),
    "topic_defaults": lambda text: dict(_pairs(text, "NAME=VALUE")),
}


def _in_setting(name: str, read: Callable[[_A], _T], value: _A) -> _T:
    """Parse `value`; prefix any error with the setting's name."""
    try:
        return read(value)
    except (EndpointError, LogLevelError, ConfigError) as error:
        raise ConfigError(f"{name}: {error}") from None


def _put(settings: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        settings = settings.setdefault(name, {})
    settings[path[-1]] = value


def _merge(settings: dict[str, Any], stronger: Mapping[str, Any]) -> None:
    for name, value in stronger.items():
        old = settings.get(name)
        if isinstance(old, dict) and isinstance(value, Mapping):
            _merge(old, value)
        else:
            settings[name] = value


def _place(message: str) -> str:
    """Rewrite msgspec's error text to start with the setting: `$.listen.kafka` becomes `listen.kafka`."""
    what, found, place = message.partition(" - at `$.")
    return f"{place.rstrip('`')}: {what[:1].lower()}{what[1:]}" if found else message
