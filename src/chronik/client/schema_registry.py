"""A client of a schema registry (of a node, or of any registry with Confluent's REST API), for code without a loop.

It caches what never changes: the schema of an id, and of a version of a subject. Threads may share it.
"""

from __future__ import annotations

import base64
import json
import ssl
import threading
import urllib.error
import urllib.request
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode, urlsplit, urlunsplit

from chronik.client.node_http import ANONYMOUS, Caller

CONTENT_TYPE = "application/vnd.schemaregistry.v1+json"
TIMEOUT_S = 10.0
CACHED_MAX = 1_000
RESPONSE_BYTES_MAX = 16 * 1024 * 1024
REFERENCES_DEPTH_MAX = 50
SERVER_ERRORS = 500
AVRO, JSON_SCHEMA, PROTOBUF = "AVRO", "JSON", "PROTOBUF"


class RegistryError(Exception):
    """The registry did not answer, or refused. `status` is 0 without an answer; `code` is Confluent's error code."""

    def __init__(self, message: str, status: int = 0, code: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class Reference:
    """A schema that another schema uses under `name`: a type (Avro), an address (JSON Schema) or an import."""

    name: str
    subject: str
    version: int
    schema: Schema


@dataclass(frozen=True, slots=True)
class Schema:
    """A schema with everything that it refers to. `kind` is AVRO, JSON or PROTOBUF."""

    kind: str
    text: str
    references: tuple[Reference, ...] = ()

    def flat(self) -> list[Reference]:
        """Return all references, the innermost first, each name once: the order in which a parser needs them."""
        found: dict[str, Reference] = {}
        for reference in self.references:
            found.update((inner.name, inner) for inner in reference.schema.flat() if inner.name not in found)
            found.setdefault(reference.name, reference)
        return list(found.values())


class RegistryClient:
    """Requests to a registry. With several addresses, it tries the next one if one cannot answer."""

    def __init__(self, urls: str | Sequence[str], caller: Caller = ANONYMOUS, timeout_s: float = TIMEOUT_S) -> None:
        """`urls` may be one text with commas. A user and a password in a URL are sent as Basic credentials."""
        texts = urls.split(",") if isinstance(urls, str) else list(urls)
        self._urls = [_address(text.strip()) for text in texts if text.strip()]
        if not self._urls:
            raise RegistryError("no address of a schema registry is given: pass http://HOST:PORT")
        self._authorization = caller.authorization
        context = caller.tls or ssl.create_default_context()
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[str, str], Any] = OrderedDict()

    # -- what never changes --------------------------------------------------------------------------------------------

    def schema(self, schema_id: int, subject: str = "") -> Schema:
        """Return the schema with this id, and all that it refers to. `subject` selects the context of the id."""
        path = f"/schemas/ids/{schema_id}"
        return self._parsed(self._cached(path, subject=subject or None), 0)

    def version(self, subject: str, version: int) -> Schema:
        return self._parsed(self._cached(f"/subjects/{quote(subject, safe='')}/versions/{version}", deleted="true"), 0)

    def descriptors(self, schema_id: int, subject: str = "") -> dict[str, bytes]:
        """Return the serialized FileDescriptorProto of a Protobuf schema and of its imports, imports first.

        The keys are the names that files import; the schema itself has the empty name. Files of Google's own that the
        schema imports without a reference (google/protobuf/...) are not included.
        """
        found: dict[str, bytes] = {}
        for reference in self.schema(schema_id, subject).flat():
            path = f"/subjects/{quote(reference.subject, safe='')}/versions/{reference.version}"
            found[reference.name] = _descriptor(self._cached(path, deleted="true", format="serialized"))
        path = f"/schemas/ids/{schema_id}"
        return {**found, "": _descriptor(self._cached(path, subject=subject or None, format="serialized"))}

    def _parsed(self, answer: dict[str, Any], depth: int) -> Schema:
        if depth > REFERENCES_DEPTH_MAX:
            raise RegistryError(f"references are nested more than {REFERENCES_DEPTH_MAX} deep")
        references = []
        for each in answer.get("references") or ():
            path = f"/subjects/{quote(each['subject'], safe='')}/versions/{each['version']}"
            schema = self._parsed(self._cached(path, deleted="true"), depth + 1)
            references.append(Reference(each["name"], each["subject"], each["version"], schema))
        return Schema(answer.get("schemaType") or AVRO, answer["schema"], tuple(references))

    def _cached(self, path: str, **query: str | None) -> dict[str, Any]:
        key = path, urlencode({name: value for name, value in query.items() if value is not None})
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return dict(self._cache[key])
        answer = self.request("GET", path, **query)
        if not isinstance(answer, dict) or not isinstance(answer.get("schema"), str):
            raise RegistryError(f"{path} did not answer with a schema: is the address that of a schema registry?")
        with self._lock:
            self._cache[key] = answer
            while len(self._cache) > CACHED_MAX:
                self._cache.popitem(last=False)
        return dict(answer)

    # -- any request ---------------------------------------------------------------------------------------------------

    def request(self, method: str, path: str, body: object = None, **query: str | None) -> Any:
        """Return the parsed answer. Raise RegistryError with the registry's message. `path` is already quoted."""
        given = {name: value for name, value in query.items() if value is not None}
        target = path + (f"?{urlencode(given)}" if given else "")
        failure: RegistryError | None = None
        for url, credentials in self._urls:
            try:
                return self._send(method, url + target, credentials or self._authorization, body)
            except RegistryError as error:
                if error.status and error.status < SERVER_ERRORS:
                    raise
                failure = error
        assert failure is not None
        raise failure

    def _send(self, method: str, url: str, authorization: str, body: object) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Accept": CONTENT_TYPE, "Content-Type": CONTENT_TYPE}
        if authorization:
            headers["Authorization"] = authorization
        # The scheme is http or https: `_address` checks it.
        request = urllib.request.Request(url, data, headers, method=method)  # noqa: S310
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                return json.loads(response.read(RESPONSE_BYTES_MAX))
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(error, url) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise RegistryError(f"the schema registry {url.partition('?')[0]} did not answer: {reason}") from None


def _refusal(error: urllib.error.HTTPError, url: str) -> RegistryError:
    try:
        answer = json.loads(error.read(RESPONSE_BYTES_MAX))
        message, code = str(answer.get("message") or answer.get("error")), int(answer.get("error_code", error.code))
    except (OSError, ValueError, AttributeError, TypeError):
        message, code = str(error.reason), error.code
    return RegistryError(f"{message} ({url.partition('?')[0]} answered {error.code})", error.code, code)


def _address(text: str) -> tuple[str, str]:
    """Return a URL without credentials, and the credentials as a header's value."""
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise RegistryError(f"{text} is not the address of a schema registry: pass http://HOST:PORT")
    login, _, place = parts.netloc.rpartition("@")
    credentials = f"Basic {base64.b64encode(login.encode()).decode()}" if login else ""
    return urlunsplit((parts.scheme, place, parts.path.rstrip("/"), "", "")), credentials


def _descriptor(answer: dict[str, Any]) -> bytes:
    try:
        return base64.b64decode(answer["schema"], validate=True)
    except ValueError:
        raise RegistryError("the registry ignores format=serialized: it returned no serialized descriptor") from None
