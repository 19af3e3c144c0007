"""The command `torchfmri scan`: one prompt, or a file of them.

`run` checks all options before the model is loaded, because loading takes minutes; an option that
would do nothing is refused. Then a `Scanner` does the work. `demo` shares `spoken` and `summary`,
and the keys of `summary` are those of `--json`, which are public. Under torchrun each process scans
its part of a dataset, and the first one prints.
"""

from __future__ import annotations

import codecs
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from torchfmri._arguments import check_number, require
from torchfmri._model import load_model, unwrap
from torchfmri._scan import (
    TELL_EVERY,
    DatasetRow,
    DatasetScan,
    LiveBoard,
    LiveToken,
    Reading,
    Scan,
    Scanner,
    ScanOptions,
    require_replaceable,
    rows_of,
    scan_rows,
)
from torchfmri._text import Progress, plural, printable
from torchfmri.cli.options import LOG_SECONDS, CommandOptions, Result, dtype_of, say
from torchfmri.cli.view import add_server_arguments, served
from torchfmri.exceptions import InspectionError

_DATASET_ONLY = ("--field", "--condition-field", "--id-field", "--batch", "--strict")
_MEASURED = ("voxel", "loss", "tensors", "verify", "attention", "lens", "experts", "heads")
_PROMPT_ONLY = ("--picture", "--page", "--overwrite", "--live")


def add_arguments(parser: CommandOptions) -> None:
    """Add the options of `torchfmri scan`."""
    what = parser.one_of()
    what.text("--prompt", "scan one prompt")
    text = "scan every row of a file; after an interruption the same command resumes"
    what.path("--dataset", text, "FILE.jsonl")
    parser.model()
    parser.path("--out", "folder to keep the scan in (needed for --dataset)", "NAME.fmri")
    parser.switch("--overwrite", "replace the folder (--prompt)")
    parser.path("--picture", "draw the scan into this file (--prompt)")
    parser.path("--page", "write the page of the scan (--prompt)", "FILE.html")
    parser.switch("--live", "watch the scan in a browser, until Ctrl-C (--prompt)")
    _add_generation(parser.group("generation"))
    _add_measurement(parser.group("measurement"))
    rows = parser.group("datasets")
    rows.text("--field", "field with the prompt (default: prompt, messages, text or ids)", "NAME")
    text = "field with the label for `torchfmri contrast` (default: condition)"
    rows.text("--condition-field", text, "NAME")
    rows.text("--id-field", "field that names a row (default: its number)", "NAME")
    rows.number("--batch", None, "rows at once (default: 1)")
    rows.switch("--strict", "stop at the first row that cannot be scanned")
    add_server_arguments(parser)


def _add_generation(group: CommandOptions) -> None:
    group.switch("--chat", "wrap texts as a user's message")
    group.number("--max-new-tokens", 64, "largest number of new tokens; 0 only reads the prompt")
    group.switch("--sample", "sample instead of decoding greedily")
    group.text("--temperature", "temperature of sampling", "T", type=float)
    group.number("--seed", 0, "seed of sampling")


def _add_measurement(group: CommandOptions) -> None:
    gradients = ("position", "token_loss", "cached", "none")
    text = "gradient to measure; none records activations only"
    group.choice("--per", gradients, text, "position")
    group.several("--layers", "layers to watch")
    group.number("--voxel", 64, "units per voxel")
    text = "tokens that the loss counts (default: generated, if any)"
    group.choice("--loss", ("generated", "all"), text)
    group.switch("--heads", "also record what each head writes")
    group.text("--tensors", "layers whose tensors are kept in full", "PATTERN")
    group.argument(
        "--vectors",
        action="append",
        choices=("all", "prompt", "generated", "last", "none"),
        help="tokens whose mean vector is kept per layer; may be repeated (default: all, generated "
        "and last for a dataset)",
    )
    text = "also record scores of every head; with a pattern, the full attention of those layers"
    group.text("--attention", text, "PATTERN", nargs="?", const=True, default=False)
    group.switch("--lens", "also record what each block would predict next")
    group.switch("--experts", "also record which experts each token is sent to")
    group.switch("--verify", "generate again without hooks and compare the tokens")
    group.device(dtype=True)


