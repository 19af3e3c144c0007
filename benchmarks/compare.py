"""Planted faults located by compare, pairs that differ by rounding, and training runs that part.

`--pairs` prints the table of real pairs in docs/compare.md, `--faults` that of planted faults,
`--unseen` those of architectures on which no threshold was chosen, `--runs` that of training runs;
without an option all of them. The tables of `--unseen` tell where to cut: how many times its noise
a pair differs, and how alike the difference is under new rounding.
"""

import argparse
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from benchmarks._compare_faults import FAULTS, Fault
from benchmarks._compare_models import MODELS, batch, build
from benchmarks._compare_pairs import EXPECTED, PAIRS, pairs, quiet
from benchmarks._compare_unseen import FAULTS as PLANTED
from benchmarks._compare_unseen import fault_pairs, rounding_pairs
from benchmarks._timing import describe_machine, report
from torchfmri import Comparison, Monitor, Run, compare
from torchfmri._compare.difference import FACTOR


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--faults", action="store_true", help="planted faults")
    parser.add_argument("--pairs", nargs="*", metavar="KIND", help=f"of {', '.join(PAIRS)}")
    parser.add_argument(
        "--unseen", nargs="*", choices=("pairs", "faults"), help="architectures not tuned on"
    )
    parser.add_argument("--runs", action="store_true", help="training runs")


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    """The tables that were asked for."""
    several = (arguments.pairs, arguments.unseen)
    everything = not (arguments.faults or arguments.runs) and several == (None, None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    try:
        with quiet():
            if arguments.faults or everything:
                result |= _faults() | _silent()
            if arguments.pairs is not None or everything:
                result |= _pairs(arguments.pairs or None)
            if arguments.unseen is not None or everything:
                parts = arguments.unseen or ("pairs", "faults")
                result |= _unseen_pairs() if "pairs" in parts else {}
                result |= _unseen_faults() if "faults" in parts else {}
            if arguments.runs or everything:
                result |= _runs()
    finally:
        torch.set_num_threads(threads)
    return {**result, "machine": describe_machine()}


# -- faults --------------------------------------------------------------------------------------


def is_located(found: Comparison, fault: Fault) -> bool:
    """Whether layer, token and direction are right, and the kind where one is expected."""
    first = found.first
    return (
        first is not None
        and (first.layer, first.direction) == (fault.layer, fault.direction)
        and first.token == (first.token if fault.token is None else fault.token)
        and (not fault.kind or fault.kind in [kind.name for kind in first.kinds])
    )


def _faults() -> dict[str, Any]:
    rows, located = {}, 0
    for fault in FAULTS:
        start = time.perf_counter()
        found = compare(*fault.pair())
        right = is_located(found, fault)
        located += right
        seconds = time.perf_counter() - start
        rows[f"{fault.model}: {fault.name}"] = (
            f"{'located' if right else 'WRONG'}, {_place(found)} ({seconds:.1f} s)"
        )
        report(f"{fault.model}: {fault.name}: {right}")
    models = {fault.model for fault in FAULTS}
    return {
        "faults": len(FAULTS), "faults_located": located, "architectures": len(models),
        "planted": rows,
    }  # fmt: skip


def _place(found: Comparison) -> str:
    first = found.first
    if first is None:
        return "nothing found"
    kinds = ", ".join(dict.fromkeys(kind.name for kind in first.kinds)) or "no kind"
    token = "" if first.token is None else f", token {first.token}"
    return f"{first.direction} {first.layer}{token}: {kinds}"


def _silent() -> dict[str, Any]:
    """Two equal models: nothing may be found."""
    alarms = 0
    for name in MODELS:
        found = compare(Run(build(name), batch(name)), Run(build(name), batch(name)))
        alarms += not found.agree
    return {"identical_pairs": len(MODELS), "alarms_on_identical_pairs": alarms}


# -- pairs ---------------------------------------------------------------------------------------


def _pairs(wanted: list[str] | None) -> dict[str, Any]:
    table: dict[str, dict[str, Comparison]] = {}
    for kind, name, (a, b) in pairs(wanted):
        table.setdefault(kind, {})[name] = compare(a, b)
        report(f"{kind}, {name}: {table[kind][name].summary()}")
        torch.compiler.reset()
    rows = ["| pair | architectures | part | largest difference forward | times own noise |",
            "|---|---|---|---|---|"]  # fmt: skip
    alarms = 0
    for kind, found in table.items():
        parted = [name for name, each in found.items() if not each.agree]
        alarms += 0 if kind in EXPECTED else len(parted)
        forward = [
            p.worst for each in found.values() for p in each.pairs if p.direction == "forward"
        ]
        rows.append(
            f"| {kind} | {len(found)} | {len(parted)} | {max(forward):.1e} "
            f"| {_ratio(found.values()):.2g} |"
        )
    return {"alarms_on_rounding_pairs": alarms, "pairs": rows}


# -- architectures and seeds not looked at before ------------------------------------------------


def _unseen_pairs() -> dict[str, Any]:
    pairs: dict[str, list[Comparison]] = {}
    for kind, name, a, b in rounding_pairs():
        found = compare(a, b)
        pairs.setdefault(kind, []).append(found)
        report(f"{kind}, {name}: {found.summary()}; {_ratio([found]):.2g} times own noise")
    silent = ["| pair | pairs | part | times own noise | alike |", "|---|---|---|---|---|"]
    for kind, several in pairs.items():
        quiet_ones = [each for each in several if each.agree]
        silent.append(
            f"| {kind} | {len(several)} | {len(several) - len(quiet_ones)} "
            f"| {_ratio(quiet_ones):.2g} | {_alike(quiet_ones)} |"
        )
    return {"unseen_pairs": silent}


def _unseen_faults() -> dict[str, Any]:
    columns = ("planted", "float32", "bfloat16", "of these by size alone", "silent but listed",
               "times own noise in bfloat16", "alike", "float32 / bfloat16")  # fmt: skip
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for fault in PLANTED:
        several = [_found(fault, low) for low in ((False, False), (True, True), (False, True))]
        rows.append(_fault_row(fault, *several))
        report(rows[-1])
    return {"unseen_faults": rows}


def _found(fault: str, low: tuple[bool, bool]) -> list[Comparison]:
    return [compare(a, b) for _, a, b in fault_pairs(fault, low=low)]


def _fault_row(
    fault: str, high: list[Comparison], low: list[Comparison], mixed: list[Comparison]
) -> str:
    seen = [sum(not each.agree for each in several) for several in (high, low, mixed)]
    by_size = sum(any(pair.differs and not pair.repeats for pair in each.pairs) for each in low)
    listed = sum(each.agree and bool(each.changes) for each in low)
    sizes = sorted(_ratio([each]) for each in low)
    return (
        f"| {fault} | {seen[0]} of {len(high)} | {seen[1]} of {len(low)} | {by_size} | {listed} "
        f"| {sizes[0]:.2g} to {sizes[-1]:.2g} | {_alike(low)} | {seen[2]} of {len(mixed)} |"
    )


def _ratio(several: Iterable[Comparison]) -> float:
    """The largest difference in units of the measured noise."""
    return max(
        (
            pair.worst / pair.noise * FACTOR
            for each in several
            for pair in each.pairs
            if 0 < pair.noise < float("inf")
        ),
        default=0.0,
    )


def _alike(several: Iterable[Comparison]) -> str:
    """How alike differences beyond typical noise are under new rounding: the least and the most."""
    found = [max((p.alike for p in each.pairs if p.alike == p.alike), default=0.0)
             for each in several]  # fmt: skip
    return f"{min(found):.2f} to {max(found):.2f}"


# -- training runs -------------------------------------------------------------------------------


def train(
    seed: int = 0, rate: float = 0.05, changed: int | None = None, steps: int = 60,
    folder: Any = None,
) -> Monitor:  # fmt: skip
    """A small training run; at step `changed` one sample of the batch is another one."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    data = torch.Generator().manual_seed(1)
    with Monitor(model, optimizer, folder=folder) as monitor:
        for step in range(steps):
            x = torch.randn(16, 8, generator=data)
            y = (x[:, 0] > 0).long()
            if step == changed:
                x[3] = -x[3]
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            monitor.loss(loss)
            optimizer.step()
    return monitor


RUNS: dict[str, dict[str, Any]] = {
    "identical": {},
    "one sample at step 37": {"changed": 37},
    "learning rate 1 % higher": {"rate": 0.0505},
    "another seed": {"seed": 5},
}
"""What is changed -> the arguments of `train`."""


def _runs() -> dict[str, Any]:
    base = train()
    return {
        "runs": {name: compare(base, train(**change)).summary() for name, change in RUNS.items()}
    }
