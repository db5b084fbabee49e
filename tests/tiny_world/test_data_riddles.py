"""Riddles of the tiny world: their text, their answers, their thoughts and the data source."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from rl.api.data import RowRules
from tiny_world import riddles
from tiny_world.captions import Wish, caption, scene_of
from tiny_world.data import shape_riddles
from tiny_world.data.synthetic import SyntheticConfig
from tiny_world.pixel_judge import grade_wish
from tiny_world.scenes import draw

CHAINS = (("cup", "hat", "jade"), ("bag", "car", "crimson"), ("bus", "pen", "raven"))
RIDDLE = riddles.Riddle(CHAINS, 0, (3, 0, 4, 1, 5, 2), "disc", "upper left")
TEXT = (
    "where hat is jade, cup matches hat, car is crimson, bag matches car, pen is raven, bus "
    "matches pen: a disc that matches cup in the upper left corner"
)


def test_a_riddle_asks_for_the_colour_of_what_is_matched():
    assert RIDDLE.text == TEXT
    assert RIDDLE.wish == riddles.read_riddle(TEXT) == Wish("green", "circle", (0, 0))
    assert riddles.thought_of(CHAINS[0]) == "where cup matches hat, hat is jade."
    assert RIDDLE.stated_colours == (("hat", "jade"), ("car", "crimson"), ("pen", "raven"))


def test_every_riddle_is_parsed_back_to_its_wish():
    rng = random.Random(0)
    for _ in range(200):
        riddle = riddles.make_riddle(rng)
        assert riddles.is_riddle(riddle.text) and riddles.read_riddle(riddle.text) == riddle.wish


def test_a_single_lookup_is_right_once_in_three():
    """Each position in the text is the right one equally often."""
    rng, counts = random.Random(1), Counter[int]()
    for _ in range(3000):
        riddle = riddles.make_riddle(rng)
        things = [thing for thing, _ in riddle.stated_colours]
        counts[things.index(riddle.chains[riddle.asked][1])] += 1
    assert [counts[place] / 3000 for place in range(3)] == pytest.approx([1 / 3] * 3, abs=0.03)


def test_the_judge_grades_what_a_riddle_means():
    wrong = Wish("red", "circle", (0, 0))
    assert [grade_wish(draw(scene_of(wish)), TEXT) for wish in (RIDDLE.wish, wrong)] == [10, 0]


def test_a_sample_has_a_riddle_and_its_caption():
    sample = shape_riddles.ShapeRiddles(SyntheticConfig(type="shape_riddles"), RowRules())[7]
    assert sample.reference == caption(riddles.read_riddle(sample.instruction))
    assert sample.category in sample.instruction and sample.sources == ()
