"""Certificates of a test: an authority in a folder, a node's pair, and contexts of clients."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from chronik.local.certificates import create_authority
from chronik.node.config import Tls

HOSTS = ("127.0.0.1", "localhost")


class Certificates:
    """An authority in `folder`, and `node.pem`, `node.key` that it issued."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = create_authority(folder)
        self.authorities = folder / "ca.pem"
        self.issue("node", *HOSTS)

    def issue(self, name: str, *hosts: str, **more: Any) -> tuple[Path, Path]:
        return self.authority.issue(self.folder, name, hosts, **more)

    @property
    def settings(self) -> dict[str, str]:
        """The keys of [tls]."""
        certificate, key = self.folder / "node.pem", self.folder / "node.key"
        return {"certificate": str(certificate), "key": str(key), "authorities": str(self.authorities)}

    def tls(self, **more: Any) -> Tls:
        return Tls(**{**self.settings, **more})

    def client(self, name: str | None = None) -> ssl.SSLContext:
        """Return the context of a client that trusts the authority, with the certificate `name` if given."""
        context = ssl.create_default_context(cafile=str(self.authorities))
        if name is not None:
            context.load_cert_chain(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        return context
