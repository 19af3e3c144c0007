"""Reading a scan: values by name, delta_sc, statistics, tables, the page's data."""

import base64
import json
import math
import re
import statistics as plain
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scans import make_anatomy, make_scan, make_sequence

import torchfmri
from torchfmri import Anatomy, InspectionError, LayerNotFoundError, Scan, ScannedSequence
from torchfmri._scan.record.blocks import depth_of, inside_of, kinds_of, outline_of
from torchfmri._scan.record.delta_sc import delta_between_layers, delta_within_layers, standardised
from torchfmri._scan.record.reading import Reading
from torchfmri._scan.record.sequence import METRICS, STATISTICS


def z_of(values: list[float]) -> list[float]:
    """The slow way: only finite values count; no spread, no z."""
    known = [value for value in values if math.isfinite(value)]
    deviation = plain.pstdev(known) if known else 0.0
    if not deviation or min(known) == max(known):
        return [math.nan] * len(values)
    middle = plain.fmean(known)
    return [(value - middle) / deviation if math.isfinite(value) else math.nan for value in values]


def contrast(activation: list[float], gradient: list[float]) -> list[float]:
    return [a - b for a, b in zip(z_of(activation), z_of(gradient), strict=True)]


# -- delta_sc ------------------------------------------------------------------------------------


def test_delta_sc_by_voxel_is_a_contrast_within_the_layer() -> None:
    scan = make_scan(blocks=2, tokens=5)
    found = scan.delta_sc(by="voxel").values
    activation, gradient = (scan.only.voxels[name] for name in ("activation", "gradient"))
    for token in range(5):
        for layer in range(len(scan.layers)):
            columns = np.flatnonzero(scan.anatomy.layer == layer).tolist()
            expected = contrast(
                activation[token, columns].astype(float).tolist(),
                gradient[token, columns].astype(float).tolist(),
            )
            np.testing.assert_allclose(found[token, columns], expected, rtol=1e-12, atol=1e-12)
    assert np.isnan(found[-1]).all(), "the last token has no gradient"
    assert np.isfinite(found[:-1]).all()


def test_delta_sc_by_layer_compares_logarithms_of_layers_of_one_kind() -> None:
    scan = make_scan(blocks=4, tokens=3)
    names, found = scan.delta_sc()
    activation, gradient = (scan.only.layers[name] for name in ("activation", "gradient"))
    for token in range(2):
        for kind in {re.sub(r"\.\d+", ".#", name) for name in names}:
            columns = [i for i, name in enumerate(names) if re.sub(r"\.\d+", ".#", name) == kind]
            expected = contrast(
                [math.log10(float(x)) for x in activation[token, columns]],
                [math.log10(float(x)) for x in gradient[token, columns]],
            )
            np.testing.assert_allclose(found[token, columns], expected, rtol=1e-9, atol=1e-9)
    alone = [names.index(name) for name in ("model.embed", "model.norm", "lm_head")]
    assert np.isnan(found[:, alone]).all(), "a kind with one layer has no spread"
    assert np.isfinite(np.delete(found[:-1], alone, axis=1)).all()


def test_delta_sc_of_a_pattern_is_the_same_as_of_all() -> None:
    scan = make_scan(blocks=4)
    names, found = scan.delta_sc(pattern="*.mlp")
    assert names == tuple(f"model.layers.{block}.mlp" for block in range(4))
    everything = scan.delta_sc()
    columns = [everything.names.index(name) for name in names]
    np.testing.assert_array_equal(found, everything.values[:, columns])


@pytest.mark.parametrize("value", [0.1, 1 / 3, 7.0, 0.0])
def test_no_spread_gives_nan_however_the_mean_is_rounded(value: float) -> None:
    assert np.isnan(standardised(np.full((2, 7), value))).all()
    assert np.isnan(standardised(np.array([[value]]))).all()
    assert standardised(np.zeros((2, 0))).shape == (2, 0)
    same = np.full((1, 5), value)
    assert np.isnan(delta_between_layers(same, same, [[0, 1, 2, 3, 4]])).all()


