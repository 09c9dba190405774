"""The schema registry that a command uses: the one that it is given, else that of the cluster's nodes."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from chronik.cli.errors import CliError
from chronik.cli.options import with_cluster
from chronik.client.errors import SecurityError
from chronik.client.node_addresses import http_addresses
from chronik.client.node_http import caller_of
from chronik.client.properties import ClientSettings

if TYPE_CHECKING:
    from chronik.client.schema_registry import RegistryClient

URL, LOGIN = "schema.registry.url", "basic.auth.user.info"
"""Settings of a schema registry in a file of client settings, as Confluent's clients name them."""

RegistryUrl = Annotated[
    str | None,
    typer.Option(
        "--registry", metavar="URL", help=f"The schema registry; default: {URL} in --properties, else the cluster's."
    ),
]


def registry_client(given: str | None, bootstrap: ClientSettings) -> RegistryClient:
    """Return a client with the credentials for that registry; those of the cluster are sent only to its own nodes."""
    from chronik.client.schema_registry import RegistryClient, RegistryError

    urls: str | Sequence[str] | None = given or bootstrap.others.get(URL)
    try:
        caller = caller_of(bootstrap.security)
        if urls:
            login = bootstrap.others.get(LOGIN, "")
            credentials = f"Basic {base64.b64encode(login.encode()).decode()}" if login else ""
            caller = caller._replace(authorization=credentials)
        else:
            urls = with_cluster(bootstrap, lambda cluster: http_addresses(cluster, caller))
        if not urls:
            raise CliError(f"no schema registry answers in the cluster: pass --registry URL, or {URL} in --properties")
        return RegistryClient(urls, caller)
    except (RegistryError, SecurityError) as error:
        raise CliError(str(error)) from None
