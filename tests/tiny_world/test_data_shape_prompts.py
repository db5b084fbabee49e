"""Prompts of the tiny world for prompt enhancement, and their data source."""

from __future__ import annotations

from rl.api.data import RowRules
from rl.api.types import Sample
from tiny_world import captions
from tiny_world.captions import Wish
from tiny_world.data import shape_prompts
from tiny_world.pixel_judge import parse_scene
from tiny_world.scenes import COLOURS, SHAPES, draw


def samples_of(start: int, num: int, **config) -> list[Sample]:
    section = shape_prompts.Config.model_validate({"type": "shape_prompts", **config})
    source = shape_prompts.ShapePrompts(section, RowRules())
    return [source[index] for index in range(start, start + num)]


def test_prompts_and_captions_are_parsed_back_to_their_wish():
    disc, triangle = Wish("red", "circle", (0, 0)), Wish("green", "triangle", (1, 0))
    assert captions.prompt_text(disc, "adjective") == "a crimson disc in the upper left corner"
    assert captions.caption(triangle) == "green triangle bottom left"
    for prompt in captions.user_prompts(False) + captions.user_prompts(True):
        caption = captions.caption(prompt.wish)
        assert captions.read_prompt(prompt.text) == captions.read_caption(caption) == prompt.wish
        # A user's prompt and the renderer's caption share only the words left and right.
        assert set(prompt.text.split()) & set(caption.split()) <= {"left", "right"}


def test_the_scene_shows_the_wish():
    for wish in captions.all_wishes():
        [shape] = parse_scene(draw(captions.scene_of(wish, 2, (1, -2)))).shapes
        assert (shape.colour, shape.shape, shape.cell) == (wish.colour, wish.shape, wish.cell)


def test_held_out_pairs_are_new_but_their_words_are_not():
    train, held_out = captions.user_prompts(False), captions.user_prompts(True)
    assert (len(train), len(held_out)) == (216, 72)
    pairs = [{(p.wish.colour, p.wish.shape) for p in half} for half in (train, held_out)]
    assert not pairs[0] & pairs[1]
    assert len(pairs[0] | pairs[1]) == len(COLOURS) * len(SHAPES)
    words = [{word for p in half for word in p.text.split()} for half in (train, held_out)]
    assert words[1] <= words[0]


def test_each_pass_over_the_prompts_has_its_own_order():
    passes = [
        [sample.instruction for sample in samples_of(start, 216, seed=seed)]
        for start, seed in ((0, 1), (216, 1), (0, 2))
    ]
    assert len(set(passes[0])) == 216 and passes[0] not in passes[1:]


def test_the_held_out_list_holds_each_prompt_once():
    samples = samples_of(0, 72, held_out=True, num_samples=72)
    assert {s.instruction for s in samples} == {p.text for p in captions.user_prompts(True)}
    assert {s.category for s in samples} == set(captions.KINDS)
    for sample in samples:
        wish = captions.read_prompt(sample.instruction)
        assert captions.read_caption(sample.reference) == wish
