"""Settings: precedence, unknown keys, addresses."""

from pathlib import Path

import msgspec
import pytest

from chronik.client.endpoint import Endpoint, EndpointError
from chronik.node.config import ConfigError, NodeConfig, Peer, load


def write(folder: Path, text: str) -> str:
    path = folder / "node.toml"
    path.write_text(text)
    return str(path)


def test_the_defaults_configure_one_node_on_this_machine() -> None:
    config = load()
    assert config.kafka_endpoint == Endpoint("127.0.0.1", 9092)
    assert config.http_endpoint == Endpoint("127.0.0.1", 6092)
    assert config.internal_endpoint == Endpoint("127.0.0.1", 5092)
    assert config.durability == "synced"
    assert config.data_folder == "chronik-data/node-1"
    assert config.warnings() == []


def test_flags_override_the_environment_which_overrides_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, 'node_id = 1\ndata_dir = "file"\nrack = "file"\n[listen]\nkafka = "127.0.0.1:9001"\n')
    env = {"CHRONIK_DATA_DIR": "env", "CHRONIK_NODE_ID": "2", "CHRONIK_LISTEN_KAFKA": "127.0.0.1:9002"}
    config = load(file, env, {"node_id": 3, "listen.kafka": "127.0.0.1:9003", "data_dir": None})
    assert (config.node_id, config.data_dir, config.rack) == (3, "env", "file")
    assert config.listen.kafka == "127.0.0.1:9003"


def test_every_setting_has_an_environment_variable() -> None:
    env = {
        "CHRONIK_FORWARDING": "false",
        "CHRONIK_PEERS": "2=127.0.0.1:5093,3=127.0.0.1:5094",
        "CHRONIK_LOG_LEVELS": "warning,groups=debug",
        "CHRONIK_TOPIC_DEFAULTS": "retention.ms=5000",
        "CHRONIK_ADVERTISE_KAFKA": "broker.example:9092",
        "CHRONIK_FRAME_BYTES_MAX": "1000",
    }
    config = load(env=env)
    assert config.forwarding is False
    assert config.peers == (Peer(2, "127.0.0.1:5093"), Peer(3, "127.0.0.1:5094"))
    assert config.levels.level_of("groups") == 10
    assert config.topic_defaults == {"retention.ms": "5000"}
    assert config.advertised_kafka() == Endpoint("broker.example", 9092)
    assert config.frame_bytes_max == 1000


