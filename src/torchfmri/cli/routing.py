"""The command `torchfmri routing`: train sparse routing, and compare what it learns from.

`run` makes an `Experiment` of `routing/experiment` and prints its table. What is finished in
`--out` is not run again. Defaults are those of `RunPlan`, which stands in every result: an option
that changes the training belongs there, or old results are taken for new ones.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from torchfmri.cli.options import CommandOptions, Result, say
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
_SIZES = {
    "steps": "training steps of a run",
    "batch": "sequences per step",
    "hidden_size": "size of the residual stream",
    "blocks": "transformer blocks",
    "heads": "attention heads",
}
"""Options with the names of fields of a `RunPlan`."""


def add_arguments(parser: CommandOptions) -> None:
    """Add the options of `torchfmri routing`."""
    plan = RunPlan("")
    parser.argument(
        "--signal",
        action="append",
        choices=tuple(VARIANTS),
        help="what the routing learns from; may be repeated (default: all)",
    )
    parser.number("--seeds", 3, "seeds per signal")
    parser.argument(
        "--lengths",
        type=int,
        nargs="+",
        default=list(plan.lengths),
        help="lengths of the sequence tasks (default: %(default)s)",
    )
    text = f"learn grid puzzles instead: a folder of ARC tasks, or '{MADE}' to make some"
    parser.text("--puzzles", text, "FOLDER")
    for name, meaning in _SIZES.items():
        parser.number(f"--{name.replace('_', '-')}", getattr(plan, name), meaning)
    parser.argument(
        "--device", default="cpu", help="device to train on, such as cuda (default: cpu)"
    )
    parser.number("--workers", 1, "parallel runs, one thread each")
    parser.number("--checkpoint-every", 500, "steps between two checkpoints")
    text = "folder of results and checkpoints; what is finished there is not run again"
    parser.path("--out", text, "FOLDER", default=Path("torchfmri-routing"))
    parser.switch("--no-figures", "write the results without figures")


def run(options: Namespace) -> Result:
    """Train what is missing, and return the result as data, as text, and as an exit code."""
    sizes = {name: getattr(options, name) for name in _SIZES}
    plan = RunPlan("", lengths=tuple(options.lengths), puzzles=_puzzles(options), **sizes)
    experiment = Experiment(
        plan=plan,
        variants=tuple(dict.fromkeys(options.signal or VARIANTS)),
        seeds=options.seeds,
        folder=options.out,
        device=options.device,
        workers=options.workers,
        checkpoint_every=options.checkpoint_every,
    )
    say("routing", f"{len(experiment.plans)} runs of {plan.steps} steps; results in {options.out}")
    results = experiment.run()
    text = table(results).text()
    if not options.no_figures:
        from torchfmri.routing.experiment import write_figures

        for path in write_figures(results, options.out):
            say("routing", f"wrote {path}")
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
    say("routing", f"{trained} puzzles to learn from, {tested} to be judged by{skipped}")
    return str(folder)
