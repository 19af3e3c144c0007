"""The public functions `scan`, `stream` and `scan_dataset`.

Users and the package's `__init__` import them through `_scan`; the command line uses `Scanner`
directly. They turn flat arguments into `ScanOptions`, hand over to `Scanner` or `dataset`, and hold
the documentation. Signatures are public; a new option of a scan goes into `ScanOptions` first.
`stream` enters the caller's autocast again, because the model runs in another thread there and
autocast belongs to a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields
from os import PathLike
from typing import Any, Literal

import torch
from torch import nn

from torchfmri._arguments import check_callable, check_flag, check_folder, check_number
from torchfmri._model import Pattern
from torchfmri._scan.run.dataset import DatasetScan, scan_rows
from torchfmri._scan.run.dataset_rows import rows_of
from torchfmri._scan.run.decoding import Decode
from torchfmri._scan.run.live_token import LiveToken
from torchfmri._scan.run.prompt import Prompt
from torchfmri._scan.run.scan_loss import OwnLoss
from torchfmri._scan.run.scan_options import ScanOptions
from torchfmri._scan.run.scanner import Scanner
from torchfmri._scan.run.stream import ScanStream
from torchfmri._scan.scan_record import Scan
from torchfmri.exceptions import InspectionError


def scan(
    model: nn.Module,
    tokenizer: Any,
    prompt: Prompt,
    max_new_tokens: int = 64,
    per: Literal["position", "token_loss", "cached"] | None = "position",
    layers: Pattern = "*",
    *,
    voxel: int = 64,
    loss: str | OwnLoss | None = None,
    tensors: Pattern | None = None,
    chat: bool = False,
    seed: int | None = None,
    on_token: Callable[[LiveToken], None] | None = None,
    decode: Decode | None = None,
    live: bool = True,
    verify: bool = False,
    attention: bool | Pattern = False,
    lens: bool = False,
    experts: bool = False,
    features: object | None = None,
    **generate: Any,
) -> Scan:
    """Let a language model answer, and return what every layer did at every token.

    Activations are taken while it generates, with its KV cache as it is; gradients come from one
    further pass over the finished sequence, forward and backward. The model, its `.grad`, its mode
    and the random state are afterwards as they were.

    Args:
        model: A causal language model of transformers, or any module from token ids to logits.
            Encoders can be read with `max_new_tokens=0`.
        tokenizer: That of the model; None where the prompt is token ids.
        prompt: A text (as it is), chat messages, token ids, or a list of these.
        max_new_tokens: How many tokens to generate at most; 0 reads the text and writes nothing.
        per: Which gradient: "position" (one backward pass, adds up to `.grad`), "token_loss" (of
            each token's own loss, one backward pass per token), "cached" (with the KV cache held
            constant), or None for activations alone.
        layers: Which layers, as for `Inspector.layers`.
        voxel: How many neighbouring units make a voxel, where no head or expert does.
        loss: Of the "generated" tokens, of "all", or a function of output, ids and generated.
        tensors: Layers whose activations are kept in full.
        chat: Wrap a text as a user's message in the tokenizer's chat template.
        seed: Of sampling; without one the present random state is used, and put back.
        on_token: Called with each token as soon as the model has been run on it.
        decode: Your own decoding loop: model and (b, s) ids -> all ids.
        live: False takes activations from the pass alone.
        verify: Also generate once more without any hook, and compare the tokens.
        attention: Read the attention of every head; `scan.attention` has its scores. A pattern
            over layers also keeps the whole patterns of those, for `scan.plot_attention`.
        lens: Read every block's output through the model's own head; see `scan.lens`.
        experts: Keep which experts a mixture sends each token to; see `scan.experts`.
        features: {place: object with encode, or function} of a dictionary of features, whose
            strongest are kept for every token; see `scan.features`.
        **generate: For the model's `generate`: do_sample, temperature, num_beams, ...

    Returns:
        The scan, with one sequence per prompt.

    Raises:
        LayerNotFoundError: The pattern matches no layer.
        InspectionError: Something of this cannot be done; the message says what to do instead.
    """
    options = ScanOptions(
        per=per, layers=layers, voxel=voxel, loss=loss, tensors=tensors, live=live, verify=verify,
        attention=attention, lens=lens, experts=experts, features=features,
    )  # fmt: skip
    return Scanner(model, tokenizer, options).scan(
        prompt,
        max_new_tokens,
        chat=chat,
        seed=seed,
        on_token=on_token,
        decode=decode,
        generate=generate,
    )


def stream(
    model: nn.Module, tokenizer: Any, prompt: Prompt, max_new_tokens: int = 64, **options: Any
) -> ScanStream:
    """Scan as `scan` does, and hand out the tokens as they come; `.scan` is there after the last.

    Args:
        model: As for `scan`.
        tokenizer: As for `scan`.
        prompt: As for `scan`.
        max_new_tokens: As for `scan`.
        **options: The other arguments of `scan`, except `on_token`.
    """
    if "on_token" in options:
        raise InspectionError(
            "stream() hands over the tokens itself: for token in stream. on_token= is for scan()."
        )

    # Autocast belongs to the thread that turned it on; the model runs in another one.
    outer = [
        torch.autocast(kind, dtype=torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    ]

    def run(on_token: Callable[[LiveToken], None]) -> Scan:
        with ExitStack() as stack:
            for each in outer:
                stack.enter_context(each)
            return scan(model, tokenizer, prompt, max_new_tokens, on_token=on_token, **options)

    return ScanStream(run)


def scan_dataset(
    model: nn.Module,
    tokenizer: Any,
    dataset: Any,
    out: str | PathLike[str],
    max_new_tokens: int = 64,
    *,
    options: ScanOptions | None = None,
    batch: int = 1,
    chat: bool = False,
    seed: int | None = None,
    field: str | None = None,
    condition_field: str = "condition",
    id_field: str | None = None,
    strict: bool = False,
    on_row: Callable[[int, int, str], None] | None = None,
    **generate: Any,
) -> DatasetScan:
    """Scan every row of a dataset into a folder, and say how it went; `load` reads the folder.

    Every field of a row is kept with its sequence (`sequence.fields`), and so is the mean vector of
    each layer (`sequence.vectors`); see `ScanOptions.vectors`.

    Sequences are committed as they come. Whatever interrupts it, calling it again goes on with what
    is missing: what was committed stays, nothing is written twice, and tokens that are sampled do
    not depend on it. A row that cannot be read or scanned is named and passed over. Among several
    processes (torchrun) each takes its share.

    Args:
        model: As for `scan`.
        tokenizer: As for `scan`.
        dataset: A .jsonl file, or anything with a length whose elements are records, texts,
            messages or ids: a list, a dataset of Hugging Face.
        out: The folder of the scan; it is created, or added to.
        max_new_tokens: As for `scan`, for each row.
        options: What to measure.
        batch: How many rows are run at once: neighbours in the dataset.
        chat: Wrap texts as a user's messages.
        seed: Of sampling; each batch has one of its own, made from it.
        field: Where a record has its prompt; by default the first of prompt, messages, text, ids.
        condition_field: Where it has its condition, the label for contrasts.
        id_field: Where it has its id, which then names its sequence. A row whose id is in the
            folder is taken as done, even where its text has changed.
        strict: Stop at the first row that cannot be read or scanned.
        on_row: Told how many of how many are done, and the name of the next.
        **generate: For the model's `generate`.

    Raises:
        LayerNotFoundError: The pattern matches no layer.
        InspectionError: The dataset cannot be read, the folder holds another scan (the message says
            what differs), or the first rows cannot be scanned.
    """
    misplaced = [each.name for each in fields(ScanOptions) if each.name in generate]
    if misplaced:
        name = misplaced[0]
        raise InspectionError(
            f"{name}= is one of the options of a scan: write "
            f"options=torchfmri.ScanOptions({name}={generate[name]!r})."
        )
    check_folder("out", out)
    check_callable("on_row", on_row, "give a function of done, total and name")
    for name, value in (("strict", strict), ("chat", chat)):
        check_flag(name, value)
    if seed is not None:
        check_number("seed", seed, None, "a whole number that fits into 64 bits, or None")
    rows = rows_of(dataset, field, condition_field, id_field=id_field, strict=strict)
    return scan_rows(
        Scanner(model, tokenizer, options),
        rows,
        out,
        max_new_tokens,
        batch=batch,
        chat=chat,
        seed=seed,
        generate=generate,
        strict=strict,
        on_row=on_row,
    )
