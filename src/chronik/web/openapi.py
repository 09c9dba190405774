"""The OpenAPI description of the HTTP API, made from its endpoints, their parameters and the structs they return."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import msgspec

from chronik.observe.traces import Trace
from chronik.web.answers import JSON, Parameter, Parameters
from chronik.web.node_view import NOT_READY
from chronik.web.schemas import Error, OpenApi

PLAIN_TEXT = "text/plain"
Need: TypeAlias = Literal["login", "metrics", "nothing"]
"""What a path needs: a log-in, a log-in unless `public_metrics` is set, or nothing."""
SCHEMAS = "#/components/schemas/"
ERRORS = {
    400: ("BadParameter", "A parameter is unknown, missing, invalid or out of range."),
    401: ("LogIn", "The node requires a log-in, and the session, token or password is missing, wrong or expired."),
    403: ("Forbidden", "The logged-in user lacks a right, which the line names, or another web site sent the request."),
    404: ("NotFound", "The topic, partition or group does not exist."),
    409: ("NoLogIn", "The node requires no log-in."),
    429: ("Delayed", "Too many wrong passwords came from this address. Retry later."),
    503: ("NotNow", f"The node is busy or {NOT_READY}, or the partition has no leader. Retry later."),
}


class Endpoint(NamedTuple):
    """A path of the API, and the type of the body that it returns.

    If `parameters` is None, all parameters are ignored. Otherwise unknown and invalid ones are rejected.
    """

    path: str
    handle: Callable[[Parameters], Awaitable[object]]
    """Returns a response, or the value or the bytes of a JSON body."""
    summary: str
    answer: type = str
    parameters: tuple[Parameter, ...] | None = ()
    media_type: str = JSON
    is_always_available: bool = False
    need: Need = "login"
    method: str = "GET"
    body: dict[str, Any] | None = None
    """The schema of the request's body, if it has one."""

    @property
    def errors(self) -> list[int]:
        """The statuses of its error responses."""
        errors = [] if self.parameters is None else [400]
        if self.need != "nothing":
            errors += [401, 403]
        if "{name" in self.path:
            errors.append(404)
        if self.method != "GET":
            errors.append(409)
        if self.need != "nothing":
            errors.append(429)
        return errors if self.is_always_available else [*errors, 503]


SECURITY_SCHEMES = {
    "session": {
        "type": "apiKey",
        "in": "cookie",
        "name": "chronik-session-CLUSTER",
        "description": "Set by POST /api/session. With TLS, the name begins with __Host-.",
    },
    "token": {"type": "http", "scheme": "bearer", "description": "A token of POST /api/tokens."},
    "password": {"type": "http", "scheme": "basic"},
}


def describe(endpoints: Sequence[Endpoint], *, is_login_required: bool = False) -> OpenApi:
    answers, schemas = msgspec.json.schema_components(
        [*(endpoint.answer for endpoint in endpoints), Error], ref_template=SCHEMAS + "{name}"
    )
    _make_exact(schemas)
    _name_traces(schemas)
    *answers_of, error = answers
    responses: dict[str, Any] = {name: _response(text, JSON, error) for name, text in ERRORS.values()}
    for name in ("NotNow", "Delayed"):
        responses[name]["headers"] = {"retry-after": {"schema": {"type": "integer"}}}
    paths: dict[str, Any] = {}
    for endpoint, answer in zip(endpoints, answers_of, strict=True):
        paths.setdefault(endpoint.path.replace(":path}", "}"), {}).update(_path(endpoint, answer))
    return OpenApi(
        "3.1.0",
        {
            "title": "Chronik",
            "version": "1",
            "description": "The state of a node and its cluster. It is read-only, except that users log in and out.",
        },
        paths,
        {"responses": responses, "schemas": schemas, "securitySchemes": SECURITY_SCHEMES},
        [{name: []} for name in SECURITY_SCHEMES] if is_login_required else [],
    )


def _make_exact(schemas: dict[str, Any]) -> None:
    """State that no other fields exist, and that a field with a default is left out instead of being null."""
    for schema in schemas.values():
        schema["additionalProperties"] = False
        for field in schema["properties"].values():
            if "default" in field:
                del field["default"]
                for kind in field.pop("anyOf", ()):
                    field |= {} if kind == {"type": "null"} else kind


def _name_traces(schemas: dict[str, Any]) -> None:
    """Describe all kinds of traces as one schema, because fields may be added to a kind."""
    trace = schemas["Trace"] = schemas.pop("TraceEvent")
    del trace["additionalProperties"]
    trace |= {"title": "Trace", "description": "The kind determines which other fields exist."}
    trace["properties"]["kind"] = {"enum": [kind.__struct_config__.tag for kind in get_args(Trace)]}
    schemas["Traces"]["properties"]["events"]["items"] = {"$ref": SCHEMAS + "Trace"}


def _path(endpoint: Endpoint, answer: dict[str, Any]) -> dict[str, Any]:
    responses = {"200": _response(endpoint.summary, endpoint.media_type, answer)}
    for status in endpoint.errors:
        name, _ = ERRORS[status]
        response = {"$ref": f"#/components/responses/{name}"}
        if endpoint.media_type == PLAIN_TEXT and status == 503:
            response = _response(f"The node is {NOT_READY}.", PLAIN_TEXT, answer)
        responses[str(status)] = response
    operation: dict[str, Any] = {
        "operationId": _operation_id(endpoint),
        "summary": endpoint.summary,
        "responses": responses,
    }
    if endpoint.need == "nothing":
        operation["security"] = []
    if endpoint.body is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": endpoint.body}}}
    if endpoint.parameters:
        operation["parameters"] = [_parameter(parameter) for parameter in endpoint.parameters]
    if "{name" not in endpoint.path:
        return {endpoint.method.lower(): operation}
    path_name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    return {"parameters": [path_name], endpoint.method.lower(): operation}


def _operation_id(endpoint: Endpoint) -> str:
    name = "-".join(re.findall(r"[\w.]+", endpoint.path.replace(":path", "")))
    return name if endpoint.method == "GET" else f"{endpoint.method.lower()}-{name}"


def _parameter(parameter: Parameter) -> dict[str, Any]:
    described: dict[str, Any] = {"name": parameter.name, "in": "query", "schema": parameter.schema}
    if parameter.is_required:
        described["required"] = True
    if parameter.description:
        described["description"] = parameter.description
    return described


def _response(text: str, media_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": {media_type: {"schema": schema}}}
