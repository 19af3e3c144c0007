"""Shell-style patterns over dotted names, and the names that come closest."""

from __future__ import annotations

import fnmatch
import pickle
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchfmri._model.patterns import (
    compile_pattern,
    expand_braces,
    match_names,
    nearest_names,
    not_found,
)
from torchfmri.exceptions import InspectionError

NAMES = [
    "conv1",
    "features.conv2",
    "features.0.conv",
    "layers.0.ffn.up",
    "layers.0.ffn.down",
    "layers.1.ffn.up",
    "layers.10.ffn.up",
    "layers.0.attn.q_proj",
    "layers.0.attn.k_proj",
    "layers.0.attn.v_proj",
    "layers.0.attn.o_proj",
    "ffn",
    "ffn.up",
    "ffnx",
]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*", NAMES),
        ("**", NAMES),
        ("conv1", ["conv1"]),
        ("*.conv*", ["conv1", "features.conv2", "features.0.conv"]),
        ("*.ffn.*", [name for name in NAMES if re.search(r"(^|\.)ffn\.", name)]),
        ("*.ffn", ["ffn"]),
        ("layers.?.ffn.up", ["layers.0.ffn.up", "layers.1.ffn.up"]),
        ("layers.*.up", ["layers.0.ffn.up", "layers.1.ffn.up", "layers.10.ffn.up"]),
        ("layers.[0-1].ffn.up", ["layers.0.ffn.up", "layers.1.ffn.up"]),
        ("layers.[!0].ffn.up", ["layers.1.ffn.up"]),
        ("layers.[^0].ffn.up", ["layers.1.ffn.up"]),
        ("layers.1[0].ffn.up", ["layers.10.ffn.up"]),
        ("*.{q,k,v}_proj", [f"layers.0.attn.{each}_proj" for each in "qkv"]),
        ("{conv1,ffn}", ["conv1", "ffn"]),
        ("layers.{0,1{,0}}.ffn.up", ["layers.0.ffn.up", "layers.1.ffn.up", "layers.10.ffn.up"]),
        ("{*.conv*,ffn.*}", ["conv1", "features.conv2", "features.0.conv", "ffn.up"]),
        ("up", []),
        ("conv", []),
        ("layers.0", []),
        ("CONV1", []),
        ("conv1.", []),
        ("", []),
    ],
)
def test_match(pattern: str, expected: list[str]) -> None:
    assert match_names(pattern, NAMES) == expected


def test_a_dot_is_a_dot() -> None:
    assert match_names("a.b", ["a.b", "aXb"]) == ["a.b"]


def test_order_is_that_of_the_names_and_each_comes_once() -> None:
    assert match_names("{b,a,*}", ["a", "b"]) == ["a", "b"]


@pytest.mark.parametrize("name", ["a[0]", "a{b,c}", "a*", "a?", "{", "[", "a]", "[]", "a\\b", "a+"])
def test_a_name_with_special_characters_is_found_by_itself(name: str) -> None:
    assert match_names(name, ["other", name]) == [name]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a", ["a"]),
        ("{a,b}", ["a", "b"]),
        ("x{a,b}y", ["xay", "xby"]),
        ("{a,b}{c,d}", ["ac", "ad", "bc", "bd"]),
        ("{a,{b,c}d}", ["a", "bd", "cd"]),
        ("{,a}x", ["x", "ax"]),
        ("{a}", ["{a}"]),
        ("{a,b", ["{a,b"]),
        ("a}b", ["a}b"]),
        ("{a}{b,c}", ["{a}b", "{a}c"]),
        ("{{a,b}}", ["{a}", "{b}"]),
    ],
)
def test_braces(pattern: str, expected: list[str]) -> None:
    assert sorted(expand_braces(pattern)) == sorted(expected)


@pytest.mark.parametrize(
    "pattern", ["[z-a]", "layers.[9-0].*", "[", "[]", "[!]", "a[", "[[]", "[\\]"]
)
def test_strange_sets_match_nothing_or_raise_our_error(pattern: str) -> None:
    """Never an error of the `re` module, whose text speaks of something the user did not write."""
    try:
        found = match_names(pattern, ["a", "layers.0.x"])
    except InspectionError as error:
        assert pattern in str(error)  # noqa: PT017
    else:
        assert found == []


ALPHABET = st.text(st.sampled_from("ab.0_"), min_size=1, max_size=8)


@settings(deadline=None, max_examples=200)
@given(st.text(st.sampled_from("ab.0*?"), min_size=1, max_size=6), st.lists(ALPHABET))
def test_without_sets_and_braces_it_is_fnmatch_but_for_the_leading_star(
    pattern: str, names: list[str]
) -> None:
    """`*` crosses dots in fnmatch too; a leading `*.` may match nothing here."""
    expected = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    if pattern.startswith("*."):
        rest = pattern[2:]
        expected = [n for n in names if n in expected or fnmatch.fnmatchcase(n, rest)]
    assert match_names(pattern, names) == [n for n in names if n in expected or n == pattern]


@settings(deadline=None, max_examples=200)
@given(st.text(st.sampled_from("ab.0*?[]{},!^-\\|&~"), max_size=8))
def test_any_text_is_a_pattern_or_our_error(pattern: str) -> None:
    try:
        assert isinstance(match_names(pattern, ["a", "a.b", "0"]), list)
        nearest_names(pattern, ["a", "a.b", "0"])
    except InspectionError:
        pass


def test_patterns_are_compiled_once() -> None:
    assert compile_pattern("*.some_layer") is compile_pattern("*.some_layer")


@pytest.mark.parametrize(
    ("pattern", "best"),
    [
        ("layers.0.fnn.up", "layers.0.ffn.up"),
        ("*.q_prj", "layers.0.attn.q_proj"),
        ("*.conv11", "conv1"),
        ("features.conv", "features.conv2"),
        ("layer.0.ffn.up", "layers.0.ffn.up"),
        ("fnn", "ffn"),
        ("*.{q,k}_prj", "layers.0.attn.q_proj"),
    ],
)
def test_nearest(pattern: str, best: str) -> None:
    found = nearest_names(pattern, NAMES)
    assert found[0] == best
    assert len(found) <= 3


def test_nearest_names_are_compared_segment_by_segment() -> None:
    """As whole strings 'encoder.layer' is nearer to 'decoder.layer'; the segments know better."""
    names = ["decoder.layers.0.mlp", "encoder.layers.0.attention", "encoder.layers.0.mlp"]
    assert nearest_names("encoder.layers.0.mpl", names)[0] == "encoder.layers.0.mlp"


def test_nearest_of_nothing() -> None:
    assert nearest_names("anything", []) == []
    assert nearest_names("qqqqqqqqq", ["conv1"], count=1) in ([], ["conv1"])


def test_nearest_survives_a_half_written_set() -> None:
    assert nearest_names("layers.[0-", ["layers.0"]) == ["layers.0"]


def test_the_error_of_a_missing_name_says_what_was_looked_for() -> None:
    error = not_found("wieght", ["weight", "bias"], "tokens.names", "parameter")
    assert str(error) == (
        "No parameter matches 'wieght' among 2 parameters. Nearest: 'weight'. "
        "List them with tokens.names."
    )
    assert str(not_found("c", ["a"])) == "No layer matches 'c' among 1 layer."
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
