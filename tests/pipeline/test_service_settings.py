"""The file of `chronik pipeline run`: what it accepts, and what an error names."""

from __future__ import annotations

from pathlib import Path

import pytest

from chronik.pipeline.errors import PipelineError
from chronik.pipeline.service.settings import parse

LANDING = '[[landing]]\ntopics = ["orders"]\nto = "tables"\n'
SINK = '[[sink]]\nname = "s"\ntopic = "orders"\nto = "copy"\ncheckpoint = "c"\n'


def test_paths_are_relative_to_the_file_and_its_name_is_the_default(tmp_path: Path) -> None:
    settings = parse(LANDING + SINK + "[[audit]]\nevery = 60\n", str(tmp_path / "eu.toml"))
    (landing,), (sink,) = settings.landing, settings.sink
    assert (settings.name, landing.to) == ("eu", str(tmp_path / "tables"))
    assert landing.checkpoint == str(tmp_path / "tables" / ".checkpoints")  # as of `chronik pipeline land`
    assert (sink.checkpoint, settings.listen) == (str(tmp_path / "c"), "127.0.0.1:9400")
    typed = parse(LANDING + 'schema = "o.sql"\non_change = "stop"\n', str(tmp_path / "p.toml")).landing[0].options
    assert (typed.schema, typed.on_change) == (str(tmp_path / "o.sql"), "stop")
    remote = parse(LANDING.replace("tables", "s3://b/t") + 'checkpoint = "s3a://b/c"\n', "p.toml")
    assert (remote.landing[0].to, remote.landing[0].checkpoint) == ("s3://b/t", "s3a://b/c")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", r"there is nothing to run: add \[\[landing\]\]"),
        ("x =", "is not TOML: "),
        ("naem = 1", "naem is unknown: did you mean name"),
        (LANDING + "triger = 3", r"landing\[0\].triger is unknown: did you mean trigger\?"),
        ("[spark]\nqqqq = 1", "spark.qqqq is unknown: known are master, ui, conf"),
        (LANDING + 'trigger = "3"', r"landing\[0\].trigger: expected `float`, got `str`"),
        (LANDING + "trigger = -1", r"landing\[0\].trigger: expected `float` >= 0.0"),
        (LANDING + 'format = "xml"', r"landing\[0\]: --format xml is unknown"),
        (LANDING + "schema = 3", r"landing\[0\].schema: expected"),
        (LANDING + "options = {}", r"landing\[0\].options is unknown"),
        (LANDING + 'scema = "x"', r"landing\[0\].scema is unknown: did you mean schema"),
        ("[[landing]]\ntopics = []\nto = 't'", r"landing\[0\].topics: expected `array` of length >= 1"),
        ("[[landing]]\nto = 't'", r"landing\[0\]: object missing required field `topics`"),
        (LANDING + LANDING, r"landing\[1\]: orders lands in .*/tables/orders twice"),
        (LANDING + LANDING.replace("tables", "./x/../tables"), r"landing\[1\]: orders lands in .*/tables/orders twice"),
        (SINK + SINK.replace('"s"', '"z"').replace('t = "c"', 't = "./c"'), r"sink\[1\]: .* is used twice"),
        (LANDING + SINK.replace('t = "c"', 't = "tables/.checkpoints/orders"'), "that of the landing of orders"),
        (LANDING.replace("tables", "s3://b"), "is not a folder: add checkpoint"),
        ('listen = "x"\n' + LANDING, "listen: 'x' is not HOST:PORT"),
        ('bootstrap = "localhost"\n' + LANDING, "bootstrap: 'localhost' is not HOST:PORT"),
        (SINK + 'table = "t"', r"sink\[0\].table is unknown"),
        (SINK.replace("copy", "orders"), "writes to the topic orders that it reads"),
        (SINK + SINK, r"sink\[1\]: the name s is used twice"),
        (SINK + 'delivery = "twice"', r"sink\[0\].delivery: invalid enum value"),
        (LANDING + '[[audit]]\ntopics = ["other"]', r"audit\[0\].topics: other is not landed here"),
        (LANDING + "[[audit]]\n[[audit]]", r"audit\[1\]: orders is audited twice"),
        (LANDING.replace('"orders"', ",".join(f'"t{i}"' for i in range(201))), "201 topics and sinks are too many"),
    ],
)  # fmt: skip
def test_an_error_names_the_file_and_the_setting(text: str, fault: str) -> None:
    with pytest.raises(PipelineError, match=f"^p.toml(: | ){fault}|^p.toml: .*{fault}"):
        parse(text, "p.toml")
