"""A `generate` that runs compiled is recorded inside its graph, and stays compiled."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from oracles import assert_same_state, state_of
from scan_oracles import build, prompts
from versions import needs

import torchfmri
from torchfmri import Scan

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 6


def slow(case: Any) -> Any:
    """A way to compile that differs little from one of the fast tier."""
    return pytest.param(case, marks=pytest.mark.slow)


class Compiler:
    """A backend that counts what it compiles, and runs the graph as it is."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def __call__(self, graph: Any, inputs: Any, **_: Any) -> Any:
        self.graphs.append(graph)
        return graph.forward


def settings(backend: Any, **more: Any) -> dict[str, Any]:
    """Options with which `generate` compiles its steps, also on the CPU."""
    config = transformers.CompileConfig(backend="eager", mode=None)
    config._compile_all_devices = True
    config.to_dict = lambda: {"backend": backend}
    return {"cache_implementation": "static", "compile_config": config, "do_sample": False,
            "eos_token_id": None, "pad_token_id": 0, **more}  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def assert_alike(one: Scan, other: Scan, sequences: int = 1) -> None:
    for number in range(sequences):
        a, b = one[number], other[number]
        assert a.tokens.ids.tolist() == b.tokens.ids.tolist()
        np.testing.assert_allclose(a.voxels["activation"], b.voxels["activation"], rtol=1e-5)
        np.testing.assert_allclose(
            a.statistics["activations"], b.statistics["activations"], rtol=1e-5, atol=1e-7
        )
        np.testing.assert_allclose(a.tokens.surprisal, b.tokens.surprisal, rtol=1e-4, atol=1e-5)


def test_it_stays_compiled_and_is_the_eager_scan() -> None:
    model, backend = build("llama"), Compiler()
    options = settings(backend)
    before = state_of(model)
    found = torchfmri.scan(model, None, prompts()[0], STEPS, per=None, **options)
    assert_same_state(before, state_of(model))
    assert "_compiled_call" not in model.__dict__
    assert found.meta["generation"] == "compiled"
    assert len(backend.graphs) == 1
    eager = torchfmri.scan(
        model, None, prompts()[0], STEPS, per=None, **settings(backend, disable_compile=True)
    )
    assert eager.meta["generation"] == "eager"
    assert_alike(found, eager)
    assert np.isfinite(found[0].voxels["activation"][len(prompts()[0]) : -1]).all()


@needs("torch", "2.13", "it compiles more often")
def test_a_second_scan_compiles_nothing_and_the_user_s_graph_is_his_own() -> None:
    model, backend = build("llama"), Compiler()
    options = settings(backend)
    ids = torch.tensor([prompts()[0]])

    def generate() -> Any:
        return model.generate(ids, max_new_tokens=STEPS, **options)

    plain = generate()
    own = len(backend.graphs)
    first = torchfmri.scan(model, None, prompts()[0], STEPS, per=None, **options)
    assert len(backend.graphs) == own + 1
    second = torchfmri.scan(model, None, prompts()[0], STEPS, per="position", **options)
    shorter = torchfmri.scan(model, None, prompts()[0][:-2], STEPS - 2, per=None, **options)
    again = generate()
    assert len(backend.graphs) == own + 1
    assert first.meta["generation"] == second.meta["generation"] == "compiled"
    assert shorter.meta["generation"] == "compiled"
    assert plain.tolist() == again.tolist() == [first[0].tokens.ids.tolist()]


def eager_and_compiled(change: Any, steps: int = STEPS, **more: Any) -> list[Scan]:
    """The scan of a model that was changed, without and with compiled steps."""
    found = []
    for disabled in (True, False):
        torch.compiler.reset()
        model = build("llama")
        options = {**settings("eager", disable_compile=disabled), **(change(model) or {})}
        found.append(torchfmri.scan(model, None, prompts()[0], steps, per=None, **options, **more))
    assert found[0].meta["generation"] == "eager"
    return found


def test_a_model_that_changes_between_the_steps_is_followed() -> None:
    """Torch has to look in every step at what the graph depends on."""

    def steer(model: Any) -> dict[str, Any]:
        norm = model.model.layers[0].input_layernorm

        def change(ids: Any, scores: Any) -> Any:
            norm.variance_epsilon = 1e-6 if ids.shape[1] < len(prompts()[0]) + 6 else 5.0
            return scores

        return {"logits_processor": transformers.LogitsProcessorList([change])}

    eager, compiled = eager_and_compiled(steer, steps=10)
    assert compiled.meta["generation"] == "compiled"
    assert_alike(compiled, eager)


