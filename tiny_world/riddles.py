"""Riddles: prompts for one shape on grey whose colour takes two look-ups in the prompt.

"where hat is jade, cup matches hat, car is crimson, bag matches car: a disc that matches cup in the
upper left corner" asks for a green circle. Matches and colours are random in every riddle, so they
cannot be memorised: to write the colour at once a policy has to look up the hat and the hat's
colour in one step. A thought such as "where cup matches hat, hat is jade." needs one look-up at a
time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tiny_world.captions import CELL_OF_CORNER, COLOUR_OF_ADJECTIVE, SHAPE_OF_NOUN, Wish

THINGS = ("cup", "hat", "bag", "car", "bus", "pen", "jar", "mug")
NUM_CHAINS = 3
"""Number of chains (a thing matches another thing, which has a colour); one is asked for."""
THINKING = "First look up what matches what."
"""The request for a thought, in a line after the riddle; the policy was trained with it, and a
run's `policy.thought.instruction` has to be the same."""
OPENING = "where "
MARKER = "Picture:"
"""Separates the thought from the caption."""


@dataclass(frozen=True)
class Riddle:
    """A prompt that needs two look-ups."""

    chains: tuple[tuple[str, str, str], ...]
    """(thing, matched thing, adjective for the colour of the matched thing)."""
    asked: int
    """Index of the chain that is asked for."""
    order: tuple[int, ...]
    """Order of the statements: i < NUM_CHAINS is the match of chain i, i >= NUM_CHAINS the colour
    of chain i - NUM_CHAINS."""
    shape_noun: str
    """One of SHAPE_OF_NOUN."""
    corner: str
    """One of CELL_OF_CORNER."""

    @property
    def text(self) -> str:
        """The prompt as the user writes it."""
        statements = [_matches(chain) for chain in self.chains]
        statements += [_is(chain) for chain in self.chains]
        facts = ", ".join(statements[i] for i in self.order)
        thing, noun, corner = self.chains[self.asked][0], self.shape_noun, self.corner
        return f"{OPENING}{facts}: a {noun} that matches {thing} in the {corner} corner"

    @property
    def wish(self) -> Wish:
        """The right answer."""
        return wish_of(self, self.chains[self.asked][2])

    @property
    def stated_colours(self) -> tuple[tuple[str, str], ...]:
        """(matched thing, adjective) in the order of the statements."""
        chains = [self.chains[i - NUM_CHAINS] for i in self.order if i >= NUM_CHAINS]
        return tuple(chain[1:] for chain in chains)


def make_riddle(rng: random.Random) -> Riddle:
    """A riddle drawn uniformly at random."""
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
    """The riddle's wish if `adjective` were the right colour."""
    cell = CELL_OF_CORNER[riddle.corner]
    return Wish(COLOUR_OF_ADJECTIVE[adjective], SHAPE_OF_NOUN[riddle.shape_noun], cell)


def thought_of(chain: tuple[str, str, str]) -> str:
    """'where cup matches hat, hat is jade.'"""
    return f"where {_matches(chain)}, {_is(chain)}."


def is_riddle(text: str) -> bool:
    """Whether a prompt begins as only riddles do."""
    return text.lstrip().startswith(OPENING)


def read_riddle(text: str) -> Wish:
    """Solves a riddle; raises ValueError if `Riddle.text` cannot have written it."""
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