def test_the_config_file_accepts_all_tables(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        """
        durability = "replicated"
        [log_levels]
        groups = "debug"
        [topic_defaults]
        "retention.ms" = 5000
        "cleanup.policy" = "compact"
        [[peers]]
        id = 2
        internal = "127.0.0.1:5093"
        """,
    )
    config = load(file)
    assert config.durability == "replicated"
    assert config.topic_defaults == {"retention.ms": 5000, "cleanup.policy": "compact"}
    assert config.peers == (Peer(2, "127.0.0.1:5093"),)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("node_ids = 1", "unknown key node_ids in .*: did you mean node_id?"),
        ("[listen]\nkafak = 'a:1'", "unknown key listen.kafak in .*: did you mean listen.kafka?"),
        ("[[peers]]\nid = 1\nhost = 'a:1'", "unknown key peers.host"),
        ("cluster_secret = 'x'", "did you mean cluster_secret_file"),
        ("zzz = 1", "unknown key zzz"),
        ("node_id = 'one'", "node_id"),
        ("durability = 'sync'", "durability"),
        ("node_id = ", "not valid TOML"),
        ("[listen]\nkafka = 'nine'", "listen.kafka: 'nine' is not HOST:PORT"),
        ("[log_levels]\ngroups = 'loud'", "log_levels: log level 'loud' is unknown"),
        ("executor_threads = 0", "executor_threads = 0 is too small"),
        ("replica_lag_ms_max = 400", "replica_lag_ms_max = 400 is too small"),
        ("scrub_interval_ms = -1", "scrub_interval_ms = -1 is negative: use 0 to turn scrubbing off"),
        ("[[peers]]\nid = 2\ninternal = 'a:1'\n[[peers]]\nid = 2\ninternal = 'b:1'", "two peers have the same id"),
    ],
)
def test_the_error_for_an_invalid_file_names_the_invalid_part(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        load(write(tmp_path, text))
    assert "\n" not in str(refused.value)


def test_the_error_for_a_missing_file_names_the_file() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        load("nowhere.toml")


def test_unrelated_environment_variables_are_ignored() -> None:
    assert load(env={"CHRONIK_SERVICE_HOST": "10.0.0.1", "PATH": "x"}) == NodeConfig()


def test_a_disk_timeout_that_a_busy_disk_would_exceed_is_refused() -> None:
    assert load(env={"CHRONIK_DISK_TIMEOUT_MS": "700"}).disk_timeout_ms == 700
    with pytest.raises(ConfigError, match="disk_timeout_ms = 100 is too small"):
        load(env={"CHRONIK_DISK_TIMEOUT_MS": "100"})


def test_a_wildcard_bind_needs_an_advertised_address() -> None:
    for wildcard in ("0.0.0.0:9092", "[::]:9092"):
        with pytest.raises(ConfigError, match="--advertise HOST:9092"):
            load(flags={"listen.kafka": wildcard})
    accepted = {"advertise.kafka": "broker.example:9092", "security.insecure": True}
    config = load(flags={"listen.kafka": "0.0.0.0:9092", **accepted})
    assert config.advertised_kafka() == Endpoint("broker.example", 9092)


def test_a_wildcard_cannot_be_advertised() -> None:
    with pytest.raises(ConfigError, match="not an address to connect to"):
        load(flags={"advertise.kafka": "0.0.0.0:9092"})


def test_a_public_bind_warns_and_keeps_internal_listeners_on_loopback() -> None:
    for flags in (
        {"listen.kafka": "192.0.2.7:9092"},
        {"listen.kafka": "0.0.0.0:9092", "advertise.kafka": "broker.example:9092"},
    ):
        config = load(flags={**flags, "security.insecure": True})
        assert len(config.warnings()) == 1
        assert config.http_endpoint == Endpoint("127.0.0.1", 6092)
        assert config.internal_endpoint == config.advertised_internal() == Endpoint("127.0.0.1", 5092)


def test_the_internal_host_is_the_kafka_host_if_there_are_peers_unless_configured() -> None:
    insecure = {"CHRONIK_SECURITY_INSECURE": "true"}
    config = load(env={"CHRONIK_PEERS": "2=192.0.2.8:5092", **insecure}, flags={"listen.kafka": "192.0.2.7:9092"})
    assert config.internal_endpoint == Endpoint("192.0.2.7", 5092)
    assert len(config.warnings()) == 2
    alone = load(env=insecure, flags={"listen.kafka": "192.0.2.7:9092", "listen.internal": "192.0.2.7:4000"})
    assert alone.internal_endpoint == Endpoint("192.0.2.7", 4000)


def test_the_cluster_secret_is_not_a_setting() -> None:
    """The secret has its own file, which other users cannot read; settings are visible to everyone."""
    config = load(env={"CHRONIK_CLUSTER_SECRET": "x" * 64, "CHRONIK_CLUSTER_SECRET_FILE": "/run/secret"})
    assert config.cluster_secret_file == "/run/secret"
    assert "x" * 64 not in repr(config)


def test_port_zero_lets_the_system_choose_all_ports() -> None:
    config = load(flags={"listen.kafka": "127.0.0.1:0"})
    assert config.http_endpoint.port == 0
    assert config.advertised_kafka(bound_port=4711) == Endpoint("127.0.0.1", 4711)


def test_the_error_for_a_low_kafka_port_names_the_setting_to_change() -> None:
    with pytest.raises(ConfigError, match="--http"):
        load(flags={"listen.kafka": "127.0.0.1:2000"})


@pytest.mark.parametrize("text", ["host", "host:", ":9092", "host:99999", "::1:9092", "host:-1", "host:９"])
def test_text_that_is_not_an_address_is_refused(text: str) -> None:
    with pytest.raises(EndpointError):
        Endpoint.parse(text)


def test_an_address_reads_back_as_it_was_written() -> None:
    for text in ("127.0.0.1:9092", "[::1]:9092", "broker.example:1"):
        assert str(Endpoint.parse(text)) == text


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        load().node_id = 2  # type: ignore[misc]
    assert msgspec.structs.replace(load(), node_id=2).node_id == 2