def test_steps_that_torch_compiles_no_more_are_taken_in_once() -> None:
    """A hook that counts its calls has torch compile every step, until it gives up."""

    def count(model: Any) -> None:
        left = [6]

        def amplify(module: Any, arguments: Any, output: Any) -> Any:
            if output.shape[1] > 1:
                return None
            left[0] -= 1
            return output * 8.0 if left[0] < 0 else None

        model.model.layers[0].mlp.register_forward_hook(amplify)

    told: list[Any] = []
    eager, compiled = eager_and_compiled(count, steps=12, on_token=told.append)
    assert compiled.meta["generation"] == "eager"
    assert any("torch compiled them too often" in each for each in compiled.meta["notes"])
    assert_alike(compiled, eager)
    assert [each.position for each in told] == 2 * list(range(len(prompts()[0]) + 12))


def test_a_step_with_a_gap_in_its_graph_has_what_was_seen() -> None:
    def interrupt(model: Any) -> None:
        written = model.model.layers[0].mlp.forward

        def forward(x: Any) -> Any:
            y = written(x)
            torch._dynamo.graph_break()
            return y

        model.model.layers[0].mlp.forward = forward

    eager, compiled = eager_and_compiled(interrupt)
    assert any("could be followed into the compiled graph" in n for n in compiled.meta["notes"])
    for layer in eager.layers:
        one, other = (
            each.values("activation", pattern=layer)[1][:, 0] for each in (eager, compiled)
        )
        if layer in compiled.meta["missed"]:
            one = np.where(np.isnan(other), np.nan, one)
        np.testing.assert_allclose(other, one, rtol=1e-5, err_msg=layer)
    assert len(compiled.meta["missed"]) < 3


def compile_in_place(model: Any, backend: Any) -> None:
    model.compile(backend=backend)


def compile_forward(model: Any, backend: Any) -> None:
    model.forward = torch.compile(model.forward, backend=backend)


@pytest.mark.parametrize("how", [compile_in_place, slow(compile_forward)])
def test_a_model_that_the_user_compiled_stays_compiled(how: Any) -> None:
    """With the cache that grows, for which torch compiles a second graph of changing shapes."""
    model, backend = build("llama"), Compiler()
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = torchfmri.scan(model, None, prompts()[0], STEPS, per=None, **options)
    how(model, backend)
    ids = torch.tensor([prompts()[0]])
    plain = model.generate(ids, max_new_tokens=STEPS, **options).tolist()
    own, before, attributes = len(backend.graphs), state_of(model), dict(vars(model))
    found = torchfmri.scan(model, None, prompts()[0], STEPS, per=None, **options)
    compiled = len(backend.graphs)
    assert compiled > own
    assert found.meta["generation"] == "compiled"
    assert plain == [found[0].tokens.ids.tolist()]
    assert_alike(found, expected)
    assert_same_state(before, state_of(model))
    assert dict(vars(model)) == attributes
    again = torchfmri.scan(model, None, prompts()[0], STEPS, per="position", **options)
    assert again.meta["generation"] == "compiled"
    assert model.generate(ids, max_new_tokens=STEPS, **options).tolist() == plain
    assert len(backend.graphs) == compiled


def test_a_compiled_model_is_put_back_after_an_error() -> None:
    model, backend = build("llama"), Compiler()
    model.compile(backend=backend)
    attributes = dict(vars(model))

    def stop(token: Any) -> None:
        if token.position == len(prompts()[0]) + 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        torchfmri.scan(model, None, prompts()[0], STEPS, per=None, on_token=stop, do_sample=False)
    assert dict(vars(model)) == attributes


def compile_wrapped(model: Any, backend: Any) -> None:
    for number, block in enumerate(model.model.layers):
        model.model.layers[number] = torch.compile(block, backend=backend)


def compile_blocks(model: Any, backend: Any) -> None:
    for block in model.model.layers:
        block.compile(backend=backend)


def compile_forwards(model: Any, backend: Any) -> None:
    for block in model.model.layers:
        block.forward = torch.compile(block.forward, backend=backend)


def compile_one_part(model: Any, backend: Any) -> None:
    model.model.layers[1].mlp.compile(backend=backend)


