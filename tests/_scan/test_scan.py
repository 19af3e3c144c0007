"""The door of a scan: what it takes, what it says, and that it leaves no trace on the model."""

from __future__ import annotations

import copy
import gc
import json
import math
import random
import threading
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from oracles import assert_same_state, state_of, whole_numbers
from scan_oracles import build, prompts
from torch import Tensor, nn
from transformers import GenerationConfig

import torchfmri
from torchfmri import InspectionError, LayerNotFoundError, Scan, Scanner, ScanOptions
from torchfmri.routing import RoutingConfig, RoutingLanguageModel

# The fast tier keeps half of the cases of each test; the slow tier runs the others.
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.one_in(2)]
STEPS = 4
PER = (None, "position", "cached", "token_loss")


def model_in_use() -> Any:
    """A model in the middle of its life: training, with gradients, partly frozen, with hooks."""
    model = build("qwen3")
    ids = torch.tensor([prompts()[0]])
    model(ids, labels=ids).loss.backward()
    model.train()
    model.model.layers[0].mlp.eval()
    model.lm_head.weight.requires_grad_(False)
    model.model.norm.register_forward_hook(lambda *_: None)
    random.seed(3)
    np.random.seed(4)
    torch.manual_seed(5)
    return model


def same(one: Scan, other: Scan) -> bool:
    return all(
        np.array_equal(a.layers[metric], b.layers[metric], equal_nan=True)
        for a, b in zip(one, other, strict=True)
        for metric in a.layers
    )


# -- no trace ------------------------------------------------------------------------------------


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"do_sample": True, "seed": 1}],
                         ids=["greedy", "sampled", "seed"])  # fmt: skip
def test_a_scan_leaves_no_trace(per: Any, options: dict[str, Any]) -> None:
    model = model_in_use()
    before = state_of(model, model.generation_config, model.config)
    torchfmri.scan(model, None, prompts(), STEPS, per=per, **options)
    assert_same_state(before, state_of(model, model.generation_config, model.config))


class Stop(BaseException):
    """What no `except Exception` catches."""


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, Stop])
@pytest.mark.parametrize("at", [0, 8, 10])
def test_an_exception_in_on_token(at: int, kind: type[BaseException]) -> None:
    model = model_in_use()
    before = state_of(model, model.generation_config)
    seen: list[int] = []

    def on_token(token: torchfmri.LiveToken) -> None:
        seen.append(token.id)
        if len(seen) > at:
            raise kind("enough")

    with pytest.raises(kind, match="enough"):
        torchfmri.scan(model, None, prompts()[0], STEPS, on_token=on_token, eos_token_id=66)
    assert len(seen) == at + 1
    assert_same_state(before, state_of(model, model.generation_config))


class Fails(nn.Module):
    """Hands its input on, and raises at a chosen call."""

    calls: ClassVar[list[int]] = []  # outside of any instance: what a module holds is put back

    def __init__(self, inner: nn.Module, kind: type[BaseException], fails_at: int = -1) -> None:
        super().__init__()
        self.inner, self.kind, self.fails_at = inner, kind, fails_at
        self.calls.clear()

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        self.calls.append(1)
        if len(self.calls) == self.fails_at:
            raise self.kind("broken")
        return self.inner(*arguments, **keywords)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("per", ["position", "cached", "token_loss"])
def test_an_exception_in_the_model(per: Any, kind: type[BaseException]) -> None:
    """In the first look at it, in the prompt, in a step, and in the passes with gradients."""
    counted = build("qwen3")
    counted.model.norm = Fails(counted.model.norm, kind)
    torchfmri.scan(counted, None, prompts()[0], STEPS, per=per, eos_token_id=66)
    calls = len(Fails.calls)
    # Two looks, the prompt, the steps without the last, and the passes.
    assert calls == 2 + STEPS + (STEPS + 2 if per == "cached" else 1)
    for at in (1, 3, 4, calls - 1, calls):
        model = model_in_use()
        model.model.norm = Fails(model.model.norm, kind, at)
        before = state_of(model)
        with pytest.raises(kind, match="broken"):
            torchfmri.scan(model, None, prompts()[0], STEPS, per=per, eos_token_id=66)
        assert_same_state(before, state_of(model))


@pytest.mark.parametrize("per", ["position", "cached", "token_loss"])
def test_an_exception_in_the_backward_pass(per: Any) -> None:
    model = model_in_use()
    before = state_of(model)

    def broken(_: nn.Module, __: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: (_ for _ in ()).throw(KeyboardInterrupt("broken")))

    handle = model.model.layers[0].mlp.register_forward_hook(broken)
    with pytest.raises((KeyboardInterrupt, SystemError, RuntimeError)):
        torchfmri.scan(model, None, prompts()[0], STEPS, per=per)
    handle.remove()
    after = state_of(model)
    assert_same_state(before, after)


