"""One shape on grey whose colour has to be worked out: two things are to be looked up, one by one.

"where hat is jade, cup matches hat, car is crimson, bag matches car: a disc that matches cup in the
upper left corner" asks for a green circle. Which thing matches which, and which has which colour,
is drawn anew for every riddle, so that nothing of it can be known beforehand: to say the colour in
one go a reader has to find the hat and the colour of the hat at once. Whoever first writes "where
cup matches hat, hat is jade." looks up one thing at a time. Pure functions.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tiny_world.captions import (
    CELL_OF_CORNER,
    COLOUR_OF_ADJECTIVE,
    SHAPE_OF_NOUN,
    Wish,
)

THINGS = ("cup", "hat", "bag", "car", "bus", "pen", "jar", "mug")
NUM_CHAINS = 3
"""Pairs of a thing that matches another and that other's colour; one of them is asked for."""
THINKING = "First look up what matches what."
"""Asks for a thought, a line behind the riddle; the policy was taught under it, and a run's
`policy.thought.instruction` has to be the same."""
OPENING = "where "
MARKER = "Picture:"
"""Stands between the thought and the caption."""


@dataclass(frozen=True)
class Riddle:
    """A prompt that takes two look-ups."""

    chains: tuple[tuple[str, str, str], ...]
    """(thing, the thing it matches, the adjective of that one's colour)."""
    asked: int
    """Which of them is asked for."""
    order: tuple[int, ...]
    """In which the statements stand: i < NUM_CHAINS says what chain i's thing matches, the others
    which colour the thing it matches has."""
    shape_noun: str
    """One of SHAPE_OF_NOUN."""
    corner: str
    """One of CELL_OF_CORNER."""

    @property
    def text(self) -> str:
        """As the user writes it."""
        said = [_matches(chain) for chain in self.chains]
        said += [_is(chain) for chain in self.chains]
        facts = ", ".join(said[i] for i in self.order)
        thing, noun, corner = self.chains[self.asked][0], self.shape_noun, self.corner
        return f"{OPENING}{facts}: a {noun} that matches {thing} in the {corner} corner"

    @property
    def wish(self) -> Wish:
        """What it asks for."""
        return wish_of(self, self.chains[self.asked][2])

    @property
    def colours_said(self) -> tuple[tuple[str, str], ...]:
        """(thing, adjective) in the order in which they are said."""
        chains = [self.chains[i - NUM_CHAINS] for i in self.order if i >= NUM_CHAINS]
        return tuple(chain[1:] for chain in chains)


def make_riddle(rng: random.Random) -> Riddle:
    """Each as likely as any other."""
    things = rng.sample(THINGS, 2 * NUM_CHAINS)
    adjectives = rng.sample(list(COLOUR_OF_ADJECTIVE), NUM_CHAINS)
    chains = zip(things[:NUM_CHAINS], things[NUM_CHAINS:], adjectives, strict=True)
    return Riddle(
        chains=tuple(chains),
        asked=rng.randrange(NUM_CHAINS),
        order=tuple(rng.sample(range(2 * NUM_CHAINS), 2 * NUM_CHAINS)),
        shape_noun=rng.choice(list(SHAPE_OF_NOUN)),
        corner=rng.choice(list(CELL_OF_CORNER)),
    )


def wish_of(riddle: Riddle, adjective: str) -> Wish:
    """What the riddle would ask for if that were the answer to it."""
    cell = CELL_OF_CORNER[riddle.corner]
    return Wish(COLOUR_OF_ADJECTIVE[adjective], SHAPE_OF_NOUN[riddle.shape_noun], cell)


def thought_of(chain: tuple[str, str, str]) -> str:
    """'where cup matches hat, hat is jade.'"""
    return f"where {_matches(chain)}, {_is(chain)}."


def is_riddle(text: str) -> bool:
    """Whether a prompt begins as a riddle does, and no other prompt of this world."""
    return text.lstrip().startswith(OPENING)


def read_riddle(text: str) -> Wish:
    """What a riddle asks for; ValueError when it is not one `Riddle.text` writes."""
    facts, _, question = text.strip().removeprefix(OPENING).partition(": ")
    links: dict[str, str] = {}
    for fact in facts.split(", "):
        thing, _, other = fact.replace(" matches ", " is ").partition(" is ")
        links[thing] = other
    match question.split():
        case ["a", noun, "that", "matches", thing, "in", "the", row, column, "corner"]:
            try:
                return Wish(
                    COLOUR_OF_ADJECTIVE[links[links[thing]]],
                    SHAPE_OF_NOUN[noun],
                    CELL_OF_CORNER[f"{row} {column}"],
                )
            except KeyError as unknown:
                raise ValueError(f"{text!r} does not say what {unknown} is") from unknown
    raise ValueError(
        f"{text!r} is not 'where <facts>: a <shape> that matches <thing> in the <corner> corner'"
    )


def _matches(chain: tuple[str, str, str]) -> str:
    return f"{chain[0]} matches {chain[1]}"


def _is(chain: tuple[str, str, str]) -> str:
    return f"{chain[1]} is {chain[2]}"
