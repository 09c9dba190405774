"""Security of a local cluster: its certificates, its administrator, and files of client settings.

DIR/certs/ca.pem, ca.key          the authority; see `certificates`
DIR/certs/node-N.pem, node-N.key  a node's certificate, for clients, HTTP and other nodes
DIR/users                         the administrator and its random password, for the nodes (mode 0600)
DIR/client.properties             client settings of the administrator, in librdkafka's names (mode 0600)
DIR/java.properties               the same in Java's names (mode 0600)

Paths in the files are absolute. They are written again at each start, because the folder may have been moved.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from chronik.authentication.sasl import SCRAM_SHA_512
from chronik.client.properties import ClientSettings, PropertiesError, java_properties, load_settings
from chronik.client.security import ClientSecurity
from chronik.local.certificates import create_authority, load_authority
from chronik.local.errors import LocalClusterError

CERTIFICATES = "certs"
USERS = "users"
CLIENT_PROPERTIES = "client.properties"
JAVA_PROPERTIES = "java.properties"
ADMINISTRATOR = "admin"
PASSWORD_BYTES = 24
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_secured(folder: str) -> bool:
    return os.path.exists(os.path.join(folder, USERS))


def create_security(folder: str) -> None:
    """Create the authority and the administrator of a new cluster."""
    certificates = os.path.join(folder, CERTIFICATES)
    if not os.path.exists(os.path.join(certificates, "ca.key")):
        create_authority(certificates)
    _write_private(os.path.join(folder, USERS), f"{ADMINISTRATOR}:{secrets.token_urlsafe(PASSWORD_BYTES)}\n")


def node_settings(folder: str, node_id: int, hosts: Sequence[str]) -> dict[str, Any]:
    """Return the security settings of a node, and issue its certificate if it has none."""
    certificates = os.path.join(folder, CERTIFICATES)
    name = f"node-{node_id}"
    if not os.path.exists(os.path.join(certificates, f"{name}.pem")):
        load_authority(certificates).issue(certificates, name, list(dict.fromkeys((*LOOPBACK, *hosts))))
    return {
        "security": {"protocol": "SASL_SSL", "internal_tls": True, "http_tls": True, "http_login": True},
        "tls": {
            "certificate": os.path.join(certificates, f"{name}.pem"),
            "key": os.path.join(certificates, f"{name}.key"),
            "authorities": _authorities(folder),
        },
        "sasl": {"mechanisms": [SCRAM_SHA_512], "users_file": os.path.join(folder, USERS)},
        "authorization": {"enabled": True, "super_users": [f"User:{ADMINISTRATOR}"]},
    }


def write_client_settings(folder: str, bootstrap: str) -> None:
    """Write the files of client settings of the administrator."""
    security = _administrator(folder)
    client = {
        "bootstrap.servers": bootstrap,
        "security.protocol": security.protocol,
        "sasl.mechanism": security.mechanism,
        "sasl.username": security.username,
        "sasl.password": security.password,
        "ssl.ca.location": security.authorities,
    }
    _write_private(os.path.join(folder, CLIENT_PROPERTIES), _lines(client))
    java = {"bootstrap.servers": bootstrap, **java_properties(security)}
    escaped = {name: value.replace("\\", "\\\\") for name, value in java.items()}
    _write_private(os.path.join(folder, JAVA_PROPERTIES), _lines(escaped))


def client_settings(folder: str, bootstrap: str) -> ClientSettings:
    """Return how to connect to the cluster of a folder: as its administrator, if it is secured."""
    path = os.path.join(folder, CLIENT_PROPERTIES)
    if not is_secured(folder):
        return ClientSettings(bootstrap)
    try:
        return load_settings(path, bootstrap)
    except PropertiesError as error:
        raise LocalClusterError(f"{error}; chronik cluster up writes it again") from None


def _administrator(folder: str) -> ClientSecurity:
    path = os.path.join(folder, USERS)
    try:
        with open(path, encoding="utf-8") as opened:
            name, _, password = opened.readline().rstrip("\n").partition(":")
    except OSError as error:
        raise LocalClusterError(f"cannot read {path}: {error.strerror}; it has the administrator's password") from None
    return ClientSecurity(
        protocol="SASL_SSL",
        mechanism=SCRAM_SHA_512,
        username=name,
        password=password,
        authorities=_authorities(folder),
    )


def _authorities(folder: str) -> str:
    return os.path.join(folder, CERTIFICATES, "ca.pem")


def _lines(properties: Mapping[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in properties.items())


def _write_private(path: str, text: str) -> None:
    """Replace a file that only this user may read."""
    temporary = f"{path}.new"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as opened:
            os.fchmod(descriptor, 0o600)
            opened.write(text)
        os.replace(temporary, path)
    except OSError as error:
        raise LocalClusterError(
            f"cannot write {path}: {error.strerror}; make it writable, or pass another --dir"
        ) from None
