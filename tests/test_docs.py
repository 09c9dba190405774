"""The documents that state what the code does, held against the code."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from chronik.node.apis import load_apis
from chronik.node.config import NodeConfig
from chronik.observe.metrics import api_name

DOCS = Path(__file__).resolve().parents[1] / "docs"
OPERATIONS = DOCS / "operations.md"
PROTOCOL = DOCS / "protocol.md"


def test_protocol_lists_every_api_with_its_versions() -> None:
    rows = re.findall(r"^\| (\d+) \| (\w+) \| (\d+)-(\d+) \|", PROTOCOL.read_text(), re.MULTILINE)
    documented = {int(key): (name, (int(lowest), int(highest))) for key, name, lowest, highest in rows}
    assert documented == {key: (api_name(key), api.versions) for key, api in load_apis().items()}


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
