"""Contrasts: how often they find something in nothing, what they find, and how long they take.

`--part calibration` shuffles the labels of real prompts, so that there is nothing to be found, and
counts the draws in which each path finds anything at q = 0.05, with a test over tokens beside them.
`--part power` plants effects of known size in known voxels. `--part speed` contrasts 1,000 stored
prompts. `--part real` compares questions about capitals with sums, and draws the map. The scan is
kept in --scan, so that draws are cheap.
"""

import argparse
import time
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import torchfmri
from benchmarks._contrast_prompts import rows
from benchmarks._timing import report
from torchfmri import Anatomy, Scan, ScannedSequence, ScanOptions, Tokens
from torchfmri._contrast import PromptTable, TestOptions, compare
from torchfmri._contrast.classification import classify
from torchfmri._contrast.corrections import adjust_fdr
from torchfmri._contrast.group_tests import welch
from torchfmri._scan.prompts.prompt_values import tabulate
from torchfmri._scan.prompts.question import Question, ValueSource

PARTS = ("calibration", "power", "speed", "real")
BOUND = 19
"""How many of 200 draws may find something: the 99 % bound of a true 5 %."""
_PERMUTATIONS = 199


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", action="append", choices=PARTS, help="all by default")
    parser.add_argument("--model", default="tiny", help="tiny (default) or smollm2")
    parser.add_argument("--scan", type=Path, help="the folder of the scan; made if it is not there")
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--only", default="", help="calibrate the paths that have this text")
    parser.add_argument("--picture", type=Path, help="of the real contrast")


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        parts = arguments.part or PARTS
        found: dict[str, Any] = {"model": [arguments.model]}
        if set(parts) - {"speed"}:
            scan = scan_questions(arguments.model, arguments.scan or Path(folder) / "scan.fmri")
        if "real" in parts:
            found |= {
                f"real {name}": lines for name, lines in real(scan, arguments.picture).items()
            }
        if "calibration" in parts:
            found["calibration: draws that found anything"] = calibrate(
                scan, arguments.draws, arguments.only
            )
            if not arguments.only:
                found["calibration: uniformity"] = uniformity(scan, arguments.draws)
        if "power" in parts:
            found["power: share of planted effects found"] = power(scan)
        if "speed" in parts:
            found |= speed(Path(folder) / "large.fmri")
    return found


def scan_questions(name: str, folder: Path) -> Scan:
    """The scan of forty questions, made unless it is there."""
    model, tokenizer = torchfmri.load_model(name) if not folder.exists() else (None, None)
    if model is not None:
        report(f"scanning {len(rows())} questions with {name}")
        started = time.perf_counter()
        chat = bool(getattr(tokenizer, "chat_template", None))
        torchfmri.scan_dataset(
            model, tokenizer, rows(), folder, 16, id_field="id", chat=chat, batch=4,
            options=ScanOptions(per=None), do_sample=False,
        )  # fmt: skip
        report(f"scanned in {time.perf_counter() - started:.0f} s")
    return torchfmri.load(folder)


def source_of(scan: Scan) -> ValueSource:
    return ValueSource(scan.anatomy, list(scan), scan.meta)


# -- nothing to be found -------------------------------------------------------------------------


def shuffled(table: PromptTable, random: np.random.Generator, kinds: int = 2) -> PromptTable:
    """The table with labels that mean nothing, in equal numbers, and pairs that mean nothing."""
    n = len(table.names)
    labels = np.array([chr(97 + k % kinds) for k in range(n)], object)[random.permutation(n)]
    pairs = np.empty(n, object)
    for letter in set(labels):
        own = np.flatnonzero(labels == letter)
        pairs[own] = np.arange(len(own)).astype(str)
    return replace(table, groups=labels, pairs=pairs)


