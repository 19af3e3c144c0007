"""What prompts lack: values that are not finite at some tokens, labels, characters of the text."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scans import make_anatomy, make_sequence

from torchfmri import InspectionError, Scan, ScannedSequence, Tokens, contrast
from torchfmri._scan.prompts.token_choice import choose_tokens

ANATOMY = make_anatomy(1)
Change = Callable[[np.ndarray], None]


def make(change: Change | None = None, **tables: Any) -> Scan:
    """Eight prompts of two conditions; the table of layers of the first one is changed."""
    made = []
    for k in range(8):
        fields = {"pair": k // 2, "score": float(k)}
        each = make_sequence(ANATOMY, 9 + k, seed=k, condition="ab"[k % 2], fields=fields)
        if k == 0 and change is not None:
            change(each.layers["activation"])
        made.append(replace(each, **{name: build(each) for name, build in tables.items()}))
    return Scan(ANATOMY, made, {"model": "random"})


def said(notes: tuple[str, ...], *words: str) -> bool:
    return any(all(word in note for word in words) for note in notes)


def spoil(token: Any, column: Any, value: float = np.nan) -> Change:
    return lambda table: table.__setitem__((token, column), value)


# -- tokens without a value ----------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_token_without_a_finite_value_is_left_out_and_named(value: float) -> None:
    found = make(spoil(3, 4, value)).contrast("a", "b", level="layer")
    assert said(
        found.notes, "1 of 11 columns have no finite value at some tokens", "1 token of '0'"
    )
    assert said(found.notes, f": {ANATOMY.layers[4]}")
    clean = make()
    kept = [k for k in range(1, 9) if k != 3]  # 0 is a special token
    means = [
        each.layers["activation"][kept if n == 0 else slice(1, None), 4].mean(dtype=np.float64)
        for n, each in enumerate(clean)
    ]
    np.testing.assert_allclose(found.effect[4], np.mean(means[::2]) - np.mean(means[1::2]))
    assert not said(clean.contrast("a", "b", level="layer").notes, "finite")


def test_tokens_and_prompts_without_values_are_counted() -> None:
    def two_prompts(scan: Scan) -> Scan:
        scan[2].layers["activation"][[2, 5], 1] = np.nan
        return scan

    found = two_prompts(make(spoil([2, 3, 4], 0))).contrast("a", "b", level="layer")
    assert said(found.notes, "2 of 11 columns", "(5 tokens of 2 prompts: '0', '2')")


def test_a_token_without_any_value_is_named() -> None:
    found = make(spoil(3, slice(None))).contrast("a", "b", level="layer")
    assert said(found.notes, "no finite value in any column at 1 token of '0': left out")
    # The last token was written and not read: that is no fault, and nothing is said of it.
    last = make(spoil(-1, slice(None))).contrast("a", "b", level="layer")
    assert not said(last.notes, "no finite value")


def test_a_layer_without_values_names_the_prompts_that_lack_them() -> None:
    found = make(spoil(slice(None), 2)).contrast("a", "b", level="layer")
    assert said(found.notes, "lack finite values for some prompts", "('0')", ANATOMY.layers[2])
    assert found.n_a[2] == 3


def test_gaps_in_full_tensors_are_counted_for_units() -> None:
    def tensors(each: ScannedSequence) -> dict[str, np.ndarray]:
        table = np.ones((len(each), 128), np.float32) + each.layers["activation"][:, :1]
        table[3, 5] = np.nan if each.name == "0" else table[3, 5]
        return {"model.embed": table}

    scan = make(tensors=tensors)
    found = scan.contrast("a", "b", metric="signed", level="unit", tokens="prompt")
    assert said(found.notes, "1 of 128 columns have no finite value", "1 token of '0'")
    assert not np.isnan(found.effect).any()


def test_a_mean_vector_that_is_not_finite_is_no_direction() -> None:
    def vectors(each: ScannedSequence) -> dict[str, dict[str, np.ndarray]]:
        vector = np.ones(128, np.float32)
        vector[5] = np.nan if each.name == "0" else 1.0
        return {"last": {"model.embed": vector, "lm_head": np.ones(300, np.float32)}}

    found = make(vectors=vectors).contrast(
        "a", "b", metric="signed", level="unit", tokens="last", height_control=None
    )
    assert said(found.notes, "('0')", "model.embed[5]")
    with pytest.raises(InspectionError, match="not finite in 1 of 128 units"):
        found.direction("model.embed")
    assert found.direction("lm_head").norm == 0


def test_probes_and_models_name_what_they_leave_out() -> None:
    def change(each: ScannedSequence) -> dict[str, np.ndarray]:
        table = each.voxels["activation"].copy()
        table[:, 0] = np.nan if each.name == "0" else table[:, 0]
        table[3, 1] = np.nan if each.name == "2" else table[3, 1]
        return {"activation": table}

    scan = make(voxels=change)
    probe = scan.classify("a", "b", folds=2, permutations=5)
    assert said(probe.notes, "1 of 27 features (activation) lack finite values", "('0')")
    assert said(probe.notes, "1 of 27 columns have no finite value at some tokens", "'2'")
    pytest.importorskip("formulaic")
    model = scan.glm("position + score")
    assert said(model.notes, "2 columns without a finite value at some tokens of '0', '2'")


def test_copies_of_prompts_are_named_by_probes() -> None:
    """A copy in the training part and one in the other would be peeking."""
    scan = make()
    twice = [replace(scan[k % 4], name=str(k)) for k in range(8)]
    found = Scan(ANATOMY, twice, scan.meta).classify("a", "b", folds=2, permutations=5)
    assert said(found.notes, "not independent: only 2 of 4 prompts of 'a'")


def test_tokens_without_a_partner_are_no_gaps() -> None:
    """Text that only one of two models wrote is left out on purpose, and said once."""
    one, other = make(), make()
    tokens = one[0].tokens
    changed = replace(tokens, spelling=(*tokens.spelling[:5], *[b" other"] * (len(tokens) - 5)))
    second = Scan(ANATOMY, [replace(one[0], tokens=changed), *list(other)[1:]], {"model": "other"})
    found = contrast(one, second, paired=True, level="layer")
    assert said(found.notes, "only tokens of text that both have are compared")
    assert not said(found.notes, "no finite value")


# -- labels that are missing ---------------------------------------------------------------------


def test_a_missing_number_is_no_condition_and_no_pair() -> None:
    """Rows of a pandas frame have NaN where a label is missing."""
    made = [
        replace(each, fields={"group": "xy"[k % 2] if k > 1 else np.nan, "pair": pair})
        for (k, each), pair in zip(enumerate(make()), [np.nan, np.nan, *"aabbcc"], strict=True)
    ]
    scan = Scan(ANATOMY, made, {})
    assert said(scan.contrast("x", "y", by="group", level="layer").notes, "2 prompts without 'grou")
    found = scan.contrast("a", "b", paired="pair", level="layer")
    assert found.n_a[0] == 3
    assert said(found.notes, "2 prompts without a partner are left out: '0', '1'")


# -- characters and patterns ---------------------------------------------------------------------

TEXT = (b"<|begin|>", b"The", b" caf", b"\xc3", b"\xa9", b"<|end|>", b"A", b" dog")


def chosen(tokens: Any) -> list[int]:
    number, special = np.zeros(8, np.float32), np.isin(np.arange(8), [0, 5])
    said = Tokens(np.arange(8), TEXT, number, number, np.zeros(8, bool), special)
    sequence = ScannedSequence("s", said, {}, {}, fields={"noun": "dog", "marked": "<|end|>A"})
    return np.flatnonzero(choose_tokens(sequence, tokens, np.ones(8, bool))).tolist()


@pytest.mark.parametrize(
    ("tokens", "places"),
    [
        ({"characters": (0, 3)}, [1]),  # of "The caféA dog": special tokens do not count
        ({"characters": (7, 8)}, [3, 4]),
        ({"characters": (8, 9)}, [6]),
        ({"characters": (-3, 99)}, [7]),
        (re.compile("^The"), [1]),
        (re.compile(r"^A\b"), [6]),  # each stretch between special tokens has a beginning
        (re.compile("é$"), [3, 4]),
        (re.compile("begin"), []),
        (re.compile("éA"), []),  # nothing is found across a special token
        ({"match": r"\w+ dog"}, [6, 7]),
        ({"field": "noun"}, [7]),
        ({"field": "marked"}, [6]),
    ],
)
def test_characters_and_patterns_are_those_of_the_text_without_special_tokens(
    tokens: Any, places: list[int]
) -> None:
    assert chosen(tokens) == places
