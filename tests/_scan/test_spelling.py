"""The bytes of tokens: they add up to the text, whatever the tokenizer writes for them."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import torchfmri
from torchfmri._scan.record.sequence import Tokens
from torchfmri._scan.run.spelling import Speller

TEXTS = (
    "Once upon a time",
    "  two  spaces\n\tand a tab ",
    "naïve café, Ġ and ▁ are letters, too",
    "你好，世界。日本語",
    "😀👩‍👩‍👧 ​",
    "##not a word piece <0x41>",
)


@cache
def byte_level() -> Any:
    return torchfmri.load_model("tiny").tokenizer


def spelt(tokenizer: Any, text: str) -> bytes:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return b"".join(Speller(tokenizer).spell(ids))


# -- byte-level ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_a_byte_level_tokenizer_are_the_text(text: str) -> None:
    assert spelt(byte_level(), text) == text.encode()


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=40))
def test_the_bytes_of_any_text(text: str) -> None:
    assert spelt(byte_level(), text) == text.encode()


def test_a_character_may_be_spread_over_tokens() -> None:
    tokenizer = byte_level()
    ids = tokenizer("你", add_special_tokens=False)["input_ids"]
    spelling = Speller(tokenizer).spell(ids)
    assert len(spelling) > 1
    assert b"".join(spelling) == "你".encode()
    # decode() gives a replacement character for each: that is why bytes are kept.
    assert "�" in tokenizer.decode(ids[:1])


def test_special_tokens_are_marked_and_written_as_they_are() -> None:
    tokenizer = byte_level()
    speller = Speller(tokenizer)
    ids = tokenizer("Hi")["input_ids"]
    assert speller.is_special(ids[0])
    assert not any(speller.is_special(each) for each in ids[1:])
    assert speller.spell(ids)[0] == tokenizer.convert_ids_to_tokens(ids[0]).encode()


def test_added_tokens_are_text_and_special_only_if_they_say_so() -> None:
    model = models.BPE({"Ġa": 0, "a": 1, "Ã": 2, "©": 3}, [])
    raw = Tokenizer(model)
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<é>")
    tokenizer.add_tokens([AddedToken("é!", special=False)])
    speller = Speller(tokenizer)
    special, plain = tokenizer.convert_tokens_to_ids(["<é>", "é!"])
    assert speller.spell([special, plain, 0, 2, 3]) == (
        "<é>".encode(), "é!".encode(), b" a", b"\xc3", b"\xa9",
    )  # fmt: skip
    assert [speller.is_special(each) for each in (special, plain, 0)] == [True, False, False]


# -- SentencePiece -------------------------------------------------------------------------------


def sentence_piece(*more: str) -> Any:
    """In the manner of Llama 2 and Gemma: ▁ for a space, bytes where there is no piece."""
    pieces = ["<unk>", "</s>", "▁", "▁the", "▁cat", "s", "a", "t", "c", "h", "e", *more]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    raw = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    raw.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def test_pieces_with_spaces_and_bytes() -> None:
    tokenizer = sentence_piece()
    numbers = tokenizer.convert_tokens_to_ids(["▁the", "▁cat", "s", "<0x0A>", "<0xE4>", "</s>"])
    assert Speller(tokenizer).spell(numbers) == (
        b" the", b" cat", b"s", b"\n", b"\xe4", b"</s>",
    )  # fmt: skip
    assert [Speller(tokenizer).is_special(each) for each in numbers] == [False] * 5 + [True]


@pytest.mark.parametrize("text", ["the cat", "cats\nhat", "你好 the cat", "é 😀"])
def test_the_bytes_of_sentence_pieces_are_the_text(text: str) -> None:
    assert spelt(sentence_piece(), text) == text.encode()


def test_a_letter_of_maltese_does_not_make_a_byte_level_tokenizer() -> None:
    """Ġ is what GPT-2 writes for a space, and a letter: XLM-R and Gemma have it as a piece."""
    tokenizer = sentence_piece("Ġ", "▁Ġ", "é")
    numbers = tokenizer.convert_tokens_to_ids(["▁the", "Ġ", "▁Ġ", "é"])
    assert Speller(tokenizer).spell(numbers) == (
        b" the", "Ġ".encode(), " Ġ".encode(), "é".encode(),
    )  # fmt: skip


# -- WordPiece and words -------------------------------------------------------------------------


def test_word_pieces() -> None:
    """The spaces that BERT throws away are written again, one before each word."""
    vocabulary = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "play": 3, "##ing": 4, "card": 5, "##s": 6}
    raw = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    speller = Speller(tokenizer)
    assert speller.spell([1, 3, 4, 5, 6, 2]) == (
        b"[CLS]", b" play", b"ing", b" card", b"s", b"[SEP]",
    )  # fmt: skip
    assert [speller.is_special(each) for each in (1, 3, 2)] == [True, False, True]


def test_characters_stand_as_they_are() -> None:
    raw = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "é": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>")
    assert Speller(tokenizer).spell([1, 2]) == (b"a", "é".encode())


# -- others --------------------------------------------------------------------------------------


def test_without_a_tokenizer_tokens_are_numbers() -> None:
    speller = Speller(None)
    assert speller.spell([5, 17]) == (b"5 ", b"17 ")
    assert not speller.is_special(5)


def test_ids_that_only_the_model_has() -> None:
    """Embeddings are often padded to a round number of rows."""
    assert Speller(byte_level()).spell([9_999]) == (b"<9999>",)


def test_pieces_that_are_bytes() -> None:
    class Bytes:
        """As tiktoken's."""

        def convert_ids_to_tokens(self, token: int) -> bytes:
            return [b"\xe4", b" a"][token]

    assert Speller(Bytes()).spell([1, 0]) == (b" a", b"\xe4")


# -- pieces: the text of each token ----------------------------------------------------------------


def tokens_of(spelling: list[bytes]) -> Tokens:
    number, no = np.zeros(len(spelling), np.float32), np.zeros(len(spelling), bool)
    return Tokens(np.arange(len(spelling)), tuple(spelling), number, number, no, no)


@pytest.mark.parametrize(
    ("spelling", "pieces"),
    [
        ([b"\xe4", b"a", b"b", b"c"], ["", "\ufffda", "b", "c"]),  # a character that never ends
        ([b"\xf5", b"a"], ["\ufffd", "a"]),  # a byte that begins no character
        ([b"a", b"\xf0\x9f"], ["a", "\ufffd"]),
        ([b"\xf0", b"", b"", b"", b"", b"\x9f\x98\x80"], ["", "", "", "", "", "😀"]),
        ([], []),
    ],
)
def test_a_character_is_at_its_last_token(spelling: list[bytes], pieces: list[str]) -> None:
    assert tokens_of(spelling).pieces == pieces


@given(st.lists(st.sampled_from([b"", b"a", b"\xf0", b"\x9f\x98", b"\x80", b"\xe4\xbd", b"\xa0"])))
@settings(deadline=None, derandomize=True)
def test_pieces_add_up_and_a_part_of_them_is_the_same(spelling: list[bytes]) -> None:
    tokens = tokens_of(spelling)
    assert "".join(tokens.pieces) == tokens.text == b"".join(spelling).decode("utf-8", "replace")
    for first in range(len(spelling) + 1):
        for last in range(first, len(spelling) + 1):
            assert tokens.pieces_of(first, last) == tokens.pieces[first:last]
