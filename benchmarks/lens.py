"""Attention, lens and logit attribution over every architecture of the installed transformers.

Attention is compared with what the eager implementation writes out (`output_attentions=True`), the
last row of the lens with the logits of the model, and the parts of a logit with the logit. What is
right, what was refused by name and what is wrong is counted, and all that is not right is listed.
"""

import argparse
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

import torchfmri
from benchmarks import _zoo
from benchmarks._timing import report
from torchfmri import InspectionError

SECONDS = 20
RIGHT, REFUSED, WRONG, NO_ORACLE = "right", "refused", "wrong", "no oracle"
_TOLERANCE = 1e-5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="*", help="only these types of models")


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    """How many architectures are right, refused and wrong, by subject."""
    subjects = ("attention", "lens", "masked lens", "logit", "inputs")
    counts = {name: Counter[str]() for name in subjects}
    lines: dict[str, list[str]] = {REFUSED: [], WRONG: [], NO_ORACLE: []}
    built = 0
    for kind, model_type, name in _zoo.architectures():
        if arguments.only and model_type not in arguments.only:
            continue
        with _zoo.quiet():
            try:
                with _zoo.within(SECONDS):
                    small = _zoo.build(kind, model_type, name)
            except (Exception, _zoo.TooLongError):
                continue
            built += 1
            for subject, verdict, detail in _judge(small):
                counts[subject][verdict] += 1
                if verdict in lines:
                    lines[verdict].append(f"{subject} {kind} {model_type}: {detail}")
        if built % 20 == 0:
            report(f"{built} models: { {k: dict(v) for k, v in counts.items()} }")
    result: dict[str, Any] = {"models": built}
    result |= {subject: dict(each) for subject, each in counts.items()}
    return result | dict(lines)


def _judge(small: _zoo.Small) -> list[tuple[str, str, str]]:
    subjects: dict[str, Any] = {"attention": _attention}
    if small.kind in ("causal", "masked"):
        subjects["lens" if small.kind == "causal" else "masked lens"] = _lens
    if small.kind == "causal":
        subjects |= {"logit": _logit, "inputs": _inputs}
    found = []
    for subject, judge in subjects.items():
        try:
            with _zoo.within(SECONDS):
                found.append((subject, *judge(small)))
        except InspectionError as error:
            found.append((subject, REFUSED, str(error)[:160]))
        except _zoo.TooLongError as error:
            found.append((subject, NO_ORACLE, str(error)))
        except Exception as error:
            found.append((subject, WRONG, f"{type(error).__name__}: {str(error)[:160]}"))
    return found


def _attention(small: _zoo.Small) -> tuple[str, str]:
    model = small.model
    try:
        _set(model, "eager")
        with torch.no_grad():
            output = model(**small.inputs, output_attentions=True)
        expected = _patterns(output)
    except Exception as error:  # the model cannot write its attention out
        return NO_ORACLE, f"{type(error).__name__}: {str(error)[:100]}"
    if not expected:
        return NO_ORACLE, "the model returns no attentions"
    if not all(_is_distribution(each) for each in expected):
        return NO_ORACLE, "what it returns as attentions are no weights"
    chosen = "sdpa" if _set(model, "sdpa") else "eager"
    read: list[Tensor] = []
    inspector = torchfmri.Inspector(model)
    inspector.watch("*", what="attention")
    with torch.no_grad(), inspector.recording(keep="tensors") as inspection:
        other = model(**small.inputs)
    if not torch.allclose(_first(other), _first(output), atol=1e-5):
        return NO_ORACLE, f"{chosen} and eager give other outputs, with or without torchfmri"
    for record in inspection.values():
        read += [each for call in record.calls for each in call.attention if each is not None]
    if not read:
        return REFUSED, "nothing was read: " + next(iter(inspection.missing.values()), "")
    apart = []
    for pattern in expected:
        same = [each for each in read if each.shape == pattern.shape]
        # A query that may read nothing is uniform in eager and zero in kernels.
        rows = [_apart(each, pattern) for each in same]
        apart.append(min(rows, default=float("inf")))
    if max(apart) <= _TOLERANCE:
        return RIGHT, chosen
    if max(apart) == float("inf"):  # attention in windows, or of two kinds in one
        wanted = tuple(expected[apart.index(max(apart))].shape)
        return REFUSED, f"no pattern {wanted} was read"
    return WRONG, f"{chosen}: {max(apart):.1e}"


def _is_distribution(pattern: Tensor) -> bool:
    """Whether every row has weights that add up to 1, or to less beside a sink (gpt-oss)."""
    return bool((pattern >= 0).all() and (pattern.double().sum(-1) <= 1 + 1e-3).all())


def _apart(read: Tensor, expected: Tensor) -> float:
    blank = read.sum(-1) == 0
    return float(((read - expected).abs().amax(-1)).masked_fill(blank, 0.0).max())


def _first(output: Any) -> Tensor:
    found: Tensor = output.logits if "logits" in output else output[0]
    return found


def _patterns(output: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for key, value in output.items():
        if "attentions" in key and isinstance(value, (tuple, list)):
            found += [each for each in value if isinstance(each, Tensor) and each.ndim == 4]
    return found


def _set(model: nn.Module, implementation: str) -> bool:
    try:
        model.set_attn_implementation(implementation)  # type: ignore[operator]
    except Exception:
        return False
    return True


def _ids(small: _zoo.Small) -> Tensor:
    return small.inputs["input_ids"][:1]


def _lens(small: _zoo.Small) -> tuple[str, str]:
    ids = _ids(small)
    lens = torchfmri.lens(small.model, None, ids)
    with torch.no_grad():
        logits = small.model(input_ids=ids).logits[0]
    ahead = 1 if small.kind == "causal" else 0  # a masked model speaks about the token itself
    said = ids.shape[1] - ahead
    shares = logits.softmax(-1)[:said].gather(-1, ids[0, ahead:, None])[:, 0]
    apart = float((torch.tensor(lens.probability[-1, :said]) - shares).abs().max())
    return (RIGHT, "") if apart <= _TOLERANCE else (WRONG, f"{apart:.1e}")


def _logit(small: _zoo.Small) -> tuple[str, str]:
    found = torchfmri.attribute_logit(small.model, None, _ids(small), 5)
    relative = abs(found.residual) / max(abs(found.logit), 1e-3)
    if relative > _TOLERANCE:
        return WRONG, f"residual {relative:.1e} of the logit"
    split = "by head" if found.heads.size else "; ".join(found.notes)[:100]
    return RIGHT, split


def _inputs(small: _zoo.Small) -> tuple[str, str]:
    found = torchfmri.attribute_inputs(small.model, None, _ids(small), 5, method="gradient_x_input")
    if found.logit != found.logit:
        return NO_ORACLE, "the logits of the model are nan"
    finite = bool(torch.tensor(found.values).isfinite().all())
    return (RIGHT, "") if finite else (WRONG, "not finite")
