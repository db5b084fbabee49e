"""Draws scenes and edits of them from a seed, so that every result's quality is known."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from rl.api.types import Sample
from rl.audit.audit_cases import Case, case_of
from rl.files import open_picture

SIDE_PX = 512
COLOURS = {
    "red": (214, 40, 40),
    "green": (46, 139, 60),
    "blue": (40, 90, 210),
    "yellow": (245, 205, 40),
    "purple": (125, 50, 160),
    "orange": (240, 125, 30),
    "white": (250, 250, 250),
    "black": (25, 25, 25),
}
BACKGROUNDS = {
    "light grey": (205, 205, 205),
    "light blue": (180, 210, 235),
    "beige": (225, 212, 185),
    "pink": (240, 195, 205),
}
FORMS = ("circle", "square", "triangle", "star", "cross")
PLACES = {
    "top left": (0.25, 0.25),
    "top right": (0.75, 0.25),
    "bottom left": (0.25, 0.75),
    "bottom right": (0.75, 0.75),
}
"""Where an object is -> its centre (x, y), as shares of the side."""
PHOTOS = ("china.jpg", "flower.jpg")
"""Photographs that the package scikit-learn contains (CC BY, see its `datasets/images`)."""


class Thing(NamedTuple):
    """An object of a scene."""

    form: str
    colour: str
    place: str

    @property
    def name(self) -> str:
        return f"{self.colour} {self.form}"

    @property
    def with_article(self) -> str:
        return f"{'an' if self.colour == 'orange' else 'a'} {self.name}"


@dataclass(frozen=True)
class Drawing:
    """A scene; all objects differ in form, colour and place."""

    background: str
    things: tuple[Thing, ...]

    def with_thing(self, old: Thing, *new: Thing) -> Drawing:
        """The scene with `old` replaced by `new` (nothing: removed)."""
        kept = (new if thing == old else (thing,) for thing in self.things)
        return replace(self, things=tuple(thing for things in kept for thing in things))


class Edit(NamedTuple):
    """An instruction with the scenes it may lead to."""

    category: str
    instruction: str
    right: Drawing
    wrong: Mapping[str, Drawing]
    """Kind of a wrong result (`audit_cases.KINDS`) -> its scene."""


def scene_cases(num_cases: int, seed: int, with_sources: bool) -> list[Case]:
    """`num_cases` cases of drawn scenes; without sources the instruction describes the picture.
    With sources, every sixth case edits a photograph, if scikit-learn is installed."""
    photos = _photos() if with_sources else []
    made = [_made(number, seed, with_sources, photos) for number in range(num_cases + 1)]
    cases = (case_of(sample, other, drawn) for (sample, drawn), (other, _) in pairwise(made))
    return [case for case in cases if case is not None]


def _made(
    number: int, seed: int, with_sources: bool, photos: Sequence[Image.Image]
) -> tuple[Sample, Mapping[str, Image.Image]]:
    """Sample `number` and the wrong results that are drawn rather than derived."""
    rng = random.Random(f"audit:{seed}:{number}")
    name = f"scene-{seed}-{number}"
    if photos and number % 6 == 5:
        instruction, source, target, wrong = _photo_edit(rng, photos[number // 6 % len(photos)])
        return Sample(name, instruction, (source,), target, category="photo"), wrong
    scene = _scene(rng)
    if not with_sources:
        edit = _caption(rng, scene)
        wrong = {kind: draw(drawing) for kind, drawing in edit.wrong.items()}
        sample = Sample(name, edit.instruction, target=draw(scene), category=edit.category)
        return sample, wrong
    edit = (_recolour, _remove, _add, _repaint)[number % 4](rng, scene)
    sample = Sample(
        name, edit.instruction, (draw(scene),), draw(edit.right), category=edit.category
    )
    return sample, {kind: draw(drawing) for kind, drawing in edit.wrong.items()}


def draw(scene: Drawing) -> Image.Image:
    """RGB, 512 x 512, edges antialiased."""
    large = 2 * SIDE_PX
    picture = Image.new("RGB", (large, large), BACKGROUNDS[scene.background])
    pen = ImageDraw.Draw(picture)
    for thing in scene.things:
        x, y = (share * large for share in PLACES[thing.place])
        pen.polygon(_outline(thing.form, x, y, 0.16 * large), COLOURS[thing.colour])
    return picture.resize((SIDE_PX, SIDE_PX), Image.Resampling.LANCZOS)


def _outline(form: str, x: float, y: float, radius: float) -> list[tuple[float, float]]:
    """Corners of a form around (x, y)."""
    if form == "cross":
        arm, end = radius / 3, radius
        corner = [(arm, end), (arm, arm), (end, arm)]
        points = [(a, b) for a, b in corner]
        quarters = [points, [(b, -a) for a, b in points]]
        quarters += [[(-a, -b) for a, b in quarter] for quarter in quarters]
        return [(x + a, y + b) for quarter in quarters for a, b in quarter]
    corners = {"circle": 72, "square": 4, "triangle": 3, "star": 10}[form]
    turn = np.pi / 4 if form == "square" else -np.pi / 2
    outline = []
    for i in range(corners):
        angle = turn + 2 * np.pi * i / corners
        reach = radius * (0.45 if form == "star" and i % 2 else 1.0)
        outline.append((x + reach * np.cos(angle), y + reach * np.sin(angle)))
    return outline


def _scene(rng: random.Random) -> Drawing:
    forms, colours = rng.sample(FORMS, 3), rng.sample(list(COLOURS), 3)
    places = rng.sample(list(PLACES), 3)
    things = map(Thing, forms, colours, places)
    return Drawing(rng.choice(list(BACKGROUNDS)), tuple(things))


def _new_colour(rng: random.Random, scene: Drawing, *also_not: str) -> str:
    used = {*also_not, *(thing.colour for thing in scene.things)}
    return rng.choice([colour for colour in COLOURS if colour not in used])


def _recolour(rng: random.Random, scene: Drawing) -> Edit:
    thing, other, third = rng.sample(scene.things, 3)
    colour = _new_colour(rng, scene)
    another = _new_colour(rng, scene, colour)
    right = scene.with_thing(thing, thing._replace(colour=colour))
    return Edit(
        "colour",
        f"Change the colour of the {thing.name} to {colour}.",
        right,
        {
            "wrong_object": scene.with_thing(other, other._replace(colour=colour)),
            "wrong_colour": scene.with_thing(thing, thing._replace(colour=another)),
            "over_edit": right.with_thing(third, third._replace(colour=another)),
        },
    )


def _remove(rng: random.Random, scene: Drawing) -> Edit:
    thing, other, third = rng.sample(scene.things, 3)
    right = scene.with_thing(thing)
    return Edit(
        "remove",
        f"Remove the {thing.name}.",
        right,
        {
            "wrong_object": scene.with_thing(other),
            "wrong_colour": scene.with_thing(thing, thing._replace(colour=_new_colour(rng, scene))),
            "over_edit": right.with_thing(third),
        },
    )


def _add(rng: random.Random, scene: Drawing) -> Edit:
    colour = _new_colour(rng, scene)
    form = rng.choice([f for f in FORMS if f not in {thing.form for thing in scene.things}])
    [place] = PLACES.keys() - {thing.place for thing in scene.things}
    new, other = Thing(form, colour, place), rng.choice(scene.things)
    right = replace(scene, things=(*scene.things, new))

    def added(thing: Thing) -> Drawing:
        return replace(scene, things=(*scene.things, thing))

    return Edit(
        "add",
        f"Add {new.with_article} in the empty {place} corner.",
        right,
        {
            "wrong_object": added(new._replace(form=other.form)),
            "wrong_colour": added(new._replace(colour=_new_colour(rng, scene, colour))),
            "over_edit": right.with_thing(other),
        },
    )


def _repaint(rng: random.Random, scene: Drawing) -> Edit:
    background, another = rng.sample([b for b in BACKGROUNDS if b != scene.background], 2)
    thing = rng.choice(scene.things)
    right = replace(scene, background=background)
    return Edit(
        "background",
        f"Make the background {background}.",
        right,
        {
            "wrong_object": scene.with_thing(thing, thing._replace(colour=_new_colour(rng, scene))),
            "wrong_colour": replace(scene, background=another),
            "over_edit": right.with_thing(thing),
        },
    )


def _caption(rng: random.Random, scene: Drawing) -> Edit:
    """The scene described in words, for judges of pictures without a source."""
    described = ", ".join(f"{thing.with_article} at the {thing.place}" for thing in scene.things)
    thing = rng.choice(scene.things)
    form = rng.choice([f for f in FORMS if f not in {thing.form for thing in scene.things}])
    recoloured = thing._replace(colour=_new_colour(rng, scene))
    return Edit(
        "caption",
        f"On a {scene.background} background: {described}, and nothing else.",
        scene,
        {
            "wrong_object": scene.with_thing(thing, thing._replace(form=form)),
            "wrong_colour": scene.with_thing(thing, recoloured),
            "partial": scene.with_thing(thing),
        },
    )


def _photos() -> list[Image.Image]:
    """Those of the photographs that are installed, 512x512 px; [] without scikit-learn. The package
    is not imported, because that takes seconds."""
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        return []
    folder = Path(package.origin).parent / "datasets" / "images"
    files = [folder / name for name in PHOTOS if (folder / name).is_file()]
    return [ImageOps.fit(open_picture(file, ("JPEG",)), (SIDE_PX, SIDE_PX)) for file in files]


def _photo_edit(
    rng: random.Random, photo: Image.Image
) -> tuple[str, Image.Image, Image.Image, Mapping[str, Image.Image]]:
    """(instruction, source, right result, wrong results) of an edit of the whole photograph."""
    grey, mirrored = ImageOps.grayscale(photo).convert("RGB"), ImageOps.mirror(photo)
    if rng.random() < 0.5:
        sepia = ImageOps.colorize(ImageOps.grayscale(photo), (60, 30, 0), (255, 240, 200))
        wrong = {"wrong_colour": sepia, "wrong_object": mirrored, "over_edit": ImageOps.flip(grey)}
        return "Make the photo black and white.", photo, grey, wrong
    turned = photo.transpose(Image.Transpose.ROTATE_90)
    grey_turned = grey.transpose(Image.Transpose.ROTATE_90)
    wrong = {"wrong_colour": grey, "wrong_object": mirrored, "over_edit": grey_turned}
    return "Rotate the photo by 90 degrees, counter-clockwise.", photo, turned, wrong