@pytest.mark.parametrize("argument", ["loss", "decode"])
def test_an_exception_in_the_user_s_function(argument: str) -> None:
    model = model_in_use()
    before = state_of(model)

    def broken(*_: Any) -> Tensor:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        torchfmri.scan(model, None, prompts()[0], STEPS, **{argument: broken})
    assert_same_state(before, state_of(model))


def test_ids_beyond_the_vocabulary_are_refused_before_the_model_runs() -> None:
    """On a GPU such an id ends the whole process."""
    model = model_in_use()
    before = state_of(model)
    for wrong in ([5, 6, 1000], [5, 6, -1], [5, 6, 67]):
        words = rf"Token id {wrong[2]} at position 2 of prompt 0.*from 0 to 66"
        with pytest.raises(InspectionError, match=words):
            torchfmri.scan(model, None, wrong, STEPS)
    assert_same_state(before, state_of(model))

    class Own(nn.Sequential):
        """A module that cannot tell how many tokens it knows."""

        def get_input_embeddings(self) -> nn.Module:
            raise NotImplementedError

    for own in (nn.Sequential, Own):
        small = own(nn.Embedding(9, 4), nn.Linear(4, 9))
        with pytest.raises(InspectionError, match=r"Token id -3.*never negative"):
            torchfmri.scan(small, None, [5, -3], STEPS)
        assert len(torchfmri.scan(small, None, [5, 3], STEPS)) == 1