PLAIN = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@needs("torch", "2.13", "it compiles more often")
@pytest.mark.parametrize(
    "how", [compile_blocks, slow(compile_forwards), slow(compile_wrapped), compile_one_part]
)
def test_blocks_that_the_user_compiled_stay_compiled(how: Any) -> None:
    model, backend = build("llama"), Compiler()
    expected = torchfmri.scan(model, None, prompts()[0], STEPS, per=None, **PLAIN)
    how(model, backend)
    ids = torch.tensor([prompts()[0]])
    plain = model.generate(ids, max_new_tokens=STEPS, **PLAIN).tolist()
    own, before = len(backend.graphs), state_of(model)
    attributes = [dict(vars(each)) for each in model.modules()]
    found = torchfmri.scan(model, None, prompts()[0], STEPS, per=None, verify=True, **PLAIN)
    compiled = len(backend.graphs)
    assert own < compiled <= 2 * own
    assert found.meta["generation"] == "compiled parts"
    assert found.meta["notes"] == expected.meta["notes"]
    assert found[0].checks["tokens_identical"] is True
    assert plain == [found[0].tokens.ids.tolist()]
    assert_alike(found, expected)
    assert np.isfinite(found[0].voxels["activation"][len(prompts()[0]) : -1]).all()
    assert_same_state(before, state_of(model))
    assert [dict(vars(each)) for each in model.modules()] == attributes
    again = torchfmri.scan(model, None, prompts()[0], STEPS, per="position", **PLAIN)
    assert again.meta["generation"] == "compiled parts"
    assert model.generate(ids, max_new_tokens=STEPS, **PLAIN).tolist() == plain
    assert len(backend.graphs) == compiled


@pytest.mark.parametrize("how", [slow(compile_blocks), slow(compile_forwards), compile_wrapped])
def test_compiled_blocks_are_put_back_after_an_error(how: Any) -> None:
    model, backend = build("llama"), Compiler()
    how(model, backend)
    attributes = [dict(vars(each)) for each in model.modules()]
    ran: list[int] = []

    def stop(token: Any) -> None:
        ran.append(token.position)
        if token.position == len(prompts()[0]) + 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        torchfmri.scan(model, None, prompts()[0], STEPS, per=None, on_token=stop, do_sample=False)
    assert ran
    assert backend.graphs
    assert [dict(vars(each)) for each in model.modules()] == attributes
    stance = torch.compiler.set_stance("default")
    assert stance.prev.stance == "default"
    seen = len(backend.graphs)
    model.generate(torch.tensor([prompts()[0]]), max_new_tokens=2, **PLAIN)
    assert len(backend.graphs) > seen  # the user's own code is compiled at last


def test_more_blocks_than_torch_keeps_graphs_of_one_function() -> None:
    """Transformers number their layers, and a graph serves one number."""
    model, backend = build("llama", num_hidden_layers=10), Compiler()
    expected = torchfmri.scan(model, None, prompts()[0], STEPS, per=None, **PLAIN)
    compile_blocks(model, backend)
    found = torchfmri.scan(model, None, prompts()[0], STEPS, per=None, **PLAIN)
    assert found.meta["generation"] == "compiled parts"
    assert found.meta["notes"] == expected.meta["notes"]
    assert_alike(found, expected)
    compiled = len(backend.graphs)
    assert compiled >= 10
    torchfmri.scan(model, None, prompts()[0], STEPS, per=None, **PLAIN)
    assert len(backend.graphs) == compiled


def test_alike_blocks_are_compiled_once() -> None:
    """Blocks that keep no number and no cache share a graph in the scan as without it."""
    model, backend = build("llama", num_hidden_layers=6), Compiler()
    for block in model.model.layers:
        block.mlp.compile(backend=backend)
    found = torchfmri.scan(model, None, prompts()[0], STEPS, per=None, **PLAIN)
    assert found.meta["generation"] == "compiled parts"
    assert len(backend.graphs) == 1


@pytest.mark.parametrize("architecture", [slow("gpt2"), slow("deepseek-v3"), "qwen3-moe"])
def test_compiled_parts_of_other_models(architecture: str) -> None:
    model, backend = build(architecture), Compiler()
    expected = torchfmri.scan(model, None, prompts()[:2], STEPS, per=None, **PLAIN)
    blocks = model.transformer.h if architecture == "gpt2" else model.model.layers
    for block in blocks:
        block.compile(backend=backend)
    found = torchfmri.scan(model, None, prompts()[:2], STEPS, per=None, **PLAIN)
    assert found.meta["generation"] == "compiled parts"
    assert found.meta["missed"] == expected.meta["missed"]
    assert_alike(found, expected, sequences=2)


def test_a_part_that_is_called_repeatedly_runs_eagerly_and_says_so() -> None:
    model, backend = build("llama"), Compiler()
    model.model.layers[1].mlp = model.model.layers[0].mlp
    compile_blocks(model, backend)
    found = torchfmri.scan(model, None, prompts()[0], STEPS, per=None, **PLAIN)
    assert found.meta["generation"] == "eager"
    assert any("called several times" in each for each in found.meta["notes"])
    assert not backend.graphs


