"""Client settings in Kafka's names, as a file has them: bootstrap servers, security, and properties of other clients.

librdkafka and Java name some settings differently (`ssl.ca.location` and `ssl.truststore.location`). Both names are
accepted, so one file serves every tool. Values of both dialects have to agree.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from chronik.authentication.sasl import OAUTHBEARER, PLAIN
from chronik.client.endpoint import Endpoint, parse_bootstrap
from chronik.client.security import PLAINTEXT_SECURITY, ClientSecurity, SecuritySettingError, parse_security

BOOTSTRAP = "bootstrap.servers"
FILE_BYTES_MAX = 1024 * 1024
OTHERS_BITS = stat.S_IRWXG | stat.S_IRWXO

_JAVA_NAMES = re.compile(r"sasl\.jaas\.config|ssl\.(truststore|keystore)\..*")
"""Settings that only Java's clients know. Their values have the escapes and continued lines of Java's files."""
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


class PropertiesError(ValueError):
    """A file of client settings that cannot be used. The message is one line, without a secret."""


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Where a cluster is and how to connect to it."""

    bootstrap: str
    security: ClientSecurity = PLAINTEXT_SECURITY
    others: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Properties of other clients, for example `fetch.min.bytes`. They are not in the repr: one may be a secret."""
    path: str | None = None
    """The file from which the settings were read. Spark's jobs pass it on in place of the secrets in it."""

    @classmethod
    def of(cls, given: str | ClientSettings) -> ClientSettings:
        """Return the settings themselves, or those of a cluster without security, given by its addresses."""
        return cls(given) if isinstance(given, str) else given

    @property
    def endpoints(self) -> list[Endpoint]:
        return parse_bootstrap(self.bootstrap)

    def at(self, bootstrap: str) -> ClientSettings:
        """Return the same settings for other addresses of the cluster."""
        return replace(self, bootstrap=bootstrap)

    def __str__(self) -> str:
        return self.bootstrap

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path of the file in place of its secrets: Spark stores what its tasks receive."""
        if self.path is not None:
            return load_settings, (self.path, self.bootstrap)
        return ClientSettings, (self.bootstrap, self.security, dict(self.others))


Target: TypeAlias = str | ClientSettings
"""A cluster: its addresses if it has no security, or all settings."""


def load_settings(path: str, bootstrap: str | None = None) -> ClientSettings:
    """Read a file of client settings. `bootstrap` overrides the addresses in it.

    Raise PropertiesError if the file cannot be used, or if it has a secret that other users can read.
    """
    absolute = os.path.abspath(path)
    try:
        with open(absolute, "rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            content = opened.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise PropertiesError(f"cannot read {path}: {error.strerror}") from None
    if len(content) > FILE_BYTES_MAX:
        raise PropertiesError(f"{path} is larger than {FILE_BYTES_MAX} bytes: it is not a file of client settings")
    try:
        settings = settings_of(parse_properties(content.decode()), bootstrap)
    except UnicodeDecodeError:
        raise PropertiesError(f"{path} is not UTF-8 text") from None
    except (PropertiesError, SecuritySettingError) as error:
        raise PropertiesError(f"{path}: {error}") from None
    has_secret = settings.security.has_secret or any(is_secret(name) for name in settings.others)
    if has_secret and mode & OTHERS_BITS:
        raise PropertiesError(f"{path} has a password that other users of this machine can access: chmod 600 {path}")
    return replace(settings, path=absolute)


def settings_of(properties: Mapping[str, str], bootstrap: str | None = None) -> ClientSettings:
    """Return the settings that properties describe. Raise SecuritySettingError or PropertiesError."""
    security, others = parse_security(properties)
    others.pop("metadata.broker.list", None)
    addresses = bootstrap or properties.get(BOOTSTRAP) or properties.get("metadata.broker.list")
    others.pop(BOOTSTRAP, None)
    if not addresses:
        raise PropertiesError(f"{BOOTSTRAP} is missing: add it, or pass -b HOST:PORT")
    return ClientSettings(addresses, security, others)


def java_properties(security: ClientSecurity) -> dict[str, str]:
    """Return the security in the names of Java's clients, which Spark's own Kafka connector has too."""
    given: dict[str, str] = {"security.protocol": security.protocol}
    if security.uses_tls:
        if security.authorities:
            given |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": security.authorities}
        if security.certificate:
            if security.key and security.key != security.certificate:
                raise SecuritySettingError("Java's clients need the certificate and its key in one PEM file")
            given |= {"ssl.keystore.type": "PEM", "ssl.keystore.location": security.certificate}
            if security.key_password:
                given["ssl.key.password"] = security.key_password
        if not security.checks_host:
            given["ssl.endpoint.identification.algorithm"] = ""
        if not security.checks_certificate:
            raise SecuritySettingError("Java's clients always verify certificates: set ssl.ca.location")
    if security.uses_sasl:
        if security.mechanism == OAUTHBEARER:
            raise SecuritySettingError("OAUTHBEARER cannot be passed to Java's clients: use format chronik")
        module = "plain.PlainLoginModule" if security.mechanism == PLAIN else "scram.ScramLoginModule"
        user, password = (_jaas_quoted(text) for text in (security.username, security.password))
        given["sasl.mechanism"] = security.mechanism
        given["sasl.jaas.config"] = (
            f"org.apache.kafka.common.security.{module} required username={user} password={password};"
        )
    return given


def _jaas_quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def is_secret(name: str) -> bool:
    """Whether a property's value must not be shown. Unknown properties are judged by their name, as Spark does."""
    return re.search(r"password|secret|token|jaas|\.key$|\.pem$", name, re.IGNORECASE) is not None


def parse_properties(text: str) -> dict[str, str]:
    """Parse NAME=VALUE lines. # and ! begin comments. Errors name the line's number, never its content."""
    properties: dict[str, str] = {}
    lines = iter(enumerate(text.splitlines(), 1))
    for number, raw in lines:
        line = raw.strip()
        if not line or line[0] in "#!":
            continue
        match = re.match(r"([A-Za-z0-9_.-]+)\s*[=:]\s*", line)
        if match is None:
            raise PropertiesError(f"line {number} is not NAME=VALUE")
        name, value = match[1], line[match.end() :]
        if _JAVA_NAMES.fullmatch(name):
            while _is_continued(value):
                value = value[:-1] + next(lines, (0, ""))[1].strip()
            value = re.sub(r"\\(.)", lambda escape: _ESCAPES.get(escape[1], escape[1]), value)
        properties[name] = value
    return properties


def _is_continued(value: str) -> bool:
    return (len(value) - len(value.rstrip("\\"))) % 2 == 1