def test_buffers_are_put_back() -> None:
    """A model that counts its passes is not counted up."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding, self.head = nn.Embedding(67, 8), nn.Linear(8, 67)
            self.register_buffer("passes", torch.zeros(()))
            self.seen: list[int] = []

        def forward(self, ids: Tensor) -> Tensor:
            self.passes += 1
            self.seen.append(ids.shape[1])
            return self.head(self.embedding(ids).cumsum(1))

    model = Counting()
    before = state_of(model)
    torchfmri.scan(model, None, prompts()[0], STEPS)
    assert_same_state(before, state_of(model))
    assert not model.passes
    assert not model.seen


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_the_caller_s_modes(context: Any, per: Any) -> None:
    model = build("llama")
    expected = torchfmri.scan(model, None, prompts(), STEPS, per=per)
    with context():
        modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        found = torchfmri.scan(model, None, prompts(), STEPS, per=per)
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == modes
    assert same(found, expected)
    # What came out can be used afterwards, and so can the model.
    model(torch.tensor([prompts()[0]])).logits.sum().backward()
    assert model.lm_head.weight.grad is not None


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFMRI", "off")
    model = model_in_use()
    before = state_of(model)
    with pytest.raises(InspectionError, match=r"TORCHFMRI=off.*Unset"):
        torchfmri.scan(model, None, prompts()[0], STEPS)
    assert_same_state(before, state_of(model))


def test_two_scans_are_alike() -> None:
    model = build("llama")
    one, two = (torchfmri.scan(model, None, prompts(), STEPS, do_sample=True) for _ in range(2))
    assert same(one, two)


@pytest.mark.parametrize("compiled", ["model", "block"])
def test_a_compiled_model(compiled: str) -> None:
    expected = torchfmri.scan(build("llama"), None, prompts(), STEPS)
    model = build("llama")
    if compiled == "block":
        model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    whole = torch.compile(model, backend="eager") if compiled == "model" else model
    before = state_of(model)
    found = torchfmri.scan(whole, None, prompts(), STEPS)
    assert_same_state(before, state_of(model))
    assert found.layers == expected.layers
    assert same(found, expected)


def test_offloaded_weights_are_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(build("llama"), execution_device=torch.device("cpu"))
    with pytest.raises(InspectionError, match=r"is offloaded .*device_map"):
        torchfmri.scan(model, None, prompts()[0], STEPS)


# -- streams -------------------------------------------------------------------------------------


def threads() -> int:
    return threading.active_count()


@pytest.mark.parametrize("after", [0, 1, 7, 9])
def test_a_stream_that_is_left_early(after: int) -> None:
    model = model_in_use()
    before, running = state_of(model), threads()
    with torchfmri.stream(model, None, prompts()[0], 40, eos_token_id=66) as stream:
        for count, _ in enumerate(stream):
            if count == after:
                break
    assert threads() == running
    assert_same_state(before, state_of(model))
    with pytest.raises(InspectionError, match="all tokens"):
        _ = stream.scan
    stream.close()


def test_a_stream_that_nobody_reads() -> None:
    model = model_in_use()
    before, running = state_of(model), threads()
    with torchfmri.stream(model, None, prompts()[0], STEPS):
        pass
    assert threads() == running
    assert_same_state(before, state_of(model))


def test_a_slow_reader_loses_nothing() -> None:
    """More tokens than may wait: the model waits for the reader."""
    model = build("llama", max_position_embeddings=512)
    ids = whole_numbers(5, 60, 150)
    with torchfmri.stream(model, None, ids, 20, per=None, eos_token_id=66) as stream:
        found = list(stream)
    assert [each.position for each in found] == list(range(170))
    assert [each.id for each in found] == stream.scan.tokens.ids.tolist()


def test_an_error_of_a_stream_reaches_its_reader() -> None:
    model = model_in_use()
    before, running = state_of(model), threads()
    with (
        pytest.raises(InspectionError, match="needs a tokenizer"),
        torchfmri.stream(model, None, "text", STEPS) as stream,
    ):
        list(stream)
    model.model.norm = Fails(model.model.norm, ZeroDivisionError, 4)
    with (
        pytest.raises(ZeroDivisionError, match="broken"),
        torchfmri.stream(model, None, prompts()[0], STEPS, eos_token_id=66) as stream,
    ):
        list(stream)
    assert threads() == running
    model.model.norm = model.model.norm.inner
    assert_same_state(before, state_of(model))


def test_two_streams_at_a_time() -> None:
    one, two = build("llama"), build("gpt2")
    expected = [torchfmri.scan(each, None, prompts(), STEPS) for each in (one, two)]
    with (
        torchfmri.stream(one, None, prompts(), STEPS) as first,
        torchfmri.stream(two, None, prompts(), STEPS) as second,
    ):
        count = sum(1 for _ in zip(first, second, strict=False))
        list(first)
        list(second)
    assert count > STEPS
    assert same(first.scan, expected[0])
    assert same(second.scan, expected[1])


def test_a_stream_is_an_iterator() -> None:
    with torchfmri.stream(build("llama"), None, prompts()[0], STEPS) as stream:
        assert next(stream).id == prompts()[0][0]
        rest = list(stream)
    assert len(rest) == len(stream.scan.tokens) - 1


# -- Scanner -------------------------------------------------------------------------------------


def test_a_scanner_scans_prompt_after_prompt() -> None:
    """What was found out about the model on the first prompt holds for every other length."""
    model = build("gpt2")
    scanner = Scanner(model, None, ScanOptions(per="position"))
    for prompt in (prompts()[0], [9], prompts(), prompts()[1]):
        found = scanner.scan(prompt, STEPS)
        assert same(found, torchfmri.scan(model, None, prompt, STEPS))


def test_names_and_conditions() -> None:
    scanner = Scanner(build("llama"))
    scan = scanner.scan(prompts(), 2, names=["one", "two"], conditions=["a", "b"])
    assert scan.names == ("one", "two")
    assert [each.condition for each in scan] == ["a", "b"]
    plain = scanner.scan([prompts()[0]] * 2, 2)
    assert len({*plain.names}) == 2
    for wrong in (["one"], ["one", "two", "three"]):
        for key in ("names", "conditions"):
            with pytest.raises(InspectionError, match=f"2 sequences.*{key}"):
                scanner.scan(prompts(), 2, **{key: wrong})


def test_options_are_a_frozen_record() -> None:
    options = ScanOptions()
    assert (options.per, options.layers, options.voxel, options.live) == ("position", "*", 64, True)
    with pytest.raises(AttributeError):
        options.per = None  # type: ignore[misc]


# -- what a scan holds ---------------------------------------------------------------------------


def test_layers_by_pattern_and_type() -> None:
    model = build("qwen3")
    whole = torchfmri.scan(model, None, prompts()[0], STEPS)
    for pattern in ("*.mlp", nn.Linear, ["*.q_proj", "lm_head"], "model.layers.1.*"):
        scan = torchfmri.scan(model, None, prompts()[0], STEPS, layers=pattern)
        expected = [
            name for name in whole.layers if name in torchfmri.Inspector(model).layers(pattern)
        ]
        assert list(scan.layers) == expected
        for layer in scan.layers:
            for metric in ("activation", "gradient", "learning_cost"):
                one, other = (
                    each.only.layers[metric][:, each.layers.index(layer)] for each in (scan, whole)
                )
                np.testing.assert_allclose(one, other, rtol=1e-5, err_msg=f"{layer} {metric}")


@pytest.mark.parametrize(
    ("name", "layer", "sizes", "kind"),
    [
        ("qwen3", "model.layers.0.self_attn.q_proj", [4] * 4, "head"),
        ("qwen3", "model.layers.0.self_attn.k_proj", [4] * 2, "head"),
        ("qwen3", "model.layers.0.self_attn.q_norm", [4] * 4, "head"),
        ("qwen3", "model.layers.0.mlp.up_proj", [10, 10, 4], "units"),
        ("qwen3", "model.embed_tokens", [10, 6], "units"),
        ("gpt2", "transformer.h.0.mlp.c_fc", [10] * 6 + [4], "units"),
        ("bert", "bert.encoder.layer.0.attention.self.query", [4] * 4, "head"),
        ("mixtral", "model.layers.0.mlp.experts", [10, 6, 1, 1, 1, 1], "units"),
    ],
)
def test_voxels(name: str, layer: str, sizes: list[int], kind: str) -> None:
    """A head in attention's projections, an expert where experts are rows, else neighbours."""
    scan = torchfmri.scan(build(name), None, prompts()[0], 0, per=None, voxel=10, layers=layer)
    anatomy = scan.anatomy
    assert anatomy.count.tolist() == sizes
    from torchfmri._scan.record.anatomy import KINDS

    kinds = [KINDS[each] for each in anatomy.kind]
    experts = sizes.count(1)
    assert kinds == [kind] * (len(sizes) - experts) + ["expert"] * experts
    assert scan.only.voxels["activation"].shape == (7, len(sizes))