def run(options: Namespace) -> Result:
    """Scan, and return the result as data, as text, and as an exit code."""
    # Before the model is loaded: what is wrong, or would be ignored, is said at once.
    _check_options(options)
    per = None if options.per == "none" else options.per
    same: dict[str, Any] = {name: getattr(options, name) for name in _MEASURED}
    vectors = _vectors(options.vectors)
    measured = ScanOptions(per, options.layers or "*", vectors=vectors, **same)
    rows = None
    if options.dataset is not None:
        label = "condition" if options.condition_field is None else options.condition_field
        rows = rows_of(
            options.dataset, options.field, label, id_field=options.id_field, strict=options.strict
        )
    say("scan", f"loading {options.model}")
    device = _device(options.device)
    named = load_model(options.model, dtype=dtype_of(options.dtype), device=device)
    scanner = Scanner(named.model, named.tokenizer, measured)
    generate: dict[str, Any] = {}
    if options.sample or hasattr(unwrap(named.model), "generation_config"):
        generate["do_sample"] = options.sample
    if options.temperature is not None:
        generate["temperature"] = options.temperature
    if rows is not None:
        return _run_dataset(options, scanner, rows, generate)
    return _run_prompt(options, scanner, generate)


def _vectors(given: list[str] | None) -> str | list[str] | None:
    if given is None:
        return "auto"
    require("none" not in given or given == ["none"], "--vectors", given, "none stands alone")
    return None if given == ["none"] else given


def _check_options(options: Namespace) -> None:
    alone = options.dataset is None
    kind, others = ("--prompt", _DATASET_ONLY) if alone else ("--dataset", _PROMPT_ONLY)
    for option in others:
        if getattr(options, option.lstrip("-").replace("-", "_")) not in (None, False):
            raise InspectionError(f"{option} does nothing with {kind}. Leave it out.")
    if not alone and options.out is None:
        raise InspectionError("--dataset needs --out NAME.fmri: the folder to write the scan to.")
    if options.temperature is not None and not options.sample:
        raise InspectionError(
            "--temperature is for --sample; without it decoding is greedy. Add --sample."
        )
    if alone and options.out is not None and options.out.exists() and not options.overwrite:
        raise InspectionError(
            f"{str(options.out)!r} exists. Choose another folder, or replace it: --overwrite."
        )
    check_number(
        "--max-new-tokens", options.max_new_tokens, 0, "how many tokens to generate, 0 for none"
    )
    check_number("--seed", options.seed, None, "a whole number that fits into 64 bits")
    if options.batch is not None:
        check_number("--batch", options.batch, 1, "give the number of rows to run at once")
    if options.overwrite and options.out is not None:
        require_replaceable(options.out, True)
    if options.page is not None:
        require(not options.page.is_dir(), "--page", str(options.page), "name a file, not a folder")


def _device(wanted: str | None) -> str | None:
    """Return the device of this process: torchrun's, each its own GPU."""
    rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{rank}" if wanted == "cuda" and rank is not None else wanted


def _run_prompt(options: Namespace, scanner: Scanner, generate: dict[str, Any]) -> Result:
    if not options.live:
        return _scan_prompt(options, scanner, generate)
    anatomy, meta = scanner.describe(options.prompt, options.max_new_tokens, chat=options.chat)
    board = LiveBoard(anatomy, meta)
    with served(options, board, "scan") as view:
        board.changed = view.changed
        board.begin("live")
        result = _scan_prompt(options, scanner, generate, board)
        say("scan", "done; the page stays until Ctrl-C")
        view.wait()
    return result