def paths(scan: Scan) -> dict[str, Callable[[np.random.Generator], bool]]:
    """Every way to ask, as a function of a random state: whether it found anything."""
    source = source_of(scan)
    voxels = tabulate([source], Question())
    layers = tabulate([source], Question(level="layer", tokens="prompt_last"))
    units = tabulate([source], Question(metric="signed", level="unit", tokens="last"))

    def asks(
        table: PromptTable, question: Any = "a - b", paired: bool = False, kinds: int = 2,
        **options: Any,
    ) -> Callable[[np.random.Generator], bool]:  # fmt: skip
        chosen = TestOptions(**options)

        def ask(random: np.random.Generator) -> bool:
            null = shuffled(table, random, kinds)
            found = compare(null, question, is_paired=paired, options=chosen)
            return bool(found.survives.any())

        return ask

    draws = {"permutations": _PERMUTATIONS}
    glm = scan.glm("surprisal + position + condition", level="voxel")
    term = next(name for name in glm.terms if name.startswith("condition"))

    def ask_glm(random: np.random.Generator) -> bool:
        found = glm.shuffled(int(random.integers(1 << 31))).contrast(term)
        return bool(found.survives.any())

    def ask_probe(random: np.random.Generator) -> bool:
        null = shuffled(layers_of_voxels, random)
        found = classify(
            [null], "a - b", is_paired=False, folds=5, permutations=99,
            seed=int(random.integers(1 << 31)),
        )  # fmt: skip
        return any(row.p_max <= 0.05 for row in found.rows)

    kept = [layer for layer in scan.layers if layer.endswith((".mlp", ".self_attn"))]
    layers_of_voxels = tabulate([source], Question(layers=kept))
    return {
        "Welch t, voxels, fdr": asks(voxels),
        "Welch t, voxels, bonferroni": asks(voxels, height_control="bonferroni"),
        "Welch t, layers, last token of the prompt, fdr": asks(layers),
        "Welch t, signed units, last token, fdr": asks(units),
        "paired t, voxels, fdr": asks(voxels, paired=True),
        "permutation, voxels, fdr": asks(voxels, test="permutation", **draws),
        "permutation, voxels, largest statistic": asks(voxels, height_control="max", **draws),
        "sign flips, pairs, largest statistic": asks(
            voxels, paired=True, height_control="max", **draws
        ),
        "F of three conditions, voxels, fdr": asks(voxels, ["a - b", "a - c"], kinds=3),
        "GLM: condition with surprisal and position, voxels, fdr": ask_glm,
        "probe, attention and MLP, largest accuracy": ask_probe,
        "NAIVE t over tokens, voxels, fdr (must not be done)": naive(scan),
    }


def naive(scan: Scan) -> Callable[[np.random.Generator], bool]:
    """A t-test over tokens, as if they were independent: what must not be done."""
    parts = [sequence.voxels["activation"] for sequence in scan]
    usable = [~sequence.tokens.special for sequence in scan]
    finite = [np.isfinite(part).any(1) & own for part, own in zip(parts, usable, strict=True)]
    values = np.concatenate([part[kept] for part, kept in zip(parts, finite, strict=True)])
    owner = np.concatenate([np.full(int(kept.sum()), k) for k, kept in enumerate(finite)])

    def ask(random: np.random.Generator) -> bool:
        labels = random.permutation(np.arange(len(parts)) % 2)[owner]
        members = labels == np.arange(2)[:, None]
        found = welch(values, members, np.array([1.0, -1.0]), alpha=0.05, two_sided=True)
        return bool((adjust_fdr(found.p) <= 0.05).any())

    return ask


def calibrate(scan: Scan, draws: int, only: str = "") -> dict[str, str]:
    found = {}
    for name, ask in paths(scan).items():
        if only not in name:
            continue
        started = time.perf_counter()
        seen = sum(ask(np.random.default_rng(draw)) for draw in range(draws))
        found[name] = f"{seen} of {draws}"
        report(f"{name}: {found[name]} ({time.perf_counter() - started:.0f} s)")
    return found


def permutation_p(scan: Scan, draws: int, columns: int = 10) -> np.ndarray:
    """(draws, columns + 1): p of some voxels by relabelling, and of the largest of all of them."""
    table = tabulate([source_of(scan)], Question())
    complete = np.flatnonzero(np.isfinite(table.values).all(0) & (table.values.std(0) > 0))
    chosen = complete[np.linspace(0, len(complete) - 1, columns).astype(int)]
    small = replace(table, values=table.values[:, chosen], columns=table.columns[chosen])
    options = TestOptions(height_control="max", test="permutation", permutations=_PERMUTATIONS)
    found = np.empty((draws, columns + 1))
    for draw in range(draws):
        null = shuffled(small, np.random.default_rng(draw))
        one = compare(null, "a - b", options=replace(options, seed=draw))
        assert one.p_max is not None
        found[draw, :-1], found[draw, -1] = one.p, one.p_max.min()
    return found


def uniformity(scan: Scan, draws: int) -> dict[str, str]:
    from scipy.stats import kstest

    p = permutation_p(scan, draws)
    # p is one of 1/200 ... 200/200: a uniform number is taken from each step.
    smooth = p - np.random.default_rng(0).random(p.shape) / (_PERMUTATIONS + 1)
    tests = [kstest(column, "uniform").pvalue for column in smooth.T]
    return {
        "KS p of ten voxels": ", ".join(f"{each:.2f}" for each in tests[:-1]),
        "KS p of the largest statistic": f"{tests[-1]:.2f}",
    }


# -- something to be found -----------------------------------------------------------------------


def power(scan: Scan, repeats: int = 40) -> dict[str, str]:
    """Effects of so many standard deviations in ten voxels, with ever more prompts."""
    table = tabulate([source_of(scan)], Question())
    spread = table.values.std(0)
    usable = np.flatnonzero(np.isfinite(spread) & (spread > 0))
    found = {}
    for size in (0.5, 1.0, 1.5, 2.0, 3.0):
        for count in (5, 10, 20):
            shares = planted(table, usable, size, count, repeats)
            found[f"g = {size}, {count} + {count} prompts"] = ", ".join(
                f"{name} {share:.2f}" for name, share in shares.items()
            )
    return found