def test_meta_is_plain_and_says_what_was_measured() -> None:
    model = build("gpt2")
    scan = torchfmri.scan(
        model, None, prompts()[0], STEPS, per="cached", voxel=8, do_sample=True, seed=3
    )
    meta = json.loads(json.dumps(scan.meta))
    assert meta["class"] == "GPT2LMHeadModel"
    assert meta["per"] == "cached"
    assert meta["voxel"] == 8
    assert "generated" in meta["loss"]
    assert meta["decoding"]["do_sample"] is True
    assert "do not add up to .grad" in " ".join(meta["notes"])
    assert meta["parameters"] == sum(each.numel() for each in model.parameters())
    assert (
        meta["config_hash"]
        != torchfmri.scan(build("llama"), None, prompts()[0], 1, per=None).meta["config_hash"]
    )


def test_the_garbage_collector_rests_while_the_model_runs_and_not_longer() -> None:
    """Neither between steps, nor after an error, nor where it was off before."""
    model, seen, told = build("llama"), [], []

    def look(*_: Any) -> None:
        seen.append(gc.isenabled())
        if len(seen) == fails_at:
            raise ValueError("planned")

    model.model.norm.register_forward_hook(look)
    fails_at = 0
    torchfmri.scan(model, None, prompts()[0], 3, on_token=lambda _: told.append(gc.isenabled()))
    assert gc.isenabled()
    assert told
    assert all(told)
    assert not any(seen[-4:])  # of the steps, and of the pass for gradients
    for steps in (3, 0):
        seen.clear()
        fails_at = 2 if steps else 1
        with pytest.raises(ValueError, match="planned"):
            torchfmri.scan(model, None, prompts()[0], steps)
        assert gc.isenabled()
    fails_at = 0
    gc.disable()
    try:
        torchfmri.scan(model, None, prompts()[0], 2)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_changed_configuration_has_another_hash() -> None:
    model = build("llama")

    def found() -> str:
        scan: Scan = torchfmri.scan(model, None, prompts()[0], 0, per=None)
        return str(scan.meta["config_hash"])

    first = found()
    assert found() == first
    model.config.initializer_range = 0.5
    assert found() != first


def test_what_is_not_captured_is_listed_with_its_reason() -> None:
    """Every layer that was asked for is a column or has a reason, and no column is empty."""
    for name in ("gpt2", "mixtral", "mamba", "falcon", "llama"):
        model = build(name)
        scan = torchfmri.scan(model, None, prompts(), STEPS)
        asked = {
            each
            for each in torchfmri.Inspector(model).layers("*")
            if not isinstance(model.get_submodule(each), nn.ModuleList)
        }
        missed, notes = scan.meta["missed"], scan.meta["layer_notes"]
        assert {*scan.layers} | {*missed} == asked
        assert all(missed.values())
        for column, layer in enumerate(scan.layers):
            empty = all(np.isnan(each.layers["activation"][:, column]).all() for each in scan)
            assert not empty or "learning cost" in notes.get(layer, "") or layer in missed, layer
        assert ("not captured" in scan.table(width=400, sequence=0)) is bool(missed)


def test_a_tied_head_says_where_its_learning_cost_stands() -> None:
    model = build("llama", tie_word_embeddings=True)
    scan = torchfmri.scan(model, None, prompts()[0], STEPS)
    assert np.isnan(scan.only.layers["learning_cost"][:, scan.layers.index("lm_head")]).all()
    assert "learning cost stands there" in scan.meta["layer_notes"]["lm_head"]


def test_a_cache_that_held_the_beginning_is_noted() -> None:
    from transformers import DynamicCache

    model, row = build("llama"), prompts()[0]
    cache = DynamicCache()
    with torch.no_grad():
        model(torch.tensor([row[:4]]), past_key_values=cache)
    scan = torchfmri.scan(model, None, row, STEPS, per=None, past_key_values=cache)
    assert any("4" in note and "cache" in note for note in scan.meta["notes"])


