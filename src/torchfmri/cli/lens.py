"""The command `torchfmri lens`: what each layer would say next, and what made a logit."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch

from torchfmri._model import CHOICES, load_model
from torchfmri._scan import attribute_inputs, attribute_logit, lens
from torchfmri.visualization import check_picture, save_figure

DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_arguments(parser: ArgumentParser) -> None:
    """The options of `torchfmri lens`."""
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what the model reads")
    parser.add_argument("--model", default="tiny", help=f"{CHOICES} (default: %(default)s)")
    parser.add_argument("--chat", action="store_true", help="wrap the text as a user's message")
    parser.add_argument(
        "--position", type=int, default=-1, metavar="N", help="which token's stream (default: -1)"
    )
    parser.add_argument("--top", type=int, default=3, metavar="K", help="tokens to show per layer")
    parser.add_argument(
        "--token", metavar="TEXT", help='whose logit to split, such as " Paris" (the likeliest)'
    )
    parser.add_argument("--against", metavar="TEXT", help="a token whose logit is taken off")
    parser.add_argument(
        "--inputs", action="store_true", help="also what each input token adds (gradients)"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the lens")
    parser.add_argument("--dtype", choices=DTYPES, help="by default float32")
    parser.add_argument("--device", help="such as cuda; by default where the model is loaded")


def run(options: Namespace) -> tuple[dict[str, Any], str, int]:
    """Read a prompt, and return the result as data, as text, and as an exit code."""
    if options.picture is not None:
        check_picture("--picture", options.picture)
    dtype = getattr(torch, options.dtype) if options.dtype else None
    model, tokenizer = load_model(options.model, dtype=dtype, device=options.device)
    chat, position = options.chat, options.position
    found = lens(model, tokenizer, options.prompt, top=options.top, chat=chat)
    parts = attribute_logit(
        model, tokenizer, options.prompt, options.token,
        against=options.against, position=position, chat=chat,
    )  # fmt: skip
    texts = [found.table(position, options.top), parts.table()]
    data: dict[str, Any] = {
        "lens": found.to_dict(),
        "logit": {
            "token": parts.token,
            "against": parts.against,
            "position": parts.position,
            "logit": parts.logit,
            "residual": parts.residual,
            "parts": dict(zip(parts.names, parts.values.tolist(), strict=True)),
            "notes": list(parts.notes),
        },
    }
    if options.inputs:
        inputs = attribute_inputs(
            model, tokenizer, options.prompt, options.token,
            against=options.against, position=position, chat=chat,
        )  # fmt: skip
        texts.append(inputs.table())
        data["inputs"] = {
            "method": inputs.method,
            "tokens": list(inputs.pieces),
            "values": inputs.values.tolist(),
            "residual": inputs.residual,
        }
    if options.picture is not None:
        figure: Any = found.plot().figure
        save_figure(figure, options.picture, dpi=150)
        texts.append(f"picture: {options.picture}")
    return data, "\n\n".join(texts), 0