def test_a_part_that_cannot_be_compiled_runs_eagerly_and_says_so() -> None:
    def broken(graph: Any, inputs: Any, **_: Any) -> Any:
        raise RuntimeError("no compiler here")

    model = build("llama")
    expected = torchfmri.scan(model, None, prompts()[0], STEPS, per=None, **PLAIN)
    compile_blocks(model, broken)
    found = torchfmri.scan(model, None, prompts()[0], STEPS, per=None, **PLAIN)
    assert found.meta["generation"] == "eager"
    assert any("compiled parts ran eagerly" in each for each in found.meta["notes"])
    assert_alike(found, expected)


def test_a_forward_that_was_compiled_in_place_of_the_class_s_own_is_the_one_that_runs() -> None:
    model, backend = build("llama"), Compiler()
    block = model.model.layers[0].mlp
    written = block.forward
    block.forward = lambda x: 2 * written(x)
    expected = torchfmri.scan(model, None, prompts()[0], STEPS, per=None, **PLAIN)
    block.forward = torch.compile(block.forward, backend=backend)
    found = torchfmri.scan(model, None, prompts()[0], STEPS, per=None, **PLAIN)
    assert found.meta["generation"] == "compiled parts"
    assert_alike(found, expected)


@pytest.mark.parametrize("how", [slow(compile_in_place), compile_blocks])
def test_a_compiled_model_that_was_scanned_can_be_freed(how: Any) -> None:
    model = build("llama")
    how(model, Compiler())
    torchfmri.scan(model, None, prompts()[0], STEPS, per=None, **PLAIN)
    gone = weakref.ref(model.model.layers[0])
    torch.compiler.reset()
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.slow
@pytest.mark.parametrize("how", [compile_blocks, compile_wrapped])
def test_blocks_compiled_by_inductor(how: Any) -> None:
    model = build("llama")
    eager = torchfmri.scan(model, None, prompts()[0], STEPS, per=None, **PLAIN)
    how(model, "inductor")
    ids = torch.tensor([prompts()[0]])
    plain = model.generate(ids, max_new_tokens=STEPS, **PLAIN).tolist()
    found = torchfmri.scan(model, None, prompts()[0], STEPS, per=None, **PLAIN)
    assert found.meta["generation"] == "compiled parts"
    assert plain == [found[0].tokens.ids.tolist()]
    assert_alike(found, eager)


def test_live_tokens_a_padded_batch_and_kept_tensors() -> None:
    model, options = build("llama"), settings("eager")
    told: list[Any] = []
    layer = "model.layers.0.mlp"
    found = torchfmri.scan(
        model, None, prompts()[:2], STEPS, per=None, on_token=told.append, verify=True,
        tensors=layer, **options,
    )  # fmt: skip
    eager = torchfmri.scan(
        model, None, prompts()[:2], STEPS, per=None, tensors=layer,
        **{**options, "disable_compile": True},
    )  # fmt: skip
    assert found.meta["generation"] == "compiled"
    assert_alike(found, eager, sequences=2)
    assert found[0].checks["tokens_identical"] is True
    assert len(told) == sum(len(each.tokens.ids) for each in found)
    for each in told:
        here = found[each.row].voxels["activation"][each.position]
        np.testing.assert_array_equal(each.voxels, here)
    for row in range(2):
        np.testing.assert_allclose(
            found[row].tensors[layer], eager[row].tensors[layer], rtol=1e-5, atol=1e-6
        )


@pytest.mark.slow
def test_what_cannot_be_compiled_runs_eagerly_and_says_so() -> None:
    def broken(graph: Any, inputs: Any, **_: Any) -> Any:
        raise RuntimeError("no compiler here")

    model = build("llama")
    found = torchfmri.scan(model, None, prompts()[0], STEPS, per=None, **settings(broken))
    expected = torchfmri.scan(
        model, None, prompts()[0], STEPS, per=None, **settings("eager", disable_compile=True)
    )
    assert found.meta["generation"] == "eager"
    assert any("steps ran eagerly" in each for each in found.meta["notes"])
    assert_alike(found, expected)


def test_a_layer_that_is_called_repeatedly_is_followed_eagerly() -> None:
    model = build("llama")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    found = torchfmri.scan(model, None, prompts()[0], STEPS, per=None, **settings("eager"))
    assert found.meta["generation"] == "eager"
    assert any("called several times" in each for each in found.meta["notes"])
