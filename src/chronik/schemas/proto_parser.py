"""Reads the text of a .proto file: proto2, proto3 and editions.

It is no C++: a hostile text can only cost time, which its size and the depth of nesting bound. What names mean is
checked later, when a descriptor is made of the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NoReturn

from chronik.schemas.errors import InvalidSchema
from chronik.schemas.proto_file import (
    FIELD_NUMBER_MAX,
    SCALARS,
    Enum,
    EnumValue,
    Extend,
    Extensions,
    Field,
    Message,
    Method,
    OneOf,
    Option,
    ProtoFile,
    Range,
    Reserved,
    Service,
    Value,
    Word,
)

DEPTH_MAX = 32
"""The limit of Google's compiler."""
TOKENS_MAX = 150_000
ENUM_NUMBER_MAX = (1 << 31) - 1
_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*.*?\*/)
    |(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<number>0[xX][0-9a-fA-F]+|(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[fF]?)
    |(?P<word>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<sign>[{}\[\]()<>;:,.=/+-])""",
    re.DOTALL | re.VERBOSE,
)
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = {b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}
_EDITION = re.compile(r"20[0-9]{2}")


def parse_file(text: str) -> ProtoFile:
    """Raise InvalidSchema if the text is not a Protobuf file."""
    return _Parser(text).file()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._kinds: list[str] = []
        self._tokens: list[str] = []
        self._places: list[int] = []
        self._at = 0
        self._depth = 0
        self._file = ProtoFile()
        place = 0
        for found in _TOKEN.finditer(text):
            if found.start() != place:
                break
            if len(self._tokens) > TOKENS_MAX:
                raise InvalidSchema(f"the Protobuf schema has more than {TOKENS_MAX} words and signs")
            place = found.end()
            if found.lastgroup != "space":
                self._kinds.append(str(found.lastgroup))
                self._tokens.append(found.group())
                self._places.append(found.start())
        self._kinds.append("end")
        self._tokens.append("")
        self._places.append(place)
        if place != len(text):
            self._at = len(self._tokens) - 1
            self._fail(f"{text[place : place + 20]!r} cannot be read")

    # -- tokens --------------------------------------------------------------------------------------------------------

    def _fail(self, reason: str) -> NoReturn:
        line = self._text.count("\n", 0, self._places[self._at]) + 1
        raise InvalidSchema(f"the Protobuf schema is invalid at line {line}: {reason}")

    def _is(self, token: str) -> bool:
        return self._tokens[self._at] == token and self._kinds[self._at] != "text"

    def _take(self, token: str) -> bool:
        if self._is(token):
            self._at += 1
            return True
        return False

    def _expect(self, token: str) -> None:
        if not self._take(token):
            self._fail(f"expected {token!r}, found {self._tokens[self._at][:50]!r}")

    def _next(self, kind: str) -> str:
        if self._kinds[self._at] != kind:
            self._fail(f"expected a {kind}, found {self._tokens[self._at][:50]!r}")
        self._at += 1
        return self._tokens[self._at - 1]

    def _name(self) -> str:
        return self._next("word")

    def _path(self) -> str:
        """Read a name with dots; a leading dot makes it absolute."""
        parts = ["."] if self._take(".") else []
        parts.append(self._name())
        while self._take("."):
            parts += [".", self._name()]
        return "".join(parts)

    def _whole(self, lowest: int, highest: int) -> int:
        sign = -1 if self._take("-") else 1
        token = self._next("number")
        try:
            number = sign * (int(token, 8) if re.fullmatch("0[0-7]+", token) else int(token, 0))
        except ValueError:
            self._fail(f"{token[:50]} is not a whole number")
        if not lowest <= number <= highest:
            self._fail(f"the number {number} is not between {lowest} and {highest}")
        return number

    def _string(self) -> str:
        parts = [self._next("text")]
        while self._kinds[self._at] == "text":
            parts.append(self._next("text"))
        raw = b"".join(_unescaped(part[1:-1]) for part in parts)
        return raw.decode(errors="surrogateescape")

    def _inside(self, read: Callable[[], None]) -> None:
        """Read statements up to the closing brace."""
        self._depth += 1
        if self._depth > DEPTH_MAX:
            self._fail(f"blocks are nested more than {DEPTH_MAX} deep")
        self._expect("{")
        while not self._take("}"):
            if not self._take(";"):
                read()
        self._depth -= 1

    # -- the file ------------------------------------------------------------------------------------------------------

    def file(self) -> ProtoFile:
        file = self._file
        if self._is("syntax") or self._is("edition"):
            is_edition = self._name() == "edition"
            self._expect("=")
            file.syntax = self._string()
            if file.is_edition != is_edition or (is_edition and not _EDITION.fullmatch(file.syntax)):
                self._fail(f"{file.syntax[:50]!r} is neither proto2, proto3 nor an edition")
            self._expect(";")
        while self._kinds[self._at] != "end":
            if not self._take(";"):
                self._statement()
        return file

    def _statement(self) -> None:
        file = self._file
        word = self._name()
        if word == "package":
            if file.package:
                self._fail("there are two packages")
            file.package = self._path()
            self._expect(";")
        elif word == "import":
            is_public = self._take("public")
            if not is_public and not self._take("weak"):
                self._take("option")
            (file.public_imports if is_public else file.imports).append(self._string())
            self._expect(";")
        elif word == "option":
            file.options.append(self._option_statement())
        elif word == "message":
            file.messages.append(self._message())
        elif word == "enum":
            file.enums.append(self._enum())
        elif word == "extend":
            file.extends.append(self._extend())
        elif word == "service":
            file.services.append(self._service())
        elif word in ("export", "local") and (self._is("message") or self._is("enum")):
            self._statement()
        else:
            self._fail(f"{word[:50]!r} does not begin a statement")

    # -- messages ------------------------------------------------------------------------------------------------------

    def _message(self) -> Message:
        message = Message(self._name())
        self._body(message)
        return message

    def _body(self, message: Message) -> None:
        self._inside(lambda: self._member(message))

    def _member(self, message: Message) -> None:
        """Read a member. As in Google's compiler, a keyword here is never the name of a type."""
        if self._tokens[self._at] in ("export", "local") and self._tokens[self._at + 1] in ("message", "enum"):
            self._at += 1
        if self._take("message"):
            message.messages.append(self._message())
        elif self._take("enum"):
            message.enums.append(self._enum())
        elif self._take("extend"):
            message.extends.append(self._extend())
        elif self._take("oneof"):
            message.oneofs.append(self._oneof())
        elif self._take("option"):
            message.options.append(self._option_statement())
        elif self._take("reserved"):
            message.reserved.append(self._reserved(FIELD_NUMBER_MAX))
        elif self._take("extensions"):
            message.extensions.append(self._extensions())
        else:
            message.fields.append(self._field())

    def _field(self, *, in_oneof: bool = False) -> Field:
        label = ""
        if self._tokens[self._at] in ("optional", "required", "repeated") and self._tokens[self._at + 1] != "=":
            label = self._name()
            if in_oneof:
                self._fail("a field of a oneof has a label")
        if self._is("group") and self._kinds[self._at + 1] == "word" and self._tokens[self._at + 2] == "=":
            return self._group(label)
        if self._is("map") and self._tokens[self._at + 1] == "<":
            kind = self._map_kind()
            if label or in_oneof:
                self._fail("a map has a label, or is in a oneof")
        else:
            kind = self._path()
        name = self._name()
        self._expect("=")
        number = self._whole(1, FIELD_NUMBER_MAX)
        options = self._bracketed_options()
        self._expect(";")
        if not label and not in_oneof and self._file.syntax in ("", "proto2") and not kind.startswith("map<"):
            self._fail(f"the field {name} needs a label: required, optional or repeated")
        return Field(name, kind, number, label, options)

    def _map_kind(self) -> str:
        self._at += 1
        self._expect("<")
        key = self._name()
        if key not in SCALARS - {"double", "float", "bytes"}:
            self._fail(f"{key} cannot be the type of a map's keys")
        self._expect(",")
        value = self._path()
        self._expect(">")
        return f"map<{key}, {value}>"

    def _group(self, label: str) -> Field:
        self._at += 1
        name = self._name()
        if not name[:1].isupper():
            self._fail(f"the name of the group {name} does not begin with an upper-case letter")
        self._expect("=")
        number = self._whole(1, FIELD_NUMBER_MAX)
        options = self._bracketed_options()
        message = Message(name)
        self._body(message)
        return Field(name.lower(), name, number, label, options, message)

    def _oneof(self) -> OneOf:
        oneof = OneOf(self._name())

        def member() -> None:
            if self._take("option"):
                oneof.options.append(self._option_statement())
            else:
                oneof.fields.append(self._field(in_oneof=True))

        self._inside(member)
        return oneof

    def _extend(self) -> Extend:
        extend = Extend(self._path(), [])
        self._inside(lambda: extend.fields.append(self._field()))
        return extend

    def _reserved(self, highest: int) -> Reserved:
        parts: list[Range | str] = []
        while True:
            if self._kinds[self._at] == "text":
                parts.append(self._string())
            elif self._kinds[self._at] == "word":
                parts.append(self._name())
            else:
                parts.append(self._range(1 if highest == FIELD_NUMBER_MAX else -highest - 1, highest))
            if not self._take(","):
                self._expect(";")
                return Reserved(parts)

    def _range(self, lowest: int, highest: int) -> Range:
        first = self._whole(lowest, highest)
        if not self._take("to"):
            return first, first
        last = highest if self._take("max") else self._whole(lowest, highest)
        if last < first:
            self._fail(f"the range {first} to {last} is empty")
        return first, last

    def _extensions(self) -> Extensions:
        ranges = [self._range(1, FIELD_NUMBER_MAX)]
        while self._take(","):
            ranges.append(self._range(1, FIELD_NUMBER_MAX))
        options = self._bracketed_options()
        self._expect(";")
        return Extensions(ranges, options)

    # -- enums and services --------------------------------------------------------------------------------------------

    def _enum(self) -> Enum:
        enum = Enum(self._name())

        def member() -> None:
            if self._take("option"):
                enum.options.append(self._option_statement())
            elif self._take("reserved"):
                enum.reserved.append(self._reserved(ENUM_NUMBER_MAX))
            else:
                name = self._name()
                self._expect("=")
                number = self._whole(-ENUM_NUMBER_MAX - 1, ENUM_NUMBER_MAX)
                enum.values.append(EnumValue(name, number, self._bracketed_options()))
                self._expect(";")

        self._inside(member)
        return enum

    def _service(self) -> Service:
        service = Service(self._name())

        def member() -> None:
            if self._take("option"):
                service.options.append(self._option_statement())
            else:
                self._expect("rpc")
                service.methods.append(self._method())

        self._inside(member)
        return service

    def _method(self) -> Method:
        name = self._name()
        is_streams, kinds = [], []
        for part in range(2):
            if part:
                self._expect("returns")
            self._expect("(")
            is_streams.append(self._is("stream") and self._tokens[self._at + 1] != ")")
            self._at += is_streams[-1]
            kinds.append(self._path())
            self._expect(")")
        options: list[Option] = []
        if self._is("{"):

            def member() -> None:
                self._expect("option")
                options.append(self._option_statement())

            self._inside(member)
        else:
            self._expect(";")
        return Method(name, kinds[0], kinds[1], is_streams[0], is_streams[1], options)

    # -- options -------------------------------------------------------------------------------------------------------

    def _option_statement(self) -> Option:
        option = self._option()
        self._expect(";")
        return option

    def _bracketed_options(self) -> list[Option]:
        options: list[Option] = []
        if self._take("["):
            options.append(self._option())
            while self._take(","):
                options.append(self._option())
            self._expect("]")
        return options

    def _option(self) -> Option:
        parts: list[str] = []
        while True:
            if self._take("("):
                parts.append(f"({self._path()})")
                self._expect(")")
            else:
                parts.append(self._name())
            if not self._take("."):
                break
        self._expect("=")
        return Option(".".join(parts), self._value())

    def _value(self) -> Value:
        if self._kinds[self._at] == "text":
            return self._string()
        if self._is("{") or self._is("<"):
            return self._aggregate()
        if self._is("["):
            return self._list()
        sign = "-" if self._take("-") else ""
        if not sign:
            self._take("+")
        if self._kinds[self._at] not in ("number", "word"):
            self._fail(f"{self._tokens[self._at][:50]!r} is not a value")
        self._at += 1
        return Word(sign + self._tokens[self._at - 1])

    def _list(self) -> list[Value]:
        self._expect("[")
        found: list[Value] = []
        while not self._take("]"):
            if found:
                self._expect(",")
            found.append(self._nested(self._value))
        return found

    def _nested(self, read: Callable[[], Value]) -> Value:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            self._fail(f"values are nested more than {DEPTH_MAX} deep")
        found = read()
        self._depth -= 1
        return found

    def _aggregate(self) -> dict[str, Value]:
        """Read a message in the text format. A name that is there twice gets a list."""
        end = "}" if self._take("{") else ">"
        if end == ">":
            self._expect("<")
        found: dict[str, Value] = {}
        while not self._take(end):
            name = self._field_name()
            if not self._take(":") and not (self._is("{") or self._is("<")):
                self._expect(":")
            value = self._nested(self._value)
            if name in found:
                before = found[name] if isinstance(found[name], list) else [found[name]]
                value = [*before, *(value if isinstance(value, list) else [value])]
            found[name] = value
            if not self._take(","):
                self._take(";")
        return found

    def _field_name(self) -> str:
        if not self._take("["):
            return self._name()
        path = self._path()
        while self._take("/"):
            path += "/" + self._path()
        self._expect("]")
        return f"[{path}]"


def _unescaped(text: str) -> bytes:
    if "\\" not in text:
        return text.encode()

    def replaced(found: re.Match[bytes]) -> bytes:
        octal, hexadecimal, short, long, other = found.groups()
        if octal:
            return bytes([int(octal, 8) & 0xFF])
        if hexadecimal:
            return bytes([int(hexadecimal, 16)])
        if short or long:
            number = int(short or long, 16)
            if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                raise InvalidSchema(f"\\U{number:08x} is not a character")
            return chr(number).encode()
        return _ESCAPED.get(other, other)

    return _ESCAPE.sub(replaced, text.encode())
