"""How a client proves who it is and checks the broker: the settings, from librdkafka's or Java's names.

security.protocol                          PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL
sasl.mechanism, sasl.mechanisms            PLAIN, SCRAM-SHA-256, SCRAM-SHA-512 or OAUTHBEARER
sasl.username, sasl.password               or Java's sasl.jaas.config
sasl.oauthbearer.token                     a token (JWT); sasl.oauthbearer.token.file names a file that has it
ssl.ca.location                            or Java's ssl.truststore.location with ssl.truststore.type=PEM
ssl.certificate.location, ssl.key.location or Java's ssl.keystore.location with ssl.keystore.type=PEM
ssl.key.password
ssl.endpoint.identification.algorithm      https (default), or none: the host name is not checked
enable.ssl.certificate.verification        true (default) or false
ssl.enabled.protocols                      TLSv1.2,TLSv1.3
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from chronik.authentication.clients import MECHANISMS
from chronik.authentication.sasl import OAUTHBEARER

SecurityProtocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
PROTOCOLS: tuple[SecurityProtocol, ...] = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
TLS_PROTOCOLS = ("SSL", "SASL_SSL")
SASL_PROTOCOLS = ("SASL_PLAINTEXT", "SASL_SSL")
DEFAULT_AUTHORITIES = ("", "probe")
TOKEN_BYTES_MAX = 64 * 1024

_LOGIN_MODULES = {"PlainLoginModule": "PLAIN", "ScramLoginModule": "SCRAM", "OAuthBearerLoginModule": OAUTHBEARER}
_JAAS = re.compile(r"\s*([\w.$]+)\s+(required|requisite|sufficient|optional)\b(.*?);?\s*", re.DOTALL)
_JAAS_OPTION = re.compile(r"""\s*([\w.-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|'([^']*)'|([^\s;"']+))""")

_TUNING = re.compile(r"sasl\.login\..*|sasl\.client\.callback\.handler\.class|sasl\.kerberos\..*|ssl\.protocol")
"""Settings of Java's clients without a meaning here, which do not weaken or strengthen the connection."""
_IN_FILES = {
    "ssl.ca.pem": "ssl.ca.location",
    "ssl.certificate.pem": "ssl.certificate.location",
    "ssl.key.pem": "ssl.key.location",
    "ssl.truststore.certificates": "ssl.truststore.location",
    "ssl.keystore.certificate.chain": "ssl.keystore.location",
    "ssl.keystore.key": "ssl.keystore.location",
}
_TLS_VERSIONS = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}


