"""Panels about one cell: attention and lens, read from scans that have them."""

from typing import Any

import numpy as np
import pytest
import torch
from browser import Page
from scans import make_scan

import torchfmri
from torchfmri import Scan
from torchfmri._viewer import Panel

LAYER = "model.layers.2.self_attn"


@pytest.fixture(scope="module")
def named() -> Any:
    return torchfmri.load_model("tiny")


@pytest.fixture(scope="module")
def scanned(named: Any) -> Scan:
    return torchfmri.scan(
        *named, "The capital of France", 3, per=None, attention="*", lens=True
    )  # fmt: skip


def panels(scan: Scan, row: str, column: int) -> dict[str, Panel]:
    return {each.name: each for each in scan._board().panels_at(0, row, column)}


def test_a_head_lists_what_it_attends_to(scanned: Scan) -> None:
    pattern = scanned.attention_pattern(LAYER)
    column = len(scanned.only) - 2
    found = panels(scanned, f"{LAYER}.q_proj[head 1]", column)["attention"]
    shares = pattern[1, column]
    assert "head 1" in found.title
    assert found.data["columns"][0] == int(shares.argmax())
    for key, value in zip(found.data["columns"], found.data["values"], strict=True):
        assert value == pytest.approx(float(shares[key]), rel=1e-6)
        assert value > 0
        assert key <= column, "nobody attends to what comes later"
    whole = panels(scanned, LAYER, column)
    mean = pattern[:, column].mean(0)
    assert whole["attention"].data["columns"][0] == int(mean.argmax())
    matrix = np.array(whole["attention-pattern"].data["values"])
    np.testing.assert_allclose(matrix, pattern.mean(0), rtol=1e-5, atol=1e-7)
    assert whole["attention-pattern"].data["row"] == column


def test_a_head_that_ran_on_the_last_token_alone_is_no_nan(scanned: Scan) -> None:
    board = scanned._board()
    assert np.isnan(board.values(0, "activation", "layers")).any()
    assert not [each for each in board.health(0) if "NaN" in each.text]


def test_a_nan_begins_in_the_layer_that_made_it() -> None:
    model, tokenizer = torchfmri.load_model("tiny")
    layer = "model.layers.2.mlp.down_proj"
    with torch.no_grad():
        model.get_submodule(layer).weight[0, 0] = torch.nan
    board = torchfmri.scan(model, tokenizer, "The capital of France", per=None)._board()
    [found] = [each for each in board.health(0) if each.severity == "alarm"]
    assert (found.layer, found.column) == (layer, 0)
    assert f"first at {layer}, token 0" in found.text


def test_a_nan_begins_where_it_was_computed_first_not_where_it_was_registered_first() -> None:
    model, tokenizer = torchfmri.load_model("tiny")
    mlp = model.model.layers[2].mlp
    mlp._modules = dict(reversed(mlp._modules.items()))  # act_fn and down_proj come first now
    layer = "model.layers.2.mlp.gate_proj"
    with torch.no_grad():
        mlp.gate_proj.weight[0, 0] = torch.nan
    scan = torchfmri.scan(model, tokenizer, "The capital of France", per=None)
    names = list(scan.layers)
    assert names.index("model.layers.2.mlp.down_proj") < names.index(layer)

    def alarm() -> Any:
        [found] = [each for each in scan._board().health(0) if each.severity == "alarm"]
        return found

    assert (alarm().layer, alarm().column) == (layer, 0)
    assert f"first at {layer}, token 0" in alarm().text
    del scan.meta["order"]  # as in a scan of an earlier version
    assert "first in model order at" in alarm().text
    scan.meta["order"] = [{"not": "a name"}, 3]
    assert "first in model order at" in alarm().text


def test_layers_that_no_gradient_reaches_are_no_nan(named: Any) -> None:
    board = torchfmri.scan(*named, "The capital of France", 3, per="position")._board()
    names = list(board.layers)
    for metric, silent in (("gradient", ["model.rotary_emb"]), ("delta_sc", ["model", "lm_head"])):
        values, missing = board.values(0, metric, "layers"), board.missing(0, metric, "layers")
        assert missing is not None
        assert np.isnan(values[:, [names.index(each) for each in silent]]).all()
        assert (np.isnan(values) <= missing).all(), metric


def test_a_gradient_that_is_nan_is_not_taken_for_unmeasured() -> None:
    scan = make_scan(blocks=2, tokens=9)
    gradient = scan.only.layers["gradient"]
    behind = scan.layers.index("model.layers.1.mlp")
    gradient[:, : behind + 1] = np.nan  # it came from there, and went on to the embedding
    missing = scan._board().missing(0, "gradient", "layers")
    assert missing is not None
    assert not missing[:-1, : behind + 1].any()
    scan = make_scan(blocks=2, tokens=9)
    scan.only.layers["gradient"][3, behind] = np.nan
    for metric in ("gradient", "delta_sc"):
        missing = scan._board().missing(0, metric, "layers")
        assert missing is not None
        assert not missing[3, behind], "one cell of a row that has gradients"