class BaseTuner(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.model(*arguments, **keywords)


class PeftModel(nn.Module):
    """As PEFT wraps a model: a forward of its own, while the inner model generates."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = BaseTuner(model)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.base_model(*arguments, **keywords)

    def generate(self, *arguments: Any, **keywords: Any) -> Any:
        return self.base_model.model.generate(*arguments, **keywords)


class Prepared(PeftModel):
    """As PEFT's activated LoRA: its own forward and generate prepare what the inner model does."""

    def _prepared(self, run: Any, arguments: Any, keywords: Any) -> Any:
        norm = self.base_model.model.model.norm
        handle = norm.register_forward_pre_hook(lambda module, inputs: (inputs[0].flip(-1),))
        try:
            return run(*arguments, **keywords)
        finally:
            handle.remove()

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self._prepared(self.base_model, arguments, keywords)

    def generate(self, *arguments: Any, **keywords: Any) -> Any:
        return self._prepared(self.base_model.model.generate, arguments, keywords)


def test_the_wrapper_s_own_generate_is_used() -> None:
    model, ids = Prepared(build("llama")), torch.tensor([prompts()[0]])
    expected = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=66)[0].tolist()
    inner = build("llama").generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=66)
    assert expected != inner[0].tolist()
    scan = torchfmri.scan(model, None, ids, 4, eos_token_id=66)
    assert scan.tokens.ids.tolist() == expected
    assert scan.only.checks["live_difference"] < 1e-5


class Prompted(PeftModel):
    """As PEFT's prompt learning."""

    _adapters_disabled = False
    active_peft_config = SimpleNamespace(
        is_prompt_learning=True, peft_type="PREFIX_TUNING", num_virtual_tokens=3
    )


@pytest.mark.parametrize("per", [None, "position"])
def test_virtual_tokens_are_refused_by_name(per: Any) -> None:
    model = Prompted(build("llama"))
    words = r"PREFIX_TUNING\) puts 3 virtual tokens before.*disable_adapter"
    with pytest.raises(InspectionError, match=words):
        torchfmri.scan(model, None, prompts()[0], 2, per=per)
    model._adapters_disabled = True
    assert len(torchfmri.scan(model, None, prompts()[0], 2, per=per)) == 1


@pytest.mark.parametrize("wrap", [PeftModel, nn.DataParallel])
@pytest.mark.parametrize("per", [None, "position"])
def test_a_wrapped_model_is_scanned_as_the_one_inside(wrap: Any, per: Any) -> None:
    inner = build("llama")
    expected = torchfmri.scan(inner, None, prompts(), 8, per=per)
    assert len(expected[1]) < 4 + 8, "no row ends early"
    found = torchfmri.scan(wrap(inner), None, prompts(), 8, per=per)
    assert found.layers == expected.layers
    assert same(found, expected)
    if per is not None:
        assert found[0].checks["live_difference"] == expected[0].checks["live_difference"] > 0


def test_a_loop_that_never_runs_the_model() -> None:
    """Nothing live was recorded: an error, or the pass's values and no difference of 0."""
    model = build("llama")

    def decode(model: nn.Module, ids: Tensor) -> Tensor:
        return torch.cat([ids, ids[:, :2]], 1)

    scan = torchfmri.scan(model, None, prompts()[0], STEPS, decode=decode)
    assert scan.only.checks.get("live_difference") is None
    try:
        scan = torchfmri.scan(model, None, prompts()[0], STEPS, per=None, decode=decode)
    except InspectionError:
        return
    assert scan.meta["notes"]


# -- what is refused -----------------------------------------------------------------------------


