"""What repeated runs leave behind, and the rows, tables and plots that are made of it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from bench import report
from bench.plots import LogAxis, line_plot, ratio_plot
from bench.rows import compared_row, own_row
from bench.samples import Figure, Samples
from bench.servers import CHRONIK

PEER = "Apache Kafka"
ROOT = Path(__file__).resolve().parents[2]


def measured(path: Path | None, ours: list[float], theirs: list[float], *, is_adding: bool = False) -> Samples:
    samples = Samples(path, is_adding=is_adding)
    for side, values in ((CHRONIK, ours), (PEER, theirs)):
        for value in values:
            samples.add(side, Figure("produce 1 KB", "records", "1/s", value, ">= 1.0", cpu_s=1.5, resident_mb=40.0))
    return samples


def growing() -> Samples:
    samples = Samples(None)
    for x, value in ((10.0, 40.0), (5000.0, 90.0)):
        samples.add(CHRONIK, Figure(f"{x:g} partitions", "memory", "MB", value, series="partitions", x=x))
        samples.add(PEER, Figure(f"{x:g} partitions", "memory", "MB", 10 * value, series="partitions", x=x))
    return samples


def test_a_row_needs_both_sides_and_a_goal() -> None:
    assert list(measured(None, [1.0], []).rows()) == []
    assert list(growing().rows()) == []
    assert [row["ratio"] for row in measured(None, [1.0], [2.0]).rows()] == [0.5]


def test_an_own_goal_is_judged_without_the_peer_and_shown_beside_it() -> None:
    samples = Samples(None)
    for side, value in ((CHRONIK, 1.5), (PEER, 9.0)):
        samples.add(side, Figure("failover", "commit after", "s", value, "<= 2.0", is_own_goal=True))
    (row,) = samples.rows()
    assert (row["chronik"], row["peer"], row["ratio"], row["met"]) == (1.5, None, None, True)
    assert "| failover | commit after | s | 1.5 | 9 |" in report.markdown(samples, [row])


def test_a_new_run_replaces_the_samples_of_the_last(tmp_path: Path) -> None:
    path = tmp_path / "samples.json"
    measured(path, [1.0, 2.0], [4.0]).save()
    (row,) = measured(path, [8.0], [2.0]).rows()
    assert (row["chronik"], row["chronik_spread"], row["ratio"]) == (8.0, [8.0, 8.0], 4.0)


def test_a_run_that_adds_keeps_them(tmp_path: Path) -> None:
    path = tmp_path / "samples.json"
    measured(path, [1.0, 2.0], [4.0]).save()
    (row,) = measured(path, [9.0], [6.0], is_adding=True).rows()
    assert (row["chronik"], row["chronik_spread"], row["peer"]) == (2.0, [1.0, 9.0], 5.0)


def test_what_is_saved_is_what_is_read(tmp_path: Path) -> None:
    samples = measured(tmp_path / "samples.json", [1.0], [2.0])
    samples.smallest_heap_mb = 128
    samples.save()
    again = Samples(tmp_path / "samples.json")
    assert again.measured == samples.measured
    assert again.smallest_heap_mb == 128


def test_the_table_shows_a_missed_goal_as_missed() -> None:
    missed, met = measured(None, [1.0, 1.5], [2.0, 4.0]), measured(None, [2.0], [1.0])
    table = report.markdown(missed, list(missed.rows()))
    assert "| 1.25 (1-1.5) | 3 (2-4) | 0.417 | >= 1.0 | **no** | 1.5 / 1.5 | 40 / 40 |" in table
    assert "0 of 1 goals met" in table
    assert "1 of 1 goals met" in report.markdown(met, list(met.rows()))


def test_rows_with_a_peer_of_another_kind_are_left_to_their_own_table() -> None:
    samples = measured(None, [2.0], [1.0])
    other = compared_row("Spark reads", "rows", "1/s", [1.0], [2.0], "a connector", ">= 1.0")
    assert "1 of 1 goals met" in report.markdown(samples, [*samples.rows(), other])
    assert "Spark" not in report.plots(samples, [*samples.rows(), other])["ratios.svg"]


def test_the_table_goes_between_its_marks_and_touches_nothing_else() -> None:
    begin, end = report.marks("a table")
    text = f"before\n{begin}\nold\n{end}\nafter\n"
    assert report.put_between(text, "a table", "new") == f"before\n{begin}\nnew\n{end}\nafter\n"
    with pytest.raises(ValueError):
        report.put_between("no marks", "a table", "new")


def test_a_missed_goal_is_listed_with_its_reason_and_a_met_one_is_not() -> None:
    rows = [own_row("a", "p50", "ms", 3.25, "<= 2.0") | {"limit": "the disk"}, own_row("b", "p50", "ms", 1, "<= 2.0")]
    listed = report.missed_goals(rows)
    assert "1 of 2 goals met" in listed
    assert "| a | p50 | ms | 3.25 | - | - | <= 2.0 | the disk |" in listed
    assert "| b |" not in listed


def test_each_row_is_in_the_comparison_or_among_the_own_goals() -> None:
    samples = measured(None, [2.0], [1.0])
    rows = [*samples.rows(), compared_row("Spark reads", "rows", "1/s", [1.0], [2.0], "a connector", ">= 1.0")]
    own = report.own_goals(samples, rows)
    assert "| Spark reads | rows | 1/s | 1 | 2 (a connector) | 0.5 | >= 1.0 | **no** |" in own
    assert "produce" not in own


def test_the_document_shows_the_latest_results() -> None:
    rows, text = json.loads((ROOT / "bench/results/latest.json").read_text()), (ROOT / "docs/benchmarks.md").read_text()
    for name, table in report.tables(Samples(ROOT / "bench/results/side_by_side.json"), rows).items():
        assert report.put_between(text, name, table) == text, f"bench/run.py --report writes {name}"


def test_a_plot_has_a_line_for_each_side_with_a_dot_for_each_point() -> None:
    plots = report.plots(growing(), [])
    assert list(plots) == ["growth-partitions.svg"]
    drawn = ElementTree.fromstring(plots["growth-partitions.svg"])
    names = [element.tag.rpartition("}")[2] for element in drawn.iter()]
    assert (names.count("polyline"), names.count("circle")) == (2, 4)


def test_larger_values_are_drawn_higher_and_further_right() -> None:
    drawn = ElementTree.fromstring(line_plot("t", "x", "y", {"a": [(1.0, [1.0]), (100.0, [50.0, 70.0, 60.0])]}))
    first, last = ((float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in drawn.iter() if "r" in dot.attrib)
    assert first[0] < last[0]
    assert first[1] > last[1]


def test_the_overview_colours_a_missed_goal_differently() -> None:
    def colours(samples: Samples) -> set[str]:
        drawn = ElementTree.fromstring(ratio_plot(list(samples.rows())))
        return {dot.attrib["fill"] for dot in drawn.iter() if "r" in dot.attrib}

    assert len(colours(measured(None, [1.0], [2.0])) | colours(measured(None, [2.0], [1.0]))) == 2


def test_nothing_at_or_below_zero_is_put_on_a_logarithmic_axis() -> None:
    with pytest.raises(ValueError):
        LogAxis([0.0, 1.0], 0, 100)