def _scan_prompt(
    options: Namespace, scanner: Scanner, generate: dict[str, Any], board: LiveBoard | None = None
) -> Result:
    with spoken() as speak:

        def on_token(token: LiveToken) -> None:
            if speak is not None:
                speak(token)
            if board is not None:
                board.on_token(token)

        scan = scanner.scan(
            options.prompt,
            options.max_new_tokens,
            chat=options.chat,
            seed=options.seed,
            on_token=on_token if speak is not None or board is not None else None,
            tell_every=TELL_EVERY,
            generate=generate,
        )
    if board is not None:
        board.finish(scan)
    lines = [scan[0].text, "", scan.table(), ""]
    files = _write(options, scan)
    lines += [f"wrote {path}" for path in files]
    data = {**summary(scan), "files": [str(path) for path in files]}
    code = 1 if scan[0].checks.get("tokens_identical") is False else 0
    return data, "\n".join(lines).rstrip(), code


def summary(scan: Scan) -> dict[str, Any]:
    """Return a scan of one sequence as plain data: the text, its checks, and medians per layer.

    `positions` says how many tokens each median is over: of a gradient, those the loss reaches.
    """
    sequence = scan[0]
    reading = Reading(scan.anatomy, sequence, scan.meta)
    found = {metric: reading.medians(metric) for metric in sequence.layers}
    return {
        "text": sequence.text,
        "tokens": len(sequence),
        "generated": int(sequence.tokens.generated.sum()),
        "checks": dict(sequence.checks),
        "meta": dict(scan.meta),
        **{
            name: {
                metric: dict(zip(scan.layers, both[at].tolist(), strict=True))
                for metric, both in found.items()
            }
            for at, name in enumerate(("medians", "positions"))
        },
    }


def _write(options: Namespace, scan: Scan) -> list[Path]:
    files = [path for path in (options.out, options.picture, options.page) if path is not None]
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
    if options.out is not None:
        scan.save(options.out, overwrite=options.overwrite)
    if options.picture is not None:
        scan.draw(options.picture)
    if options.page is not None:
        scan.save_html(options.page)
    return files


@contextmanager
def spoken() -> Iterator[Any]:
    """Write the text to standard error as it comes, where somebody is looking."""
    if not getattr(sys.stderr, "isatty", lambda: False)():
        yield None
        return

    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def speak(token: LiveToken) -> None:
        print(printable(decoder.decode(token.spelling), lines=True), end="", file=sys.stderr)
        sys.stderr.flush()

    try:
        yield speak
    finally:
        print(file=sys.stderr, flush=True)


def _run_dataset(
    options: Namespace, scanner: Scanner, rows: Sequence[DatasetRow], generate: dict[str, Any]
) -> Result:
    with _processes(), Progress("scan", len(rows), log_seconds=LOG_SECONDS) as progress:
        own = scan_rows(
            scanner,
            rows,
            options.out,
            options.max_new_tokens,
            batch=1 if options.batch is None else options.batch,
            chat=options.chat,
            seed=options.seed if options.sample else None,
            generate=generate,
            strict=options.strict,
            on_row=lambda done, total, name: progress.at(done, total, name),
        )
        several = _gather(own)
    if several is None:
        return {}, "", 1 if own.failed else 0
    scanned = sum(each.scanned for each in several)
    failed = {name: why for each in several for name, why in each.failed.items()}
    text = [f"{own.path}: {plural(scanned, 'sequence')} scanned, {own.found} were there already"]
    text += [f"not scanned: {why}" for why in failed.values()]
    if failed:
        text.append("Run the same command again to try these again.")
    data = {"path": str(own.path), "scanned": scanned, "found": own.found, "failed": failed}
    return data, "\n".join(text), 1 if failed else 0


@contextmanager
def _processes() -> Iterator[None]:
    """Join the other processes of torchrun if it started this one."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if not several or torch.distributed.is_initialized():
        yield
        return
    torch.distributed.init_process_group("gloo")
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def _gather(own: DatasetScan) -> list[DatasetScan] | None:
    """Return what all processes did, in the first one; None in the others, which say nothing."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [own]
    first = torch.distributed.get_rank() == 0
    found: list[Any] | None = [None] * torch.distributed.get_world_size() if first else None
    torch.distributed.gather_object(own, found)
    return found
