"""`torchfmri lens`: the numbers of the library, as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import torchfmri
from torchfmri import cli

ASK = "The capital of France is"


def test_it_says_what_the_library_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "lens.png"
    options = ["--prompt", ASK, "--token", " Paris", "--against", " Rome", "--inputs"]
    assert cli.main(["lens", *options, "--json", "--picture", str(picture)]) == 0
    data = json.loads(capsys.readouterr().out)
    model, tokenizer = torchfmri.load_model("tiny")
    found = torchfmri.attribute_logit(model, tokenizer, ASK, " Paris", against=" Rome")
    assert data["logit"]["parts"] == pytest.approx(
        dict(zip(found.names, found.values, strict=True))
    )
    assert abs(data["logit"]["residual"]) <= 1e-5 * abs(data["logit"]["logit"])
    inputs = torchfmri.attribute_inputs(model, tokenizer, ASK, " Paris", against=" Rome")
    assert np.allclose(data["inputs"]["values"], inputs.values)
    assert data["lens"]["top"][-1][-1][0] == " Paris"
    assert picture.stat().st_size > 1000


def test_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lens", "--prompt", ASK, "--position", "-2", "--top", "1"]) == 0
    text = capsys.readouterr().out
    assert "after token 4, ' France'; ' is' came next" in text
    assert "residual" in text


def test_scans_read_out_what_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.fmri"
    options = ["--prompt", ASK, "--max-new-tokens", "2", "--per", "none", "--out", str(out)]
    assert cli.main(["scan", *options, "--attention", "L2.attn", "--lens", "--json"]) == 0
    scan = torchfmri.load(out)
    assert scan.attention("first").values.shape == (8, 20)
    assert scan.attention_pattern("model.layers.2.self_attn").shape == (4, 8, 8)
    assert scan.lens().rank.shape == (6, 8)
