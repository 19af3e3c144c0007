"""Cost of scanning a language model while it generates, as a ratio to plain `generate`.

On the SmolLM2 shape (random weights: the arithmetic is the same) with all layers, voxels and
metrics; the small Qwen3 beside it. `activations` is compared with plain `generate`,
`position_gradients` with plain `generate` and one plain forward and backward pass over the result.
`naive_per_token` runs forward and backward over everything so far for each new token, as one would
without thinking. `store_share` is the time of saving a scan, as a share of the time of scanning.
"""

import argparse
import importlib.util
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import _peers
from benchmarks._peers import Task
from benchmarks._qwen3 import SMALL, build_qwen3
from benchmarks._timing import PLAIN_AGAIN, Effort, Run, describe_machine, measure_ratios, report

PEERS = (("nnsight", _peers.build_nnsight), ("torchlens", _peers.build_torchlens))
NOTES = {
    "naive_per_token": "compared like position_gradients, with fewer new tokens (its cost grows "
    "with their square)",
    "nnsight": "saves the outputs of all Linears, activations only: no gradients while generating; "
    "on the small Qwen3, compared with plain generate",
    "torchlens": "saves the outputs of all Linears, on the small Qwen3 with 8 new tokens",
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
    parser.add_argument("--dtype", default="float32", help="of the model")
    parser.add_argument("--no-peers", action="store_true", help="only ours, a quick look")


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ratios with intervals, for both shapes."""
    torch.set_num_threads(arguments.threads)
    place = {"device": arguments.device, "dtype": getattr(torch, arguments.dtype)}
    effort = Effort(rounds=arguments.rounds, warm_up=1, slow_seconds=600)
    result: dict[str, Any] = {"intervals": {}, "notes": NOTES, "errors": {}, "not_installed": []}
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
    result["task"] = {"prompt": arguments.prompt, "new_tokens": arguments.new_tokens}
    result["machine"] = describe_machine()
    return result


class Subject:
    """A model, a prompt, and what is done with them."""

    def __init__(self, model: nn.Module, prompt: int, new_tokens: int) -> None:
        self.model, self.new_tokens = model, new_tokens
        generator = torch.Generator().manual_seed(1)
        device = next(model.parameters()).device
        self.ids = torch.randint(5, 900, (1, prompt), generator=generator).to(device)

    @property
    def options(self) -> dict[str, Any]:
        """The same number of tokens each time."""
        return {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}

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
    figures = measure_ratios(subject.generate, {"activations": subject.scan(None)}, effort)
    report(f"{prefix or 'SmolLM2 shape, '}gradients")
    more = measure_ratios(
        subject.generate_and_differentiate,
        {"position_gradients": subject.scan("position")},
        effort,
    )
    named = {
        "activations": figures["activations"],
        "generate_again": figures[PLAIN_AGAIN],
        "position_gradients": more["position_gradients"],
        "generate_and_differentiate_again": more[PLAIN_AGAIN],
    }
    for name, figure in named.items():
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


def smollm2_shape() -> nn.Module:
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
    return LlamaForCausalLM(config).eval()


def small_qwen3() -> nn.Module:
    """The small Qwen3 of the other benchmarks."""
    model: nn.Module = build_qwen3(SMALL, max_position_embeddings=4096, pad_token_id=0)
    return model.eval()
