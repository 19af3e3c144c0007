"""Train the tiny language model that comes with torchfmri, from nothing but a seed.

    python scripts/train_tiny.py --out DIR     train, examine, and write the files of the model

The text is made by `tiny_corpus.py`. With the same torch and number of threads the loss curve is
the same, bit for bit, on the same machine; elsewhere it starts the same to rounding and ends at the
same level. `train` is an ordinary loop that other programs may watch or disturb through
`before_step` and `on_step`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from tiny_corpus import Exchange, draw_document, draw_examination, words_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from torchfmri import Monitor

BOS, EOS, PAD, USER, ASSISTANT = "<|begin|>", "<|end|>", "<|pad|>", "<|user|>", "<|assistant|>"
VOCABULARY = 1536
LENGTH = 128
STEPS = 1600
QUESTION = 0.1  # weight of a token of the user's: most of them cannot be foreseen
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|user|>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ raise_exception('The tiny model knows the roles user and assistant, not '"
    " + message['role']) }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Training:
    """What a run of `train` leaves.

    Attributes:
        model: The trained model.
        tokenizer: Its tokenizer.
        losses: The loss of every step, before its update.
    """

    model: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast
    losses: list[float]


def train(
    steps: int = STEPS,
    *,
    seed: int = 0,
    batch_size: int = 16,
    learning_rate: float = 2.5e-3,
    tokenizer: PreTrainedTokenizerFast | None = None,
    before_step: Callable[[int, nn.Module, torch.optim.Optimizer, Batch], None] | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> Training:
    """The model after `steps` updates, with the loss of each; the global random state is kept.

    Args:
        steps: How many updates; the learning rate warms up and falls to a tenth over them.
        seed: Of the corpus and of the parameters.
        batch_size: Sequences of `LENGTH` tokens per step.
        learning_rate: The highest.
        tokenizer: To use instead of one that is trained first, which takes a second.
        before_step: Called as `before_step(step, model, optimizer, batch)` when the learning rate
            of the step is set and the gradients are cleared. It may change all three in place:
            `optimizer.param_groups[0]["lr"]`, a parameter, `batch["input_ids"]` (b, s) or
            `batch["weights"]` (b, s), the share of each token in the loss. The learning rate is
            set anew at every step.
        on_step: Called as `on_step(step, loss)` after the update.
    """
    tokenizer = tokenizer or make_tokenizer(seed)
    model = make_model(tokenizer, seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.2, fused=True
    )
    model.train()
    losses = []
    for step, batch in enumerate(make_batches(tokenizer, steps, batch_size, seed)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * schedule(step, steps)
        optimizer.zero_grad()
        if before_step is not None:
            before_step(step, model, optimizer, batch)
        loss = language_loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if on_step is not None:
            on_step(step, losses[-1])
    return Training(model.eval(), tokenizer, losses)


def schedule(step: int, steps: int) -> float:
    """The share of the highest learning rate: a linear rise, then half a cosine down to 2 %."""
    warm_up = max(1, min(50, steps // 10))
    progress = max(0.0, (step + 1 - warm_up) / max(1, steps - warm_up))
    return min(1.0, (step + 1) / warm_up) * (0.02 + 0.98 * (1 + math.cos(math.pi * progress)) / 2)


def language_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean surprisal of every token after the first, in nats; padding has weight 0."""
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    targets, weights = batch["input_ids"][:, 1:], batch["weights"][:, 1:]
    surprisal = nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="none"
    )
    return (surprisal * weights.flatten()).sum() / weights.sum()


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE trained on the corpus; digits stay single."""
    random = Random(f"tokenizer {seed}")
    texts = [text for _ in range(4_000) for _, text in draw_document(random)]
    # Every word of the world as often as a frequent one, so that most are one token.
    texts += [f" {word}" for word in words_of(texts) for _ in range(200)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS, PAD, USER, ASSISTANT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=2 * LENGTH,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """The untrained model: Llama's architecture, with tied embeddings."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=144,
        intermediate_size=384,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2 * LENGTH,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    # What a layer adds starts small, so that the word itself reaches the last layer.
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.mul_(0.1)
        layer.mlp.down_proj.weight.data.mul_(0.1)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
        max_new_tokens=96,
    )
    return model


def make_batches(
    tokenizer: PreTrainedTokenizerFast, count: int, batch_size: int, seed: int | str
) -> Iterator[Batch]:
    """Batches of whole documents, packed one after the other into sequences, the rest padding."""
    random = Random(f"batches {seed}")
    waiting: list[list[tuple[int, float]]] = []
    for _ in range(count):
        ids = torch.full((batch_size, LENGTH), tokenizer.pad_token_id)
        weights = torch.zeros(batch_size, LENGTH)
        for row in range(batch_size):
            packed: list[tuple[int, float]] = []
            while True:
                while len(waiting) < 8:
                    waiting.append(_encode(tokenizer, draw_document(random))[:LENGTH])
                room = LENGTH - len(packed)
                fitting = [index for index, each in enumerate(waiting) if len(each) <= room]
                if not fitting:
                    break
                packed += waiting.pop(fitting[0])
            ids[row, : len(packed)] = torch.tensor([token for token, _ in packed])
            weights[row, : len(packed)] = torch.tensor([weight for _, weight in packed])
        yield {"input_ids": ids, "weights": weights}


