"""Principals of certificates, by the rules of Kafka's own tests."""

from __future__ import annotations

import pytest

from chronik.authentication.principals import (
    MappingRuleError,
    NoMatchingRule,
    PrincipalMapping,
)

KAFKA_RULES = (
    "RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/, "
    "RULE:^CN=(.*?),OU=(.*?),O=(.*?),L=(.*?),ST=(.*?),C=(.*?)$/$1@$2/L, "
    "RULE:^cn=(.*?),ou=(.*?),dc=(.*?),dc=(.*?)$/$1@$2/U, "
    "RULE:^.*[Cc][Nn]=([a-zA-Z0-9.]*).*$/$1/U, "
    "DEFAULT"
)


@pytest.mark.parametrize(
    ("distinguished", "name"),
    [
        ("CN=Duke,OU=ServiceUsers,O=Org,C=US", "Duke"),
        ("CN=Duke,OU=SME,O=mycp,L=Fulton,ST=MD,C=US", "duke@sme"),
        ("cn=duke,ou=sme,dc=mycp,dc=com", "DUKE@SME"),
        ("cN=duke,OU=JavaSoft,O=Sun Microsystems", "DUKE"),
        ("OU=JavaSoft,O=Sun Microsystems,C=US", "OU=JavaSoft,O=Sun Microsystems,C=US"),
    ],
)
def test_first_matching_rule_decides(distinguished: str, name: str) -> None:
    assert PrincipalMapping([KAFKA_RULES]).name(distinguished) == name
    # As the settings' list splits it at commas.
    assert PrincipalMapping(KAFKA_RULES.split(",")).name(distinguished) == name


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        ("RULE:^CN=(.*?),.*$/$1$2/", "a$2"),
        ("RULE:^CN=(.*?),.*$/$10/", "a0"),
        ("RULE:^CN=(.*?),.*$/\\$1/", "$1"),
        ("RULE:^CN=(.*?),O=x\\/y$/$1/", None),
        ("RULE:CN=a/b/", None),
    ],
)
def test_replacement_follows_java(rule: str, name: str | None) -> None:
    mapping = PrincipalMapping([rule])
    if name is not None:
        assert mapping.name("CN=a,O=x") == name
    else:
        with pytest.raises(NoMatchingRule):
            mapping.name("CN=a,O=x")


@pytest.mark.parametrize("rule", ["default", "DEFAUL", "RULE:^CN=(.*?)", "RULE:a/b/X", "RULE:(/b/", "DEFAULT/L"])
def test_malformed_rule_is_named(rule: str) -> None:
    with pytest.raises(MappingRuleError, match="principal_mapping_rules"):
        PrincipalMapping([rule])


def test_principal_is_a_user() -> None:
    assert PrincipalMapping([]).principal("CN=a") == "User:CN=a"
