"""Principals of client certificates: Kafka's `ssl.principal.mapping.rules`, applied to the subject's name.

    RULE:pattern/replacement/[LU]     a Java regular expression for the whole name; L and U change the case
    DEFAULT                           the whole name

The first rule that matches decides. A certificate that no rule matches has no principal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

USER = "User:"


class MappingRuleError(ValueError):
    """A rule is malformed. The text names it."""


class NoMatchingRule(Exception):
    """No rule maps the certificate's name."""


_Rule: TypeAlias = Callable[[str], str | None]

_RULES = re.compile(r"\s*(?:(DEFAULT)|RULE:((?:\\.|[^\\/])*)/((?:\\.|[^\\/])*)/([LU]?))\s*(?:,|$)")
_REFERENCE = re.compile(r"\\(.)|\$([0-9]+)")


class PrincipalMapping:
    """Kafka's rules, parsed. The settings' list may have a rule in each entry, or Kafka's whole text in one."""

    def __init__(self, rules: Sequence[str]) -> None:
        text = ",".join(rules) or "DEFAULT"
        self._rules: list[_Rule] = []
        at = 0
        while at < len(text):
            match = _RULES.match(text, at)
            if match is None:
                raise MappingRuleError(
                    f"principal_mapping_rules: {text[at:]!r} is neither DEFAULT nor RULE:pattern/replacement/[LU]"
                )
            self._rules.append(_identity if match[1] else _rule(match[2], match[3], match[4]))
            at = match.end()

    def name(self, distinguished: str) -> str:
        """Return the name that the first matching rule makes. Raise NoMatchingRule if there is none."""
        for rule in self._rules:
            name = rule(distinguished)
            if name is not None:
                return name
        raise NoMatchingRule(f"no rule of principal_mapping_rules matches {distinguished!r}")

    def principal(self, distinguished: str) -> str:
        """Return the principal (User:...) of a certificate's subject, given as RFC 2253 text."""
        return USER + self.name(distinguished)


def _identity(distinguished: str) -> str:
    return distinguished


def _rule(pattern: str, replacement: str, case: str) -> _Rule:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise MappingRuleError(f"principal_mapping_rules: {pattern!r} is not a regular expression ({error})") from None
    template = _template(replacement, compiled.groups)

    def apply(distinguished: str) -> str | None:
        if compiled.fullmatch(distinguished) is None:
            return None
        # As Java's replaceAll, once the whole name has matched.
        name = compiled.sub(template, distinguished)
        return name.lower() if case == "L" else name.upper() if case == "U" else name

    return apply


def _template(replacement: str, groups: int) -> Callable[[re.Match[str]], str]:
    """Translate Java's $1 and \\$. A reference to a group that does not exist stays as it is, as in Kafka."""

    def expand(match: re.Match[str]) -> str:
        def part(found: re.Match[str]) -> str:
            if found[1] is not None:
                return found[1]
            digits = found[2]
            # Java takes as many digits as name an existing group.
            for length in range(len(digits), 0, -1):
                if int(digits[:length]) <= groups:
                    return (match[int(digits[:length])] or "") + digits[length:]
            return found[0]

        return _REFERENCE.sub(part, replacement)

    return expand
