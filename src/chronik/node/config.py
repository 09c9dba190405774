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
    [security]
    protocol = "SASL_SSL"         # of listen.kafka
    [[listeners]]                 # further listeners for clients
    name = "INSIDE"
    listen = "127.0.0.1:9192"
    protocol = "SASL_PLAINTEXT"
    [tls]
    certificate = "node.pem"
    key = "node.key"
    authorities = "ca.pem"
    [sasl]
    mechanisms = ["SCRAM-SHA-512"]
    [authorization]
    enabled = true
    super_users = ["User:admin"]

`CHRONIK_NODE_ID`, `CHRONIK_LISTEN_KAFKA`, ... mirror every setting; lists and tables there are written with commas
(`CHRONIK_PEERS=2=127.0.0.1:5093,3=127.0.0.1:5094`, `CHRONIK_LOG_LEVELS=info,groups=debug`), listeners as
NAME=PROTOCOL://HOST:PORT[@ADVERTISED] (`CHRONIK_LISTENERS=INSIDE=SASL_SSL://0.0.0.0:9192@broker-1:9192`), and super
users with semicolons, because certificate names contain commas. An unknown key is an error that names it. An unknown
variable is ignored, because another program may own it.

A listener beyond loopback needs TLS, and one for Kafka clients or HTTP also authentication, or `security.insecure`.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from chronik.client.endpoint import Endpoint, EndpointError
from chronik.client.security import SASL_PROTOCOLS, TLS_PROTOCOLS, SecurityProtocol
from chronik.groups.assignors import ASSIGNORS
from chronik.metadata.group_configs import RANGED_CONFIGS
from chronik.metadata.image import DEFAULT_LISTENER
from chronik.observe.logging import LogLevelError, LogLevels, parse_levels

PROCESSES_MAX = 64
HTTP_PORT_BELOW_KAFKA = 3000
INTERNAL_PORT_BELOW_KAFKA = 4000
ENVIRONMENT_PREFIX = "CHRONIK_"
REPLICA_LAG_MS_MIN = 1_000
DISK_TIMEOUT_MS_MIN = 500
QUOTA_WINDOWS_MIN = 2
COMMIT_LOG_BYTES_MIN = 128 * 1024

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
    """Another node of the cluster and its internal address.

    With `processes`, several nodes of another machine: this one and the next ids, at the next ports. `machine` is the
    id of the machine's first node (see `process_config`).
    """

    id: int
    internal: str
    processes: int = 1
    machine: int | None = None

    @property
    def rank(self) -> int:
        """Return which of its machine's nodes it is; 0 is the first."""
        return 0 if self.machine is None else self.id - self.machine


Mechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"]


class ListenerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A listener for Kafka clients. That of `listen.kafka` comes first, and its name is KAFKA."""

    name: str
    listen: str
    protocol: SecurityProtocol
    advertise: str | None = None

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint.parse(self.listen)

    def advertised(self, bound_port: int | None = None) -> Endpoint:
        """Return the address for clients; `bound_port` is the port that the system chose if the setting is 0."""
        endpoint = Endpoint.parse(self.advertise or self.listen)
        return endpoint._replace(port=bound_port) if endpoint.port == 0 and bound_port else endpoint

    @property
    def uses_tls(self) -> bool:
        return self.protocol in TLS_PROTOCOLS

    @property
    def uses_sasl(self) -> bool:
        return self.protocol in SASL_PROTOCOLS


class Security(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the node's own addresses are protected. `insecure` allows plaintext beyond loopback."""

    protocol: SecurityProtocol = "PLAINTEXT"
    """Of `listen.kafka`."""
    internal_tls: bool = False
    """Whether nodes encrypt what they send to each other. All nodes of a cluster need the same value."""
    http_tls: bool = False
    http_login: bool = False
    """Whether the web page and the HTTP API require a login."""
    public_metrics: bool = True
    """Whether /metrics, /healthz and /readyz answer without a login."""
    http_hosts: tuple[str, ...] = ()
    """Further host names by which browsers reach the page, as that of a load balancer."""
    insecure: bool = False