def test_layers_without_one_attention_have_no_panel_of_it(scanned: Scan) -> None:
    assert "attention" in panels(scanned, "model.layers.2", 1), "the block has one inside"
    assert "attention" not in panels(scanned, "model", 1), "it has several"
    assert "attention" not in panels(scanned, "lm_head", 1)
    assert panels(scanned, "no such layer", 1) == {}
    assert panels(scanned, f"{LAYER}.q_proj[head 99]", 1) == {}


def test_scores_where_whole_patterns_were_not_kept(named: Any) -> None:
    scan = torchfmri.scan(*named, "Once upon", 2, per=None, attention=True)
    found = panels(scan, LAYER, 2)["attention"]
    names, values = scan.attention("entropy", LAYER)
    at = found.data["columns"].index("entropy")
    assert len(found.data["rows"]) == len(names)
    said = [float(row[at]) for row in found.data["rows"]]
    np.testing.assert_allclose(said, values[2], rtol=0.02)


def test_a_lens_says_rank_and_likeliest_tokens(scanned: Scan, named: Any) -> None:
    lens = scanned.lens(named.tokenizer)
    board = scanned._board()
    board.tokenizer = named.tokenizer
    (found,) = [each for each in board.panels_at(0, "lm_head", 2) if each.name == "lens"]
    for row, name, rank, top in zip(
        found.data["rows"], lens.layers, lens.rank[:, 2], lens.top[:, 2], strict=True
    ):
        assert row[0]["layer"] == name
        assert row[0]["text"] == name.removeprefix("model.")
        assert row[1] == int(rank)
        assert row[2].startswith(f"{lens.spell(top[0]).strip()} ")
    without = panels(scanned, "lm_head", 2)["lens"].data["rows"]
    assert any("#" in row[2] for row in without), "numbers, where nobody spells them"


@pytest.mark.parametrize("written", [0, 3])
def test_at_the_last_token_the_lens_says_what_it_would_say(named: Any, written: int) -> None:
    scan = torchfmri.scan(*named, "The capital of France", written, per=None, lens=True)
    last = len(scan.only) - 1
    found = panels(scan, "lm_head", last)["lens"]
    assert "the text ends here, so there is no rank" in found.title
    assert found.data["columns"] == ["layer", "would say"]
    tokens = scan.only.tokens
    known = dict(zip(tokens.ids.tolist(), tokens.pieces, strict=True))
    for row, token in zip(found.data["rows"], scan.lens().top[:, last, 0].tolist(), strict=True):
        assert row[1].startswith(f"{known.get(token, f'#{token}').strip()} ")
    before = panels(scan, "lm_head", last - 1)["lens"]
    assert repr(scan.only.tokens.pieces[last].strip()) in before.title
    assert before.data["columns"] == ["layer", "rank", "would say"]


def test_a_token_that_no_lens_read_is_said_to_be_unread(scanned: Scan) -> None:
    tensors = scanned.only.tensors
    name = next(each for each in tensors if each.endswith("top_probability"))
    kept = tensors[name]
    try:
        tensors[name] = np.where(np.arange(len(kept))[:, None] == 2, np.nan, kept)
        assert panels(scanned, "lm_head", 2)["lens"].kind == "text"
        assert panels(scanned, "lm_head", 3)["lens"].kind == "table"
    finally:
        tensors[name] = kept


def test_the_page_shows_the_panels_of_the_crosshair(page: Page, scanned: Scan) -> None:
    with torchfmri.view(scanned, browser=False) as view:
        page.open(view.url)
        page.js(f"app.goTo('{LAYER}.q_proj[head 1]', 5)")
        cell = f"[data-row='{LAYER}.q_proj[head 1]'][data-column='5']"
        page.page.wait_for_selector(f".details{cell}:not([aria-busy])")
        assert "lens" in page.js(
            "[...app.root.querySelectorAll('.panel')].map(p => p.dataset.panel)"
        )
        strongest = int(scanned.attention_pattern(LAYER)[1, 5].argmax())
        page.page.locator("[data-panel=attention] button").first.click()
        assert page.js("app.state.column") == strongest


def test_lesions_bring_a_panel_that_leads_to_their_blocks(page: Page, scanned: Scan) -> None:
    model, tokenizer = torchfmri.load_model("tiny")
    prompts, answers = ["Once upon a", "The dog went to the"], [" time", " park"]
    lesions = torchfmri.lesion(model, tokenizer, prompts, answers, of="mlps")
    first = lesions.top(1)[0]
    with torchfmri.view(scanned, browser=False, panels=[lesions.panel(scanned.layers)]) as view:
        page.open(view.url)
        rows = page.page.locator("[data-panel=lesions] tbody tr")
        rows.first.wait_for()
        assert rows.count() == len(lesions.names)
        name, change, p = rows.first.locator("td").all_inner_texts()
        at = lesions.names.index(first)
        assert name == first
        assert float(change) == pytest.approx(lesions.effect.mean(0)[at], rel=1e-3)
        assert float(p) == pytest.approx(lesions.over_prompts().p[at], rel=0.1)
        rows.first.locator("button").click()
        page.until(f"app.state.layer === 'model.layers.{lesions.blocks[at]}'")
        page.page.goto("about:blank")
