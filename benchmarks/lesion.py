"""Lesions: known results found again, equality with plain passes, and what they cost.

`python -m benchmarks lesion` prints figures that docs/lesion.md and RESULTS.md have. Every fast
path is compared with the same lesion in a pass of its own; peers run only if they are installed.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import torchfmri
from benchmarks import _lesion_peers
from benchmarks._timing import Effort, describe_machine, measure_ratios, report

PARTS = ("induction", "cost", "smollm2", "patching", "peers")
COUNTRIES = {
    "France": " Paris", "Germany": " Berlin", "Italy": " Rome", "Spain": " Madrid",
    "Japan": " Tokyo", "China": " Beijing", "Russia": " Moscow", "Egypt": " Cairo",
    "Greece": " Athens", "Austria": " Vienna", "Poland": " Warsaw", "Portugal": " Lisbon",
    "Ireland": " Dublin", "Norway": " Oslo", "Cuba": " Havana", "Peru": " Lima",
    "Kenya": " Nairobi", "Hungary": " Budapest", "Finland": " Helsinki", "Iraq": " Baghdad",
}  # fmt: skip
NAMES = ("John", "Mary", "Tom", "James", "Sarah", "David")
_VOCABULARY, _HALF = 48, 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=PARTS, action="append", help="by default all")
    parser.add_argument("--prompts", type=int, default=20, help="of smollm2")
    parser.add_argument("--pairs", type=int, default=3, help="of names, for patching")
    parser.add_argument("--steps", type=int, default=1200, help="of training the induction model")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="where smollm2 keeps its map, to go on later")
    parser.add_argument("--picture", type=Path, help="draw smollm2's map")


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of every part, each under its name."""
    chosen = arguments.part or PARTS
    run = {
        "induction": induction, "cost": cost, "smollm2": smollm2, "patching": patching,
        "peers": peers,
    }  # fmt: skip
    found: dict[str, Any] = {}
    for part in PARTS:
        if part in chosen:
            report(part)
            found |= {f"{part}_{key}": value for key, value in run[part](arguments).items()}
    return {**found, "machine": describe_machine()}


# -- a model with induction heads ----------------------------------------------------------------


def repeated(count: int, draw: torch.Generator, length: int = _HALF) -> Tensor:
    """Random tokens twice over, (count, 1 + 2 * length), after a first token that is always 0."""
    half = torch.randint(1, _VOCABULARY, (count, length), generator=draw)
    return torch.cat([torch.zeros(count, 1, dtype=torch.long), half, half], 1)


def second_half(logits: Tensor, ids: Tensor) -> Tensor:
    """The mean surprisal of the tokens that repeat, but the first of them."""
    losses = nn.functional.cross_entropy(logits[_HALF + 1 : -1], ids[_HALF + 2 :], reduction="none")
    return losses.mean()


def train_induction_model(steps: int) -> nn.Module:
    """A Llama of two layers that learns to go on with a sequence it has seen."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCABULARY, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).train()
    draw = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        length = int(torch.randint(4, _HALF + 5, (1,), generator=draw))  # so that none is learned
        ids = repeated(48, draw, length)
        logits = model(ids).logits[:, length + 1 : -1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, length + 2 :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def attention_scores(model: nn.Module, ids: Tensor) -> dict[str, dict[str, float]]:
    """How much each head looks one token back, and after the last time a token came."""
    with torch.no_grad():
        patterns = model(ids, output_attentions=True).attentions
    found = {}
    later = torch.arange(_HALF + 2, ids.shape[1])
    back = torch.arange(2, ids.shape[1])
    for layer, pattern in enumerate(patterns):
        for head in range(pattern.shape[1]):
            found[f"L{layer}H{head}"] = {
                "induction": float(pattern[:, head, later, later - _HALF + 1].mean()),
                "previous": float(pattern[:, head, back, back - 1].mean()),
            }
    return found


def _largest(lesions: torchfmri.LesionMap, layer: str) -> str:
    return next(name for name in lesions.top(len(lesions.names)) if name.startswith(layer))


def induction(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train a model to have induction heads, and find them by lesion."""
    model = train_induction_model(arguments.steps)
    ids = repeated(12, torch.Generator().manual_seed(2))
    lesions = torchfmri.lesion(
        model, None, list(ids), metric=second_half, of="heads", edit="mean", method="both"
    )
    scores = attention_scores(model, ids)
    effect = lesions.effect.mean(0)
    best = max(scores, key=lambda name: scores[name]["induction"])
    previous = max(scores, key=lambda name: scores[name]["previous"])
    table = {
        name: f"lesion {effect[at]:+.2f} nats (t {lesions.over_prompts().t[at]:.1f}), "
        f"induction {scores[name]['induction']:.2f}, previous token {scores[name]['previous']:.2f}"
        for at, name in enumerate(lesions.names)
    }
    return {
        "surprisal_intact": float(lesions.intact.mean()),
        "surprisal_of_guessing": float(np.log(_VOCABULARY - 1)),
        "effect_of_best_induction_head": float(lesions.effect_of(best).mean()),
        "effect_of_best_previous_token_head": float(lesions.effect_of(previous).mean()),
        "found": {
            "largest effect in layer 1": _largest(lesions, "L1"),
            "highest induction score": best,
            "largest effect in layer 0": _largest(lesions, "L0"),
            "highest previous-token score": previous,
        },
        "estimate": lesions.estimate_error(),
        "heads": table,
    }


