"""Cost of scanning a language model while it generates, as a ratio to plain `generate`.

On the SmolLM2 shape (random weights: the arithmetic is the same) with all layers, voxels and
metrics; the small Qwen3 beside it. `activations` is compared with plain `generate`,
`position_gradients` with plain `generate` and one plain forward and backward pass over the result.
`naive_per_token` runs forward and backward over everything so far for each new token, as one would
without thinking. `store_share` is the time of saving a scan, as a share of the time of scanning.
`empty_hooks` is `generate` with a hook on every module that does nothing.

On a GPU (`--device cuda`) the second shape is that of Qwen3-1.7B, and `compiled_activations` is
compared with `generate` with a static cache, which transformers compiles. `throughput` has tokens
per second of `generate` and of the scan, by the number of prompts in a batch.
"""

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import _peers
from benchmarks._peers import Task
from benchmarks._qwen3 import HUGE, LARGE, SMALL, build_qwen3
from benchmarks._timing import (
    PLAIN_AGAIN,
    Effort,
    Figure,
    Run,
    describe_machine,
    measure_ratios,
    report,
    time_once,
)

PEERS = (("nnsight", _peers.build_nnsight), ("torchlens", _peers.build_torchlens))
NOTES = {
    "naive_per_token": "compared like position_gradients, with fewer new tokens (its cost grows "
    "with their square)",
    "nnsight": "saves the outputs of all Linears, activations only: no gradients while generating; "
    "on the small Qwen3, compared with plain generate",
    "torchlens": "saves the outputs of all Linears, on the small Qwen3 with 8 new tokens",
    "compiled_apart": "the largest difference between the norms of the compiled scan and those of "
    "the eager one, as a share of the layer's largest; compiled_logits_apart is that between the "
    "logits of plain compiled and plain eager generate",
    "compiled_parting": "where the tokens of the compiled scan part from those of plain compiled "
    "generate: how much larger the logit of the plain run's token was; compiled_logits_most_apart "
    "is the largest difference of any logit between plain compiled and plain eager generate",
    "overhead_1024_over_64": "the ratio of `activations` at 1,024 new tokens over that at 64, on "
    "the small Qwen3",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this subject."""
    parser.add_argument("--rounds", type=int, default=7, help="rounds (default: 7)")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of the prompt")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens to generate")
    parser.add_argument("--long", type=int, default=1024, help="tokens of the long generation")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", help="of the model (float32; on a GPU bfloat16)")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 32, 256], help="of prompts")
    parser.add_argument("--skip", nargs="*", default=[], help="eager, compiled or throughput")
    parser.add_argument(
        "--shapes", nargs="*", default=["smollm2", "large"], help="on a GPU: smollm2, large, 8b"
    )
    parser.add_argument("--no-peers", action="store_true", help="only ours, a quick look")


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ratios with intervals, for both shapes."""
    torch.set_num_threads(arguments.threads)
    cuda = arguments.device.startswith("cuda")
    dtype = getattr(torch, arguments.dtype or ("bfloat16" if cuda else "float32"))
    place = {"device": arguments.device, "dtype": dtype}
    # The first two passes of a shape are followed operation by operation, later ones are not.
    effort = Effort(rounds=arguments.rounds, warm_up=2, slow_seconds=600)
    result: dict[str, Any] = {"intervals": {}, "notes": NOTES, "errors": {}, "not_installed": []}
    measure_all = measure_on_gpu if cuda else measure_on_cpu
    measure_all(arguments, place, effort, result)
    result["task"] = {
        "prompt": arguments.prompt,
        "new_tokens": arguments.new_tokens,
        "dtype": str(dtype).removeprefix("torch."),
    }
    result["machine"] = describe_machine()
    return result


def measure_on_cpu(
    arguments: argparse.Namespace, place: dict[str, Any], effort: Effort, result: dict[str, Any]
) -> None:
    """SmolLM2's shape, the small Qwen3, storing, long runs, and the peers."""
    smollm2 = Subject(smollm2_shape().to(**place), arguments.prompt, arguments.new_tokens)
    measure(smollm2, effort, result, "")
    result["store_share"] = store_share(smollm2)
    report("naive per token")
    measure_naive(smollm2, result, new_tokens=8)
    del smollm2
    small = Subject(small_qwen3().to(**place), arguments.prompt, arguments.new_tokens)
    measure(small, effort, result, "small_")
    report(f"{arguments.long} new tokens")
    long = Subject(small.model, arguments.prompt, arguments.long)
    few = Effort(rounds=max(3, arguments.rounds // 2), warm_up=1, slow_seconds=600)
    figure = measure_ratios(long.generate, {"long": long.scan(None)}, few)["long"]
    result["small_activations_long"] = figure.ratio
    result["overhead_1024_over_64"] = figure.ratio / result["small_activations"]
    if not arguments.no_peers:
        measure_peers(result, arguments.prompt, arguments.new_tokens)


def measure_on_gpu(
    arguments: argparse.Namespace, place: dict[str, Any], effort: Effort, result: dict[str, Any]
) -> None:
    """SmolLM2's shape and that of Qwen3-1.7B: eager, compiled, and in batches."""
    shapes = {
        "smollm2": ("", smollm2_shape),
        "large": ("large_", large_qwen3),
        "8b": ("8b_", huge_qwen3),
    }
    for prefix, build in [shapes[name] for name in arguments.shapes]:
        model = build(arguments.device).to(**place)
        subject = Subject(model, arguments.prompt, arguments.new_tokens)
        result[f"{prefix}milliseconds_per_token"] = subject.milliseconds_per_token()
        if "compiled" not in arguments.skip:
            measure_compiled(subject, effort, result, prefix)
        if "eager" not in arguments.skip:
            measure(subject, effort, result, prefix)
        result[f"{prefix}peak_memory"] = measure_peak(subject)
        if "throughput" not in arguments.skip:
            result[f"{prefix}throughput"] = {
                b: measure_throughput(Subject(model, arguments.prompt, arguments.new_tokens, b))
                for b in arguments.batches
            }
        del model, subject
        torch.compiler.reset()
        torch.cuda.empty_cache()


def measure_peak(subject: "Subject") -> dict[str, float]:
    """The most memory allocated at a time, in GB: plain, with gradients, and for their scan."""
    runs: dict[str, Run] = {
        "generate": subject.generate,
        "generate_and_differentiate": subject.generate_and_differentiate,
        "position_gradients": subject.scan("position"),
    }
    found = {}
    for name, run in runs.items():
        run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        found[name] = torch.cuda.max_memory_allocated() / 1e9
    report(f"peak memory: {found}")
    return found


def measure_throughput(subject: "Subject") -> dict[str, float]:
    """Tokens per second of a batch, plain and scanned; the best of two runs each."""
    count = len(subject.ids) * subject.new_tokens
    runs: dict[str, Run] = {"generate": subject.generate, "scan": subject.scan(None)}
    found = {}
    for name, run in runs.items():
        report(f"{len(subject.ids)} prompts, {name}")
        run()
        found[name] = count / min(time_once(run) for _ in range(2))
    return found


def measure_compiled(
    subject: "Subject", effort: Effort, result: dict[str, Any], prefix: str
) -> None:
    """The compiled scan beside compiled `generate`, and how far its values are from eager ones."""
    static = Subject(subject.model, subject.ids.shape[1], subject.new_tokens, static=True)
    report(f"{prefix}compiled generate")
    result[f"{prefix}compile_seconds"] = time_once(static.generate)
    report(f"{prefix}compiled scan")
    scan: Callable[[], Any] = static.scan(None)
    result[f"{prefix}compile_watched_seconds"] = time_once(scan)
    result[f"{prefix}compiled_milliseconds_per_token"] = static.milliseconds_per_token()
    report(str({name: each for name, each in result.items() if "compile" in name}))
    figures = measure_ratios(static.generate, {"scan": scan}, effort)
    named = {
        "compiled_activations": figures["scan"],
        "compiled_generate_again": figures[PLAIN_AGAIN],
    }
    note_figures(named, result, prefix)
    found, tokens = scan(), static.generate()[0].tolist()
    result[f"{prefix}compiled_generation"] = found.meta["generation"]
    result[f"{prefix}compiled_same_tokens"] = found[0].tokens.ids.tolist() == tokens
    static.compiles = False
    eager = static.scan(None)()
    same = min(_common(found[0].tokens.ids, eager[0].tokens.ids), len(tokens) - 1)
    result[f"{prefix}compiled_common_tokens"] = same
    result[f"{prefix}compiled_apart"] = _apart(
        *(numpy.asarray(each.values("activation", by="layer")[1])[:same] for each in (found, eager))
    )
    logits = {}
    start = subject.ids.shape[1]
    for compiles in (False, True):
        static.compiles = compiles
        logits[compiles] = static.logits()
    # As long as both were fed the same tokens.
    shared = _common(*(logits[each].argmax(-1).tolist() for each in (True, False))) + 1
    pair = [logits[each][:shared] for each in (True, False)]
    norms = [each.norm(dim=-1)[:, None] for each in pair]
    result[f"{prefix}compiled_logits_apart"] = _apart(*norms)
    result[f"{prefix}compiled_logits_most_apart"] = float((pair[0] - pair[1]).abs().max())
    own = found[0].tokens.ids
    parted = _common(own, tokens)
    if parted < len(tokens):  # by how much the plain compiled run preferred its token there
        there = logits[True][parted - start]
        result[f"{prefix}compiled_parting"] = float(there[tokens[parted]] - there[own[parted]])
    report(str({name: each for name, each in result.items() if "compiled_" in name}))


def _common(one: Any, other: Any) -> int:
    """How many tokens two sequences have in common before they part."""
    parts = [at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    return parts[0] if parts else len(one)


def _apart(one: Any, other: Any) -> float:
    """The largest difference in a column, as a share of the column's largest value."""
    one, other = (numpy.asarray(each, dtype=numpy.float64) for each in (one, other))
    with numpy.errstate(invalid="ignore"):
        return float(numpy.nanmax(numpy.abs(one - other) / numpy.nanmax(other, 0)))


class Subject:
    """A model, a prompt, and what is done with them."""

    def __init__(
        self, model: nn.Module, prompt: int, new_tokens: int, b: int = 1, static: bool = False
    ) -> None:
        self.model, self.new_tokens, self._static = model, new_tokens, static
        self.compiles = True
        generator = torch.Generator().manual_seed(1)
        device = next(model.parameters()).device
        self.ids = torch.randint(5, 900, (b, prompt), generator=generator).to(device)

    @property
    def options(self) -> dict[str, Any]:
        """The same number of tokens each time."""
        options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        if self._static:
            options |= {"cache_implementation": "static", "disable_compile": not self.compiles}
        return options

    def milliseconds_per_token(self) -> float:
        """Return what a token of plain `generate` takes, the best of three runs."""
        self.generate()
        return 1e3 * min(time_once(self.generate) for _ in range(3)) / self.new_tokens

    def logits(self) -> Tensor:
        """Return the logits of every new token of plain `generate`, (n, vocabulary)."""
        found = self.model.generate(
            self.ids, attention_mask=torch.ones_like(self.ids), max_new_tokens=self.new_tokens,
            return_dict_in_generate=True, output_logits=True, **self.options,
        )  # fmt: skip
        return torch.cat(found.logits).float().cpu()

    def generate_with_empty_hooks(self) -> None:
        """With a hook on every module that does nothing."""
        modules = [each for each in self.model.modules() if each is not self.model]
        handles = [each.register_forward_hook(lambda *_: None) for each in modules]
        try:
            self.generate()
        finally:
            for handle in handles:
                handle.remove()

    def generate(self) -> Tensor:
        """Plain."""
        found = self.model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            max_new_tokens=self.new_tokens,
            **self.options,
        )
        _wait(found)
        return found

    def generate_and_differentiate(self) -> None:
        """Plain, and one forward and backward pass over the result."""
        ids = self.generate()
        self.model.zero_grad()
        logits = self.model(input_ids=ids, use_cache=False).logits
        start = self.ids.shape[1]
        F.cross_entropy(
            logits[0, start - 1 : -1].float(), ids[0, start:], reduction="sum"
        ).backward()
        self.model.zero_grad()
        _wait(ids)

    def scan(self, per: str | None) -> Run:
        """Ours, all layers, voxels and metrics."""
        from torchfmri import Scanner, ScanOptions

        scanner = Scanner(self.model, None, ScanOptions(per=per))
        return lambda: scanner.scan(self.ids, self.new_tokens, generate=self.options)


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


def measure(subject: Subject, effort: Effort, result: dict[str, Any], prefix: str) -> None:
    """Our two figures and their noise floors."""
    report(f"{prefix or 'SmolLM2 shape, '}activations")
    runs = {"activations": subject.scan(None), "empty_hooks": subject.generate_with_empty_hooks}
    figures = measure_ratios(subject.generate, runs, effort)
    report(f"{prefix or 'SmolLM2 shape, '}gradients")
    more = measure_ratios(
        subject.generate_and_differentiate,
        {"position_gradients": subject.scan("position")},
        effort,
    )
    named = {
        "activations": figures["activations"],
        "empty_hooks": figures["empty_hooks"],
        "generate_again": figures[PLAIN_AGAIN],
        "position_gradients": more["position_gradients"],
        "generate_and_differentiate_again": more[PLAIN_AGAIN],
    }
    note_figures(named, result, prefix)


def note_figures(figures: Mapping[str, Figure], result: dict[str, Any], prefix: str) -> None:
    """Put figures into the result, and report them: a long run may be cut short."""
    for name, figure in figures.items():
        report(f"  {prefix}{name}: {figure.ratio:.3f} [{figure.low:.3f}, {figure.high:.3f}]")
        result[prefix + name] = figure.ratio
        result["intervals"][prefix + name] = [figure.low, figure.high]


def store_share(subject: Subject, rounds: int = 3) -> float:
    """Seconds of saving a scan / seconds of scanning, the median of some rounds."""
    scan: Callable[[], Any] = subject.scan("position")
    shares = []
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            begin = time.perf_counter()
            found = scan()
            middle = time.perf_counter()
            found.save(Path(folder) / f"{number}.fmri")
            shares.append((time.perf_counter() - middle) / (middle - begin))
    return sorted(shares)[rounds // 2]


def measure_naive(subject: Subject, result: dict[str, Any], new_tokens: int) -> None:
    """A backward pass over the whole sequence at every step."""
    short = Subject(subject.model, subject.ids.shape[1], new_tokens)

    def naive() -> None:
        ids = short.ids
        kept: list[Tensor] = []

        def keep(module: nn.Module, arguments: object, output: Tensor) -> None:
            output.register_hook(lambda gradient: kept.append(gradient.norm(dim=-1)))
            kept.append(output.detach().norm(dim=-1))

        linears = [each for each in short.model.modules() if isinstance(each, nn.Linear)]
        handles = [each.register_forward_hook(keep) for each in linears]
        try:
            for _ in range(new_tokens):
                logits = short.model(input_ids=ids, use_cache=False).logits
                token = logits[:, -1].argmax(-1)
                F.cross_entropy(logits[:, -1].float(), token).backward()
                short.model.zero_grad()
                ids = torch.cat([ids, token[:, None]], 1)
        finally:
            for handle in handles:
                handle.remove()

    few = Effort(rounds=3, warm_up=1, slow_seconds=600)
    plain = short.generate_and_differentiate
    result["naive_per_token"] = measure_ratios(plain, {"naive": naive}, few)["naive"].ratio


def measure_peers(result: dict[str, Any], prompt: int, new_tokens: int) -> None:
    """The peers' `generate`, on the small Qwen3; TorchLens last, it leaves torch wrapped."""
    for name, build in PEERS:
        if importlib.util.find_spec(name) is None:
            result["not_installed"].append(name)
            continue
        report(name)
        tokens = 8 if name == "torchlens" else new_tokens
        subject = Subject(small_qwen3(), prompt, tokens)
        task = Task(subject.model, subject.ids, tokens)
        effort = Effort(rounds=3, warm_up=1, slow_seconds=600)
        try:
            run = build(task)["generate"]
            result[name] = measure_ratios(task.generate, {name: run}, effort)[name].ratio
        except Exception as error:  # a peer that fails is a result
            result["errors"][name] = f"{type(error).__name__}: {error}"


def smollm2_shape(device: str = "cpu") -> nn.Module:
    """SmolLM2-135M with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).eval()


def small_qwen3() -> nn.Module:
    """The small Qwen3 of the other benchmarks."""
    model: nn.Module = build_qwen3(SMALL, max_position_embeddings=4096, pad_token_id=0)
    return model.eval()


def large_qwen3(device: str = "cpu") -> nn.Module:
    """The shape of Qwen3-1.7B with random weights."""
    model: nn.Module = build_qwen3(LARGE, device, max_position_embeddings=4096, pad_token_id=0)
    return model.eval()


def huge_qwen3(device: str = "cpu") -> nn.Module:
    """The shape of Qwen3-8B with random weights."""
    options = {"max_position_embeddings": 4096, "pad_token_id": 0}
    model: nn.Module = build_qwen3(HUGE, device, torch.bfloat16, **options)
    return model.eval()