class SecuritySettingError(ValueError):
    """A setting that is wrong or missing. The message names it, and never contains a secret."""


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """The security of a client's connections. Secrets are not in the repr."""

    protocol: SecurityProtocol = "PLAINTEXT"
    mechanism: str = ""
    username: str = ""
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    token_file: str = ""
    authorities: str = ""
    """A PEM file or a folder with the certificate authorities to trust; empty means those of the system."""
    certificate: str = ""
    key: str = ""
    key_password: str = field(default="", repr=False)
    checks_host: bool = True
    checks_certificate: bool = True
    tls_versions: tuple[str, ...] = tuple(_TLS_VERSIONS)

    @property
    def uses_tls(self) -> bool:
        return self.protocol in TLS_PROTOCOLS

    @property
    def uses_sasl(self) -> bool:
        return self.protocol in SASL_PROTOCOLS

    @property
    def has_secret(self) -> bool:
        return bool(self.password or self.token or self.key_password)

    @property
    def who(self) -> str:
        """Return the identity that the broker should see, as far as the settings tell."""
        if self.uses_sasl:
            return f"User:{self.username}" if self.username else "the owner of the token"
        if self.uses_tls and self.certificate:
            return f"the owner of {self.certificate}"
        return "User:ANONYMOUS"

    def ssl_context(self) -> ssl.SSLContext | None:
        """Load the certificates; return None without TLS. Reads files. Raise SecuritySettingError."""
        if not self.uses_tls:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        versions = [_TLS_VERSIONS[version] for version in self.tls_versions]
        context.minimum_version, context.maximum_version = min(versions), max(versions)
        context.check_hostname = self.checks_host and self.checks_certificate
        context.verify_mode = ssl.CERT_REQUIRED if self.checks_certificate else ssl.CERT_NONE
        self._load_authorities(context)
        if self.certificate:
            self._load_certificate(context)
        return context

    def bearer_token(self) -> str:
        """Return the token, from its file if there is one. A file is read each time: tokens expire."""
        if not self.token_file:
            return self.token
        try:
            with open(self.token_file, "rb") as opened:
                token = opened.read(TOKEN_BYTES_MAX).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise SecuritySettingError(f"sasl.oauthbearer.token.file {self.token_file}: {reason}") from None
        if not token:
            raise SecuritySettingError(f"sasl.oauthbearer.token.file {self.token_file} is empty")
        return token

    def _load_authorities(self, context: ssl.SSLContext) -> None:
        if self.authorities in DEFAULT_AUTHORITIES:
            context.load_default_certs()
            return
        is_folder = os.path.isdir(self.authorities)
        try:
            context.load_verify_locations(
                None if is_folder else self.authorities, self.authorities if is_folder else None
            )
        except ssl.SSLError:
            raise SecuritySettingError(f"ssl.ca.location {self.authorities} has no certificates in PEM") from None
        except OSError as error:
            raise SecuritySettingError(f"ssl.ca.location {self.authorities}: {error.strerror}") from None

    def _load_certificate(self, context: ssl.SSLContext) -> None:
        def password() -> str:
            if not self.key_password:
                # Without this, OpenSSL would ask on the terminal.
                raise SecuritySettingError(f"the key in {self.key or self.certificate} is encrypted: ssl.key.password")
            return self.key_password

        try:
            context.load_cert_chain(self.certificate, self.key or None, password)
        except ssl.SSLError as error:
            reason = (
                "the key does not belong to the certificate"
                if error.reason == "KEY_VALUES_MISMATCH"
                else "wrong ssl.key.password"
                if self.key_password
                and error.reason in ("BAD_DECRYPT", "BAD_PASSWORD_READ", "PKCS12_CIPHERFINAL_ERROR")
                else "they are not a certificate and its private key in PEM"
            )
            files = f"{self.certificate} and {self.key}" if self.key else self.certificate
            raise SecuritySettingError(f"ssl.certificate.location, ssl.key.location ({files}): {reason}") from None
        except OSError as error:
            files = f"{self.certificate} or {self.key}" if self.key else self.certificate
            raise SecuritySettingError(
                f"ssl.certificate.location, ssl.key.location ({files}): {error.strerror}"
            ) from None


PLAINTEXT_SECURITY = ClientSecurity()


def parse_security(properties: Mapping[str, str]) -> tuple[ClientSecurity, dict[str, str]]:
    """Return the security that properties describe, and all other properties. Raise SecuritySettingError."""
    given = {name: value.strip() for name, value in properties.items() if name.startswith(("ssl.", "sasl."))}
    others = {name: value for name, value in properties.items() if name not in given}
    protocol = _protocol(others.pop("security.protocol", ""))
    verification = others.pop("enable.ssl.certificate.verification", "true").strip().lower()
    if verification not in ("true", "false"):
        raise SecuritySettingError(f"enable.ssl.certificate.verification={verification} is neither true nor false")
    for name, instead in _IN_FILES.items():
        if name in given:
            raise SecuritySettingError(f"{name} is not supported: write the PEM to a file, and name it with {instead}")
    jaas = _jaas(given.pop("sasl.jaas.config", ""))
    sasl = _sasl(given, jaas) if protocol.startswith("SASL_") else _without(given, "sasl.")
    tls = _tls(given) if protocol.endswith("SSL") else _without(given, "ssl.")
    unknown = sorted(name for name in given if not _TUNING.fullmatch(name))
    if unknown:
        raise SecuritySettingError(f"{unknown[0]} is not supported by this client: remove it")
    return ClientSecurity(protocol=protocol, checks_certificate=verification == "true", **sasl, **tls), others


def _protocol(text: str) -> SecurityProtocol:
    protocol = text.strip().upper() or "PLAINTEXT"
    if protocol not in PROTOCOLS:
        raise SecuritySettingError(f"security.protocol={text} is unknown: use {', '.join(PROTOCOLS)}")
    return protocol


def _without(given: dict[str, str], prefix: str) -> dict[str, Any]:
    """Drop settings that the protocol does not use: one file may serve several protocols."""
    for name in [name for name in given if name.startswith(prefix)]:
        del given[name]
    return {}