class Tls(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Certificates, as PEM files. A changed file is loaded without a restart.

    `certificate` may contain the chain of intermediate certificates. `authorities` verify the certificates of clients
    and of other nodes. `principal_mapping_rules` are Kafka's `ssl.principal.mapping.rules`.
    """

    certificate: str = ""
    key: str = ""
    key_password_file: str | None = None
    authorities: str = ""
    client_auth: Literal["none", "requested", "required"] = "none"
    principal_mapping_rules: tuple[str, ...] = ("DEFAULT",)
    protocols: tuple[Literal["TLSv1.2", "TLSv1.3"], ...] = ("TLSv1.2", "TLSv1.3")
    ciphers: str = ""
    """OpenSSL's list of the ciphers for TLS 1.2; empty means OpenSSL's default."""
    handshake_timeout_ms: int = 10_000


class Sasl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How clients authenticate on SASL listeners.

    `users_file` lists users of this node, a line `NAME:PASSWORD` each, for PLAIN and SCRAM: without one, nobody could
    log in to create the first user. SCRAM credentials in the metadata take precedence. `jwks` is a file or a URL.
    """

    mechanisms: tuple[Mechanism, ...] = ("SCRAM-SHA-512",)
    users_file: str | None = None
    reauthenticate_ms: int = 0
    """How long a client stays authenticated (`connections.max.reauth.ms`); 0 means as long as it is connected."""
    failure_delay_ms: int = 1_000
    jwks: str = ""
    jwt_issuer: str = ""
    jwt_audience: tuple[str, ...] = ()
    jwt_scope: tuple[str, ...] = ()
    jwt_principal_claim: str = "sub"
    jwt_clock_skew_s: int = 30


class Authorization(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """ACLs, as Kafka's StandardAuthorizer. Without `enabled` every client may do everything."""

    enabled: bool = False
    super_users: tuple[str, ...] = ()
    allow_everyone_if_no_acl_found: bool = False


class ExposedListener(msgspec.Struct, frozen=True):
    """A listener beyond loopback that is not protected: its setting, what it lacks, and the settings to add."""

    setting: str
    exposure: str
    cure: str


class NodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings of one node, validated. Created by `load`, or directly in tests."""

    node_id: int = 1
    cluster_id: str | None = None
    rack: str | None = None
    data_dir: str = ""
    processes: int = 1
    """How many nodes `chronik start` runs on this machine. Each of them has 1 here: see `process_config`."""
    listen: Listen = msgspec.field(default_factory=Listen)
    advertise: Advertise = msgspec.field(default_factory=Advertise)
    peers: tuple[Peer, ...] = ()
    cluster_secret_file: str | None = None
    listeners: tuple[ListenerConfig, ...] = ()
    security: Security = msgspec.field(default_factory=Security)
    tls: Tls = msgspec.field(default_factory=Tls)
    sasl: Sasl = msgspec.field(default_factory=Sasl)
    authorization: Authorization = msgspec.field(default_factory=Authorization)
    loop: Literal["asyncio", "uvloop"] = "asyncio"

    durability: Literal["synced", "replicated"] = "synced"
    commit_log: bool = True
    """Whether a round of syncs may write to one commit log instead of syncing each segment. Only under `synced`."""
    commit_log_bytes: int = 64 * 1024 * 1024
    forwarding: bool = True
    log_levels: dict[str, str] = msgspec.field(default_factory=dict)

    auto_create_topics: bool = True
    num_partitions: int = 1
    default_replication_factor: int = 1
    topic_defaults: dict[str, TopicConfigValue] = msgspec.field(default_factory=dict)

    offsets_topic_partitions: int = 16
    offsets_retention_minutes: int = 7 * 24 * 60
    transaction_state_topic_partitions: int = 50
    share_state_topic_partitions: int = 50
    transaction_max_timeout_ms: int = 900_000
    transactional_id_expiration_ms: int = 7 * 24 * 3_600_000
    telemetry_max_bytes: int = 1024 * 1024
    group_initial_rebalance_delay_ms: int = 100
    group_min_session_timeout_ms: int = 6_000
    group_max_session_timeout_ms: int = 1_800_000
    group_max_size: int = 10_000
    group_consumer_session_timeout_ms: int = 45_000
    group_consumer_min_session_timeout_ms: int = 45_000
    group_consumer_max_session_timeout_ms: int = 60_000
    group_consumer_heartbeat_interval_ms: int = 5_000
    group_consumer_min_heartbeat_interval_ms: int = 5_000
    group_consumer_max_heartbeat_interval_ms: int = 15_000
    group_consumer_assignment_interval_ms: int = 0
    group_consumer_min_assignment_interval_ms: int = 0
    group_consumer_max_assignment_interval_ms: int = 15_000
    group_consumer_max_size: int = 10_000
    group_consumer_assignors: tuple[str, ...] = ("uniform", "range")
    group_consumer_migration_policy: Literal["bidirectional", "upgrade", "downgrade", "disabled"] = "bidirectional"
    group_share_session_timeout_ms: int = 45_000
    group_share_min_session_timeout_ms: int = 45_000
    group_share_max_session_timeout_ms: int = 60_000
    group_share_heartbeat_interval_ms: int = 5_000
    group_share_min_heartbeat_interval_ms: int = 5_000
    group_share_max_heartbeat_interval_ms: int = 15_000
    group_share_assignment_interval_ms: int = 0
    group_share_min_assignment_interval_ms: int = 0
    group_share_max_assignment_interval_ms: int = 15_000
    group_share_max_size: int = 200
    group_share_max_share_sessions: int = 2_000
    errors_deadletterqueue_topic_name_prefix: str = "dlq."
    errors_deadletterqueue_auto_create_topics_enable: bool = False
    group_share_record_lock_duration_ms: int = 30_000
    group_share_min_record_lock_duration_ms: int = 15_000
    group_share_max_record_lock_duration_ms: int = 60_000
    group_share_delivery_count_limit: int = 5
    group_share_min_delivery_count_limit: int = 2
    group_share_max_delivery_count_limit: int = 10
    group_share_partition_max_record_locks: int = 2_000
    group_share_min_partition_max_record_locks: int = 100
    group_share_max_partition_max_record_locks: int = 4_000
    producer_id_expiration_ms: int = 86_400_000
    replica_lag_ms_max: int = 3_000

    connections_max: int = 10_000
    connections_max_per_ip: int = 2**31 - 1
    connections_max_per_ip_overrides: dict[str, int] = msgspec.field(default_factory=dict)
    connection_creation_rate: int = 2**31 - 1
    quota_window_num: int = 11
    quota_window_size_seconds: int = 1
    connection_idle_ms_max: int = 600_000
    frame_bytes_max: int = 100 * 1024 * 1024
    in_flight_bytes_max: int = 512 * 1024 * 1024
    forward_bytes_max: int = 64 * 1024 * 1024
    in_flight_requests_max: int = 256
    fetch_bytes_max: int = 8 * 1024 * 1024
    replica_fetch_bytes_max: int = 1024 * 1024
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
    def kafka_listeners(self) -> tuple[ListenerConfig, ...]:
        """All listeners for clients; the first is that of `listen.kafka`."""
        first = ListenerConfig(DEFAULT_LISTENER, self.listen.kafka, self.security.protocol, self.advertise.kafka)
        return (first, *self.listeners)

    @property
    def uses_tls(self) -> bool:
        """Whether any listener needs the certificate."""
        security = self.security
        return security.internal_tls or security.http_tls or any(each.uses_tls for each in self.kafka_listeners)

    @property
    def http_endpoint(self) -> Endpoint:
        return self._endpoint_below(self.listen.http, HTTP_PORT_BELOW_KAFKA, "http")

    @property
    def internal_endpoint(self) -> Endpoint:
        return self._endpoint_below(self.listen.internal, INTERNAL_PORT_BELOW_KAFKA, "internal")

    def advertised_kafka(self, bound_port: int | None = None) -> Endpoint:
        """Return the address for clients of the first listener. `bound_port`: see `ListenerConfig.advertised`."""
        return self.kafka_listeners[0].advertised(bound_port)

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
        """Unprotected ways to this node: listeners that `security.insecure` allows, and a page without a log-in."""
        warnings = [f"{each.setting} {each.exposure}" for each in self.exposed_listeners()]
        if self.authorization.enabled and not self.security.http_login:
            warnings.append(
                "the web page and the HTTP API show all messages without a log-in, although authorization is enabled: "
                "set security.http_login = true"
            )
        return warnings

    def exposed_listeners(self) -> list[ExposedListener]:
        """The listeners beyond loopback that lack TLS, or authentication of their clients."""
        security, exposed = self.security, []
        without_tls = "is reachable from other machines without TLS"
        for listener in self.kafka_listeners:
            is_first = listener.name == DEFAULT_LISTENER
            setting = (
                f"listen.kafka = {listener.listen}" if is_first else f"listener {listener.name} = {listener.listen}"
            )
            protocol = "security.protocol" if is_first else "its protocol"
            if listener.endpoint.is_loopback:
                continue
            if not listener.uses_tls:
                exposure = without_tls if listener.uses_sasl else f"{without_tls} or passwords"
                cure = f'{protocol} = "SASL_SSL", tls.certificate and tls.key (chronik certs create)'
            elif not listener.uses_sasl and self.tls.client_auth != "required":
                exposure = "is reachable from other machines without passwords or client certificates"
                cure = f'{protocol} = "SASL_SSL", or tls.client_auth = "required" and tls.authorities'
            else:
                continue
            exposed.append(ExposedListener(setting, exposure, cure))
        if not self.http_endpoint.is_loopback and not (security.http_tls and security.http_login):
            exposure = f"{without_tls} or passwords"
            if security.http_tls:
                exposure = "is reachable from other machines without passwords"
            cure = "security.http_tls = true, security.http_login = true, tls.certificate and tls.key"
            exposed.append(ExposedListener(f"listen.http = {self.http_endpoint}", exposure, cure))
        if not self.internal_endpoint.is_loopback and not security.internal_tls:
            exposure = f"{without_tls}: nodes authenticate, but traffic is not encrypted"
            cure = "security.internal_tls = true, tls.certificate, tls.key and tls.authorities on each node"
            exposed.append(ExposedListener(f"listen.internal = {self.internal_endpoint}", exposure, cure))
        return exposed

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
    _check_listeners(config)
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
    _check_groups(config)
    if config.scrub_interval_ms < 0:
        raise ConfigError(f"scrub_interval_ms = {config.scrub_interval_ms} is negative: use 0 to turn scrubbing off")
    if config.quota_window_num < QUOTA_WINDOWS_MIN:
        raise ConfigError(
            f"quota_window_num = {config.quota_window_num} is too small: the last window is still filling, so a rate "
            f"needs {QUOTA_WINDOWS_MIN} or more"
        )
    for address, count in {**config.connections_max_per_ip_overrides, "": config.connections_max_per_ip}.items():
        name = f"connections_max_per_ip_overrides.{address}" if address else "connections_max_per_ip"
        if count < 0:
            raise ConfigError(f"{name} = {count} is negative: use 0 to refuse connections")
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
    for name, count in (
        ("processes", config.processes),
        *((f"peers {p.id}: processes", p.processes) for p in config.peers),
    ):
        if not 1 <= count <= PROCESSES_MAX:
            raise ConfigError(f"{name} = {count} is not between 1 and {PROCESSES_MAX}")
    if config.commit_log_bytes < COMMIT_LOG_BYTES_MIN:
        raise ConfigError(
            f"commit_log_bytes = {config.commit_log_bytes} is too small: use {COMMIT_LOG_BYTES_MIN} or more, or "
            "commit_log = false"
        )
    if config.node_id < 0:
        raise ConfigError(f"node_id = {config.node_id} is negative: use 0 or more")
    _check_peers(config)
    _check_tls(config)
    _check_exposure(config)


def _check_listeners(config: NodeConfig) -> None:
    """Check the listeners of [[listeners]]: names, addresses, and that no two of them are the same."""
    names, addresses = {DEFAULT_LISTENER}, {config.kafka_endpoint}
    for listener in config.listeners:
        where = f"listeners {listener.name}"
        if not _LISTENER_NAME.fullmatch(listener.name):
            raise ConfigError(f"listeners: {listener.name!r} is not a name: use up to 64 letters, digits, _ and -")
        if listener.name.upper() in names:
            raise ConfigError(f"two listeners are named {listener.name} ({DEFAULT_LISTENER} is that of listen.kafka)")
        names.add(listener.name.upper())
        endpoint = _in_setting(where, Endpoint.parse, listener.listen)
        if endpoint.port and endpoint in addresses:
            raise ConfigError(f"{where}: {endpoint} is the address of another listener: choose another port")
        addresses.add(endpoint)
        if listener.advertise is not None:
            if _in_setting(where, Endpoint.parse, listener.advertise).is_wildcard:
                raise ConfigError(f"{where}: {listener.advertise} is not an address to connect to: name a host")
        elif endpoint.is_wildcard:
            raise ConfigError(
                f"{where}: listening on {endpoint} needs an address that clients can reach: "
                f'add advertise = "HOST:{endpoint.port}"'
            )
    if any(listener.uses_sasl for listener in config.kafka_listeners) and not config.sasl.mechanisms:
        raise ConfigError('sasl.mechanisms is empty, and a listener uses SASL: set it, as in ["SCRAM-SHA-512"]')


def _check_tls(config: NodeConfig) -> None:
    tls = config.tls
    if tls.handshake_timeout_ms < 1:
        raise ConfigError(f"tls.handshake_timeout_ms = {tls.handshake_timeout_ms} is too small: it must be at least 1")
    if not tls.protocols:
        raise ConfigError('tls.protocols is empty: remove it, or set it, as in ["TLSv1.2", "TLSv1.3"]')
    if tls.client_auth != "none" and not tls.authorities:
        raise ConfigError(
            f'tls.client_auth = "{tls.client_auth}" needs tls.authorities: the PEM file that verifies clients'
        )
    if not config.uses_tls:
        return
    for name in ("certificate", "key"):
        if not getattr(tls, name):
            raise ConfigError(f"a listener uses TLS, and tls.{name} is not set: name a PEM file (chronik certs create)")
    if config.security.internal_tls and not tls.authorities:
        raise ConfigError("security.internal_tls needs tls.authorities: the PEM file that verifies the other nodes")


def _check_exposure(config: NodeConfig) -> None:
    """Refuse a listener that other machines can reach without protection, unless the operator accepts it."""
    exposed = config.exposed_listeners()
    if exposed and not config.security.insecure:
        first = exposed[0]
        raise ConfigError(
            f"{first.setting} {first.exposure}: set {first.cure}; or listen on 127.0.0.1; "
            "or accept it with --insecure (security.insecure = true)"
        )


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


def group_setting(name: str, end: str = "") -> str:
    """Return the setting with the default of a config of groups, or with the `min` or `max` of its range."""
    kind, _, what = name.replace(".", "_").partition("_")
    return "_".join(part for part in ("group", kind, end, what) if part)


def _check_groups(config: NodeConfig) -> None:
    for what in RANGED_CONFIGS:
        name = group_setting(what)
        value = getattr(config, name)
        lowest, highest = (getattr(config, group_setting(what, end)) for end in ("min", "max"))
        if not lowest <= value <= highest:
            raise ConfigError(
                f"{name} = {value} is not between {group_setting(what, 'min')} ({lowest}) and "
                f"{group_setting(what, 'max')} ({highest}): change one of them"
            )
    for kind in ("consumer", "share"):
        shortest = f"group_{kind}_min_assignment_interval_ms"
        if getattr(config, shortest) < 0:
            raise ConfigError(f"{shortest} = {getattr(config, shortest)} is negative: use 0 or more")
        interval, session = f"group_{kind}_heartbeat_interval_ms", f"group_{kind}_session_timeout_ms"
        if getattr(config, interval) >= getattr(config, session):
            raise ConfigError(
                f"{interval} must be lower than {session}: "
                "a member must be able to send a heartbeat before its session ends"
            )
    unknown = [name for name in config.group_consumer_assignors if name not in ASSIGNORS]
    if unknown or not config.group_consumer_assignors:
        raise ConfigError(f"group_consumer_assignors: name at least one of {', '.join(ASSIGNORS)}, and no other")


_AT_LEAST_ONE = (
    "num_partitions",
    "default_replication_factor",
    "offsets_topic_partitions",
    "offsets_retention_minutes",
    "transaction_state_topic_partitions",
    "share_state_topic_partitions",
    "transaction_max_timeout_ms",
    "transactional_id_expiration_ms",
    "telemetry_max_bytes",
    "group_max_size",
    "group_consumer_max_size",
    "group_consumer_min_session_timeout_ms",
    "group_consumer_min_heartbeat_interval_ms",
    "group_share_max_size",
    "group_share_max_share_sessions",
    "group_share_min_session_timeout_ms",
    "group_share_min_heartbeat_interval_ms",
    "group_share_min_record_lock_duration_ms",
    "group_share_min_delivery_count_limit",
    "group_share_min_partition_max_record_locks",
    "connections_max",
    "connection_creation_rate",
    "quota_window_size_seconds",
    "frame_bytes_max",
    "in_flight_bytes_max",
    "forward_bytes_max",
    "in_flight_requests_max",
    "fetch_bytes_max",
    "replica_fetch_bytes_max",
    "executor_threads",
    "trace_ring_events",
    "retention_check_interval_ms",
    "compaction_check_interval_ms",
    "recovery_point_interval_ms",
)


_LISTENER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_ENTRIES: Mapping[str, type[msgspec.Struct]] = {"peers": Peer, "listeners": ListenerConfig}
"""The tables of which there may be several."""


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
        elif key in _ENTRIES and isinstance(value, list):
            for entry in value:
                if isinstance(entry, Mapping):
                    _refuse_unknown(entry, _ENTRIES[key], f"{key}.", path)


def _from_environment(env: Mapping[str, str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for item in msgspec.structs.fields(NodeConfig):
        variable = ENVIRONMENT_PREFIX + item.name.upper()
        if isinstance(item.type, type) and issubclass(item.type, msgspec.Struct):
            for nested in msgspec.structs.fields(item.type):
                text = env.get(f"{variable}_{nested.name.upper()}")
                if text:
                    value = _split_list(item.name, nested.name, text) if _is_tuple(nested.type) else text
                    _put(settings, [item.name, nested.name], value)
        elif env.get(variable):
            read = _TABLES.get(item.name)
            text = env[variable]
            settings[item.name] = text if read is None else _in_setting(variable, read, text)
    return settings


def _is_tuple(kind: Any) -> bool:
    return get_origin(kind) is tuple or any(get_origin(choice) is tuple for choice in get_args(kind))


_SEPARATORS = {
    ("authorization", "super_users"): re.compile(";"),
    ("tls", "principal_mapping_rules"): re.compile(r",(?=\s*(?:RULE:|DEFAULT))"),
}
"""Lists whose entries may contain commas."""


def _split_list(table: str, name: str, text: str) -> list[str]:
    separator = _SEPARATORS.get((table, name)) or re.compile(",")
    return [part.strip() for part in separator.split(text) if part.strip()]


def _listeners(text: str) -> list[dict[str, str]]:
    form = "NAME=PROTOCOL://HOST:PORT or NAME=PROTOCOL://HOST:PORT@ADVERTISED:PORT"
    listeners = []
    for name, value in _pairs(text, form):
        protocol, found, address = value.partition("://")
        if not found:
            raise ConfigError(f"{name}={value} is not {form}")
        listen, _, advertise = address.partition("@")
        entry = {"name": name, "listen": listen, "protocol": protocol}
        listeners.append({**entry, "advertise": advertise} if advertise else entry)
    return listeners


def _pairs(text: str, form: str) -> list[tuple[str, str]]:
    pairs = [part.partition("=") for part in text.split(",")]
    for name, equals, _ in pairs:
        if not equals:
            raise ConfigError(f"{name!r} is not {form}")
    return [(name.strip(), value.strip()) for name, _, value in pairs]


_TABLES: Mapping[str, Callable[[str], Any]] = {
    "peers": lambda text: [{"id": peer, "internal": internal} for peer, internal in _pairs(text, "ID=HOST:PORT")],
    "listeners": _listeners,
    "log_levels": lambda text: parse_levels(text.split(",")),
    "connections_max_per_ip_overrides": lambda text: dict(_pairs(text, "ADDRESS=NUMBER")),
    "topic_defaults": lambda text: dict(_pairs(text, "NAME=VALUE")),
    "group_consumer_assignors": lambda text: [name.strip() for name in text.split(",") if name.strip()],
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