def test_values_that_are_not_finite_are_left_out() -> None:
    values = np.array([[1.0, np.nan, 3.0, np.inf]])
    np.testing.assert_allclose(standardised(values), [[-1, np.nan, 1, np.nan]])
    zero = np.array([[0.0, 1.0, 10.0]])
    other = np.array([[1.0, 2.0, 5.0]])
    found = delta_between_layers(zero, other, [[0, 1, 2]])
    assert np.isnan(found[0, 0]), "there is no logarithm of 0"
    expected = z_of([0.0, 1.0])[1] - z_of([math.log10(x) for x in (1.0, 2.0, 5.0)])[2]
    assert found[0, 2] == pytest.approx(expected)


@settings(deadline=None, max_examples=40)
@given(st.floats(0.01, 100.0), st.floats(-5.0, 5.0), st.integers(0, 1000))
def test_delta_sc_does_not_depend_on_units(factor: float, shift: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    activation, gradient = random.lognormal(0, 1, (2, 3, 6))
    layer = np.array([0, 0, 0, 1, 1, 1])
    expected = delta_within_layers(activation, gradient, layer)
    found = delta_within_layers(activation * factor + shift, gradient, layer)
    np.testing.assert_allclose(found, expected, atol=1e-8)
    kinds = [[0, 1, 2], [3, 4, 5]]
    between = delta_between_layers(activation, gradient, kinds)
    np.testing.assert_allclose(
        delta_between_layers(activation * factor, gradient, kinds), between, atol=1e-8
    )
    # The other layer, and the other kind, have no say.
    activation[:, 3:] *= random.lognormal(0, 1, 3)
    np.testing.assert_array_equal(
        delta_within_layers(activation, gradient, layer)[:, :3], expected[:, :3]
    )
    assert not np.allclose(delta_within_layers(activation, gradient, layer)[:, 3:], expected[:, 3:])


# -- values --------------------------------------------------------------------------------------


def test_values_have_the_names_of_their_columns() -> None:
    scan = make_scan(blocks=3)
    names, values = scan.values("gradient", pattern=["*.mlp", "lm_head"])
    assert names == (*(f"model.layers.{block}.mlp" for block in range(3)), "lm_head")
    for name, column in zip(names, values.T, strict=True):
        expected = scan.only.layers["gradient"][:, scan.layers.index(name)]
        np.testing.assert_array_equal(column, expected)
    assert scan.values().names == scan.layers


def test_voxels_are_named_after_heads_and_units() -> None:
    scan = make_scan(blocks=1)
    names, values = scan.values("activation", by="voxel", pattern="*{q,up}_proj")
    assert names == (
        "model.layers.0.self_attn.q_proj[head 0]",
        "model.layers.0.self_attn.q_proj[head 1]",
        "model.layers.0.mlp.up_proj[0:64]",
        "model.layers.0.mlp.up_proj[64:128]",
        "model.layers.0.mlp.up_proj[128:192]",
        "model.layers.0.mlp.up_proj[192:200]",
    )
    span = scan.anatomy.voxels_of("model.layers.0.mlp.up_proj")
    np.testing.assert_array_equal(values[:, 2:], scan.only.voxels["activation"][:, span])


def test_experts_are_named_by_number() -> None:
    anatomy = Anatomy.of_widths(["experts"], ["Experts"], [64], [64], experts=[3])
    sequence = ScannedSequence(
        "0", make_scan(1).tokens, {}, {"activation": np.ones((12, 4), np.float32)}
    )
    names = Scan(anatomy, [sequence], {}).values(by="voxel").names
    assert names == (
        "experts[0:64]", "experts[expert 0]", "experts[expert 1]", "experts[expert 2]",
    )  # fmt: skip


def test_mistakes_say_what_there_is() -> None:
    scan = make_scan(blocks=1, metrics=["activation"])
    assert scan.metrics == ("activation",)
    with pytest.raises(InspectionError, match=r"no gradient per layer: it has activation.*per="):
        scan.values("gradient")
    with pytest.raises(InspectionError, match="no gradient per voxel"):
        scan.delta_sc(by="voxel")
    with pytest.raises(InspectionError, match="no metric 'loudness': this scan has activation"):
        scan.values("loudness")
    with pytest.raises(InspectionError, match="by='head' is neither"):
        scan.values(by="head")
    with pytest.raises(LayerNotFoundError, match=r"model\.norm.* List them with scan\.layers\."):
        scan.values(pattern="model.norn")
    with pytest.raises(InspectionError, match="no sequence 3: this scan has 1 sequence"):
        scan.values(sequence=3)
    assert make_scan(blocks=1).metrics == (*METRICS, "delta_sc")


def test_conveniences_are_of_the_only_sequence() -> None:
    scan = make_scan(tokens=4)
    assert scan.text == "<s>The capital of"
    assert scan.tokens is scan.only.tokens
    several = make_scan(blocks=1, sequences=2)
    with pytest.raises(InspectionError, match=r"2 sequences: choose one, as in scan\[0\]"):
        _ = several.text
    with pytest.raises(InspectionError, match="no sequences"):
        _ = Scan(make_anatomy(1), [], {}).only


def test_learning_cost_of_a_block_is_that_of_all_its_parameters() -> None:
    scan = make_scan(blocks=2, tokens=4)
    own = scan.only.layers["learning_cost"]
    whole = Reading(scan.anatomy, scan.only, scan.meta).whole("learning_cost")
    for column, layer in enumerate(scan.layers):
        for token in range(3):
            parts = [
                float(own[token, at]) ** 2
                for at, name in enumerate(scan.layers)
                if (name == layer or name.startswith(layer + ".")) and not np.isnan(own[token, at])
            ]
            assert whole[token, column] == pytest.approx(math.sqrt(sum(parts)), rel=1e-12)
    assert np.isnan(whole[-1]).all()
    assert np.isnan(own[:, scan.layers.index("model.layers.0.mlp")]).all()


def test_statistics_of_several_sequences_are_those_of_all_values() -> None:
    random = np.random.default_rng(0)
    anatomy = Anatomy.of_widths(["a", "b"], ["X", "X"], [4, 4], [4, 4])
    data = [random.normal(3, 2, size) for size in (5, 40, 1)]
    data[1][:3] = np.nan, np.inf, 0.0
    sequences = []
    for values in [*data, np.array([np.nan])]:
        finite = values[np.isfinite(values)]
        moments = [finite.mean(), finite.std(), finite.min(), finite.max()] if len(finite) else []
        row = [
            len(values),
            *(moments or [np.nan] * 4),
            np.isnan(values).sum(),
            np.isinf(values).sum(),
            (values == 0).sum(),
        ]
        table = np.array([np.zeros(8), row])
        made = make_sequence(make_anatomy(0), 2)
        sequences.append(
            ScannedSequence("s", made.tokens, {}, {}, {"activations": table, "gradients": table})
        )
    found = Scan(anatomy, sequences, {}).statistics("b")
    assert list(found) == ["activations", "gradients"]
    everything = np.concatenate([*data, [np.nan]])
    finite = everything[np.isfinite(everything)]
    expected = [47, finite.mean(), finite.std(), finite.min(), finite.max(), 2, 1, 1]
    for name, value in zip(STATISTICS, expected, strict=True):
        assert found["activations"][name] == pytest.approx(value, rel=1e-12), name
    one = Scan(anatomy, sequences, {}).statistics("b", sequence=3)["activations"]
    assert one["count"] == one["nan"] == 1
    assert math.isnan(one["mean"])
    with pytest.raises(LayerNotFoundError):
        Scan(anatomy, sequences, {}).statistics("c")


# -- blocks --------------------------------------------------------------------------------------


def test_outline_of_real_models() -> None:
    llama = make_scan(blocks=30).layers
    chosen = [llama[column] for column in outline_of(llama)]
    assert chosen[:4] == [
        "model.embed", "model.layers.0", "model.layers.0.self_attn", "model.layers.0.mlp",
    ]  # fmt: skip
    assert chosen[-2:] == ["model.norm", "lm_head"]
    assert len(chosen) == 93
    gpt = ["transformer", "transformer.wte", "transformer.wpe"]
    for block in range(12):
        parts = ["", ".ln_1", ".attn", ".attn.c_attn", ".attn.c_proj", ".mlp", ".mlp.c_fc"]
        gpt += [f"transformer.h.{block}{part}" for part in parts]
    gpt += ["transformer.ln_f", "lm_head"]
    kinds = set(kinds_of([gpt[column] for column in outline_of(gpt)]))
    assert kinds == {
        "transformer.wte", "transformer.wpe", "transformer.h.*", "transformer.h.*.attn",
        "transformer.h.*.mlp", "transformer.ln_f", "lm_head",
    }  # fmt: skip
    experts = [f"h.{b}.mlp.experts.{e}.up" for b in range(8) for e in range(8)]
    assert outline_of(experts) == list(range(64)), "nothing stands for a block: all of them"
    assert outline_of(["a", "b.0"]) == [0, 1], "few layers are all shown"


def test_inside_and_depth() -> None:
    layers = ["", "a", "a.0", "a.0.b", "ab"]
    assert inside_of(layers) == [[0, 1, 2, 3, 4], [1, 2, 3], [2, 3], [3], [4]]
    assert [depth_of(layer) for layer in layers] == [None, None, 0, 0, None]


# -- tables --------------------------------------------------------------------------------------


def test_table_has_medians_over_tokens() -> None:
    scan = make_scan(blocks=2, tokens=9)
    text = scan.table(width=200, fold=False)
    (line,) = [each for each in text.splitlines() if each.startswith("model.layers.1.mlp.up_proj")]
    column = scan.layers.index("model.layers.1.mlp.up_proj")
    for metric in METRICS:
        expected = plain.median(
            float(x) for x in scan.only.layers[metric][:, column] if not np.isnan(x)
        )
        assert any(
            each == pytest.approx(expected, rel=6e-3)
            for each in map(float, re.findall(r"[\d.]+(?:e-?\d+)?", line.split("Linear")[1]))
        ), (metric, expected, line)


def gradients_after(reached: dict[str, int], meta: dict[str, str]) -> Scan:
    """Ten tokens, five generated; each layer's gradient is 0 before its first position."""
    anatomy = Anatomy.of_widths(
        list(reached), ["Linear"] * len(reached), [4] * len(reached), [4] * len(reached)
    )
    values = np.tile(np.arange(1.0, 11.0, dtype=np.float32)[:, None], (1, len(reached)))
    values[-1] = np.nan
    for column, first in enumerate(reached.values()):
        values[:first, column] = 0.0
    tables = {"activation": np.ones_like(values), "gradient": values, "learning_cost": values}
    return Scan(anatomy, [ScannedSequence("0", make_scan(1, 10).tokens, tables, {})], meta)


def row_of(scan: Scan, layer: str) -> list[str]:
    (line,) = [each for each in scan.table(width=200).splitlines() if each.startswith(layer + " ")]
    return line.split()


def test_gradients_are_summarised_where_the_loss_reaches_and_the_table_says_how_many() -> None:
    scan = gradients_after({"embed": 0, "head": 4}, {"loss": "the generated tokens"})
    assert row_of(scan, "embed")[2:] == ["1", "5", "9", "5"]  # 1 to 9
    assert row_of(scan, "head")[2:] == ["1", "7", "5", "7"]  # 5 to 9: five tokens were generated


def test_a_zero_where_the_loss_is_computed_counts() -> None:
    """Positions 4 to 8 have a loss. At 4, 5 and 6 the layer is dead; the prompt never counts."""
    assert row_of(gradients_after({"dead": 7}, {}), "dead")[3:] == ["0", "5", "0"]
    everywhere = gradients_after({"dead": 7}, {"loss": "the sum of -log p of all tokens"})
    assert row_of(everywhere, "dead")[3:] == ["0", "9", "0"]
    own = gradients_after({"some": 7}, {"loss": "your own loss (confidence)"})
    assert row_of(own, "some")[3:] == ["8.5", "2", "8.5"], "where an own loss is, only zeros tell"
    nowhere = gradients_after({"none": 9}, {"loss": "your own loss (confidence)"})
    assert row_of(nowhere, "none")[3:] == ["0", "9", "0"]


def test_the_head_of_a_scanned_model_has_the_median_of_the_positions_with_a_loss() -> None:
    model, tokenizer = torchfmri.load_model("tiny")
    scan = torchfmri.scan(model, tokenizer, "What is the capital of France?", chat=True)
    names, values = scan.values("gradient")
    has_loss = np.append(scan.tokens.generated[1:], False)
    for layer in ("lm_head", "model.norm", "model"):
        expected = float(np.median(values[has_loss, names.index(layer)]))
        row = row_of(scan, layer)
        at = next(place for place, cell in enumerate(row) if cell == str(has_loss.sum()))
        assert expected > 0
        assert float(row[at - 1]) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("width", [-5, 0, 1.5, "wide", True])
def test_a_width_that_is_none(width: Any) -> None:
    with pytest.raises(InspectionError, match=f"width={width!r}"):
        make_scan(1).table(width=width)


@pytest.mark.parametrize("width", [1, 2, 3, 7])
def test_a_table_of_hardly_any_width_ends(width: int) -> None:
    scan = make_scan(1)
    assert Scan(scan.anatomy, list(scan), {"missed": {"x": "no room"}}).table(width=width)


def test_a_table_of_thousands_of_layers_takes_time_in_proportion() -> None:
    def seconds(layers: int) -> float:
        names = [f"layer{number}" for number in range(layers)]
        anatomy = Anatomy.of_widths(names, ["Linear"] * layers, [4] * layers, [4] * layers)
        table = {"activation": np.ones((3, layers), np.float32)}
        scan = Scan(anatomy, [ScannedSequence("0", make_scan(1, 3).tokens, table, {})], {})
        started = time.perf_counter()
        scan.table(fold=False, width=100)
        return time.perf_counter() - started

    seconds(500)
    assert seconds(8000) < 8 * 4 * seconds(1000)  # 64 times as long if it were quadratic


def test_of_several_sequences_one_must_be_chosen(tmp_path: Path) -> None:
    several = make_scan(blocks=1, sequences=3)
    calls: list[Callable[..., Any]] = [
        several.values,
        several.delta_sc,
        several.table,
        several.plot_brain,
        several.plot_layers,
        several.draw,
        partial(several.plot_token, 1),
        partial(several.plot_voxels, "lm_head"),
        partial(several.save_html, tmp_path / "page.html"),
    ]
    for call in calls:
        with pytest.raises(InspectionError, match=r"3 sequences: choose one.*sequence=0"):
            call()
    assert not list(tmp_path.iterdir())
    for number in range(3):
        expected = several[number].layers["activation"]
        np.testing.assert_array_equal(several.values(sequence=number).values, expected)
    assert several.values(sequence=-1).values is not None
    assert "sequence 2 of" in several.table(sequence=2)


def test_table_folds_layers_of_one_kind() -> None:
    scan = make_scan(blocks=30)
    text = scan.table(width=200)
    assert re.search(r"^model\.layers\.\*\.mlp +MLP +30 ", text, re.MULTILINE)
    assert len(text.splitlines()) < 20
    assert len(make_scan(blocks=30).table(width=200, fold=False).splitlines()) > 240
    values = scan.only.layers["activation"][:, kinds_of(scan.layers)["model.layers.*.mlp"]]
    (line,) = [each for each in text.splitlines() if each.startswith("model.layers.*.mlp ")]
    assert f"{float(np.median(values)):.3g}" in line
    narrow = scan.table(width=60)
    assert max(map(len, narrow.splitlines())) <= 60


def test_repr_and_html_of_many_sizes() -> None:
    assert repr(make_scan(blocks=1)) == (
        "<Scan: 1 sequence of test model; 12 tokens, 6 generated; 11 layers, 27 voxels; activation,"
        " gradient, learning_cost>"
    )
    many = make_scan(blocks=250, tokens=3)
    assert len(many.layers) > 2000
    assert len(many._repr_html_().encode()) < 200_000
    several = make_scan(blocks=1, sequences=30, condition="<b>a</b>")
    html = several._repr_html_()
    assert "30 sequences of test model" in html
    assert "10 more sequences" in html
    assert "&lt;b&gt;a&lt;/b&gt;" in html
    assert "<b>a" not in html
    empty = Scan(make_anatomy(1), [], {"model": "m"})
    assert repr(empty) == "<Scan: 0 sequences of m; 11 layers, 27 voxels>"
    assert "0 sequences" in empty._repr_html_()
    assert "0 tokens" in repr(make_scan(blocks=1, tokens=0))
    make_scan(blocks=1, tokens=0).table()


def test_html_is_escaped_and_says_what_is_missing() -> None:
    anatomy = Anatomy.of_widths(["<script>x"], ["<i>"], [4], [4])
    sequence = ScannedSequence(
        "0", make_scan(1).tokens, {"activation": np.ones((12, 1), np.float32)}, {}, padding=3
    )
    meta = {"model": "<img src=x>", "missed": {"a.0.<u>": "<why>", "a.1.<u>": "<why>"}}
    scan = Scan(anatomy, [sequence], meta, problems=["segment <p>"])
    html = scan._repr_html_()
    for bad in ("<script>", "<i>", "<img", "<u>", "<why>", "segment <p>"):
        assert bad not in html
    text = scan.table(width=150)
    assert "a.*.<u> (2 layers): <why>" in text
    assert "3 positions" in text
    assert "segment <p>" in text


# -- the page ------------------------------------------------------------------------------------


def page_answers(text: str) -> dict[str, Any]:
    element = r'<script id="data" type="application/json">(.*?)</script>'
    found = re.search(element, text, re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1])["answers"])