def planted(
    table: PromptTable, usable: np.ndarray, size: float, count: int, repeats: int
) -> dict[str, float]:
    total = {"fdr": 0.0, "bonferroni": 0.0, "max": 0.0, "false discoveries among fdr's": 0.0}
    for repeat in range(repeats):
        random = np.random.default_rng(repeat)
        null = shuffled(table, random)
        rows = np.concatenate([np.flatnonzero(null.groups == each)[:count] for each in ("a", "b")])
        null = null.rows(rows)
        values = null.values.copy()
        chosen = random.choice(usable, 10, replace=False)
        inside = np.sqrt((values[:count].var(0, ddof=1) + values[count:].var(0, ddof=1)) / 2)
        values[:count, chosen] += (size * inside)[chosen]
        null = replace(null, values=values)
        for control in ("fdr", "bonferroni", "max"):
            options = TestOptions(height_control=control, permutations=_PERMUTATIONS
                                  if control == "max" else None)  # fmt: skip
            survives = compare(null, "a - b", options=options).survives
            total[control] += survives[chosen].mean()
            if control == "fdr":
                others = survives.sum() - survives[chosen].sum()
                total["false discoveries among fdr's"] += others / max(survives.sum(), 1)
    return {name: each / repeats for name, each in total.items()}


# -- many prompts --------------------------------------------------------------------------------


def large_sequences(anatomy: Anatomy, prompts: int, tokens: int) -> Iterable[ScannedSequence]:
    number = np.zeros(tokens, np.float32)
    text = Tokens(np.arange(tokens), (b"word ",) * tokens, number, number, number > 0, number > 0)
    for prompt in range(prompts):
        random = np.random.default_rng(prompt)
        values = random.gamma(2.0, 1.0, (tokens, len(anatomy.layer))).astype(np.float32)
        layers = np.ones((tokens, len(anatomy.layers)), np.float32)
        yield ScannedSequence(
            f"prompt-{prompt:04d}", text, {"activation": layers}, {"activation": values},
            condition="ab"[prompt % 2], fields={"pair": prompt // 2},
        )  # fmt: skip


def speed(
    folder: Path, prompts: int = 1_000, voxels: int = 5_296, tokens: int = 8
) -> dict[str, Any]:
    """Seconds and bytes of a contrast of a stored scan."""
    layers = [f"layers.{number}" for number in range(voxels // 16)]
    count = len(layers)
    anatomy = Anatomy.of_widths(layers, ["Linear"] * count, [1024] * count, [64] * count)
    sequences = list(large_sequences(anatomy, prompts, tokens))
    Scan(anatomy, sequences, {"model": "large"}).save(folder)
    size = sum(each.stat().st_size for each in folder.iterdir())
    found: dict[str, Any] = {"stored MB": size / 1e6}
    del sequences
    for name, options in (
        ("t, fdr", {}),
        ("paired t, fdr", {"paired": "pair"}),
        ("1,000 permutations, largest statistic", {"height_control": "max"}),
    ):
        scan = torchfmri.load(folder)
        started, worked = time.perf_counter(), time.process_time()
        one = scan.contrast("a", "b", **options)
        found[f"seconds: {name}"] = time.perf_counter() - started
        found[f"processor seconds: {name}"] = time.process_time() - worked
        assert len(one) == len(anatomy.layer)
    tracemalloc.start()
    torchfmri.load(folder).contrast("a", "b")
    found["peak MB"] = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    return found


# -- a real one ----------------------------------------------------------------------------------


def real(scan: Scan, picture: Path | None) -> dict[str, list[str]]:
    started, worked = time.perf_counter(), time.process_time()
    voxels = scan.contrast("capital", "arithmetic", tokens="prompt_last", height_control="max")
    units = scan.contrast("capital", "arithmetic", metric="signed", level="unit", tokens="last")
    probe = scan.classify("capital", "arithmetic", tokens="last")
    wording = scan.contrast(["0 - 1", "0 - 2", "0 - 3"], by="wording", tokens="prompt_last")
    spent = time.process_time() - worked
    report(f"contrasts, probes: {time.perf_counter() - started:.1f} s, {spent:.1f} of processor")
    if picture is not None:
        figure = voxels.plot_contrast().figure
        figure.savefig(picture, dpi=110)
    best = max(probe.rows, key=lambda row: row.accuracy)
    return {
        "voxels": voxels.table(8, 110).splitlines(),
        "units": [units.summary],
        "wording": [wording.summary],
        "probe": [f"{best.layer} ({best.features}): accuracy {best.accuracy:.3f}, p {best.p:.3g}"],
    }
