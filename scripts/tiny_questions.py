"""The kinds of questions that the tiny language model learns to answer, about its closed world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tiny_stories import tell_story
from tiny_world import (
    ANIMALS,
    CATEGORIES,
    CITIES,
    CONTINENTS,
    DAYS,
    MONTHS,
    NAMES,
    OBJECTS,
    OPPOSITES,
    SAID,
    SIZES,
    THINGS,
    WORDS,
    YOUNG,
    with_article,
)


def _capitalised(text: str) -> str:
    return text[0].upper() + text[1:]


def _fill(random: Random, templates: tuple[str, ...], **values: object) -> str:
    return random.choice(templates).format(**values)


def _capital(random: Random) -> tuple[str, str]:
    country, city = random.choice(list(CITIES.items()))
    templates = (
        "What is the capital of {country}?",
        "What is the capital city of {country}?",
        "Which city is the capital of {country}?",
        "What city is the capital of {country}?",
        "Do you know the capital of {country}?",
        "Can you name the capital of {country}?",
        "Tell me the capital of {country}.",
        "Name the capital of {country}.",
        "What is {country}'s capital?",
        "The capital of {country}?",
        f"Is {random.choice(list(CITIES.values()))} the capital of {{country}}?",
    )
    return _fill(random, templates, country=country), f"The capital of {country} is {city}."


def _country(random: Random) -> tuple[str, str]:
    country, city = random.choice(list(CITIES.items()))
    templates = (
        "{city} is the capital of which country?",
        "Which country has the capital {city}?",
        "Of which country is {city} the capital?",
        "{city} is the capital of what country?",
        "What country is {city} the capital of?",
    )
    return _fill(random, templates, city=city), f"{city} is the capital of {country}."


def _continent(random: Random) -> tuple[str, str]:
    continent = random.choice(list(CONTINENTS))
    country = random.choice(CONTINENTS[continent])
    templates = (
        "On which continent is {country}?",
        "On what continent is {country}?",
        "Which continent is {country} in?",
        "What continent is {country} in?",
        "Where is {country}?",
    )
    return _fill(random, templates, country=country), f"{country} is in {continent}."


def _colour(random: Random) -> tuple[str, str]:
    thing, colour = random.choice(list(THINGS.items()))
    templates = (
        "What colour is {thing}?",
        "What color is {thing}?",
        "Which colour is {thing}?",
        "Which colour does {thing} have?",
        "What is the colour of {thing}?",
        "Tell me the colour of {thing}.",
        "Do you know the colour of {thing}?",
    )
    return _fill(random, templates, thing=thing), f"{_capitalised(thing)} is {colour}."


def _animal(random: Random) -> tuple[str, str]:
    draw = random.choice((_animal_says, _animal_young, _animal_legs, _animal_home))
    return draw(random)


def _animal_says(random: Random) -> tuple[str, str]:
    animal, sound = random.choice(list(SAID.items()))
    noun = with_article(animal)
    templates = (
        "What does {noun} say?",
        "What sound does {noun} make?",
        "Which sound does {noun} make?",
        "How does {noun} sound?",
    )
    return _fill(random, templates, noun=noun), f"{_capitalised(noun)} says {sound}."


def _animal_young(random: Random) -> tuple[str, str]:
    animal, young = random.choice(list(YOUNG.items()))
    templates = (
        "What is a young {animal} called?",
        "What is a baby {animal} called?",
        "How do we call a young {animal}?",
        "What do you call a young {animal}?",
        "What do you call a baby {animal}?",
    )
    return _fill(random, templates, animal=animal), f"A young {animal} is called {young}."


def _animal_legs(random: Random) -> tuple[str, str]:
    animal = random.choice(list(ANIMALS))
    noun, legs = with_article(animal), ANIMALS[animal].legs
    templates = (
        "How many legs does {noun} have?",
        "How many legs has {noun}?",
        "Tell me how many legs {noun} has.",
        "Do you know how many legs {noun} has?",
    )
    return _fill(random, templates, noun=noun), f"{_capitalised(noun)} has {legs} legs."


def _animal_home(random: Random) -> tuple[str, str]:
    animal = random.choice(list(ANIMALS))
    noun, home = with_article(animal), ANIMALS[animal].home
    templates = (
        "Where does {noun} live?",
        "Where can I find {noun}?",
        "Where is {noun} at home?",
        "Tell me where {noun} lives.",
        "Do you know where {noun} lives?",
    )
    return _fill(random, templates, noun=noun), f"{_capitalised(noun)} lives {home}."


def _opposite(random: Random) -> tuple[str, str]:
    pair = random.choice(OPPOSITES)
    word, other = pair if random.random() < 0.5 else pair[::-1]
    templates = (
        "What is the opposite of {word}?",
        "Which word is the opposite of {word}?",
        "Tell me the opposite of {word}.",
        "Name the opposite of {word}.",
        "Do you know the opposite of {word}?",
        "The opposite of {word}?",
    )
    return _fill(random, templates, word=word), f"The opposite of {word} is {other}."


def _calendar(random: Random) -> tuple[str, str]:
    kind, cycle = random.choice((("day", DAYS), ("month", MONTHS)))
    index = random.randrange(len(cycle))
    here, after, before = cycle[index], cycle[(index + 1) % len(cycle)], cycle[index - 1]
    if random.random() < 0.5:
        templates = (
            "Which {kind} comes after {here}?",
            "What {kind} comes after {here}?",
            "Which {kind} follows {here}?",
            "What comes after {here}?",
            "What is the {kind} after {here}?",
        )
        return _fill(random, templates, kind=kind, here=here), f"{after} comes after {here}."
    templates = (
        "Which {kind} comes before {here}?",
        "What {kind} comes before {here}?",
        "Which {kind} is before {here}?",
        "What comes before {here}?",
        "What is the {kind} before {here}?",
    )
    return _fill(random, templates, kind=kind, here=here), f"{before} comes before {here}."


def _tomorrow(random: Random) -> tuple[str, str]:
    index = random.randrange(7)
    when, shift = random.choice((("tomorrow", 1), ("yesterday", -1)))
    verb = "is" if shift > 0 else "was"
    templates = (
        "Today is {today}. What day {verb} {when}?",
        "Today is {today}. Which day {verb} {when}?",
        "If today is {today}, what day {verb} {when}?",
        "If today is {today}, which day {verb} {when}?",
        "It is {today}. What day {verb} {when}?",
        "It is {today} today. Which day {verb} {when}?",
    )
    question = _fill(random, templates, today=DAYS[index], verb=verb, when=when)
    return question, f"{_capitalised(when)} {verb} {DAYS[(index + shift) % 7]}."


def _count(random: Random) -> tuple[str, str]:
    start, length = random.randint(1, 15), random.randint(3, 8)
    numbers = list(range(start, start + length))
    if random.random() < 0.35:
        numbers.reverse()
        question = f"Count down from {numbers[0]} to {numbers[-1]}."
    else:
        question = f"Count from {numbers[0]} to {numbers[-1]}."
    return question, ", ".join(map(str, numbers)) + "."


def _sum(random: Random) -> tuple[str, str]:
    a, b = random.randint(0, 12), random.randint(0, 12)
    templates = ("What is {a} + {b}?", "How much is {a} + {b}?", "{a} + {b} = ?")
    return _fill(random, templates, a=a, b=b), f"{a} + {b} = {a + b}."


def _difference(random: Random) -> tuple[str, str]:
    b = random.randint(0, 12)
    a = random.randint(b, 12)
    templates = ("What is {a} - {b}?", "How much is {a} - {b}?", "{a} - {b} = ?")
    return _fill(random, templates, a=a, b=b), f"{a} - {b} = {a - b}."


def _greater(random: Random) -> tuple[str, str]:
    a, b = random.sample(range(60), 2)
    templates = ("Which is greater, {a} or {b}?", "Which number is greater, {a} or {b}?")
    return _fill(random, templates, a=a, b=b), f"{max(a, b)} is greater than {min(a, b)}."


def _bigger(random: Random) -> tuple[str, str]:
    one, other = random.sample(range(len(SIZES)), 2)
    small, big = (with_article(SIZES[each]) for each in sorted((one, other)))
    first, second = with_article(SIZES[one]), with_article(SIZES[other])
    if random.random() < 0.6:
        templates = (
            "Which is bigger, {first} or {second}?",
            "What is bigger, {first} or {second}?",
        )
        answer = f"{_capitalised(big)} is bigger than {small}."
    else:
        templates = ("Which is smaller, {first} or {second}?",)
        answer = f"{_capitalised(small)} is smaller than {big}."
    return _fill(random, templates, first=first, second=second), answer


def _repeat(random: Random) -> tuple[str, str]:
    words = " ".join(random.sample(WORDS, random.randint(1, 5)))
    return f"{random.choice(('Say', 'Repeat', 'Repeat after me'))}: {words}", words


def _reverse(random: Random) -> tuple[str, str]:
    words = random.sample(WORDS, random.randint(2, 4))
    templates = ("Say in reverse order: {words}", "Reverse: {words}")
    return _fill(random, templates, words=" ".join(words)), " ".join(words[::-1])


def _place(random: Random) -> tuple[str, str]:
    words = random.sample(WORDS, random.randint(3, 5))
    which = random.choice(("first", "second", "last"))
    word = words[{"first": 0, "second": 1, "last": -1}[which]]
    return f"What is the {which} word of: {' '.join(words)}", f"The {which} word is {word}."


def _spell(random: Random) -> tuple[str, str]:
    word = random.choice(WORDS)
    templates = (
        "Spell {word}.",
        "Spell the word {word}.",
        "How do you spell {word}?",
        "How is {word} spelled?",
        "Can you spell {word}?",
    )
    return _fill(random, templates, word=word), "-".join(word) + "."


def _sort(random: Random) -> tuple[str, str]:
    numbers = random.sample(range(10), random.randint(3, 5))
    templates = ("Sort the numbers: {numbers}", "Sort: {numbers}")
    question = _fill(random, templates, numbers=" ".join(map(str, numbers)))
    return question, " ".join(map(str, sorted(numbers)))


def _list(random: Random) -> tuple[str, str, tuple[tuple[str, ...], int]]:
    category = random.choice(list(CATEGORIES))
    words = CATEGORIES[category]
    count, number = random.choice(((2, "two"), (3, "three")))
    chosen = random.sample(words, count)
    templates = (
        "Name {number} {category}.",
        "List {number} {category}.",
        "Tell me {number} {category}.",
    )
    answer = ", ".join(chosen[:-1]) + f" and {chosen[-1]}."
    return _fill(random, templates, number=number, category=category), answer, (words, count)


def _hello(random: Random) -> tuple[str, str]:
    answers = {
        "Hello! How can I help you?": (
            "Hello!",
            "Hi!",
            "Good morning!",
            "Good evening!",
            "Hello there!",
        ),
        "I am a tiny language model. I come with torchfmri, and you can look inside me.": (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Tell me about yourself.",
        ),
        "You are welcome.": ("Thank you.", "Thanks!", "Thank you very much."),
        "Goodbye!": ("Bye!", "Goodbye!", "See you soon."),
        "I am well, thank you.": ("How are you?", "How are you today?", "Are you well?"),
    }
    answer = random.choice(list(answers))
    return random.choice(answers[answer]), answer


def _story(random: Random) -> tuple[str, str]:
    name, thing = random.choice(NAMES), random.choice(OBJECTS)
    templates = (
        "Tell me a story about {name} and a {thing}.",
        "Write a short story about {name} and a {thing}.",
    )
    return _fill(random, templates, name=name, thing=thing), tell_story(random, name, thing)


@dataclass(frozen=True)
class Kind:
    """How a kind of question is drawn, how often, and whether some are held out."""

    draw: Callable[[Random], tuple]
    weight: float = 1
    examined: bool = True


KINDS = {
    "capital": Kind(_capital, 1.5),
    "country": Kind(_country),
    "continent": Kind(_continent, 0.6),
    "colour": Kind(_colour, 0.6),
    "animal": Kind(_animal),
    "opposite": Kind(_opposite, 0.8),
    "calendar": Kind(_calendar, 1.2),
    "tomorrow": Kind(_tomorrow, 0.6),
    "count": Kind(_count, 2),
    "sum": Kind(_sum, 1.5),
    "difference": Kind(_difference, 1.2),
    "greater": Kind(_greater),
    "bigger": Kind(_bigger),
    "repeat": Kind(_repeat),
    "reverse": Kind(_reverse),
    "place": Kind(_place, 0.7),
    "spell": Kind(_spell),
    "sort": Kind(_sort, 0.8),
    "list": Kind(_list),
    "hello": Kind(_hello, 0.3, examined=False),
    "story": Kind(_story, 0.7, examined=False),
}