def decode(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<f4")


def test_page_carries_the_values_bit_for_bit(tmp_path: Path) -> None:
    scan = make_scan(blocks=3, tokens=7)
    scan.save_html(tmp_path / "scan.html")
    answers = page_answers((tmp_path / "scan.html").read_text("utf-8"))
    board = answers["board"]
    assert board["layers"] == list(scan.layers)
    metrics = [each["name"] for each in answers["sequence?sequence=0"]["metrics"]]
    assert metrics == [*METRICS, "delta_sc"]
    for metric in metrics:
        values = decode(answers[f"values?metric={metric}&plane=layers&sequence=0"])
        whole = Reading(scan.anatomy, scan.only, scan.meta).whole(metric)
        np.testing.assert_array_equal(values.reshape(len(scan.layers), 7), whole.T.astype("f4"))
    key = "values?metric=activation&plane=model.layers.0.mlp.up_proj&sequence=0"
    voxels = scan.values("activation", by="voxel", pattern="model.layers.0.mlp.up_proj").values
    np.testing.assert_array_equal(decode(answers[key]).reshape(4, 7), voxels.T)
    tracks = decode(answers["values?metric=tracks&plane=tracks&sequence=0"]).reshape(3, 7)
    np.testing.assert_array_equal(tracks[0], scan.tokens.surprisal)


def test_page_is_alone_and_safe(tmp_path: Path) -> None:
    anatomy = make_anatomy(48)
    assert len(anatomy.layers) == 387
    spelling = [b"</script><script>alert(1)//", b"<!--", "\u2028é".encode(), *[b" x"] * 97]
    sequence = make_sequence(anatomy, 100, spelling=spelling)
    scan = Scan(anatomy, [sequence], {"model": "</title>{{data}}<b>", "loss": "<i>"})
    scan.save_html(tmp_path / "scan.html")
    text = (tmp_path / "scan.html").read_text("utf-8")
    assert text.count("</script>") == 2
    assert "<!--" not in text
    assert "</title>{{" not in text
    assert set(re.findall(r"https?://[^\"']+", text)) == {"http://www.w3.org/2000/svg"}, "a name"
    pieces = page_answers(text)["columns?chunk=0&sequence=0"]["pieces"]
    assert pieces[0] == "</script><script>alert(1)//"
    assert page_answers(text)["board"]["model"] == "</title>{{data}}<b>"
    scan.save_html(tmp_path / "part.html", layers="*.mlp")
    part = page_answers((tmp_path / "part.html").read_text("utf-8"))
    assert len(part["board"]["layers"]) == 48
    assert len((tmp_path / "part.html").read_bytes()) < 2_000_000
