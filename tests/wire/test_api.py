"""Keys, versions and flexible versions, compared with kio's schema."""

import subprocess
import sys

import pytest
from kio.index import load_request_schema, load_response_schema
from kio.schema.index import api_key_map

from chronik.node.api_table import APIS
from chronik.wire.api import ApiKey, is_flexible, known_versions, response_header_is_flexible
from chronik.wire.new_layouts import NEW_REQUESTS
from chronik.wire.old_layouts import OLD_REQUESTS


def test_api_keys_match_those_of_kio() -> None:
    assert {key.value: key.name.lower() for key in ApiKey}.items() <= dict(api_key_map).items()
    assert {api.key for api in APIS} <= set(ApiKey)


@pytest.mark.parametrize("key", list(ApiKey), ids=lambda key: key.name)
def test_flexible_versions_match_the_schema(key: ApiKey) -> None:
    versions = known_versions(key)
    assert len(versions) > 0
    for version in versions:
        if (key, version) in OLD_REQUESTS:
            assert not is_flexible(key, version)
            continue
        if (key, version) in NEW_REQUESTS:
            assert is_flexible(key, version)
            continue
        request = load_request_schema(key, version)
        response = load_response_schema(key, version)
        assert is_flexible(key, version) is request.__flexible__ is response.__flexible__
        assert is_flexible(key, version) is (request.__header_schema__.__version__ == 2)
        assert response_header_is_flexible(key, version) is (response.__header_schema__.__version__ == 1)


def test_api_versions_response_header_is_never_flexible() -> None:
    assert is_flexible(ApiKey.API_VERSIONS, 4)
    assert not response_header_is_flexible(ApiKey.API_VERSIONS, 4)


def test_an_unknown_api_key_has_no_versions_and_is_not_flexible() -> None:
    assert len(known_versions(9999)) == 0
    assert not is_flexible(9999, 100)
    assert not is_flexible(-1, 32767)


def test_importing_the_wire_package_loads_no_message_schema() -> None:
    code = (
        "import sys, chronik.wire.messages, chronik.wire.produce, chronik.wire.fetch, chronik.wire.batch\n"
        "loaded = [m for m in sys.modules if m.startswith('kio.schema.') and '.v' in m and '_header.' not in m]\n"
        "sys.exit(str(loaded) if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
