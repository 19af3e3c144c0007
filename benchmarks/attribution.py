"""Is every token's gradient its own? Right, refused by name or wrong, over programs and models.

`--programs` random programs, and small models of many kinds, are compared with a copy of each
parameter per row. `--zoo` adds every
architecture of the installed transformers that can be built small; there the tokens of a layer's
rows are found by nudging one token at a time, and what cannot be told in this way is not judged.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import torchfmri
from benchmarks import _zoo, _zoo_oracle
from benchmarks._timing import report

TESTS = Path(__file__).resolve().parent.parent / "tests"
NOT_JUDGED = "not judged"
SHOWN = 40
SECONDS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--programs", type=int, default=1000, help="how many random programs")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--recurrences", type=int, default=1000, help="how many random recurrences")
    parser.add_argument("--zoo", action="store_true", help="the architectures of transformers too")
    parser.add_argument("--only", nargs="*", help="only these types of models")
    parser.add_argument(
        "--control", action="store_true", help="move the zoo's truth by one position: all is wrong"
    )
    parser.add_argument("--all", action="store_true", help="show every case that is wrong")


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    """How many parameters are right, refused and wrong."""
    for folder in (TESTS, TESTS / "_tokens"):  # the oracles live beside the tests
        sys.path.insert(0, str(folder))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = _kinds()
        result |= _programs(range(arguments.seed, arguments.seed + arguments.programs))
        result |= _recurrences(range(arguments.seed, arguments.seed + arguments.recurrences))
        if arguments.zoo:
            result |= _architectures(arguments.only, arguments.control)
    finally:
        torch.set_num_threads(threads)
    if not arguments.all:
        for name, value in result.items():
            if len(value) > SHOWN and isinstance(value, list):
                result[name] = [*value[:SHOWN], f"... {len(value) - SHOWN} more (--all)"]
    return result


def _table(outcomes: Counter[str]) -> dict[str, int]:
    from attribution import EXCUSED, REFUSED, RIGHT, WRONG

    names = {RIGHT: "right", REFUSED: "refused", EXCUSED: "refused after a mix of positions"}
    names |= {WRONG: "wrong", NOT_JUDGED: NOT_JUDGED}
    return {text: outcomes[name] for name, text in names.items()}


def _programs(seeds: range) -> dict[str, Any]:
    from attribution import WRONG
    from programs import judged, kind_of

    outcomes: Counter[str] = Counter()
    wrong, refused = Counter[str](), Counter[str]()
    spoilt = 0
    for seed in seeds:
        program, verdicts = judged(seed)
        spoilt += any(each.outcome == WRONG for each in verdicts)
        for each in verdicts:
            outcomes[each.outcome] += 1
            kind = kind_of(program, each.name)
            if each.outcome == WRONG:
                wrong[kind] += 1
            elif each.outcome == "refused":
                refused[kind] += 1
        if (seed + 1) % 100 == 0:
            report(f"{seed + 1} programs: {dict(outcomes)}")
    return {
        "programs": {**_table(outcomes), "programs": len(seeds), "with something wrong": spoilt},
        "wrong by step": [f"{count} {kind}" for kind, count in wrong.most_common()],
        "refused by step": [f"{count} {kind}" for kind, count in refused.most_common()],
    }


def _recurrences(seeds: range) -> dict[str, Any]:
    """Recurrences written by hand, in forms that are chosen to be hard."""
    from attribution import WRONG
    from random_recurrences import judged

    outcomes: Counter[str] = Counter()
    wrong = []
    for seed in seeds:
        verdicts = judged(seed)
        outcomes.update(each.outcome for each in verdicts)
        spoilt = [each for each in verdicts if each.outcome == WRONG]
        wrong += [f"{seed} {each.name}: {each.detail}" for each in spoilt]
        if (seed + 1) % 100 == 0:
            report(f"{seed + 1} recurrences: {dict(outcomes)}")
    return {
        "recurrences": {**_table(outcomes), "programs": len(seeds)},
        "recurrences wrong": wrong,
    }


def _kinds() -> dict[str, Any]:
    from attribution import failed, judge
    from kinds_of_grids import KINDS
    from kinds_of_models import truth_by_rows

    outcomes: Counter[str] = Counter()
    others = []
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        for name, make in KINDS.items():
            torch.manual_seed(0)
            model = make()
            inputs = model.inputs()
            _, truth = truth_by_rows(model, *inputs)
            try:
                with torchfmri.token_gradients(model) as tokens:
                    model.loss(*inputs).backward()
                verdicts = judge(tokens, truth)
            except Exception as error:
                verdicts = failed(error, truth)
            outcomes.update(each.outcome for each in verdicts)
            others += [
                f"{each.outcome} {name}, {each.name}: {each.detail}"
                for each in verdicts
                if each.outcome != "right"
            ]
    finally:
        torch.set_default_dtype(default)
    found = {name: count for name, count in _table(outcomes).items() if name != NOT_JUDGED}
    return {"kinds": {**found, "models": len(KINDS)}, "kinds not right": others}


# -- transformers --------------------------------------------------------------------------------


def _architectures(only: list[str] | None, control: bool) -> dict[str, Any]:
    from transformer_copies import no_float32

    outcomes: dict[str, Counter[str]] = {kind: Counter() for kind in _zoo.KINDS}
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in _zoo.KINDS}
    wrong, refused, unjudged, unbuilt = [], [], [], []
    for kind, model_type, name in _zoo.architectures():
        if only and model_type not in only:
            continue
        with _zoo.quiet(), no_float32():
            try:
                with _zoo.within(SECONDS):
                    small = _zoo.build(kind, model_type, name)
            except (Exception, _zoo.TooLongError) as error:
                unbuilt.append(f"{kind} {model_type}: {error}")
                continue
            try:
                with _zoo.within(SECONDS):
                    verdicts = _judge(small, control)
            except _zoo.TooLongError as error:
                verdicts = [("all", NOT_JUDGED, str(error))]
        found = Counter(outcome for _, outcome, _ in verdicts)
        outcomes[kind] += found
        counts[kind]["models"] += 1
        counts[kind]["models with something wrong"] += found["wrong"] > 0
        report(f"{kind} {model_type}: {dict(found)}")
        for parameter, outcome, detail in verdicts:
            line = f"{model_type} {parameter}: {detail}"
            {"wrong": wrong, "refused": refused, NOT_JUDGED: unjudged}.get(outcome, []).append(line)
    result: dict[str, Any] = {
        f"zoo {kind}": {**_table(outcomes[kind]), **counts[kind]} for kind in _zoo.KINDS
    }
    return result | {
        "zoo wrong": wrong,
        "zoo refused": refused,
        "zoo not judged": unjudged,
        "zoo not built": unbuilt,
    }


def _judge(small: _zoo.Small, control: bool) -> list[tuple[str, str, str]]:
    """(parameter, outcome, detail) of every parameter of a model."""
    from attribution import WRONG, Truth, failed, judge

    try:
        truth = _zoo_oracle.zoo_truth(small)
    except Exception as error:  # a model that the oracle cannot run is not judged
        return [("all", NOT_JUDGED, f"{type(error).__name__}: {str(error)[:200]}")]
    if control:
        truth.readings = {
            name: [{kind: each.roll(1, 1) for kind, each in reading.items()} for reading in several]
            for name, several in truth.readings.items()
        }
    known = Truth(truth.readings)
    small.model.zero_grad()
    try:
        with torchfmri.token_gradients(small.model) as tokens:
            _zoo_oracle.batch_loss(small).backward()
    except Exception as error:
        known = Truth({name: [] for name in truth.alone})
        return [(each.name, WRONG, each.detail) for each in failed(error, known)]
    for name, alone in truth.alone.items():
        together = small.model.get_parameter(name).grad
        if together is None or not torch.allclose(sum(alone), together, rtol=1e-7, atol=1e-9):
            truth.unjudged[name] = "a sample has another gradient among others than alone"
            known.readings.pop(name, None)
            truth.alone[name] = []
    found = [(each.name, each.outcome, each.detail) for each in judge(tokens, known)]
    rows = {row.name: row for row in tokens.coverage()}
    missing = [name for name in truth.unjudged if name not in rows or rows[name].rule == "none"]
    known = Truth({name: [{"x": torch.ones(1, 1)}] for name in missing})
    found += [(each.name, each.outcome, each.detail) for each in judge(tokens, known)]
    for name, reason in truth.unjudged.items():
        if name not in missing:
            found.append((name, *_by_sample(tokens, rows[name], truth.alone[name], reason)))
    return found


def _by_sample(tokens: Any, row: Any, alone: list[torch.Tensor], reason: str) -> tuple[str, str]:
    """What is known of a parameter without an oracle: do a sample's tokens add up to its own?"""
    from attribution import FLOOR

    if "unattributed" in row.note:  # a part of it, and coverage() says how much
        return "refused", row.note
    try:
        found = [tokens.on(axis)[row.name].materialise() for axis in row.tokens]
    except Exception as error:
        return "wrong", f"reading it raised {type(error).__name__}: {error}"
    if not alone or any(len(each) != len(alone) for each in found):
        shapes = ", ".join(f"{each.shape[0]} x {each.shape[1]}" for each in found)
        return NOT_JUDGED, f"{reason} (found on {shapes})"
    total, wanted = sum(each.sum(1) for each in found), torch.stack(alone)
    scale = max(FLOOR, *(float(each.abs().max()) for each in (wanted, *found)))
    if (total - wanted).abs().max() > 1e-6 * scale:  # some compute a part in float32
        return "wrong", "a sample's tokens do not add up to the gradient of the sample alone"
    return NOT_JUDGED, f"{reason} (samples are right)"