def _sasl(given: dict[str, str], jaas: Mapping[str, str]) -> dict[str, Any]:
    mechanism = _same(given, "sasl.mechanism", "sasl.mechanisms").upper()
    if not mechanism:
        raise SecuritySettingError(f"sasl.mechanism is missing: use one of {', '.join(MECHANISMS)}")
    if mechanism not in MECHANISMS:
        raise SecuritySettingError(f"sasl.mechanism={mechanism} is not supported: use {', '.join(MECHANISMS)}")
    expected = jaas.get("", mechanism)
    if not mechanism.startswith(expected):
        raise SecuritySettingError(f"the login module in sasl.jaas.config is for {expected}, not for {mechanism}")
    username = given.pop("sasl.username", "") or jaas.get("username", "")
    password = given.pop("sasl.password", "") or jaas.get("password", "")
    token = given.pop("sasl.oauthbearer.token", "") or jaas.get("token", "")
    token_file = given.pop("sasl.oauthbearer.token.file", "")
    url = given.pop("sasl.oauthbearer.token.endpoint.url", "")
    if url and not url.startswith("file:"):
        raise SecuritySettingError(
            "sasl.oauthbearer.token.endpoint.url is not supported: get a token, and name its file with "
            "sasl.oauthbearer.token.file"
        )
    token_file = token_file or url.removeprefix("file://").removeprefix("file:")
    if mechanism == OAUTHBEARER:
        if not token and not token_file:
            raise SecuritySettingError("OAUTHBEARER needs sasl.oauthbearer.token.file or sasl.oauthbearer.token")
        return {"mechanism": mechanism, "token": token, "token_file": token_file}
    if not username or not password:
        missing = "sasl.password" if username else "sasl.username"
        raise SecuritySettingError(f"{mechanism} needs {missing}, or sasl.jaas.config with a user and a password")
    return {"mechanism": mechanism, "username": username, "password": password}


def _tls(given: dict[str, str]) -> dict[str, Any]:
    for store in ("truststore", "keystore"):
        kind = given.pop(f"ssl.{store}.type", "JKS" if f"ssl.{store}.location" in given else "PEM").upper()
        if kind != "PEM":
            raise SecuritySettingError(f"ssl.{store}.type={kind} is not supported: use PEM files, ssl.{store}.type=PEM")
        given.pop(f"ssl.{store}.password", None)
    authorities = _same(given, "ssl.ca.location", "ssl.truststore.location")
    certificate = _same(given, "ssl.certificate.location", "ssl.keystore.location")
    key = given.pop("ssl.key.location", "")
    if key and not certificate:
        raise SecuritySettingError("ssl.key.location needs ssl.certificate.location")
    identification = given.pop("ssl.endpoint.identification.algorithm", "https").lower()
    if identification not in ("https", "none", ""):
        raise SecuritySettingError(f"ssl.endpoint.identification.algorithm={identification}: use https or none")
    versions = tuple(part.strip() for part in given.pop("ssl.enabled.protocols", "TLSv1.2,TLSv1.3").split(","))
    if not versions or not set(versions) <= _TLS_VERSIONS.keys():
        raise SecuritySettingError(f"ssl.enabled.protocols={','.join(versions)}: use {', '.join(_TLS_VERSIONS)}")
    return {
        "authorities": authorities,
        "certificate": certificate,
        "key": key,
        "key_password": given.pop("ssl.key.password", ""),
        "checks_host": identification == "https",
        "tls_versions": versions,
    }


def _same(given: dict[str, str], one: str, other: str) -> str:
    """Take a setting that has two names. Both may be given if they agree."""
    first, second = given.pop(one, ""), given.pop(other, "")
    if first and second and first != second:
        raise SecuritySettingError(f"{one} and {other} differ: remove one")
    return first or second


def _jaas(text: str) -> dict[str, str]:
    """Return the options of a login module; its mechanism under the empty name."""
    if not text.strip():
        return {}
    match = _JAAS.fullmatch(text)
    module = match[1].rpartition(".")[2] if match else ""
    if match is None or module not in _LOGIN_MODULES:
        raise SecuritySettingError(
            f"sasl.jaas.config is not MODULE required NAME=VALUE...; with one of {', '.join(_LOGIN_MODULES)}"
        )
    return {"": _LOGIN_MODULES[module], **dict(_jaas_options(match[3]))}


def _jaas_options(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while text[at:].strip():
        match = _JAAS_OPTION.match(text, at)
        if match is None:
            raise SecuritySettingError('an option in sasl.jaas.config is not NAME="VALUE"')
        quoted, single, bare = match[2], match[3], match[4]
        value = re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else single if single is not None else bare
        yield match[1], value
        at = match.end()
