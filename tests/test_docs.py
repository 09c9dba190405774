"""Check the documents that describe the code against the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
from kio.schema.index import api_key_map
from prometheus_client.parser import text_string_to_metric_families

from chronik.node.api_table import APIS
from chronik.node.config import NodeConfig
from chronik.node.serving.rights import RIGHTS
from chronik.observe.metrics import Metrics, api_name

DOCS = Path(__file__).resolve().parents[1] / "docs"
OPERATIONS = DOCS / "operations.md"
DASHBOARD = DOCS / "grafana.json"
PROTOCOL = DOCS / "protocol.md"
SECURITY = DOCS / "security.md"


def test_protocol_lists_every_api_with_its_versions() -> None:
    rows = re.findall(r"^\| (\d+) \| (\w+) \| (\d+)-(\d+) \|", PROTOCOL.read_text(), re.MULTILINE)
    documented = {int(key): (name, (int(lowest), int(highest))) for key, name, lowest, highest in rows}
    assert documented == {int(api.key): (api_name(api.key), api.versions) for api in APIS}


def rights_table() -> str:
    """Return the table of docs/security.md; `python -m tests.test_docs` prints it."""
    lines = ["| key | API | operation | resource | without it |", "|---|---|---|---|---|"]
    for key, rights in sorted(RIGHTS.items()):
        name = "".join(word.capitalize() for word in api_key_map[key].split("_"))
        if not rights:
            lines.append(f"| {key} | {name} | none | | |")
        for right in rights:
            resource = right.resource_type.name.lower().replace("_", " ")
            if right.condition:
                resource = f"{resource}, {right.condition}"
            lines.append(f"| {key} | {name} | {right.operation.name} | {resource} | {right.without} |")
    return "\n".join(lines)


def test_security_lists_the_rights_of_every_api() -> None:
    assert {int(api.key) for api in APIS} <= set(RIGHTS)
    assert f"\n\n{rights_table()}\n\n" in SECURITY.read_text(), "python -m tests.test_docs prints the table"


def test_operations_names_every_setting_with_its_default() -> None:
    documented = dict(re.findall(r"^\| `([a-z_.]+)` \| `?([^`|]*?)`? \|", OPERATIONS.read_text(), re.MULTILINE))
    for setting in msgspec.structs.fields(NodeConfig):
        if isinstance(setting.type, type) and issubclass(setting.type, msgspec.Struct):
            nested = [f"{setting.name}.{field.name}" for field in msgspec.structs.fields(setting.type)]
            assert [name for name in nested if name not in documented] == []
            continue
        assert setting.name in documented
        if isinstance(setting.default, bool | int):
            assert documented[setting.name] == str(setting.default).lower()


def metric_names() -> dict[str, set[str]]:
    """By metric family: the names under which Prometheus stores its samples."""
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}
    families = text_string_to_metric_families(Metrics().exposition().decode())
    return {family.name: {family.name + suffix for suffix in suffixes.get(family.type, ("",))} for family in families}


def test_operations_documents_every_metric() -> None:
    documented = set(re.findall(r"`((?:chronik|process)_[a-z_]+)`", OPERATIONS.read_text()))
    missing = [name for name, stored in metric_names().items() if not documented & {name, *stored}]
    assert missing == []


def test_the_dashboard_shows_every_important_metric_and_only_existing_ones() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    queries += [variable["definition"] for variable in dashboard["templating"]["list"] if "definition" in variable]
    named = {name for query in queries for name in re.findall(r"\b(?:chronik|process)_[a-z_]+", query)}
    stored = metric_names()
    assert named <= set().union(*stored.values())
    shown = {family for family, names in stored.items() if names & named}
    details = {
        "chronik_log_start_offset",
        "chronik_high_watermark",
        "chronik_last_stable_offset",
        "chronik_watermark_updates",
    }
    assert set(stored) - shown <= details
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(places)


if __name__ == "__main__":
    print(rights_table())
