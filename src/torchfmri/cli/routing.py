"""The command `torchfmri routing`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from torchfmri.routing.experiment import (
    VARIANTS,
    Experiment,
    GridPuzzles,
    RunPlan,
    table,
    to_data,
    write_puzzles,
)

MADE = "made"


def add_arguments(parser: ArgumentParser) -> None:
    """The options of `torchfmri routing`."""
    plan = RunPlan("")
    parser.add_argument(
        "--signal",
        action="append",
        choices=tuple(VARIANTS),
        help="what the routing learns from; may be repeated (default: all)",
    )
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each (default: %(default)s)")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=list(plan.lengths),
        help="how long the sequence tasks are (default: %(default)s)",
    )
    parser.add_argument(
        "--puzzles",
        metavar="FOLDER",
        help=f"learn grid puzzles instead: a folder of ARC tasks, or '{MADE}' to make some",
    )
    for name, meaning in (
        ("steps", "training steps of a run"),
        ("batch", "sequences per step"),
        ("hidden-size", "size of the residual stream"),
        ("blocks", "transformer blocks"),
        ("heads", "attention heads"),
    ):
        default = getattr(plan, name.replace("-", "_"))
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{meaning} (default: %(default)s)"
        )
    parser.add_argument("--device", default="cpu", help="such as cpu or cuda (default: cpu)")
    parser.add_argument(
        "--workers", type=int, default=1, help="runs at a time, one thread each (default: 1)"
    )
    parser.add_argument(
        "--checkpoint-every", type=int, default=500, help="steps between two (default: %(default)s)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("torchfmri-routing"),
        help="folder of results and checkpoints; what is finished there is not run again",
    )
    parser.add_argument(
        "--no-figures", action="store_true", help="write the results and draw nothing"
    )


def run(options: Namespace) -> tuple[dict[str, Any], str, int]:
    """Train what is missing, and return the result as data, as text, and as an exit code."""
    plan = RunPlan(
        "",
        steps=options.steps,
        batch=options.batch,
        hidden_size=options.hidden_size,
        blocks=options.blocks,
        heads=options.heads,
        lengths=tuple(options.lengths),
        puzzles=_puzzles(options),
    )
    experiment = Experiment(
        plan=plan,
        variants=tuple(dict.fromkeys(options.signal or VARIANTS)),
        seeds=options.seeds,
        folder=options.out,
        device=options.device,
        workers=options.workers,
        checkpoint_every=options.checkpoint_every,
    )
    _say(f"{len(experiment.plans)} runs of {plan.steps} steps; results in {options.out}")
    results = experiment.run()
    text = table(results).text()
    if not options.no_figures:
        from torchfmri.routing.experiment import write_figures

        for path in write_figures(results, options.out):
            _say(f"wrote {path}")
    return to_data(results), text, 0


def _puzzles(options: Namespace) -> str:
    if options.puzzles is None:
        return ""
    folder = Path(options.puzzles)
    if options.puzzles == MADE:
        folder = options.out / "puzzles"
        write_puzzles(folder)
    puzzles = GridPuzzles.read(folder)
    skipped = f", {puzzles.skipped} too long" if puzzles.skipped else ""
    trained, tested = len(puzzles.train_puzzles.ids), len(puzzles.test_puzzles.ids)
    _say(f"{trained} puzzles to learn from, {tested} to be judged by{skipped}")
    return str(folder)


def _say(text: str) -> None:
    print(f"torchfmri routing: {text}", file=sys.stderr, flush=True)
