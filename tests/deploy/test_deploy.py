"""The unit files and manifests in deploy/: valid by their schemas, and their settings and commands by ours."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
import yaml

from chronik.node.config import ExposedListener, NodeConfig, load
from chronik.node.process_config import process_config
from chronik.pipeline.service.settings import parse

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
UNITS = sorted(DEPLOY.glob("systemd/*.service"))
MANIFESTS = sorted(DEPLOY.glob("kubernetes/*.yaml"))
KUBERNETES = ("1.29", "1.34")
"""The oldest and the newest version that the manifests are for."""


def objects(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def one(path: Path, kind: str) -> dict[str, Any]:
    (found,) = [each for each in objects(path) if each["kind"] == kind]
    return found


def manifest(name: str) -> Path:
    return DEPLOY / "kubernetes" / f"{name}.yaml"


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_are_valid_by_the_schemas_of_kubernetes(path: Path, version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import kubernetes_validate

        for each in objects(path):
            kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_references_inside_a_manifest_exist(path: Path) -> None:
    stateful, services = one(path, "StatefulSet"), [each for each in objects(path) if each["kind"] == "Service"]
    pod = stateful["spec"]["template"]["spec"]
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    assert stateful["spec"]["selector"]["matchLabels"] == labels
    assert stateful["spec"]["serviceName"] in [each["metadata"]["name"] for each in services]
    (container,) = pod["containers"]
    ports = {port["name"] for port in container["ports"]}
    for service in services:
        assert service["spec"]["selector"] == labels
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    volumes = {volume["name"] for volume in pod["volumes"]}
    volumes |= {claim["metadata"]["name"] for claim in stateful["spec"]["volumeClaimTemplates"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    config = one(path, "ConfigMap")["metadata"]["name"]
    assert {"name": "config", "configMap": {"name": config}} in pod["volumes"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] in ports


@pytest.mark.parametrize("ordinal", range(3))
def test_settings_of_the_nodes_in_kubernetes_start_a_protected_node(ordinal: int, tmp_path: Path) -> None:
    config = node_config(ordinal, tmp_path)
    assert config.node_id == ordinal + 1
    assert list[ExposedListener](config.exposed_listeners()) == [] == config.warnings()
    own = [peer for peer in config.peers if peer.id == config.node_id]
    assert [str(config.advertised_internal())] == [peer.internal for peer in own]
    assert config.sasl.users_file == "/run/chronik/users" and config.authorization.enabled


def node_config(ordinal: int, folder: Path) -> NodeConfig:
    """Run the container's own script up to `chronik`, and load what it passes."""
    stateful = one(manifest("chronik"), "StatefulSet")
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    shell, options, script = container["command"]
    pod = {"POD_NAME": f"chronik-{ordinal}", "POD_NAMESPACE": "chronik"}
    printed = subprocess.run(
        [shell, options, re.sub(r"^cp .*$", "", script, flags=re.MULTILINE).replace("exec chronik", "echo")],
        env={**pod, "PATH": "/bin:/usr/bin"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    flags = dict(zip(printed[1::2], printed[2::2], strict=True))
    file = folder / "node.toml"
    file.write_text(one(manifest("chronik"), "ConfigMap")["data"]["node.toml"])
    env = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    env = {
        name: re.sub(r"\$\((\w+)\)", lambda found: pod[found[1]], value)
        for name, value in env.items()
        if name.startswith("CHRONIK_")
    }
    assert flags["--config"] == "/etc/chronik/node.toml"
    given = {"node_id": flags["--node-id"], "data_dir": flags["--data-dir"], "advertise.kafka": flags["--advertise"]}
    return load(str(file), env, given)


def test_the_pipeline_in_kubernetes_has_a_valid_file() -> None:
    data = one(manifest("pipeline"), "ConfigMap")["data"]
    (name,) = data
    settings = parse(data[name], f"/etc/chronik/pipeline/{name}")
    stateful = one(manifest("pipeline"), "StatefulSet")
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    assert container["command"][-1].split()[-1] == f"/etc/chronik/pipeline/{name}"
    assert stateful["spec"]["replicas"] == 1
    assert settings.listen.endswith(f":{container['ports'][0]['containerPort']}")
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    for path in (settings.properties, settings.landing[0].checkpoint):
        assert any(str(path).startswith(f"{mount}/") for mount in mounts)


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_units_are_valid(path: Path, tmp_path: Path) -> None:
    unit = configparser.RawConfigParser(strict=True)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(path)
    assert set(unit.sections()) == {"Unit", "Service", "Install"}
    service = unit["Service"]
    assert (service["Restart"], service["KillMode"], service["Type"]) == ("always", "mixed", "exec")
    tool = shutil.which("systemd-analyze")
    if tool is None:
        return
    # The check wants programs that exist.
    name = path.name.replace("@.", "@shop.")
    text = re.sub(r"/opt/chronik/bin/\w+", "/bin/true", path.read_text())
    (tmp_path / name).write_text(text)
    checked = subprocess.run([tool, "verify", "--man=no", str(tmp_path / name)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert name not in checked.stderr, checked.stderr


def test_commands_of_the_units_exist() -> None:
    from chronik.cli.app import command

    for path in UNITS:
        (line,) = re.findall(r"^ExecStart=/opt/chronik/bin/chronik (.*)$", path.read_text(), re.MULTILINE)
        words = line.split()
        found: Any = command(words[:1])
        for word in words:
            found = getattr(found, "commands", {}).get(word, found)
        assert found.name == {"start": "start", "pipeline": "run"}[words[0]]


def test_the_file_of_a_machine_in_the_documents_starts_protected_nodes(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", (DEPLOY.parent / "docs" / "deploy.md").read_text(), re.DOTALL)
    file = tmp_path / "node.toml"
    file.write_text(example)
    machine = load(str(file), {}, {})
    nodes = [process_config(machine, number, "machine") for number in range(machine.processes)]
    assert [node.node_id for node in nodes] == [1, 2, 3, 4]
    assert [str(node.http_endpoint) for node in nodes] == [f"127.0.0.1:{port}" for port in (6092, 6093, 6094, 6095)]
    for node in nodes:
        assert list[ExposedListener](node.exposed_listeners()) == [] == node.warnings()
        assert [peer.id for peer in node.peers] == [1, 2, 3, 4, 11, 12, 13, 14, 21, 22, 23, 24]
    unit = (DEPLOY / "systemd" / "chronik.service").read_text()
    assert "--config /etc/chronik/node.toml" in unit
    assert machine.data_dir == "/var/lib/chronik"  # the unit's StateDirectory


def test_the_example_file_in_the_documents_is_valid() -> None:
    text = (DEPLOY.parent / "docs" / "pipeline.md").read_text()
    (example,) = [part for part in re.findall(r"```toml\n(.*?)```", text, re.DOTALL) if "[[landing]]" in part]
    assert len(parse(example, "pipeline.toml").sink) == 1
    tomllib.loads(example)
