"""Values by prompt: fields, mean vectors, chosen tokens, and contrasts of scans."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import torchfmri
from torchfmri import InspectionError, LayerNotFoundError, Scan, ScannedSequence, ScanOptions
from torchfmri._scan.prompts.prompt_values import tabulate
from torchfmri._scan.prompts.question import Question, ValueSource
from torchfmri._scan.prompts.token_choice import choose_tokens, token_words

NAMES = ("Tom", "Ann", "Sue", "Ben", "Max", "Lily")
ROWS = [
    {
        "prompt": f"Once upon a time {name} {what}.",
        "condition": condition,
        "pair": number,
        "who": name,
        "size": number + 0.5,
        "odd": number % 2 == 1,
        "tags": [condition, None],
        "id": f"{condition}-{name}",
    }
    for number, name in enumerate(NAMES)
    for condition, what in (("park", "went to the park"), ("fööd", "ate a red apple"))
]


@pytest.fixture(scope="module")
def tiny() -> Any:
    return torchfmri.load_model("tiny")


@pytest.fixture(scope="module")
def scan(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Scan:
    """Twelve rows with every field, mean vectors of all layers, and full tensors to compare."""
    folder = tmp_path_factory.mktemp("prompts") / "x.fmri"
    options = ScanOptions(per=None, tensors="*", vectors=("all", "prompt", "generated", "last"))
    model, tokenizer = tiny
    torchfmri.scan_dataset(
        model, tokenizer, ROWS, folder, 4, options=options, batch=4, id_field="id"
    )
    return torchfmri.load(folder)


# -- what a dataset keeps ------------------------------------------------------------------------


def test_every_field_is_kept_with_its_type(scan: Scan) -> None:
    assert [sequence.fields for sequence in scan] == ROWS
    assert scan.names == tuple(str(row["id"]) for row in ROWS)
    assert scan.conditions == {"park": 6, "fööd": 6}


def test_fields_that_are_no_json_are_kept_as_texts(tiny: Any, tmp_path: Path) -> None:
    import datetime

    row = {
        "prompt": "One",
        "when": datetime.date(2026, 1, 2),
        "array": np.arange(3),
        "number": np.float32(0.5),
        "odd": {1, 2},
        "image": "x" * 100_000,
        "half": "\ud800",
        "nan": float("nan"),
    }
    torchfmri.scan_dataset(*tiny, [row], tmp_path / "x.fmri", 1, options=ScanOptions(per=None))
    found = dict(torchfmri.load(tmp_path / "x.fmri")[0].fields)
    assert np.isnan(found.pop("nan"))
    assert found == {
        "prompt": "One",
        "when": "2026-01-02",
        "array": [0, 1, 2],
        "number": 0.5,
        "odd": "{1, 2}",
        "image": "<str, 100,002 bytes, not kept>",
        "half": "?",
    }


def test_two_rows_of_one_id_are_refused(tiny: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "One", "id": 1}, {"prompt": "Two", "id": 1}]
    with pytest.raises(InspectionError, match="Record 0 and record 1 have the same 'id': '1'"):
        torchfmri.scan_dataset(*tiny, rows, tmp_path / "x.fmri", 1, id_field="id")
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "One", "key": null}\n{"prompt": "Two", "key": "b"}\n')
    done = torchfmri.scan_dataset(*tiny, path, tmp_path / "y.fmri", 1, id_field="key")
    assert torchfmri.load(tmp_path / "y.fmri").names == ("b",)
    assert "has None in 'key'" in next(iter(done.failed.values()))


@pytest.mark.parametrize("per", [None, "position", "cached", "token_loss"])
@pytest.mark.one_in(4)
def test_mean_vectors_are_means_of_the_full_tensors(tiny: Any, per: str | None) -> None:
    options = ScanOptions(
        per=per, tensors="*", vectors=("all", "prompt", "generated", "last"), vector_bytes=1 << 30
    )
    scanner = torchfmri.Scanner(*tiny, options)
    prompts = ["Once upon a time", "The dog", "Hello my friend, what is"]  # padded to one length
    for sequence in scanner.scan(prompts, 4):
        tokens = sequence.tokens
        usable = ~tokens.special
        choices = {
            "all": usable,
            "prompt": usable & ~tokens.generated,
            "generated": usable & tokens.generated,
        }
        assert set(sequence.vectors["all"]) == set(sequence.tensors)
        for layer, tensor in sequence.tensors.items():
            known = np.isfinite(tensor).all(1)
            for choice, kept in choices.items():
                expected = tensor[kept & known].mean(0, dtype=np.float64)
                found = sequence.vectors[choice][layer]
                np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
            last = tensor[usable & known][-1]
            np.testing.assert_allclose(sequence.vectors["last"][layer], last, rtol=1e-6)


def test_mean_vectors_keep_within_their_bytes(tiny: Any, tmp_path: Path) -> None:
    options = ScanOptions(per=None, vector_bytes=20_000, layers="*")
    torchfmri.scan_dataset(*tiny, ["One", "Two"], tmp_path / "x.fmri", 2, options=options)
    scan = torchfmri.load(tmp_path / "x.fmri")
    assert scan.meta["vectors"] == ["all", "generated", "last"]
    size = sum(each.nbytes for kept in scan[0].vectors.values() for each in kept.values())
    assert 0 < size <= 20_000
    assert "model.layers.1" in scan[0].vectors["all"]
    assert "model.layers.1.mlp.up_proj" not in scan[0].vectors["all"]
    assert any("vector_bytes is" in note for note in scan.meta["notes"])
    alone = torchfmri.scan(*tiny, "One", 2, per=None)
    assert alone[0].vectors == {}  # only datasets have them by themselves


def test_a_scan_without_fields_and_vectors_is_what_it_was(tiny: Any, tmp_path: Path) -> None:
    """Segments of earlier versions have neither: such a scan loads, and has none."""
    scan = torchfmri.scan(*tiny, "One", 1, per=None)
    scan.save(tmp_path / "x.fmri")
    header = next((tmp_path / "x.fmri").glob("segment*")).read_bytes()
    assert b"fields/" not in header
    assert b"vectors/" not in header
    assert torchfmri.load(tmp_path / "x.fmri")[0].fields == {}


@pytest.mark.parametrize("vectors", ["some", ("all", "x"), 3, ()])
def test_choices_of_vectors_that_are_none(vectors: Any) -> None:
    with pytest.raises(InspectionError, match="vectors="):
        ScanOptions(vectors=vectors)


# -- which tokens count --------------------------------------------------------------------------


def chosen(sequence: ScannedSequence, tokens: Any) -> str:
    kept = choose_tokens(sequence, tokens, np.ones(len(sequence), bool))
    return "".join(p for p, k in zip(sequence.tokens.pieces, kept, strict=True) if k)


def test_tokens_are_chosen_by_place_and_text(scan: Scan) -> None:
    sequence = scan[0]
    text = sequence.text.removeprefix(sequence.tokens.pieces[0])
    written = "".join(
        p for p, g in zip(sequence.tokens.pieces, sequence.tokens.generated, strict=True) if g
    )
    assert chosen(sequence, "all") == text
    assert chosen(sequence, "generated") == written
    assert chosen(sequence, "prompt") == text.removesuffix(written)
    assert chosen(sequence, "last") == sequence.tokens.pieces[-1]
    assert chosen(sequence, "prompt_last").strip() == "."
    assert chosen(sequence, 0) == sequence.tokens.pieces[0]  # named by position, special or not
    assert chosen(sequence, 99) == ""
    assert chosen(sequence, (1, 3)) == chosen(sequence, slice(1, 3))
    assert token_words(slice(1, 9, 2)) == "tokens 1:9:2"
    assert "park" in chosen(sequence, re.compile("park"))
    assert "Once" not in chosen(sequence, re.compile("park"))
    assert chosen(sequence, {"match": "upon a"}) == chosen(sequence, re.compile("upon a"))
    assert "Tom" in chosen(sequence, {"field": "who"})
    start = str(sequence.fields["prompt"]).index("upon")  # special tokens do not count
    assert chosen(sequence, {"characters": (start, start + 1)}).strip().startswith("u")
    user = chosen(sequence, {"role": "user"})
    assert user.strip() == str(sequence.fields["prompt"])
    assert chosen(sequence, {"role": "assistant"}) == written


def test_characters_of_several_tokens_are_found(scan: Scan) -> None:
    first = scan[0]
    parts = (b"caf", "é".encode()[:1], "é".encode()[1:], b" \xff", b" noir")
    number, no = np.zeros(5, np.float32), np.zeros(5, bool)
    tokens = torchfmri.Tokens(np.arange(5), parts, number, number, no, no)
    sequence = ScannedSequence("x", tokens, first.layers, first.voxels)
    kept = choose_tokens(sequence, re.compile("é"), ~no)
    assert kept.tolist() == [False, True, True, False, False]
    assert choose_tokens(sequence, re.compile("noir"), ~no).tolist() == [*[False] * 4, True]


@pytest.mark.parametrize(
    "tokens",
    [
        "some",
        1.5,
        None,
        (1,),
        re.compile(b"Once"),
        {"match": "("},
        {"a": "b"},
        {"characters": 3},
        {"role": 1},
        {},
    ],
)
def test_choices_of_tokens_that_are_none(scan: Scan, tokens: Any) -> None:
    with pytest.raises(InspectionError, match=r"tokens=|not a regular expression"):
        scan.contrast("park", "fööd", tokens=tokens)


@pytest.mark.parametrize("tokens", [500, (5, 2), re.compile("zzz"), -1])
def test_a_choice_that_chooses_nothing_is_refused(scan: Scan, tokens: Any) -> None:
    reason = "without its special tokens" if isinstance(tokens, re.Pattern) else "The last token"
    with pytest.raises(InspectionError, match=f"chooses no token of any prompt .* {reason}"):
        scan.contrast("park", "fööd", tokens=tokens)


def test_fields_and_roles_that_are_not_there(scan: Scan) -> None:
    with pytest.raises(InspectionError, match="no field 'what'; its fields are 'prompt'"):
        scan.contrast("park", "fööd", tokens={"field": "what"})
    with pytest.raises(InspectionError, match="no message of role 'system': its roles are 'user'"):
        scan.contrast("park", "fööd", tokens={"role": "system"})


# -- tables by prompt ----------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["layer", "voxel", "head"])
def test_values_are_means_over_the_tokens_of_a_prompt(scan: Scan, level: str) -> None:
    source = ValueSource(scan.anatomy, list(scan), scan.meta)
    table = tabulate([source], Question(level=level, tokens="generated"))
    for row, sequence in enumerate(scan):
        values = sequence.layers if level == "layer" else sequence.voxels
        tokens = sequence.tokens
        kept = tokens.generated & ~tokens.special & np.isfinite(values["activation"]).any(1)
        expected = values["activation"][kept].astype(np.float64).mean(0)
        if level == "head":
            expected = expected[scan.anatomy.kind == 1]
        np.testing.assert_allclose(table.values[row], expected, rtol=1e-12)
    assert table.groups.tolist() == [row["condition"] for row in ROWS]


def test_large_tables_are_mapped_from_a_file(scan: Scan, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = scan.contrast("park", "fööd")
    monkeypatch.setattr("torchfmri._scan.prompts.prompt_values._IN_MEMORY", 0)
    found = scan.contrast("park", "fööd")
    assert found.trial is not None
    assert isinstance(found.trial.table.values.base, np.memmap | np.ndarray)
    np.testing.assert_allclose(found.t, whole.t, rtol=1e-3)


def test_signed_units_and_directions_are_differences_of_means(scan: Scan, tmp_path: Path) -> None:
    found = scan.contrast("park", "fööd", metric="signed", level="unit", tokens="last")
    layer = "model.layers.1"
    groups = {
        name: np.stack([s.vectors["last"][layer] for s in scan if s.condition == name])
        for name in ("park", "fööd")
    }
    expected = groups["park"].mean(0, dtype=np.float64) - groups["fööd"].mean(0, dtype=np.float64)
    direction = found.direction(layer)
    np.testing.assert_allclose(direction.vector, expected, rtol=1e-10, atol=1e-12)
    own = found.columns.layer == layer
    np.testing.assert_allclose(found.effect[own], expected, rtol=1e-10, atol=1e-12)
    with pytest.raises(LayerNotFoundError):
        found.direction("model.layers.99")
    found.save(tmp_path / "x.contrast")
    again = torchfmri.load_contrast(tmp_path / "x.contrast")
    np.testing.assert_array_equal(again.direction(layer).vector, direction.vector)
    text = scan.contrast("park", "fööd", metric="signed", level="unit", tokens={"field": "who"})
    assert len(text)  # of any tokens, from tensors that were kept in full


def test_an_f_test_has_no_direction(scan: Scan, tmp_path: Path) -> None:
    contrasts = ["Tom - Ann", "Ann - Sue"]
    found = scan.contrast(
        contrasts, by="who", metric="signed", level="unit", tokens="last", layers="model.layers.1"
    )
    found.save(tmp_path / "f.contrast")
    for each in (found, torchfmri.load_contrast(tmp_path / "f.contrast")):
        with pytest.raises(InspectionError, match="no single direction"):
            each.direction("model.layers.1")


def test_a_sign_is_seen_that_a_root_mean_square_is_blind_to(scan: Scan) -> None:
    turned = []
    for number, sequence in enumerate(scan):
        sign = 1.0 if number % 2 else -1.0
        noise = np.random.default_rng(number).normal(1.0, 0.1, 64).astype(np.float32)
        vectors = {"all": {"model.layers.1": np.float32(sign) * noise}}
        turned.append(ScannedSequence(**{**vars(sequence), "vectors": vectors, "tensors": {}}))
    other = Scan(scan.anatomy, turned, scan.meta)
    found = other.contrast("park", "fööd", metric="signed", level="unit")
    assert found.survives.all()
    assert (found.effect < -1.5).all()


# -- contrasts of scans --------------------------------------------------------------------------


def test_contrasts_of_a_scan(scan: Scan) -> None:
    plain = scan.contrast("park", "fööd", level="layer")
    text = scan.contrast("park - fööd", level="layer")
    np.testing.assert_array_equal(plain.t, text.t)
    paired = scan.contrast("park", "fööd", level="layer", paired="pair")
    assert paired.test == "paired t"
    assert (paired.dof[~np.isnan(paired.dof)] == 5).all()
    other = scan.contrast("True", "False", by="odd", level="layer")
    assert other.prompts["True"] == tuple(str(row["id"]) for row in ROWS if row["odd"])
    assert len(scan.contrast("park", "fööd", layers="*.mlp", level="layer")) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"a": "park", "b": "nothing"},
            "no condition 'nothing'. The conditions are 'park', 'fööd'",
        ),
        ({"a": "park", "b": "park"}, "'park' would be compared with itself"),
        ({"a": "park - fööd", "by": "colour"}, "No prompt of the scan has a condition in 'colour'"),
        ({"a": "park - fööd", "paired": "colour"}, "No prompt has anything in 'colour'"),
        ({"a": "park - fööd", "metric": "gradient"}, "This scan has no gradient"),
        ({"a": "park - fööd", "metric": "loudness"}, "metric='loudness'"),
        ({"a": "park - fööd", "metric": "signed"}, "level='unit'"),
        ({"a": "park - fööd", "level": "neuron"}, "level='neuron'"),
        ({"a": "park - fööd", "layers": "*.conv"}, "No layer matches"),
        ({"a": "park - fööd", "alpha": 5}, "alpha=5"),
        ({"a": "park - fööd", "by": 3}, "by=3"),
    ],
)
def test_contrasts_that_cannot_be_made(scan: Scan, arguments: Any, message: str) -> None:
    with pytest.raises(InspectionError, match=re.escape(message)):
        scan.contrast(**arguments)


def test_prompts_that_share_a_token_are_no_copies(scan: Scan) -> None:
    """All end in a full stop, whose embedding is the same; and only some have the word."""
    embedding = next(layer for layer in scan.layers if "embed" in layer)
    found = scan.contrast("park", "fööd", layers=embedding, tokens="prompt_last")
    assert not any("copies" in note for note in found.notes)
    some = scan.contrast("park", "fööd", level="layer", tokens=re.compile("Tom|Ann|Sue"))
    assert not any("copies" in note for note in some.notes)
    twice = Scan(scan.anatomy, [*scan, *(s for s in renamed(scan, [0, 1]))], scan.meta)
    notes = twice.contrast("park", "fööd", level="layer").notes
    assert "only 6 of 7 prompts of 'park' and 6 of 7" in notes[0]


def test_prompts_without_a_pair_are_noted(scan: Scan) -> None:
    """One of a condition that is not compared does no harm; one that is compared is left out."""
    changes: dict[int, dict[str, Any]] = {
        0: {"condition": "other", "pair": None},
        3: {"pair": None},
    }
    gaps = changed_fields(scan, changes)
    found = gaps.contrast("park", "fööd", level="layer", paired="pair")
    some = Scan(scan.anatomy, [s for row, s in enumerate(scan) if row not in (0, 3)], scan.meta)
    expected = some.contrast("park", "fööd", level="layer", paired="pair")
    np.testing.assert_array_equal(found.t, expected.t)
    assert found.n_a.max() == 4
    note = next(note for note in found.notes if "without a partner" in note)
    assert note.startswith("3 prompts without a partner are left out")
    assert repr(scan.names[3]) in note
    assert gaps.classify("park", "fööd", tokens="last", folds=2, permutations=5, paired="pair")


def test_a_scan_without_conditions_says_what_it_has(tiny: Any) -> None:
    scan = torchfmri.scan(*tiny, ["One", "Two"], 1, per=None)
    with pytest.raises(InspectionError, match="none: scan a dataset, whose rows have fields"):
        scan.contrast("a", "b")
    with pytest.raises(InspectionError, match="has no sequences"):
        Scan(scan.anatomy, [], scan.meta).contrast("a", "b")


def test_a_value_that_is_nan_is_named_and_nothing_is_lost(scan: Scan) -> None:
    broken = [ScannedSequence(**vars(each)) for each in scan]
    voxels = broken[0].voxels["activation"].copy()
    voxels[:, 5] = np.nan
    broken[0] = ScannedSequence(**{**vars(broken[0]), "voxels": {"activation": voxels}})
    found = Scan(scan.anatomy, broken, scan.meta).contrast("park", "fööd")
    assert (found.n_a[5], found.n_a[6]) == (5, 6)
    assert np.isfinite(found.p[5])
    assert any("1 of 289 columns lack finite values" in note for note in found.notes)


# -- two scans -----------------------------------------------------------------------------------


def test_two_scans_are_compared_prompt_by_prompt(scan: Scan) -> None:
    groups = [
        Scan(scan.anatomy, [s for s in scan if s.condition == name], scan.meta)
        for name in ("park", "fööd")
    ]
    found = torchfmri.contrast(*groups, names=("park", "fööd"))
    expected = scan.contrast("park", "fööd")
    np.testing.assert_allclose(found.t, expected.t)
    assert found.question == "park - fööd"
    paired = torchfmri.contrast(*groups, paired="pair")
    np.testing.assert_allclose(paired.t, scan.contrast("park", "fööd", paired="pair").t)
    with pytest.raises(InspectionError, match="is in both groups"):
        torchfmri.contrast(scan, groups[0])
    for bad in ("x.fmri", [], [3]):
        with pytest.raises(InspectionError, match="give a Scan"):
            torchfmri.contrast(scan, bad)  # type: ignore[arg-type]


def test_two_checkpoints_are_a_paired_contrast(tiny: Any, scan: Scan, tmp_path: Path) -> None:
    import copy

    model, tokenizer = copy.deepcopy(tiny.model), tiny.tokenizer
    model.model.layers[2].mlp.down_proj.weight.data *= 1.5
    options = ScanOptions(per=None, layers=["*.mlp", "*.self_attn"])
    rows = [*ROWS, {**ROWS[0], "id": "new", "prompt": "Another"}]
    torchfmri.scan_dataset(
        model, tokenizer, rows, tmp_path / "y.fmri", 4, options=options, id_field="id"
    )
    other = torchfmri.load(tmp_path / "y.fmri")
    found = torchfmri.contrast(other, scan, paired=True, names=("new", "old"), level="layer")
    assert found.test == "paired t"
    assert (found.n_a.max(), len(found)) == (12, 10)
    best = found.peaks(2)
    assert {peak.layer for peak in best} >= {"model.layers.2.mlp"}
    before = {"model.layers.0.mlp", "model.layers.1.mlp", "model.layers.0.self_attn"}
    # Shared text alone is compared, and what comes before the change is the same.
    effects = dict(zip(found.columns.layer, found.effect, strict=True))
    assert max(abs(effects[layer]) for layer in before) < 1e-4
    notes = " ".join(found.notes)
    assert "60 columns of old have no partner" in notes
    assert "1 prompts of 'new' have no partner" in notes
    assert "only tokens of text that both have" in notes
    signed = torchfmri.contrast(
        other, scan, paired=True, metric="signed", level="unit", tokens="last", names=("x", "y")
    )
    assert not any("only tokens of text that both have" in note for note in signed.notes)
    layer = "model.layers.1.self_attn"  # not the first that both have, and not all have partners
    expected = np.mean(
        [
            pair[0].vectors["last"][layer].astype(np.float64) - pair[1].vectors["last"][layer]
            for pair in zip(other, scan, strict=False)
        ],
        0,
    )
    np.testing.assert_allclose(signed.effect[signed.columns.layer == layer], expected, atol=1e-9)
    np.testing.assert_allclose(signed.direction(layer).vector, expected, atol=1e-9)
    with pytest.raises(LayerNotFoundError):  # only one of them has it: there is no difference
        signed.direction("model.layers.1")
    assert any("also of text that only one of them wrote" in note for note in signed.notes)
    nothing = Scan(scan.anatomy, [make_other(scan[0])], scan.meta)
    with pytest.raises(InspectionError, match="neither by name"):
        torchfmri.contrast(scan, nothing, paired=True)


@pytest.mark.parametrize("tokens", ["all", (0, 30), slice(1, 30), 1])
def test_text_of_one_alone_is_not_compared(tiny: Any, tokens: Any) -> None:
    """One model that wrote four tokens, and the same one that wrote none."""
    texts = ["Once upon a time", "The dog", "Hello my friend"]
    options = ScanOptions(per=None, layers="*.mlp")
    wrote, read = (torchfmri.Scanner(*tiny, options).scan(texts, count) for count in (4, 0))
    found = torchfmri.contrast(wrote, read, paired=True, tokens=tokens, level="layer")
    assert np.abs(found.effect).max() < 1e-5
    plain = torchfmri.contrast(wrote, wrote, paired=True, tokens=tokens, level="layer")
    assert (plain.effect == 0).all()


def renamed(scan: Scan, rows: list[int]) -> Scan:
    """Rows of a scan in another order, named by where they stand and what they say."""
    parts = [(place, scan[row]) for place, row in enumerate(rows)]
    sequences = [
        ScannedSequence(**{**vars(each), "name": f"{place}-{each.fields['id']}"})
        for place, each in parts
    ]
    return Scan(scan.anatomy, sequences, scan.meta)


@pytest.mark.parametrize(
    ("second", "pairs", "said"),
    [
        ([4, 3, 2, 1, 0], 5, "4 of 5 pairs matched by text"),
        ([0, 1, 2], 3, "2 prompts of 'x' have no partner"),
        ([1, 2, 3, 4], 4, "1 prompts of 'x' have no partner"),
    ],
)
def test_prompts_in_another_order_are_paired_by_text(
    scan: Scan, second: list[int], pairs: int, said: str
) -> None:
    one, other = renamed(scan, [0, 1, 2, 3, 4]), renamed(scan, second)
    found = torchfmri.contrast(one, other, paired=True, names=("x", "y"), level="layer")
    assert found.n_a.max() == pairs
    assert any(said in note for note in found.notes)
    known = found.effect[np.isfinite(found.effect)]
    assert (known == 0).all()  # each with itself


def test_prompts_of_one_text_are_all_paired(scan: Scan) -> None:
    one, other = renamed(scan, [0, 0, 1, 2]), renamed(scan, [2, 1, 0, 0])
    found = torchfmri.contrast(one, other, paired=True, names=("x", "y"), level="layer")
    assert found.n_a.max() == 4
    assert (found.effect[np.isfinite(found.effect)] == 0).all()


def make_other(sequence: ScannedSequence) -> ScannedSequence:
    tokens = sequence.tokens
    spelling = tuple(b"x" for _ in tokens.spelling)
    changed = torchfmri.Tokens(
        tokens.ids, spelling, tokens.surprisal, tokens.entropy, tokens.generated, tokens.special
    )
    return ScannedSequence(**{**vars(sequence), "tokens": changed, "name": "other"})


def test_scans_of_nothing_in_common_are_refused(scan: Scan) -> None:
    anatomy = torchfmri.Anatomy.of_widths(["conv"], ["Conv"], [4], [2])
    values = np.ones((1, 2), np.float32)
    number, no = np.zeros(1, np.float32), np.zeros(1, bool)
    tokens = torchfmri.Tokens(np.array([1]), (b"x",), number, number, no, no)
    other = Scan(anatomy, [ScannedSequence("x", tokens, {}, {"activation": values})], {})
    with pytest.raises(InspectionError, match="no layer in common"):
        torchfmri.contrast(scan, other)


# -- formulas ------------------------------------------------------------------------------------


def test_a_formula_is_fitted_in_two_levels(scan: Scan) -> None:
    pytest.importorskip("formulaic")
    api = pytest.importorskip("statsmodels.api")
    glm = scan.glm("surprisal + condition + size", level="layer", layers="*.mlp")
    assert glm.terms == ("Intercept", "condition[T.park]", "size", "surprisal")
    assert glm.token_names == ("surprisal",)
    assert "surprisal" in glm.table(prompt="park-Tom")
    column = scan.anatomy.column("model.layers.1.mlp")
    counted = [
        s.tokens.surprisal[~s.tokens.special & np.isfinite(s.layers["activation"][:, column])]
        for s in scan
    ]
    middle = np.nanmean(np.concatenate(counted).astype(np.float64))
    means, slopes = [], []
    for sequence in scan:
        table = sequence.layers["activation"][:, column]
        surprisal = sequence.tokens.surprisal.astype(np.float64) - middle
        kept = np.isfinite(table) & np.isfinite(surprisal) & ~sequence.tokens.special
        design = np.stack([np.ones(kept.sum()), surprisal[kept]], 1)
        np.testing.assert_allclose(glm.token_designs[len(means)][:, 0], surprisal[kept], atol=1e-6)
        fitted = api.OLS(table[kept].astype(np.float64), design).fit()
        means.append(fitted.params[0])
        slopes.append(fitted.params[1])
    park = [float(s.condition == "park") for s in scan]
    size = [float(s.fields["size"]) for s in scan]
    second = api.OLS(means, np.stack([np.ones(12), park, size], 1)).fit()
    found = glm.contrast("condition[T.park]")
    assert found.t[1] == pytest.approx(second.tvalues[1], rel=1e-8)
    assert found.p[1] == pytest.approx(second.pvalues[1], rel=1e-8)
    first = api.OLS(slopes, np.ones(12)).fit()
    assert glm.contrast("surprisal").t[1] == pytest.approx(first.tvalues[0], rel=1e-8)


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        ("surprisal +", "is not a formula"),
        ("loudness", "nothing called 'loudness'. Of tokens there are position"),
        ("y ~ size", "write the right side alone"),
        (3, "write the right side alone"),
        ("surprisal:entropy:condition", "cannot be split"),
        ("poly(position, 2)", r"Write position \+ I\(position\*\*2\)"),
        ("center(entropy):condition", r"Write entropy \+ I\(entropy\*\*2\)"),
    ],
)
def test_formulas_that_are_none(scan: Scan, formula: Any, message: str) -> None:
    pytest.importorskip("formulaic")
    with pytest.raises(InspectionError, match=message):
        scan.glm(formula)


def changed_fields(scan: Scan, changes: dict[int, dict[str, Any]]) -> Scan:
    """The scan with some fields of some rows changed."""
    sequences = []
    for row, each in enumerate(scan):
        fields = {**each.fields, **changes.get(row, {})}
        condition = str(fields["condition"] or "")
        sequences.append(
            ScannedSequence(**{**vars(each), "fields": fields, "condition": condition})
        )
    return Scan(scan.anatomy, sequences, scan.meta)


@pytest.mark.parametrize("field", ["condition", "odd", "who", "size"])
def test_prompts_without_a_label_are_no_baseline(scan: Scan, field: str) -> None:
    pytest.importorskip("formulaic")
    gaps = changed_fields(scan, {0: {field: None}, 3: {field: None}})
    formula = field if field != "who" else "C(who)"
    found = gaps.glm(formula, level="layer", layers="*.mlp")
    some = Scan(scan.anatomy, [s for row, s in enumerate(scan) if row not in (0, 3)], scan.meta)
    expected = some.glm(formula, level="layer", layers="*.mlp")
    assert len(found.terms) == len(expected.terms)
    np.testing.assert_array_equal(found.design, expected.design)
    np.testing.assert_allclose(found.levels[""].values, expected.levels[""].values)
    assert found.prompts == expected.prompts
    said = (
        f"2 prompts without a value of a field that the formula names left out: {scan.names[0]!r}"
    )
    assert any(said in note for note in found.notes)
    nobody = changed_fields(scan, {row: {field: None} for row in range(12)})
    with pytest.raises(InspectionError, match=f"'{field}' lack some"):
        nobody.glm(formula, level="layer")


def test_a_field_called_tokens_does_not_hide_the_number_of_tokens(scan: Scan) -> None:
    pytest.importorskip("formulaic")
    other = changed_fields(scan, {row: {"tokens": row**2} for row in range(12)})
    glm = other.glm("tokens + field_tokens", level="layer", layers="*.mlp")
    assert glm.design[:, 1].tolist() == [len(each) for each in scan]
    assert glm.design[:, 2].tolist() == [row**2 for row in range(12)]


def test_average_tokens_are_those_that_count(scan: Scan) -> None:
    pytest.importorskip("formulaic")
    glm = scan.glm("position + condition", level="layer", layers="*.mlp", tokens="generated")
    np.testing.assert_allclose(np.concatenate(glm.token_designs).mean(0), 0.0, atol=1e-12)
    plain = scan.glm("condition", level="layer", layers="*.mlp", tokens="generated")
    away = np.array([design.mean() for design in glm.token_designs])[:, None]
    # A line through the tokens of a prompt goes through their mean.
    expected = plain.levels[""].values - away * glm.levels["position"].values
    np.testing.assert_allclose(glm.levels[""].values, expected)
    assert scan.glm("position + I(position**2)", level="layer").token_names[0] == "position"


def test_columns_that_lack_values_of_any_prompt_are_counted(scan: Scan) -> None:
    pytest.importorskip("formulaic")
    broken = [ScannedSequence(**vars(each)) for each in scan]
    for row, columns in ((0, [1, 2]), (1, [2, 3])):
        values = broken[row].layers["activation"].copy()
        values[2, columns] = np.nan
        broken[row] = ScannedSequence(**{**vars(broken[row]), "layers": {"activation": values}})
    glm = Scan(scan.anatomy, broken, scan.meta).glm(
        "condition", level="layer", layers=scan.layers[:6]
    )
    assert any(
        note.startswith("3 columns without a finite value at some tokens of ") for note in glm.notes
    )


def test_too_few_tokens_for_the_regressors(scan: Scan) -> None:
    pytest.importorskip("formulaic")
    with pytest.raises(InspectionError, match="of layers, voxels or heads"):
        scan.glm("condition", metric="signed", level="unit")
    with pytest.raises(InspectionError, match="No prompt has enough tokens"):
        scan.glm("surprisal + position", tokens="last")
    assert scan.glm("condition", tokens="last", level="layer").terms[1] == "condition[T.park]"
    product = scan.glm("surprisal * condition", level="layer")
    assert "surprisal:condition[T.park]" in product.terms


def test_conditions_are_read_from_layers(scan: Scan) -> None:
    found = scan.classify("park", "fööd", tokens="last", folds=3, permutations=50, paired="pair")
    assert {row.features for row in found.rows} == {"signed", "activation"}
    assert max(row.accuracy for row in found.rows) == 1.0
    assert json.dumps([row._asdict() for row in found.rows])
    bare = [ScannedSequence(**{**vars(s), "vectors": {}, "tensors": {}}) for s in scan]
    other = Scan(scan.anatomy, bare, scan.meta).classify("park", "fööd", folds=3, permutations=9)
    assert {row.features for row in other.rows} == {"activation"}
    assert any("no mean vectors" in note for note in other.notes)


# -- what heads wrote ----------------------------------------------------------------------------


@pytest.mark.parametrize("per", [None, "position", "cached", "token_loss"])
@pytest.mark.one_in(4)
def test_what_the_heads_wrote_is_what_o_proj_was_given(tiny: Any, per: str | None) -> None:
    options = ScanOptions(
        per=per, heads=True, layers="*.self_attn*", vectors=("all", "last"), vector_bytes=1 << 30
    )
    scan = torchfmri.Scanner(*tiny, options).scan(["Once upon a time", "The dog"], 3)
    projection = "model.layers.1.self_attn.o_proj"
    columns = scan.anatomy.voxels_of(f"{projection}.input")
    weight = tiny.model.model.layers[1].self_attn.o_proj.weight.detach().numpy()
    assert set(scan.anatomy.kind[columns]) == {1}
    for sequence in scan:
        for vectors in sequence.vectors.values():  # the projection is linear, so means go through
            given, put_out = vectors[f"{projection}.input"], vectors[projection]
            np.testing.assert_allclose(weight @ given, put_out, rtol=1e-3, atol=1e-5)
        norms = sequence.voxels["activation"][:, columns]
        sizes = scan.anatomy.count[columns]
        seen = np.isfinite(norms).all(1)
        assert seen[:-1].all()
        last = np.split(sequence.vectors["last"][f"{projection}.input"], np.cumsum(sizes)[:-1])
        rms = [np.sqrt(np.mean(part**2)) for part in last]
        usable = np.flatnonzero(seen & ~sequence.tokens.special)
        np.testing.assert_allclose(norms[usable[-1]], rms, rtol=1e-4)
        if per is not None:
            assert np.isnan(sequence.voxels["gradient"][:, columns]).all()
            assert sequence.checks["live_difference"] < 1e-5
    hooked = [m for m in tiny.model.modules() if m._forward_pre_hooks or m._forward_hooks]
    assert not hooked


def test_heads_that_are_not_there(tiny: Any) -> None:
    with pytest.raises(InspectionError, match="heads=True: none of the chosen layers"):
        torchfmri.Scanner(*tiny, ScanOptions(heads=True, layers="*.mlp")).scan("One", 1)