def differentiates(model: Any, ids: Tensor) -> Tensor:
    """A loop that differentiates something at each step."""
    for _ in range(2):
        logits = model(input_ids=ids).logits[:, -1]
        logits.logsumexp(-1).sum().backward()
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return ids


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"per": "token"}, "per='token'.*'position', 'token_loss', 'cached' or None"),
        ({"loss": "sum"}, "loss='sum'.*'generated', 'all'"),
        ({"voxel": 0}, "voxel=0"),
        ({"voxel": 2.5}, r"voxel=2\.5"),
        ({"voxel": True}, "voxel=True"),
        ({"max_new_tokens": True}, "max_new_tokens=True"),
        ({"seed": "x"}, "seed='x'.*64 bits"),
        ({"seed": 2**70}, "seed=11.*64 bits"),
        ({"input_ids": torch.ones(1, 2)}, "input_ids= is a matter of the prompt"),
        ({"attention_mask": torch.ones(1, 7)}, "attention_mask= is a matter of the prompt"),
        ({"generation_config": GenerationConfig(max_new_tokens=3)}, "max_new_tokens=3, and the"),
        ({"live": "no"}, "live='no': choose True or False"),
        ({"verify": 1}, "verify=1: choose True or False"),
        ({"adapter_names": ["a"]}, "adapter_names=.*set_adapter"),
        ({"temperature": 0}, "temperature=0: .*do_sample=False"),
        ({"temperature": -1.5, "do_sample": True}, r"temperature=-1\.5: .* above 0"),
        ({"temperature": math.nan, "do_sample": True}, "temperature=nan"),
        ({"decode": differentiates}, "does not require grad.*torch.enable_grad"),
        ({"position_ids": torch.ones(1, 7)}, "position_ids= is an input of Qwen3For.*per=None"),
        ({"loss": lambda output: output}, r"lambda>\(output\) is called with output, ids and"),
        ({"loss": lambda output, ids, other, mask, more: output}, "more.*def loss"),
        ({"max_new_tokens": -3}, "max_new_tokens=-3"),
        ({"max_new_tokens": 2.0}, r"max_new_tokens=2\.0"),
        ({"max_new_tokens": 0, "loss": "generated"}, "nothing is generated.*loss='all'"),
        ({"per": "cached", "loss": lambda *_: None}, "per='cached'.*per='position'"),
        ({"loss": lambda *_: torch.ones(())}, r"depends on the model's output, not tensor\(1\.\)"),
        ({"loss": lambda *_: 3}, "must return a tensor.*not 3"),
        ({"per": "token_loss", "loss": lambda output, *_: output.logits.sum()}, "one per token"),
        ({"layers": []}, r"not \[\]"),
        ({"layers": 3}, "not 3"),
        ({"decode": lambda model, ids: None}, "NoneType"),
        ({"decode": lambda model, ids: ids[:, :2]}, r"\(1, 2\).*do not begin.*\(1, 7\)"),
        ({"decode": lambda model, ids: ids + 1}, "do not begin"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, dict) else "",  # the names of the options
)
def test_what_cannot_be_scanned(options: dict[str, Any], words: str) -> None:
    options = {"max_new_tokens": 2, **options}
    model = model_in_use()
    before = state_of(model)
    with pytest.raises(InspectionError, match=words):
        torchfmri.scan(model, None, prompts()[0], **options)
    assert_same_state(before, state_of(model))


@pytest.mark.parametrize("argument", ["layers", "tensors"])
def test_a_pattern_that_matches_nothing(argument: str) -> None:
    with pytest.raises(LayerNotFoundError) as caught:
        torchfmri.scan(build("qwen3"), None, prompts()[0], 2, **{argument: "*.q_porj"})
    assert caught.value.pattern == "*.q_porj"
    assert any(each.endswith("q_proj") for each in caught.value.nearest)
    assert isinstance(caught.value, LookupError)


def test_options_are_no_dictionary() -> None:
    with pytest.raises(InspectionError, match=r"options is a dict\. Write options=torchfmri\.Scan"):
        Scanner(build("llama"), None, {"per": None})  # type: ignore[arg-type]


def test_a_model_is_no_name() -> None:
    with pytest.raises(InspectionError, match=r"not str.*load_model"):
        torchfmri.scan("gpt2", None, [1, 2])  # type: ignore[arg-type]


def test_a_single_token_has_no_loss() -> None:
    with pytest.raises(InspectionError, match="single token"):
        torchfmri.scan(build("llama"), None, [5], 0)
    scan = torchfmri.scan(build("llama"), None, [5], 0, per=None)
    assert np.isfinite(scan.only.layers["activation"]).all()


def test_embeddings_in_the_place_of_ids() -> None:
    def decode(model: Any, ids: Tensor) -> Tensor:
        model(inputs_embeds=torch.zeros(1, 3, 16))
        return ids

    with pytest.raises(InspectionError, match=r"inputs_embeds.*input_ids"):
        torchfmri.scan(build("llama"), None, prompts()[0], 2, decode=decode)


def test_other_inputs_while_generating() -> None:
    """Of images and the like only what happens while generating can be had."""
    model, ids = build("llama"), torch.tensor([prompts()[0]])
    positions = torch.arange(7)[None]
    options = {"position_ids": positions, "eos_token_id": 66}
    scan = torchfmri.scan(model, None, ids, 2, per=None, **options)
    expected = model.generate(ids, max_new_tokens=2, do_sample=False, **options)
    assert scan.tokens.ids.tolist() == expected[0].tolist()
    with pytest.raises(InspectionError, match="position_ids="):
        torchfmri.scan(model, None, ids, 2, per=None, live=False, **options)


def test_tensors_that_are_left_out_are_refused_each_time() -> None:
    scanner = Scanner(build("llama"), None, ScanOptions(None, "*.mlp", tensors="model.norm"))
    for _ in range(2):
        with pytest.raises(InspectionError, match=r"tensors='model\.norm'.*leaves them out"):
            scanner.scan(prompts()[0], 2)


