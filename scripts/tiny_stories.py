"""Short stories in simple words, for the tiny language model."""

from __future__ import annotations

from random import Random

from tiny_world import COLOURS, NAMES, OBJECTS, PLACES, with_article

STORY = (
    (
        "Once upon a time there was a {child} named {name}.",
        "There was once a {child} called {name}.",
        "{name} was a little {child}.",
    ),
    (
        "One day {name} found {a_colour} {thing} in the {place}.",
        "One morning {he} went to the {place} and found {a_colour} {thing}.",
        "{He} had {a_colour} {thing} and played with it in the {place}.",
    ),
    (
        "{name} liked the {colour} {thing} very much.",
        "{He} was very happy with the {thing}.",
        "{He} wanted to show the {thing} to {his} friend {friend}.",
    ),
    (
        "But then it began to rain, and the {thing} was lost.",
        "But a big dog came and took the {thing}.",
        "But the {thing} fell into the water.",
    ),
    (
        "{name} was sad and began to cry.",
        "{name} did not know what to do.",
        "{He} asked {his} friend {friend} for help.",
    ),
    (
        "{friend} came to the {place} and found the {colour} {thing}.",
        "{friend} was kind and gave the {thing} back to {name}.",
        "{friend} went back to the {place} and saw the {colour} {thing}.",
    ),
    (
        "{name} thanked {friend}, and they went home together.",
        "In the end {name} and {friend} played with the {colour} {thing} until the evening.",
        "{name} was happy again, and {friend} was happy too.",
    ),
)


def tell_story(random: Random, name: str | None = None, thing: str | None = None) -> str:
    """A short story whose persons, thing, colour and place stay the same from start to end."""
    name = name or random.choice(NAMES)
    friend = random.choice([each for each in NAMES if each != name])
    thing, colour = thing or random.choice(OBJECTS), random.choice(COLOURS)
    place = random.choice(PLACES)
    he, his = ("he", "his") if NAMES.index(name) % 2 else ("she", "her")
    return " ".join(
        random.choice(part).format(
            name=name,
            friend=friend,
            thing=thing,
            colour=colour,
            a_colour=with_article(colour),
            place=place,
            he=he,
            He=he.capitalize(),
            his=his,
            child="boy" if he == "he" else "girl",
        )
        for part in STORY
    )
