"""The example in R of docs/contrast.md, run where R is installed."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import torchfmri

PAGE = Path(__file__).resolve().parents[2] / "docs" / "contrast.md"
LAYER = "model.layers.1.self_attn.v_proj"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("Rscript") is None, reason="R is not installed")
def test_r_reads_the_table_and_finds_the_same_t(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    rows: list[dict[str, Any]] = [
        {"id": f"{kind}-{name}", "prompt": f"Once {name} {text}.", "condition": kind}
        for name in ("Tom", "Ann", "Sue", "Zoë")
        for kind, text in (("park", "went to the park with a dog"), ("food", "ate a red apple"))
    ]
    options = torchfmri.ScanOptions(per=None, layers="*.self_attn*")
    model, tokenizer = torchfmri.load_model("tiny")
    torchfmri.scan_dataset(
        model, tokenizer, rows, tmp_path / "x.fmri", 4, id_field="id", options=options
    )
    scan = torchfmri.load(tmp_path / "x.fmri")
    scan.export(tmp_path / "stories.csv", by="head")
    code = re.findall(r"```r\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)[0]
    (tmp_path / "example.R").write_text(f"options(digits = 10)\n{code}", "utf-8")
    done = subprocess.run(
        ["Rscript", "--vanilla", "example.R"], cwd=tmp_path, capture_output=True, text=True,
        check=False, encoding="utf-8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    t = float(re.findall(r"t = (-?[\d.]+)", done.stdout)[0])  # of food - park: by the alphabet
    found = scan.contrast("food", "park", level="head", layers=LAYER)
    assert t == pytest.approx(found.t[found.columns.head == 0].item(), rel=1e-4)  # as printed
