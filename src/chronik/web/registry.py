"""The REST API of the schema registry, at Confluent's paths: /subjects, /schemas, /config, /mode, /compatibility.

Rights are those of topics: a subject NAME-key or NAME-value belongs to the topic NAME, any other subject to the topic
of its own name. Reading needs DESCRIBE, registering WRITE, deleting DELETE, settings ALTER_CONFIGS on the topic; global
settings need ALTER_CONFIGS on the cluster. A schema to which references lead needs DESCRIBE, too; without it, it is
answered like a missing one. Unknown query parameters and fields are ignored, as clients send new ones.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from chronik import __version__
from chronik.authorization.acls import CLUSTER_NAME, Operation, ResourceType
from chronik.node.schema_registry import SchemaRegistry
from chronik.node.serving.access import Access
from chronik.schemas.commands import DEFAULT_LEVEL, ID_MAX, REFERENCES_MAX, Command, version_view
from chronik.schemas.errors import MISSING, Code, Refused, schema_not_found, subject_not_found, version_not_found
from chronik.schemas.parsing import TYPES
from chronik.schemas.state import State, Version, context_of, normal_subject
from chronik.web.answers import CHALLENGE, Refusal, Visitor
from chronik.web.guard import Guard
from chronik.web.known_answers import VIEW, view_of
from chronik.web.node_view import NodeView

CONTENT_TYPE = "application/vnd.schemaregistry.v1+json"
PLAIN_CONTENT_TYPE = "application/json"
PATHS = frozenset({"subjects", "schemas", "config", "mode", "compatibility", "contexts", "v1"})
BODY_BYTES_MAX = 2 * 1024 * 1024
LISTED_MAX = 10_000
READING = frozenset({"register", "lookup", "check"})
"""Commands that read the schemas to which references lead."""


class RegistryRoute(BaseRoute):
    """All paths of the registry. It splits the raw path itself: a subject may contain an escaped slash."""

    def __init__(self, node: NodeView, guard: Guard) -> None:
        self._node = node
        self._guard = guard

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        # `OPTIONS *` and CONNECT have paths that do not begin with a slash.
        first = scope["path"].removeprefix("/").partition("/")[0] if scope["type"] == "http" else ""
        return (Match.FULL, {}) if first in PATHS else (Match.NONE, {})

    def url_path_for(self, name: str, /, **path_params: Any) -> Any:
        raise NotImplementedError

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        view = view_of(self._node)
        try:
            answer = _answer(await self._respond(request), content_type=_content_type(request))
        except Refused as error:
            answer = _answer({"error_code": error.code, "message": error.message}, error.status)
        except Refusal as refusal:
            answer = _answer({"error_code": refusal.status, "message": refusal.line}, refusal.status)
            if refusal.status == 401:
                answer.headers["www-authenticate"] = CHALLENGE
        if view is not None and answer.status_code == 200 and view == view_of(self._node):
            # A GET that succeeds is answered from this state, or from what never changes.
            scope.setdefault("state", {})[VIEW] = view
        await answer(scope, receive, send)

    async def _respond(self, request: Request) -> Any:
        raw = request.scope.get("raw_path") or request.scope["path"].encode()
        try:
            path = raw.decode("latin-1").partition("?")[0].strip("/")
            parts = [unquote(part, errors="strict") for part in path.split("/")]
        except UnicodeDecodeError:
            raise Refused(400, "the path is not UTF-8") from None
        is_read = request.method in ("GET", "HEAD") or parts[0] == "compatibility"
        # A lookup by POST changes nothing, but the body comes from the client.
        visitor = await (self._guard.admit(request, "login") if is_read else self._guard.admit_change(request))
        registry = self._node.schemas
        if registry is None or not self._node.is_ready:
            raise Refused(503, "this node is starting, stopping or disconnected: use another node")
        if parts == ["v1", "metadata", "id"] and request.method in ("GET", "HEAD"):
            image = self._node.image
            clusters = {
                "kafka-cluster": image.cluster_id if image is not None else "",
                "schema-registry-cluster": "schema-registry",
            }
            return {"scope": {"path": [], "clusters": clusters}}
        return await _Call(registry, request, visitor, parts).run()


def _content_type(request: Request) -> str:
    """Return the type of the answer: plain JSON only for clients that accept no type of a registry."""
    accepted = [part.partition(";")[0].strip() for part in request.headers.get("accept", "").split(",")]
    is_plain = PLAIN_CONTENT_TYPE in accepted and not any("schemaregistry" in each for each in accepted)
    return PLAIN_CONTENT_TYPE if is_plain else CONTENT_TYPE


def _answer(value: Any, status: int = 200, content_type: str = CONTENT_TYPE) -> Response:
    body = value if isinstance(value, bytes) else json.dumps(value, separators=(",", ":")).encode()
    return Response(body, status, {"content-type": content_type, "cache-control": "no-store"})


class _OneVersion(NamedTuple):
    """An answer with the schema of one version: its text, or an object with it."""

    version: Version
    view: dict[str, Any] | bytes


class _Call:
    """One request."""

    def __init__(self, registry: SchemaRegistry, request: Request, visitor: Visitor, parts: list[str]) -> None:
        self._registry = registry
        self._request = request
        self._access: Access = visitor.access
        self._parts = parts
        self._query = request.query_params

    async def run(self) -> Any:
        method = "GET" if self._request.method == "HEAD" else self._request.method
        match method, self._parts:
            case "GET", ["schemas", "types"]:
                return list(TYPES)
            case "GET", _ if (look := self._lookup()) is not None:
                return await self._in_format(await self._look_up(look))
            case "POST", ["subjects", subject]:
                self._require(Operation.DESCRIBE, subject)
                return await self._decide("lookup", subject, body=await self._body())
            case "POST", ["subjects", subject, "versions"]:
                self._require(Operation.WRITE, subject)
                return await self._submit("register", subject, body=await self._body())
            case "POST", ["compatibility", "subjects", subject, "versions", *rest] if len(rest) <= 1:
                self._require(Operation.DESCRIBE, subject)
                return await self._check(subject, _version(rest[0]) if rest else None)
            case "DELETE", ["subjects", subject]:
                self._require(Operation.DELETE, subject)
                return await self._submit("delete_subject", subject)
            case "DELETE", ["subjects", subject, "versions", text]:
                self._require(Operation.DELETE, subject)
                return await self._submit("delete_version", subject, version=_version(text))
            case "PUT", [("config" | "mode") as what, *rest] if len(rest) <= 1:
                return await self._setting(f"set_{what}", "".join(rest), body=await self._body())
            case "DELETE", [("config" | "mode") as what, *rest] if len(rest) <= 1:
                return await self._setting(f"delete_{what}", "".join(rest))
        if method not in ("GET", "POST", "PUT", "DELETE"):
            raise Refused(405, "HTTP 405 Method Not Allowed")
        raise Refused(404, "HTTP 404 Not Found")

    # -- changes -------------------------------------------------------------------------------------------------------

    async def _setting(self, name: str, subject: str, **arguments: Any) -> Any:
        if normal_subject(subject):
            self._require(Operation.ALTER_CONFIGS, subject)
        elif not self._access.allows(Operation.ALTER_CONFIGS, ResourceType.CLUSTER, CLUSTER_NAME):
            raise Refused(403, "you may not change global settings: ask for ALTER_CONFIGS on the cluster")
        return await self._submit(name, subject, **arguments)

    async def _submit(self, name: str, subject: str, **arguments: Any) -> Any:
        answer = await self._run(self._registry.submit, name, subject, arguments)
        return {"id": answer["id"]} if name == "register" and "schema" in answer else answer

    async def _check(self, subject: str, number: int | None) -> Any:
        """Test a schema. A client that wants reasons gets those of an invalid schema in the same place."""
        try:
            return await self._decide("check", subject, body=await self._body(), version=number)
        except Refused as refused:
            if refused.code != Code.INVALID_SCHEMA or not self._flag("verbose"):
                raise
            return {"is_compatible": False, "messages": [refused.message]}

    async def _decide(self, name: str, subject: str, **arguments: Any) -> Any:
        """Answer a command that changes nothing from this node's own state; parsing runs in a thread."""
        return await self._run(self._registry.decide, name, subject, arguments)

    async def _run(
        self, run: Callable[[Command], Awaitable[Any]], name: str, subject: str, arguments: dict[str, Any]
    ) -> Any:
        command = self._command(name, subject, arguments)
        if self._access.is_open or name not in READING:
            return await run(command)

        def visible(state: State) -> Command:
            names = self._visible_references(state, command.subject, arguments["body"])
            return command._replace(arguments={**command.arguments, "visible": sorted(names or ())})

        try:
            return await run(visible(await self._registry.current()))
        except Refused as refused:
            if refused.code not in MISSING:
                raise
        return await run(visible(await self._registry.caught_up()))

    def _command(self, name: str, subject: str, arguments: dict[str, Any]) -> Command:
        flags = {flag: self._flag(flag) for flag in ("normalize", "deleted", "permanent", "force", "verbose")}
        return Command(name, normal_subject(subject), {**flags, "format": self._format, **arguments})

    async def _body(self) -> dict[str, Any]:
        body = bytearray()
        async for part in self._request.stream():
            body += part
            if len(body) > BODY_BYTES_MAX:
                raise Refused(413, f"the body is larger than {BODY_BYTES_MAX:,} bytes")
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            raise Refused(400, "the body is not JSON") from None
        if not isinstance(value, dict):
            raise Refused(422, "the body is not a JSON object")
        return value

    def _flag(self, name: str) -> bool:
        return self._query.get(name, "").lower() == "true"

    # -- rights --------------------------------------------------------------------------------------------------------

    def _require(self, operation: Operation, subject: str) -> None:
        topic = topic_of(subject)
        if not self._access.allows(operation, ResourceType.TOPIC, topic):
            raise Refused(403, f"you may not do this: ask for {operation.name} on topic {topic[:260]}")

    def _sees(self, subject: str) -> bool:
        return self._access.is_open or self._access.sees(ResourceType.TOPIC, topic_of(subject))

    def _visible_references(
        self, state: State, subject: str, body: dict[str, Any] | None = None
    ) -> frozenset[str] | None:
        """Return the visible ones of the subjects to which a subject and a request lead; None if all are visible."""
        if self._access.is_open:
            return None
        given = (body or {}).get("references")
        entries = given[:REFERENCES_MAX] if isinstance(given, list) else []
        names = [str(each["subject"]) for each in entries if isinstance(each, dict) and "subject" in each]
        return frozenset(each for each in state.referred_subjects(subject, names) if self._sees(each))

    # -- lookups -------------------------------------------------------------------------------------------------------

    async def _look_up(self, look: Callable[[State], Any]) -> Any:
        try:
            return look(await self._registry.current())
        except Refused as refused:
            if refused.code not in MISSING:
                raise
        return look(await self._registry.caught_up())

    @property
    def _format(self) -> str:
        return self._query.get("format", "")

    async def _in_format(self, answer: Any) -> Any:
        """Return the schema of a version in the format that the client requests."""
        if not isinstance(answer, _OneVersion):
            return answer
        if not self._format:
            return answer.view
        visible = self._visible_references(self._registry.state, answer.version.subject)
        text = await self._registry.formatted(answer.version, self._format, visible)
        return {**answer.view, "schema": text} if isinstance(answer.view, dict) else text.encode()

    def _lookup(self) -> Callable[[State], Any] | None:
        """Return what a GET looks up, or None if the path does not exist."""
        match self._parts:
            case ["schemas", "ids", number, *rest] if rest in ([], ["schema"], ["versions"], ["subjects"]):
                return lambda state: self._by_id(state, number, rest)
            case ["schemas"]:
                return self._all_schemas
            case ["subjects"]:
                return self._subjects
            case ["contexts"]:
                return self._contexts
            case ["subjects", subject, "versions"]:
                return lambda state: self._versions(state, normal_subject(subject))
            case ["subjects", subject, "versions", text, *rest] if rest in ([], ["schema"], ["referencedby"]):
                return lambda state: self._version(state, normal_subject(subject), text, rest)
            case ["subjects", subject, "metadata"]:
                return lambda state: self._with_metadata(state, normal_subject(subject))
            case ["v1", "metadata", "version"]:
                return lambda state: {"version": __version__, "commitId": ""}
            case ["config", *rest] if len(rest) <= 1:
                return lambda state: self._config(state, normal_subject("".join(rest)))
            case ["mode", *rest] if len(rest) <= 1:
                return lambda state: self._mode(state, normal_subject("".join(rest)))
        return None

    def _by_id(self, state: State, text: str, rest: list[str]) -> Any:
        number = _number(text)
        if number is None:
            raise Refused(404, "HTTP 404 Not Found")
        version = state.by_id(number, self._query.get("subject", ""))
        versions = [] if version is None else state.with_id(version.id, context_of(version.subject), deleted=True)
        visible = [each for each in versions if self._sees(each.subject)]
        if not visible:
            raise schema_not_found(text)
        # Another subject with this id could be hidden.
        version = visible[0]
        if rest == ["schema"]:
            return _OneVersion(version, version.text.encode())
        if rest:
            shown = [each for each in visible if self._flag("deleted") or not each.is_deleted]
            if rest == ["subjects"]:
                return sorted({each.subject for each in shown})
            return [{"subject": each.subject, "version": each.version} for each in shown]
        view = {name: value for name, value in version_view(version).items() if name not in _PLACE}
        if self._flag("fetchMaxId"):
            view["maxId"] = state.last_ids[context_of(version.subject)]
        return _OneVersion(version, view)

    def _subjects(self, state: State) -> list[str]:
        return self._page(self._visible(state))

    def _contexts(self, state: State) -> list[str]:
        return sorted({".", *(context_of(name).strip(":") or "." for name in state.subjects if self._sees(name))})

    def _visible(self, state: State) -> list[str]:
        prefix, is_only_deleted = self._query.get("subjectPrefix", ""), self._flag("deletedOnly")
        is_deleted = self._flag("deleted") or is_only_deleted
        found = []
        for name in sorted(state.subjects):
            live = state.versions(name)
            is_listed = not live if is_only_deleted else bool(is_deleted or live)
            if is_listed and self._in_prefix(name, prefix) and self._sees(name):
                found.append(name)
        return found

    def _page(self, found: list[Any]) -> list[Any]:
        """Return the part of a list that `offset` and `limit` select; a limit below 1 means all."""
        offset, limit = (self._count(name) for name in ("offset", "limit"))
        return found[max(0, offset) :][: min(limit, LISTED_MAX) if limit > 0 else LISTED_MAX]

    def _count(self, name: str) -> int:
        try:
            return int(self._query.get(name, "0"))
        except ValueError:
            raise Refused(400, f"{name} is not a number") from None

    def _in_prefix(self, name: str, prefix: str) -> bool:
        if prefix.startswith(":*:"):
            return name.removeprefix(context_of(name)).startswith(prefix[3:])
        prefix = normal_subject(prefix)
        return name.startswith(prefix) and (bool(prefix) or "subjectPrefix" not in self._query or not context_of(name))

    def _all_schemas(self, state: State) -> list[dict[str, Any]]:
        found = []
        for name in self._visible(state):
            versions = state.versions(name, deleted=self._flag("deleted"))
            found += [version_view(each) for each in (versions[-1:] if self._flag("latestOnly") else versions)]
        return self._page(found)

    def _versions(self, state: State, subject: str) -> list[int]:
        self._require(Operation.DESCRIBE, subject)
        is_only_deleted = self._flag("deletedOnly")
        versions = state.versions(subject, deleted=self._flag("deleted") or is_only_deleted)
        if not versions:
            raise subject_not_found(subject)
        return [each.version for each in versions if each.is_deleted or not is_only_deleted]

    def _version(self, state: State, subject: str, text: str, rest: list[str]) -> Any:
        self._require(Operation.DESCRIBE, subject)
        number, is_deleted = _version(text), self._flag("deleted") or rest == ["referencedby"]
        version: Version | None = state.version(subject, number, deleted=is_deleted)
        if version is None:
            if not state.versions(subject, deleted=is_deleted):
                raise subject_not_found(subject)
            raise version_not_found(number)
        if rest == ["schema"]:
            return _OneVersion(version, version.text.encode())
        if rest:
            found = state.referrers(subject, version.version, deleted=self._flag("deleted"))
            return sorted({each.id for each in found if self._sees(each.subject)})
        return _OneVersion(version, version_view(version))

    def _with_metadata(self, state: State, subject: str) -> Any:
        """Return the latest version whose metadata has the properties that pairs of `key` and `value` name."""
        self._require(Operation.DESCRIBE, subject)
        wanted = dict(zip(self._query.getlist("key"), self._query.getlist("value"), strict=False))
        versions = state.versions(subject, deleted=self._flag("deleted"))
        if not versions:
            raise subject_not_found(subject)
        for version in reversed(versions):
            metadata = json.loads(version.more or "{}").get("metadata")
            properties = metadata.get("properties") if isinstance(metadata, dict) else None
            if wanted.items() <= (properties if isinstance(properties, dict) else {}).items():
                return _OneVersion(version, version_view(version))
        raise schema_not_found()

    def _config(self, state: State, subject: str) -> dict[str, Any]:
        if subject:
            self._require(Operation.DESCRIBE, subject)
        if subject and subject not in state.configs and not self._flag("defaultToGlobal"):
            message = f"Subject '{subject}' does not have subject-level compatibility configured"
            raise Refused(Code.NO_SUBJECT_COMPATIBILITY, message)
        own = {name: value for name, value in state.configs.get(subject, {}).items() if name != "subject"}
        return {**own, "compatibilityLevel": state.config(subject, "compatibilityLevel", DEFAULT_LEVEL)}

    def _mode(self, state: State, subject: str) -> dict[str, str]:
        if subject:
            self._require(Operation.DESCRIBE, subject)
        if subject and subject not in state.modes and not self._flag("defaultToGlobal"):
            raise Refused(Code.NO_SUBJECT_MODE, f"Subject '{subject}' does not have subject-level mode configured")
        return {"mode": state.mode(subject)}


_PLACE = ("subject", "version", "id")


def topic_of(subject: str) -> str:
    """Return the topic whose rights hold for a subject."""
    subject = normal_subject(subject)
    name = subject.removeprefix(context_of(subject))
    return name.removesuffix("-key") if name.endswith("-key") else name.removesuffix("-value")


def _number(text: str) -> int | None:
    """Return a number of at most 19 digits, or None: Python refuses to convert thousands of them."""
    return int(text) if len(text) < 20 and text.isascii() and text.isdecimal() else None


def _version(text: str) -> int:
    """Return the number of a version; -1 for the latest one."""
    if text in ("latest", "-1"):
        return -1
    number = _number(text)
    if number is not None and 1 <= number <= ID_MAX:
        return number
    raise Refused(
        Code.INVALID_VERSION,
        f"The specified version '{text[:100]}' is not a valid version id. Allowed values are between [1, 2^31-1] "
        'and the string "latest"',
    )