def test_wrong_names_are_said_before_the_model_runs() -> None:
    scanner = Scanner(build("llama"))
    said: list[object] = []
    for wrong in ({"names": ["one"]}, {"conditions": "ab"}):
        with pytest.raises(InspectionError, match=r"2 sequences and .* one for each"):
            scanner.scan(prompts(), 2, on_token=said.append, **wrong)  # type: ignore[arg-type]
    assert not said
    assert (
        len(scanner.scan(prompts(), 0, names=["a", "b"], generate={"num_return_sequences": 2})) == 2
    )


def test_a_typing_mistake_is_not_swallowed() -> None:
    """Unknown options go to generate, which names them; the error is ours and says so."""
    with pytest.raises(InspectionError, match="temprature"):
        torchfmri.scan(build("llama"), None, prompts()[0], 2, temprature=2.0)


def test_a_context_shorter_than_our_first_look() -> None:
    scan = torchfmri.scan(build("gpt2", n_positions=4), None, [5, 6], 2, eos_token_id=66)
    assert len(scan.tokens) == 4


def test_the_scan_s_arrays_are_its_own() -> None:
    """Nothing that comes out is a view of the model, of a buffer, or of another sequence."""
    model = build("llama")
    scan = torchfmri.scan(model, None, prompts(), STEPS, tensors="*.mlp")
    before = copy.deepcopy(scan[1].layers["activation"])
    for each in (*scan[0].layers.values(), *scan[0].voxels.values(), *scan[0].tensors.values()):
        each[:] = 0
    np.testing.assert_array_equal(scan[1].layers["activation"], before)
    assert same(
        torchfmri.scan(model, None, prompts()[1:], STEPS),
        torchfmri.scan(model, None, prompts()[1:], STEPS),
    )


def test_statistics_of_gradients_leave_out_what_has_none() -> None:
    """The last position has no gradient: its zeros are no data."""
    model = build("llama")
    scan = torchfmri.scan(model, None, prompts()[0], max_new_tokens=0, loss="all")
    layer = "model.layers.0.mlp"
    counted = scan.statistics(layer)
    width = model.config.hidden_size
    assert counted["activations"]["count"] == len(scan[0]) * width
    assert counted["gradients"]["count"] == (len(scan[0]) - 1) * width
    assert counted["gradients"]["zero"] == 0


def test_a_stream_runs_under_the_caller_s_autocast() -> None:
    model = build("llama")
    with torch.autocast("cpu", torch.bfloat16):
        scan = torchfmri.scan(model, None, prompts()[0], 3, per=None)
        with torchfmri.stream(model, None, prompts()[0], 3, per=None) as stream:
            assert list(stream)
    assert np.array_equal(
        scan[0].layers["activation"], stream.scan[0].layers["activation"], equal_nan=True
    )


# -- other models --------------------------------------------------------------------------------


def test_a_loop_that_differentiates_leaves_no_gradients() -> None:
    model = model_in_use()
    before = state_of(model)

    def decode(model: Any, ids: Tensor) -> Tensor:
        with torch.enable_grad():
            return differentiates(model, ids)

    scan = torchfmri.scan(model, None, prompts()[0], decode=decode)
    assert scan.tokens.generated.sum() == 2
    assert scan.only.checks["live_difference"] < 1e-5
    assert_same_state(before, state_of(model))


class Recomputed(torch.autograd.Function):
    """A layer that runs its own backward pass, as reversible ones do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.layer(x), gradients[0])
        return x.grad, None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(Recomputed.apply(self.embedding(ids), self.layer))


@pytest.mark.parametrize("per", ["position", "token_loss"])
def test_a_function_that_runs_backward_passes(per: Any) -> None:
    model = Reversible()
    before = state_of(model)
    torchfmri.scan(model, None, [1, 2, 3], 2, per=per, layers=["embedding", "head"])
    assert_same_state(before, state_of(model))


def test_logits_in_a_named_tuple() -> None:
    torch.manual_seed(0)
    model = RoutingLanguageModel(RoutingConfig(20, hidden_size=16, blocks=2, heads=2))
    found = torchfmri.scan(model, None, [1, 2, 3], 4)
    ids = torch.from_numpy(found.tokens.ids)[None]
    assert torch.equal(ids, model.generate(ids[:, :3], max_new_tokens=4))
    with torch.no_grad():
        logs = model(ids).logits[0, :-1].log_softmax(-1)
    expected = -logs.gather(-1, ids[0, 1:, None])[:, 0]
    np.testing.assert_allclose(found.tokens.surprisal[1:], expected, rtol=1e-4)
    activations = torchfmri.scan(model, None, [1, 2, 3], 4, per=None)
    np.testing.assert_allclose(activations.tokens.surprisal[1:], expected, rtol=1e-4)


def test_a_generate_of_its_own_ends_where_it_says() -> None:
    torch.manual_seed(0)
    model = RoutingLanguageModel(RoutingConfig(20, hidden_size=16, blocks=2, heads=2))
    free = torchfmri.scan(model, None, [[1, 2, 3], [7, 7, 7]], 5, per=None)
    end = int(free[0].tokens.ids[4])
    ended = torchfmri.scan(model, None, [[1, 2, 3], [7, 7, 7]], 5, per=None, eos_token_id=end)
    for one, other in zip(free, ended, strict=True):
        written = one.tokens.ids[3:].tolist()
        count = written.index(end) + 1 if end in written else 5
        assert other.tokens.ids.tolist() == one.tokens.ids[: 3 + count].tolist()


class LossFirst(nn.Module):
    """Returns a loss before its logits, or no logits at all."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)
        self.hidden = hidden

    def forward(self, ids: Tensor) -> Any:
        logits = self.head(self.embedding(ids))
        return logits.mean(), (logits[..., None] if self.hidden else logits)


