"""The command `torchfmri lens`: what each layer would say next, and what made a logit.

`run` calls `lens`, `attribute_logit` and, with `--inputs`, `attribute_inputs`, and prints their
tables. Options and the keys of `--json` are public.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from torchfmri._model import load_model
from torchfmri._scan import attribute_inputs, attribute_logit, lens
from torchfmri.cli.options import CommandOptions, Result, dtype_of
from torchfmri.visualization import save_figure

_LOGIT = ("token", "against", "position", "logit", "residual")


def add_arguments(parser: CommandOptions) -> None:
    """Add the options of `torchfmri lens`."""
    parser.text("--prompt", "what the model reads", required=True)
    parser.model()
    parser.switch("--chat", "wrap the text as a user's message")
    parser.number("--position", -1, "position whose stream is read")
    parser.number("--top", 3, "tokens to show per layer", "K")
    parser.text("--token", 'token whose logit is split, such as " Paris" (default: the likeliest)')
    parser.text("--against", "token whose logit is subtracted")
    parser.switch("--inputs", "also attribute the logit to the input tokens (by gradients)")
    parser.path("--picture", "draw the lens into this file")
    parser.device(dtype=True)


def run(options: Namespace) -> Result:
    """Read a prompt, and return the result as data, as text, and as an exit code."""
    loaded = load_model(options.model, dtype=dtype_of(options.dtype), device=options.device)
    model, tokenizer = loaded
    chat, position = options.chat, options.position
    found = lens(model, tokenizer, options.prompt, top=options.top, chat=chat)
    asked = (model, tokenizer, options.prompt, options.token)
    place = {"against": options.against, "position": position, "chat": chat}
    parts = attribute_logit(*asked, **place)
    texts = [found.table(position, options.top), parts.table()]
    data: dict[str, Any] = {
        "lens": found.to_dict(),
        "logit": {
            **{name: getattr(parts, name) for name in _LOGIT},
            "parts": dict(zip(parts.names, parts.values.tolist(), strict=True)),
            "notes": list(parts.notes),
        },
    }
    if options.inputs:
        inputs = attribute_inputs(*asked, **place)
        texts.append(inputs.table())
        data["inputs"] = {
            "method": inputs.method,
            "tokens": list(inputs.pieces),
            "values": inputs.values.tolist(),
            "residual": inputs.residual,
        }
    if options.picture is not None:
        save_figure(found.plot(), options.picture, dpi=150)
        texts.append(f"picture: {options.picture}")
    return data, "\n\n".join(texts), 0