# -- cost ----------------------------------------------------------------------------------------


def cost(arguments: argparse.Namespace) -> dict[str, Any]:
    """Many lesions in one forward pass, beside the same batch without lesions."""
    from torchfmri._lesion.lesion_run import LesionRun
    from torchfmri._lesion.questions import logits_for, read_questions
    from torchfmri._lesion.targets import find_targets

    model, tokenizer = torchfmri.load_model("smollm2")
    model.eval()
    (question,) = read_questions(
        model, tokenizer, "The capital of France is", " Paris", None, "surprisal"
    )
    targets = find_targets(model, ("heads", "mlps"))[64:96]
    run = LesionRun(model, targets, "zero", 0, None, len(targets))
    ids = question.ids.expand(len(targets), -1)

    def plain() -> None:
        with torch.no_grad():
            logits_for(model, ids, question.needed)

    figures = measure_ratios(
        plain,
        {"lesions": lambda: run.lesion_rows(question, targets)},
        Effort(rounds=arguments.rounds),
    )
    return {
        "lesions_over_plain_batch": figures["lesions"].ratio,
        "plain_again": figures["plain_again"].ratio,
        "interval": [figures["lesions"].low, figures["lesions"].high],
        "rows": len(targets),
    }


# -- SmolLM2 -------------------------------------------------------------------------------------


def smollm2(arguments: argparse.Namespace) -> dict[str, Any]:
    """All heads and MLPs of SmolLM2 on questions for capitals, and some of them one by one."""
    model, tokenizer = torchfmri.load_model("smollm2")
    countries = list(COUNTRIES)[: arguments.prompts]
    prompts = [f"The capital of {each} is" for each in countries]
    answers = [COUNTRIES[each] for each in countries]
    seen: list[int] = []
    start, worked = time.perf_counter(), time.process_time()
    lesions = torchfmri.lesion(
        model, tokenizer, prompts, answers, method="both", path=arguments.out,
        on_step=lambda done, total, prompt: (
            seen.append(done), report(f"{done} of {total} lesions: {prompt}")
        ),
    )  # fmt: skip
    seconds, worked = time.perf_counter() - start, time.process_time() - worked
    if arguments.picture is not None:
        lesions.draw(arguments.picture)
    print(lesions.table())
    apart = []
    for name in lesions.top(5):
        with torch.no_grad(), torchfmri.edited(model, {name: "zero"}):
            ids = torch.tensor([tokenizer(prompts[0])["input_ids"]])
            answer = tokenizer(answers[0], add_special_tokens=False)["input_ids"]
            logits = model(torch.cat([ids, torch.tensor([answer])], 1)).logits[0].double()
        found = logits.log_softmax(-1)[ids.shape[1] - 1 : -1]
        alone = -float(sum(found[at, token] for at, token in enumerate(answer)))
        apart.append(abs(alone - lesions.lesioned[0, lesions.names.index(name)]))
    return {
        "lesions": len(lesions.names) * len(prompts),
        "seconds_of_this_run": seconds,
        "processor_seconds": worked,
        "apart_from_plain_passes": max(apart),
        "estimate": lesions.estimate_error(),
        "top": lesions.top(8),
    }


# -- indirect objects ----------------------------------------------------------------------------


def _gift(one: str, other: str) -> tuple[str, str]:
    """A prompt whose answer is `one`, and the same with the answer `other`."""
    text = "When {} and {} went to the store, {} gave a drink to"
    return text.format(one, other, other), text.format(one, other, one)


def patching(arguments: argparse.Namespace) -> dict[str, Any]:
    """Who gets the drink is the name that came once; clean values are put into another prompt."""
    model, tokenizer = torchfmri.load_model("smollm2")
    scores, per_block = [], []
    for one, other in list(zip(NAMES[::2], NAMES[1::2], strict=True))[: arguments.pairs]:
        clean, corrupted = _gift(one, other)
        heads = torchfmri.patch(
            model, tokenizer, clean, corrupted, f" {one}", f" {other}", of="heads"
        )
        blocks = torchfmri.patch(
            model, tokenizer, clean, corrupted, f" {one}", f" {other}", per="token"
        )
        scores.append(heads.score[:, 0])
        per_block.append(blocks.score)
        report(f"{clean!r}: {heads.clean:+.2f}, corrupted {heads.corrupted:+.2f}")
    mean = np.mean(scores, 0)
    order = np.argsort(-np.abs(mean))[:8]
    subject = [int(np.argmax(np.abs(np.mean(per_block, 0)[block]))) for block in (0, 29)]
    return {
        "heads": {heads.names[each]: f"{mean[each]:+.3f}" for each in order},
        "tokens": {"block 0": blocks.labels[subject[0]], "block 29": blocks.labels[subject[1]]},
        "score_of_block_29_at_the_end": float(np.mean(per_block, 0)[29, -1]),
    }