def test_a_tuple_with_the_loss_first() -> None:
    assert np.isfinite(torchfmri.scan(LossFirst(False), None, [1, 2], 2).tokens.surprisal[1:]).all()


def test_without_gradients_what_is_missing_is_said_and_a_pass_has_it() -> None:
    model = build("llama")
    live = torchfmri.scan(model, None, prompts()[0], STEPS, per=None)
    start = len(prompts()[0])
    assert np.isnan(live.tokens.surprisal[:start]).all()
    assert np.isfinite(live.tokens.surprisal[start:]).all()
    assert np.isnan(live.values().values[-1]).all()
    notes = " ".join(live.meta["notes"])
    for words in ("no surprisal and entropy of the prompt", "no activations of the last token"):
        assert words in notes
        assert words in " ".join(live.table(width=100).split())
    passed = torchfmri.scan(model, None, prompts()[0], STEPS, per=None, live=False)
    assert np.isfinite(passed.tokens.surprisal[1:]).all()
    assert np.isfinite(passed.values().values).all()
    assert passed.meta["notes"] == []


def test_no_logits_at_all_are_said() -> None:
    found = torchfmri.scan(LossFirst(True), None, [1, 2, 3], 0, per=None)
    assert np.isnan(found.tokens.surprisal).all()
    assert "no surprisal and entropy of any token" in " ".join(found.meta["notes"])
    assert "no surprisal and entropy of any token" in found.table(width=400)


def test_a_table_of_positions_that_ends() -> None:
    model = build("gpt2")
    table = model.config.n_positions
    options: dict[str, Any] = {"layers": "*.mlp", "per": None, "eos_token_id": None}
    for prompt, count in ((prompts()[0], 10**9), ([3] * (table + 1), 0)):
        with pytest.raises(InspectionError, match=f"has a table of {table}"):
            torchfmri.scan(model, None, prompt, count, **options)
    with pytest.raises(InspectionError, match=f"{table + 1} positions.*table of {table}"):
        torchfmri.scan(model, None, [3] * (table - 1), 2, layers="*.mlp", eos_token_id=None)
    assert len(torchfmri.scan(model, None, [3] * (table - 1), 1, **options).only) == table


def test_a_number_of_tokens_that_no_memory_holds() -> None:
    """The model ends by itself; room for all that it might write is not made."""
    model, tokenizer = torchfmri.load_model("tiny")
    few = torchfmri.scan(model, tokenizer, "What is the capital of France?", 64, None, chat=True)
    for count in (10**12, 2**62):
        many = torchfmri.scan(
            model, tokenizer, "What is the capital of France?", count, None, chat=True
        )
        assert many.text == few.text


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_models_that_cannot_be_run() -> None:
    own = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))
    traced = torch.jit.trace(own, torch.tensor([[1, 2, 3]]))
    with torch.device("meta"):
        empty = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))
    for model, words in ((traced, "TorchScript"), (empty, r"'0\.weight' is on the meta device")):
        with pytest.raises(InspectionError, match=words):
            torchfmri.scan(model, None, [1, 2, 3], 2)
    with pytest.raises(InspectionError, match=r"Token id 99 at position 1 .* from 0 to 49"):
        torchfmri.scan(own, None, [[1, 2], [3, 99]], 2)
    scanner = Scanner(own)
    scanner.scan(list(range(20)), 0)
    with pytest.raises(InspectionError, match=r"Token id 50 at position 17 .* from 0 to 49"):
        scanner.scan([*range(17), 50], 0)


def test_all_tensors() -> None:
    model, tokenizer = torchfmri.load_model("tiny")
    for per in ("position", None):
        scan = torchfmri.scan(model, tokenizer, "One,", 2, per, tensors="*")
        assert set(scan.only.tensors) == set(scan.layers)
    some = torchfmri.scan(model, tokenizer, "One,", 2, None, "*.mlp", tensors="*")
    assert set(some.only.tensors) == set(some.layers)
    assert "leaves out" in " ".join(some.meta["notes"])
    with pytest.raises(InspectionError, match=r"tensors='model\.layers' matches no layer"):
        torchfmri.scan(model, tokenizer, "One,", 2, tensors="model.layers")
