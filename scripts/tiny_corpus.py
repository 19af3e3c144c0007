"""The text that the tiny language model learns from: questions, answers and stories, all made here.

Nothing is taken from elsewhere. Every text is drawn from a `random.Random`, so a seed gives the
corpus. About one question in ten is never drawn for training (`is_held_out`, a checksum of the
question): the same fact or operation is learned from other wordings or other numbers.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from tiny_questions import KINDS
from tiny_stories import tell_story

# Those whose answer is a sentence that stands for itself.
FACTS = ("capital", "country", "continent", "colour", "animal", "opposite", "calendar", "bigger")


@dataclass(frozen=True)
class Exchange:
    """A question and its answer.

    Attributes:
        kind: Key of `KINDS`.
        question: What the user says.
        answer: What the assistant should say.
        choices: Where several answers are right: the words to choose from, and how many.
    """

    kind: str
    question: str
    answer: str
    choices: tuple[tuple[str, ...], int] | None = None

    def accepts(self, answer: str) -> bool:
        """Whether `answer` is right."""
        if self.choices is None:
            return answer.strip() == self.answer
        words, count = self.choices
        given = [each for each in re.split(r", | and |\.", answer.strip()) if each]
        return len(given) == len(set(given)) == count and set(given) <= set(words)


def is_held_out(exchange: Exchange) -> bool:
    """Whether this question is kept for the examination: about one in ten, whatever the seed."""
    return KINDS[exchange.kind].examined and zlib.crc32(exchange.question.encode()) % 10 == 0


def draw_exchange(random: Random, kind: str) -> Exchange:
    """A question of this kind with its answer, held out or not."""
    question, answer, *choices = KINDS[kind].draw(random)
    return Exchange(kind, question, answer, choices[0] if choices else None)


def draw_lesson(random: Random, kinds: Sequence[str] | None = None) -> Exchange:
    """A question with its answer that is not held out."""
    names = list(kinds or KINDS)
    while True:
        (kind,) = random.choices(names, [KINDS[each].weight for each in names])
        exchange = draw_exchange(random, kind)
        if not is_held_out(exchange):
            return exchange


def draw_document(random: Random) -> list[tuple[str, str]]:
    """One document for training, as pairs of (role, text); a text without dialogue has role ""."""
    chance = random.random()
    if chance < 0.1:
        return [("", tell_story(random))]
    if chance < 0.2:
        exchanges = [draw_lesson(random, FACTS) for _ in range(4)]
        return [("", " ".join(each.answer for each in exchanges))]
    messages = []
    for _ in range(random.choice((1, 1, 2, 3))):
        exchange = draw_lesson(random)
        messages += [
            ("user", _say_casually(random, exchange.question)),
            ("assistant", exchange.answer),
        ]
    return messages


def draw_examination(count: int, seed: int = 1) -> Iterator[Exchange]:
    """Up to `count` different held-out questions of every kind."""
    random = Random(seed)
    for kind in KINDS:
        drawn = (draw_exchange(random, kind) for _ in range(100 * count))
        found = {each.question: each for each in drawn if is_held_out(each)}
        yield from list(found.values())[:count]


def words_of(texts: Iterable[str]) -> list[str]:
    """The different words of some texts, in alphabetical order."""
    return sorted({word for text in texts for word in re.findall(r"[A-Za-z]+", text)})


def _say_casually(random: Random, question: str) -> str:
    """As people type: now and then without a capital letter at the start or a mark at the end."""
    if random.random() < 0.1:
        question = question[0].lower() + question[1:]
    return question.rstrip("?.") if random.random() < 0.1 else question
