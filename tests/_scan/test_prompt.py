"""What a model is asked: texts, messages and ids become one tensor, padded on the left."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

import torchfmri
from torchfmri import InspectionError
from torchfmri._scan.run.prompt import encode

MESSAGES = [{"role": "user", "content": "Hello there"}]


@cache
def tokenizer() -> Any:
    return torchfmri.load_model("tiny").tokenizer


def ids_of(text: str) -> list[int]:
    return tokenizer()(text)["input_ids"]


# -- what is taken -------------------------------------------------------------------------------


def test_a_text_is_taken_as_it_is() -> None:
    found = encode("Once upon a time", tokenizer())
    assert found.ids.tolist() == [ids_of("Once upon a time")]
    assert found.mask.tolist() == [[1] * found.ids.shape[1]]
    assert found.single


def test_a_text_is_wrapped_only_when_asked_to() -> None:
    wrapped = encode("Hello there", tokenizer(), chat=True)
    by_hand = encode(MESSAGES, tokenizer())
    assert wrapped.ids.tolist() == by_hand.ids.tolist() != encode("Hello there", tokenizer()).ids
    assert wrapped.single


def test_the_template_s_ids_are_used_as_they_are() -> None:
    """Text and tokenising it again would add another first token."""
    expected = tokenizer().apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=True)
    expected = expected["input_ids"] if not isinstance(expected, list) else expected
    assert encode(MESSAGES, tokenizer()).ids.tolist() == [list(expected)]
    text = tokenizer().apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert ids_of(text) != list(expected)


@pytest.mark.parametrize(
    "prompt",
    [
        [5, 6, 7],
        (5, 6, 7),
        torch.tensor([5, 6, 7]),
        torch.tensor([[5, 6, 7]], dtype=torch.int32),
        [[5, 6, 7]],
        {"input_ids": torch.tensor([[5, 6, 7]])},
        {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]},
        BatchEncoding({"input_ids": [[5, 6, 7]], "attention_mask": [[1, 1, 1]]}),
    ],
    ids=["list", "tuple", "tensor", "int32", "batch", "mapping", "flat mapping", "encoding"],
)
def test_ids_need_no_tokenizer(prompt: Any) -> None:
    found = encode(prompt, None)
    assert found.ids.tolist() == [[5, 6, 7]]
    assert found.ids.dtype == torch.long
    assert found.mask.tolist() == [[1, 1, 1]]


@pytest.mark.parametrize(
    "prompt", [np.array([5, 6, 7]), [np.int64(5), np.int64(6), np.int64(7)]], ids=["array", "list"]
)
def test_ids_of_numpy(prompt: Any) -> None:
    assert encode(prompt, None).ids.tolist() == [[5, 6, 7]]


def test_several_prompts_are_padded_on_the_left() -> None:
    found = encode([[5, 6, 7], [8]], None)
    assert found.mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert found.ids[0].tolist() == [5, 6, 7]
    assert found.ids[1, -1] == 8
    assert not found.single
    texts = encode(["Once upon a time", "Hi"], tokenizer())
    assert texts.ids[1][texts.mask[1].bool()].tolist() == ids_of("Hi")
    assert bool((texts.ids[1][texts.mask[1] == 0] == tokenizer().pad_token_id).all())


def test_a_list_may_hold_prompts_of_every_kind() -> None:
    found = encode(["Hi", MESSAGES, [5, 6], torch.tensor([7])], tokenizer())
    rows = [row[mask.bool()].tolist() for row, mask in zip(found.ids, found.mask, strict=True)]
    assert rows[0] == ids_of("Hi")
    assert rows[1] == encode(MESSAGES, tokenizer()).ids[0].tolist()
    assert rows[2:] == [[5, 6], [7]]


def test_what_a_tokenizer_padded_keeps_its_mask() -> None:
    own = tokenizer()
    side = own.padding_side
    try:
        own.padding_side = "left"
        batch = own(["Once upon a time", "Hi"], padding=True, return_tensors="pt")
        found = encode(batch, own)
        assert torch.equal(found.mask, batch["attention_mask"])
        own.padding_side = "right"
        with pytest.raises(InspectionError, match=r"padded on the right.*padding_side = 'left'"):
            encode(own(["Once upon a time", "Hi"], padding=True, return_tensors="pt"), own)
    finally:
        own.padding_side = side


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty"),
        ("", "''.*no tokens"),
        ([[]], "no tokens|token ids"),
        (["Hi", ""], "no tokens"),
        (3, "int"),
        (None, "NoneType"),
        (b"Hi", "bytes"),
        ({"role": "user"}, "dict"),
        ([1.5, 2.5], r"1\.5"),
        ([True, False], "True"),
        (["Hi", 3], "3"),
        (torch.tensor([1.0, 2.0]), "float32"),
        (torch.tensor([True, False]), "bool"),
        (torch.zeros(1, 2, 3).long(), r"\(1, 2, 3\)"),
        (torch.zeros(0).long(), r"\(0,\)"),
        ({"input_ids": [[1, 2], [3]]}, r"input_ids|length"),
        ({"input_ids": [[1, 2]], "attention_mask": [[0, 0]]}, "no tokens|padding"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, "attention_mask"),
    ],
    ids=str,
)
def test_what_is_no_prompt(prompt: Any, words: str) -> None:
    """Each message has the value, or its type, and what would be taken."""

    class Empty:
        """A tokenizer that adds nothing."""

        pad_token_id = 0
        chat_template = None

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [ord(each) for each in text]}

    with pytest.raises(InspectionError, match=words):
        encode(prompt, Empty())


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"content": "Hi"}, "has 'content'"),
        ({"role": "user"}, "has 'role'"),
        ({"role": "user", "text": "Hi"}, "has 'role', 'text'"),
        ({}, "has nothing"),
    ],
    ids=str,
)
def test_a_message_without_role_or_content(message: Any, words: str) -> None:
    """A template would fail somewhere inside, or write an empty message."""
    with pytest.raises(InspectionError, match=rf"role and a content.*{words}"):
        encode([message], tokenizer())


def test_a_single_message_stands_in_a_list() -> None:
    with pytest.raises(InspectionError, match=r"not dict\. A single message stands in a list"):
        encode(MESSAGES[0], tokenizer())


def test_what_is_no_tokenizer() -> None:
    with pytest.raises(InspectionError, match="tokenizer='tiny' is not a tokenizer"):
        encode("Hi", "tiny")


def test_a_text_needs_a_tokenizer() -> None:
    with pytest.raises(InspectionError, match=r"needs a tokenizer.*token ids"):
        encode("Hi", None)
    with pytest.raises(InspectionError, match="tokenizer with a chat template"):
        encode(MESSAGES, None)


@pytest.mark.parametrize("prompt", [MESSAGES, "Hi"], ids=["messages", "chat=True"])
def test_messages_need_a_template(prompt: Any) -> None:
    class Plain:
        chat_template = None

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [1]}

    with pytest.raises(InspectionError, match=r"chat template.*none.*without chat=True"):
        encode(prompt, Plain(), chat=True)


@pytest.mark.parametrize("prompt", [[5, 6], torch.tensor([5, 6])], ids=["list", "tensor"])
def test_ids_cannot_be_wrapped(prompt: Any) -> None:
    """chat=True would be dropped silently."""
    with pytest.raises(InspectionError, match="chat"):
        encode(prompt, tokenizer(), chat=True)