def _encode(
    tokenizer: PreTrainedTokenizerFast, document: list[tuple[str, str]]
) -> list[tuple[int, float]]:
    """The tokens of a document, each with its weight in the loss."""
    marks = {"": ("", EOS, 1.0), "user": (USER, "", QUESTION), "assistant": (ASSISTANT, EOS, 1.0)}
    tokens = [(int(tokenizer.bos_token_id), 0.0)]
    for role, text in document:
        before, after, weight = marks[role]
        ids = tokenizer(before + text + after, add_special_tokens=False)["input_ids"]
        tokens += [(each, weight) for each in ids]
    return tokens


@torch.no_grad()
def measure_held_out_loss(training: Training, batches: int = 8) -> float:
    """The loss on documents that were not drawn for training, in nats per token."""
    found = make_batches(training.tokenizer, batches, 32, "held out")
    return sum(language_loss(training.model, batch).item() for batch in found) / batches


@torch.no_grad()
def answer(training: Training, questions: list[str]) -> list[str]:
    """What the model says to each question, greedily."""
    tokenizer = training.tokenizer
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": each}], tokenize=False, add_generation_prompt=True
        )
        for each in questions
    ]
    batch = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt")
    found = training.model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        do_sample=False,
        max_new_tokens=96,
    )
    texts: list[str] = tokenizer.batch_decode(
        found[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return texts


def examine(training: Training, count: int = 40) -> dict[str, tuple[int, int, str]]:
    """Right answers, questions, and one wrong answer in words, per kind of held-out question."""
    by_kind: dict[str, list[Exchange]] = defaultdict(list)
    for exchange in draw_examination(count):
        by_kind[exchange.kind].append(exchange)
    result = {}
    for kind, exchanges in by_kind.items():
        answers = answer(training, [each.question for each in exchanges])
        pairs = list(zip(exchanges, answers, strict=True))
        wrong = [f"{each.question} -> {said}" for each, said in pairs if not each.accepts(said)]
        result[kind] = (len(pairs) - len(wrong), len(pairs), wrong[0] if wrong else "")
    return result


def write_files(training: Training, folder: Path) -> None:
    """Write the files of the model; parameters as float16, which halves them."""
    folder.mkdir(parents=True, exist_ok=True)
    training.model.half().save_pretrained(folder)
    training.model.float()
    training.tokenizer.save_pretrained(folder)
    # In words that transformers 4 and 5 both read.
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config.pop("backend", None)
    config["additional_special_tokens"] = config.pop("extra_special_tokens", [USER, ASSISTANT])
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for path in folder.iterdir():
        path.chmod(0o644)


def main(arguments: list[str] | None = None) -> int:
    """Train, print what came out, and write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--watch", action="store_true", help="attach torchfmri's Monitor, and print its findings"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    start = time.monotonic()

    def report(step: int, loss: float) -> None:
        if step % 50 == 0 or step == options.steps - 1:
            print(f"step {step:5d}  loss {loss:.4f}  {time.monotonic() - start:5.0f} s", flush=True)

    monitors: list[Monitor] = []

    def attach(step: int, model: nn.Module, optimizer: Any, batch: object) -> None:
        if options.watch and not monitors:
            monitors.append(Monitor(model, optimizer).attach())

    training = train(options.steps, seed=options.seed, before_step=attach, on_step=report)
    for monitor in monitors:
        monitor.detach()
        print(f"findings over {options.steps} steps: {monitor.findings or 'none'}")
    write_files(training, options.out)
    # What is examined is what was written: parameters rounded to float16.
    training.model.load_state_dict(
        {name: each.half().float() for name, each in training.model.state_dict().items()}
    )
    print(f"held-out loss {measure_held_out_loss(training):.4f}")
    results = examine(training)
    print(f"{'held-out questions':20} right  of  wrong, for example")
    for kind, (right, total, wrong) in results.items():
        print(f"{kind:20} {right:5d} {total:3d}  {wrong}")
    # Beside the folder: what is in it is what ships.
    curve = options.out.with_name(f"{options.out.name}-losses.json")
    curve.write_text(json.dumps(training.losses))
    print(f"loss of every step: {curve}")
    return 1 if any(monitor.findings for monitor in monitors) else 0


if __name__ == "__main__":
    sys.exit(main())
