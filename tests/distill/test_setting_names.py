"""Settings in sections: their paths and names, rules between sections, and changes."""

from typing import Any, ClassVar

import chz
import pytest

from distill.errors import ConfigError
from distill.rules import WithSections, at_least, needs, setting
from distill.settings import by_path, changed, fields_of, meant_by, path_of, section_field
from tests.refusals import refuses


@chz.chz
class Inks:
    """Inks of a press."""

    within: ClassVar[str] = "inks."

    every: int = setting(at_least(1), default=2, doc="sheets between two fillings")
    colour: str | None = setting(needs("paper.gloss"), default=None, doc="colour beside black")
    amount: float = setting(at_least("every"), default=5.0, doc="millilitres")


@chz.chz
class Paper:
    """Paper of a press."""

    within: ClassVar[str] = "paper."

    every: int = setting(at_least(1), default=3, doc="sheets between two checks")
    gloss: bool = setting(default=False, doc="glossy paper")


@chz.chz
class Box:
    """Object of a setting that is no section."""

    gloss: int = chz.field(default=1)


@chz.chz
class Press(WithSections):
    """A press."""

    out: str = chz.field(doc="where the sheets go")
    inks: Inks = section_field(Inks)
    paper: Paper = section_field(Paper)
    box: Box = chz.field(default_factory=Box, doc="box")
    width: int = setting(at_least("paper.every"), default=9, doc="width")


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("inks.every", ["inks.every"]),
        ("inks_every", ["inks.every"]),
        ("every", ["inks.every", "paper.every"]),
        ("colour", ["inks.colour"]),
        ("gloss", ["paper.gloss"]),
        ("box.gloss", ["box.gloss"]),
        ("inks", ["inks"]),
        ("out", ["out"]),
        ("inks.gloss", []),
        ("color", []),
    ],
)
def test_a_name_means_a_path(name: str, paths: list[str]) -> None:
    assert meant_by(Press, name) == paths


def test_the_error_of_an_ambiguous_name_lists_its_meanings() -> None:
    with refuses(ConfigError, "every", names="inks.every or paper.every"):
        path_of(Press, "every")


def test_fields_have_their_paths() -> None:
    assert [*fields_of(Press)] == [
        "out", "inks.every", "inks.colour", "inks.amount", "paper.every", "paper.gloss", "box",
        "width",
    ]  # fmt: skip


def press(**settings: Any) -> Press:
    return chz.Blueprint(Press).apply({"out": "o"} | by_path(settings)).make()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"inks": {"every": 0}}, "inks.every"),
        ({"inks": {"amount": 1.0}}, "inks.amount"),
        ({"inks": {"colour": "red"}}, "inks.colour"),
        ({"width": 5, "paper": {"every": 6}}, "width"),
    ],
)
def test_rules_within_a_section_and_between_sections(settings: dict[str, Any], field: str) -> None:
    with refuses(ConfigError, field):
        press(**settings)


def test_a_section_alone_leaves_rules_about_others_to_the_whole() -> None:
    assert Inks(colour="red").colour == "red"
    assert press(inks={"colour": "red"}, paper={"gloss": True}).inks == Inks(colour="red")
    with refuses(ConfigError, "inks.amount"):
        Inks(amount=1.0)


def test_changes_reach_into_sections() -> None:
    first = press(inks={"every": 4})
    assert changed(first, inks_every=5) == changed(first, inks={"every": 5})
    assert changed(first, gloss=True, colour="red").inks == Inks(every=4, colour="red")
    assert changed(first, inks=Inks(every=1)).inks.every == 1
    with refuses(ConfigError, "inks.colour"):
        changed(first, colour="red")
