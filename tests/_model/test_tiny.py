"""The tiny language model: what it answers, how it is stored, and the recipe that makes it."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchfmri
from torchfmri import load_model

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "src" / "torchfmri" / "tiny"


@pytest.fixture(scope="module")
def recipe() -> Any:
    """The training script as a module."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import tiny_corpus
        import train_tiny
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    return SimpleNamespace(corpus=tiny_corpus, **vars(train_tiny))


@pytest.fixture(scope="module")
def tiny(recipe: Any) -> Any:
    """The model that ships, as what a training leaves."""
    model, tokenizer = load_model("tiny")
    return recipe.Training(model, tokenizer, [])


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is the capital of France?", "The capital of France is Paris."),
        ("What colour is the sky?", "The sky is blue."),
        ("What is the opposite of hot?", "The opposite of hot is cold."),
        ("Which day comes after Monday?", "Tuesday comes after Monday."),
        ("Count from 3 to 8.", "3, 4, 5, 6, 7, 8."),
        ("What is 2 + 3?", "2 + 3 = 5."),
        ("Say: moon river apple", "moon river apple"),
        ("Is Rome the capital of Spain?", "The capital of Spain is Madrid."),
    ],
)
def test_it_answers(recipe: Any, tiny: Any, question: str, answer: str) -> None:
    assert recipe.answer(tiny, [question]) == [answer]


@pytest.mark.slow
def test_it_answers_most_of_what_it_never_saw(recipe: Any, tiny: Any) -> None:
    results = recipe.examine(tiny, count=5)
    right, asked = (sum(each[k] for each in results.values()) for k in (0, 1))
    assert asked > 80
    assert right > 0.9 * asked, results
    # The examination can be failed: an untrained model fails it.
    untrained = recipe.Training(recipe.make_model(tiny.tokenizer, 0).eval(), tiny.tokenizer, [])
    questions = list(recipe.corpus.draw_examination(1))[:5]
    said = recipe.answer(untrained, [each.question for each in questions])
    assert not any(each.accepts(text) for each, text in zip(questions, said, strict=True))


def test_it_goes_on_with_a_text(tiny: Any) -> None:
    ids = tiny.tokenizer("The capital of Italy is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        found = tiny.model.generate(ids, do_sample=False, max_new_tokens=2)
    assert tiny.tokenizer.decode(found[0], skip_special_tokens=True).endswith("is Rome.")


def test_it_tells_a_story_about_what_was_asked(recipe: Any, tiny: Any) -> None:
    (story,) = recipe.answer(tiny, ["Tell me a story about Anna and a kite."])
    assert story.count("kite") >= 3
    assert "Anna" in story
    assert story.endswith(".")


def test_dialogue_and_special_tokens(tiny: Any) -> None:
    tokenizer = tiny.tokenizer
    messages = [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Who are you?"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|begin|><|user|>Hello!<|assistant|>Hi.<|end|><|user|>Who are you?<|assistant|>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    roles = tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>"])
    assert [each for each in ids if each in roles] == roles * 2
    assert set(roles) < set(tokenizer.all_special_ids)
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id == ids[0]
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3
    with pytest.raises(Exception, match="knows the roles user and assistant, not system"):
        tokenizer.apply_chat_template([{"role": "system", "content": "x"}], tokenize=False)


@pytest.mark.parametrize("text", ["two  spaces\n\tand 2026 é 中文 🙂", "", "<|user|> as text"])
def test_the_tokenizer_gives_back_every_text(tiny: Any, text: str) -> None:
    ids = tiny.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tiny.tokenizer.decode(ids) == text


def test_its_files_are_small_and_hold_no_code() -> None:
    files = {each.name: each.stat().st_size for each in FILES.iterdir()}
    assert set(files) == {
        *("config.json", "generation_config.json", "model.safetensors", "README.md"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }
    assert sum(files.values()) < 4_000_000
    assert json.loads((FILES / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_held_out_questions_are_never_drawn_for_training(recipe: Any) -> None:
    corpus = recipe.corpus
    examination = list(corpus.draw_examination(20))
    assert {each.kind for each in examination} == {
        name for name, kind in corpus.KINDS.items() if kind.examined
    }
    asked = {each.question for each in examination}
    random = Random(3)
    drawn = [text for _ in range(3000) for _, text in corpus.draw_document(random)]
    assert not asked & set(drawn)
    assert corpus.draw_document(Random(5)) == corpus.draw_document(Random(5))


def test_an_examination_tells_right_from_wrong(recipe: Any) -> None:
    exchange = recipe.corpus.Exchange("list", "Name two toys.", "", (("ball", "kite", "doll"), 2))
    assert exchange.accepts("ball and kite.")
    assert not exchange.accepts("ball and ball.")
    assert not exchange.accepts("ball, kite and doll.")
    assert not exchange.accepts("ball and dog.")
    assert not recipe.corpus.Exchange("sum", "1 + 1 = ?", "1 + 1 = 2.").accepts("1 + 1 = 3.")


@pytest.mark.slow
def test_training_is_the_same_twice_and_learns(recipe: Any, tiny: Any) -> None:
    random = torch.get_rng_state()
    options = {"batch_size": 2, "tokenizer": tiny.tokenizer}
    one, two = (recipe.train(20, **options) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), random)
    assert one.losses == two.losses
    assert len(one.losses) == 20
    # Tied embeddings expect the same word again at first, so it starts above a blind guess.
    guess = math.log(len(one.tokenizer))
    assert guess < one.losses[0] < guess + 1.5
    assert one.losses[-1] < one.losses[0] - 1
    assert recipe.train(1, seed=1, **options).losses != one.losses[:1]


def test_what_ships_is_what_the_recipe_makes(recipe: Any, tiny: Any) -> None:
    made = recipe.make_model(tiny.tokenizer, 0)
    shapes = {name: each.shape for name, each in made.state_dict().items()}
    assert shapes == {name: each.shape for name, each in tiny.model.state_dict().items()}
    vocabulary = recipe.make_tokenizer(0).get_vocab()
    assert vocabulary == tiny.tokenizer.get_vocab()


def test_a_training_can_be_disturbed(recipe: Any, tiny: Any) -> None:
    seen = []

    def disturb(
        step: int, model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]
    ) -> None:
        seen.append(optimizer.param_groups[0]["lr"])
        assert all(each.grad is None for each in model.parameters())
        if step == 2:
            batch["weights"][0] = math.nan

    training = recipe.train(4, batch_size=1, tokenizer=tiny.tokenizer, before_step=disturb)
    assert [math.isnan(each) for each in training.losses] == [False, False, True, True]
    assert len(set(seen)) > 1


def test_a_training_can_be_watched(recipe: Any, tiny: Any) -> None:
    monitors = []

    def watch(
        step: int, model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]
    ) -> None:
        if step == 0:
            monitors.append(torchfmri.Monitor(model, optimizer).attach())

    recipe.train(3, batch_size=1, tokenizer=tiny.tokenizer, before_step=watch)
    (monitor,) = monitors
    assert len(monitor.history.steps) == 3
    monitor.detach()