# -- the same with other tools -------------------------------------------------------------------


def peers(arguments: argparse.Namespace) -> dict[str, Any]:
    """Patches, lesions, patterns and attributions beside those of nnsight and TransformerLens.

    Needs the packages of the extra `benchmarks`; one that is absent is named.
    """
    model, tokenizer = torchfmri.load_model("smollm2")
    small = train_induction_model(arguments.steps)
    lens = "transformer_lens"
    rest = {"patterns": _same_patterns, "logit attribution": _same_attribution}
    return {
        "patching of SmolLM2's heads": _patching_with_peers(model.eval(), tokenizer),
        "lesions of induction heads": _lesions_with_peers(small),
        lens: {
            name: compare(small if name == "patterns" else model, tokenizer)
            if _lesion_peers.installed(lens)
            else "not installed"
            for name, compare in rest.items()
        },
    }


def _beside(task: _lesion_peers.Task, own: _lesion_peers.Run) -> dict[str, str]:
    """What every tool finds for each head: how far from bare hooks, and its seconds."""
    runs: dict[str, _lesion_peers.Run] = {
        "bare hooks": _lesion_peers.build_bare_hooks(task),
        "torchfmri": own,
    }
    found: dict[str, str] = {}
    for name, (package, build) in _lesion_peers.PEERS.items():
        if _lesion_peers.installed(package):
            runs[name] = build(task)
        else:
            found[name] = f"{package} is not installed"
    values: dict[str, np.ndarray] = {}
    for name, run in runs.items():
        report(f"  {name}")
        start, worked = time.perf_counter(), time.process_time()
        values[name] = run()
        seconds, worked = time.perf_counter() - start, time.process_time() - worked
        apart = np.abs(values[name] - values["bare hooks"]).max()
        found[name] = (
            f"{seconds:.2f} s ({worked:.2f} s of the processor), "
            f"at most {apart:.1e} from bare hooks"
        )
    plain = values["bare hooks"]
    layer, head = divmod(int(plain.argmax()), task.heads)
    found["values"] = f"{plain.min():+.3f} to {plain.max():+.3f}, that of L{layer}H{head}"
    return found


def _patching_with_peers(model: Any, tokenizer: Any) -> dict[str, str]:
    clean, corrupted = _gift(*NAMES[:2])
    ids = [torch.tensor([tokenizer(each)["input_ids"]]) for each in (corrupted, clean)]
    answer, foil = (_first_token(tokenizer, f" {each}") for each in NAMES[:2])
    task = _lesion_peers.Task(
        model=model, ids=ids[0], donor=ids[1], value=lambda z: z,
        measure=lambda logits: logits[0, -1, answer] - logits[0, -1, foil],
    )  # fmt: skip

    def own() -> np.ndarray:
        one, other = (f" {each}" for each in NAMES[:2])
        patches = torchfmri.patch(model, tokenizer, clean, corrupted, one, other, of="heads")
        return patches.patched[:, 0]

    return _beside(task, own)


def _lesions_with_peers(model: Any) -> dict[str, str]:
    ids = repeated(12, torch.Generator().manual_seed(2))
    task = _lesion_peers.Task(
        model=model, ids=ids, donor=ids,
        value=lambda z: z.mean((0, 1), keepdim=True).expand_as(z),
        measure=lambda logits: torch.stack(
            [second_half(row, own) for row, own in zip(logits, ids, strict=True)]
        ).mean(),
    )  # fmt: skip

    def own() -> np.ndarray:
        lesions = torchfmri.lesion(
            model, None, list(ids), metric=second_half, of="heads", edit="mean"
        )
        return lesions.lesioned.mean(0)

    return _beside(task, own)


def _same_patterns(model: Any, tokenizer: Any) -> str:
    ids = repeated(4, torch.Generator().manual_seed(2))
    pairs = zip(
        _lesion_peers.patterns_of_torchfmri(model, ids),
        _lesion_peers.patterns_of_lens(model, ids),
        strict=True,
    )
    return f"at most {max(float((a - b).abs().max()) for a, b in pairs):.1e} apart"


def _same_attribution(model: Any, tokenizer: Any) -> str:
    prompt = "The capital of Italy is Rome. The capital of France is"
    found = torchfmri.attribute_logit(model, tokenizer, prompt, " Paris", against=" Rome")
    own = [*found.heads.flatten(), *(found[f"L{each}.mlp"] for each in range(len(found.heads)))]
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    tokens = [_first_token(tokenizer, each) for each in (" Paris", " Rome")]
    other = _lesion_peers.attribution_of_lens(model, ids, *tokens)
    apart = np.abs(np.array(own) - other).max()
    return f"{len(own)} heads and MLPs, at most {apart:.1e} apart of {found.logit:.4f}"


def _first_token(tokenizer: Any, text: str) -> int:
    return int(tokenizer(text, add_special_tokens=False)["input_ids"][0])
