"""Failures are explained: each one is made to happen for real on a small model."""

import copy
import gc
import pickle
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from processes import run_in_processes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchfmri
from torchfmri import ExplainedError, Explanation, InspectionError, explain, explained
from torchfmri._explain.entry_points import FAILURES
from torchfmri.exceptions import explained_error


class Block(nn.Module):
    """A layer whose activation can be replaced by something that fails."""

    def __init__(self, act: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Net(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block(act), Block()])
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Wrap(nn.Module):
    """`inner` as a layer of a model, so that its name can be told."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Identity(), inner)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.body[1](*inputs)


def failure_of(run: Callable[[], object], model: nn.Module | None = None) -> Explanation:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is what is tested
        run()
    return explain(caught.value, model)


def x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3, 4)))


# --- one function per failure ------------------------------------------------------------------


def write_saved_output() -> None:
    def act(h: Tensor) -> Tensor:
        h = torch.sigmoid(h)
        h.mul_(2)
        return h

    model = Net(act)
    model(x()).sum().backward()


def step_too_early() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = model(x()).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    loss.backward()


def go_back_twice() -> None:
    loss = Net()(x()).pow(2).sum()
    loss.backward()
    loss.backward()


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, factor: Tensor) -> Tensor:
        return x * factor

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> object:
        return gradient


class ScaleShape(Scale):
    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> object:
        return gradient.sum(0), None


class ScaleDevice(Scale):
    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> object:
        return gradient.to("meta"), None


class ScaleComplex(Scale):
    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> object:
        return gradient.to(torch.complex64), None


class ScaleNumber(Scale):
    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> object:
        return 1.0, None


def go_back_through(function: type[Scale]) -> None:
    model = Net(lambda h: function.apply(h, torch.ones(8)))
    model(x()).sum().backward()


def find_nan() -> None:
    model = Net(lambda h: torch.sqrt(h * 0) * 0)
    with torch.autograd.set_detect_anomaly(True):
        model(x()).sum().backward()


def forget_graph() -> None:
    model = Net()
    with torch.no_grad():
        loss = model(x()).sum()
    loss.backward()


def give_gradient_of_wrong_shape() -> None:
    Net()(x()).backward(torch.ones(3))


def return_other_shape_from_hook() -> None:
    y = Net()(x())
    y.register_hook(lambda gradient: gradient[0])
    y.sum().backward()


def ask_for_unused() -> None:
    torch.autograd.grad(Net()(x()).sum(), x().requires_grad_())


def write_parameter() -> None:
    Net().head.weight.add_(1)


def follow_hook_in_place() -> None:
    model = Wrap(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)))
    model.body[1][0].register_full_backward_hook(lambda module, inputs, outputs: None)
    model(x())


def write_part() -> None:
    Net(lambda h: h.unbind(0)[0].add_(1))(x())


def use_inference_tensor() -> None:
    with torch.inference_mode():
        given = x()
    Net()(given)


def recompute_differently() -> None:
    calls = []

    def act(h: Tensor) -> Tensor:
        calls.append(1)
        return torch.sigmoid(h) * h if len(calls) == 1 else h

    model = Net(act)
    h = model.layers[0](x())
    checkpoint(model.layers[1], h, use_reentrant=False).sum().backward()


class Partial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def leave_parameters_out() -> None:
    model = nn.parallel.DistributedDataParallel(Partial())
    for _ in range(2):
        model(x()).sum().backward()


def need_too_much() -> None:
    Net()(torch.ones(1, 4).expand(2**44, 4))


def raise_out_of_memory() -> None:
    def act(h: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 ...")

    Net(act)(x())


def feed_cache_twice() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=50,
    )
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(50, (1, 6))
    mask = torch.zeros(1, 1, 6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), -1e9)
    cache = transformers.DynamicCache()
    for _ in range(2):
        model(ids, attention_mask=mask, past_key_values=cache)


def mix_autocast() -> None:
    model = Net()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = model.layers[0](x())
    model.layers[1](h)


def load_wrapped() -> None:
    Net().load_state_dict({f"module.{key}": each for key, each in Net().state_dict().items()})


def raise_in_hook() -> None:
    model = Net()
    model.layers[1].up.register_forward_hook(lambda module, inputs, output: 1 / 0)
    model(x())


def raise_in_tensor_hook() -> None:
    y = Net()(x())
    y.register_hook(lambda gradient: 1 / 0)
    y.sum().backward()


class Case(NamedTuple):
    """A failure, its kind, the layer that is to be named, and words of the first cure or a fact."""

    run: Callable[[], object]
    kind: str
    layer: str | None
    said: str


def in_net(act: Callable[[Tensor], object]) -> Callable[[], object]:
    return lambda: Net(act)(x())


def in_layer(module: nn.Module, *inputs: Tensor) -> Callable[[], object]:
    return lambda: Wrap(module)(*inputs)


CASES = {
    "saved output": Case(write_saved_output, "modified_in_place", None, "Sigmoid had kept"),
    "step too early": Case(step_too_early, "modified_in_place", "head", "'head.weight'"),
    "twice": Case(go_back_twice, "backward_twice", None, "detach()"),
    "gradients": Case(lambda: go_back_through(Scale), "number_of_gradients", None, "Return 2"),
    "shape": Case(lambda: go_back_through(ScaleShape), "gradient_shape", None, "sum_to_size"),
    "device": Case(lambda: go_back_through(ScaleDevice), "gradient_device", None, "zeros_like"),
    "complex": Case(lambda: go_back_through(ScaleComplex), "gradient_dtype", None, "ScaleComplex"),
    "number": Case(lambda: go_back_through(ScaleNumber), "gradient_type", None, "ScaleNumber"),
    "nan": Case(find_nan, "nan_gradient", None, "sqrt(x + eps)"),
    "no graph": Case(forget_graph, "no_graph", None, "14 of 14 parameters"),
    "not scalar": Case(lambda: Net()(x()).backward(), "loss_not_scalar", None, "shape (3, 3)"),
    "given": Case(give_gradient_of_wrong_shape, "gradient_given", None, "ones_like"),
    "hook shape": Case(return_other_shape_from_hook, "hook_changed_shape", None, "Return None"),
    "unused": Case(ask_for_unused, "not_in_graph", None, "the very tensor"),
    "leaf": Case(write_parameter, "leaf_in_place", None, "torch.no_grad()"),
    "hooked": Case(follow_hook_in_place, "hooked_in_place", "body.1.1", "inplace=False"),
    "view": Case(write_part, "view_in_place", "layers.1", "clone()"),
    "inference": Case(use_inference_tensor, "inference_tensor", "layers.0.up", "no_grad()"),
    "checkpoint": Case(recompute_differently, "checkpoint_mismatch", "layers.1", "during forward"),
    "memory": Case(need_too_much, "out_of_memory", "layers.0.up", "TiB"),
    "memory cuda": Case(raise_out_of_memory, "out_of_memory", "layers.1", "20.00 MiB"),
    "cache": Case(feed_cache_twice, "doubled_cache", "model.layers.0.self_attn", "ids[:, -1:]"),
    "linear": Case(lambda: Net()(x(3, 5)), "matrix_shape", "layers.0.up", "takes 4 features"),
    "flatten": Case(lambda: Net()(x(3, 2, 2)), "matrix_shape", "layers.0.up", "x.flatten(1)"),
    "transpose": Case(lambda: Net()(x(4, 3)), "matrix_shape", "layers.0.up", "x.transpose(0, -1)"),
    "channels": Case(
        in_layer(nn.Conv2d(3, 4, 3), x(1, 8, 8, 3)), "channels", "body.1", "x.permute(0, 3, 1, 2)"
    ),
    "one value": Case(
        in_layer(nn.BatchNorm1d(4), x(1, 4)), "one_value_per_channel", "body.1", "model.eval()"
    ),
    "norm": Case(in_layer(nn.LayerNorm(4), x(3, 5)), "normalized_shape", "body.1", "for the size"),
    "batch norm": Case(
        in_layer(nn.BatchNorm1d(4), x(3, 5)), "normalized_shape", "body.1", "for the size"
    ),
    "recurrent": Case(in_layer(nn.LSTM(4, 4), x(3, 1, 5)), "features", "body.1", "4 features"),
    "attention": Case(
        in_layer(nn.MultiheadAttention(8, 2), *[x(3, 1, 6)] * 3), "features", "body.1", "8 features"
    ),
    "small": Case(in_layer(nn.Conv2d(3, 4, 3), x(1, 3, 2, 2)), "too_small", "body.1", "padding="),
    "pool": Case(in_layer(nn.MaxPool2d(4), x(1, 3, 2, 2)), "too_small", "body.1", "padding="),
    "dimensions": Case(in_layer(nn.Conv2d(3, 4, 3), x(8, 8)), "dimensions", "body.1", "unsqueeze"),
    "sizes": Case(in_net(lambda h: h + torch.ones(5)), "sizes", "layers.1", "Print both"),
    "view shape": Case(in_net(lambda h: h.view(5, 2)), "view_shape", "layers.1", "x.view(-1"),
    "strides": Case(in_net(lambda h: h.t().view(-1)), "view_shape", "layers.1", "reshape"),
    "index": Case(
        in_layer(nn.Embedding(5, 4), torch.tensor([0, 7])),
        "index_out_of_range",
        "body.1",
        "5 rows (0 to 4); the indices run from 0 to 7",
    ),
    "bag": Case(
        in_layer(nn.EmbeddingBag(5, 4), torch.tensor([[7]])),
        "index_out_of_range",
        "body.1",
        "num_embeddings",
    ),
    "target": Case(
        lambda: F.cross_entropy(Net()(x()), torch.tensor([1, 2, 3])),
        "target_out_of_range",
        None,
        "Probably the labels start at 1",
    ),
    "ignored": Case(
        lambda: F.cross_entropy(Net()(x()), torch.tensor([-1, 0, 1])),
        "target_out_of_range",
        None,
        "ignore_index=-1",
    ),
    "target float": Case(
        lambda: nn.CrossEntropyLoss()(x(), torch.zeros(3)), "target_dtype", "", "target.long()"
    ),
    "target int": Case(
        lambda: nn.CrossEntropyLoss()(x(), torch.zeros(3).int()), "target_dtype", "", "long()"
    ),
    "target shape": Case(
        lambda: F.cross_entropy(x(2, 7, 5), torch.zeros(2, 7).long()),
        "target_shape",
        None,
        "flatten(0, 1)",
    ),
    "float ids": Case(in_layer(nn.Embedding(5, 4), x(3)), "index_dtype", "body.1", "ids.long()"),
    "meta": Case(
        lambda: Net()(torch.empty(3, 4, device="meta")), "devices", "layers.0.up", "float32 meta"
    ),
    "meta copy": Case(
        lambda: Wrap(nn.Linear(4, 4, device="meta")).to("cpu"), "meta_tensor", "body.1", "to_empty"
    ),
    "half": Case(lambda: Net()(x().half()), "dtypes", "layers.0.up", "float16 cpu"),
    "double": Case(lambda: Net()(x().double()), "dtypes", "layers.0.up", "NumPy"),
    "long": Case(lambda: Net()(torch.ones(3, 4).long()), "dtypes", "layers.0.up", "Whole numbers"),
    "autocast": Case(mix_autocast, "dtypes", "layers.1.up", "torch.autocast"),
    "conv half": Case(
        in_layer(nn.Conv2d(3, 4, 3), x(1, 3, 8, 8).half()), "dtypes", "body.1", "autocast"
    ),
    "matmul": Case(in_net(lambda h: h @ h.t().half()), "dtypes", "layers.1", "autocast"),
    "binary long": Case(
        lambda: F.binary_cross_entropy(torch.rand(3), torch.ones(3).long()),
        "target_dtype",
        None,
        "target.float()",
    ),
    "not supported": Case(
        in_net(lambda h: F.log_softmax(h.long(), -1)), "dtype_not_supported", "layers.1", "x.float"
    ),
    "prefix": Case(load_wrapped, "state_dict", "layers.0.up", "key.removeprefix('module.')"),
    "hook": Case(raise_in_hook, "hook_raised", "layers.1.up", "handle.remove()"),
    "tensor hook": Case(raise_in_tensor_hook, "hook_raised", None, "handle.remove()"),
}
DISTRIBUTED = Case(leave_parameters_out, "unused_parameters", "unused", "unused.weight")
FAKED = {"device_assert"}  # needs a GPU, and breaks the process


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_failure_is_explained(case: Case) -> None:
    assert_explained(case)


@pytest.mark.slow
def test_failure_of_distributed_training_is_explained(tmp_path: Path) -> None:
    run_in_processes(explain_distributed, tmp_path, 1)


def explain_distributed(rank: int, folder: str) -> None:
    assert_explained(DISTRIBUTED)


def assert_explained(case: Case) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # anomaly detection, DDP and checkpointing have some
        explanation = failure_of(case.run)
    assert explanation.kind == case.kind
    assert explanation.layer == case.layer
    assert case.said in "\n".join((*explanation.facts, *explanation.cure))
    assert explanation.recognised
    assert explanation.what
    assert explanation.why
    assert not [fact for fact in explanation.facts if "Reading more failed" in fact]
    assert explanation.source is not None
    assert Path(explanation.source.file).parent == Path(__file__).parent
    assert explanation.source.code
    assert max(map(len, explanation.text().splitlines())) <= 100
    assert "{" not in explanation.what + "".join(explanation.cure[1:])


WORDINGS = {
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
    " (when checking argument for argument mat1 in method wrapper_CUDA_addmm)": "devices",
    "Expected all tensors to be on the same device, but got mat1 is on cpu, different from other "
    "tensors on cuda:0 (when checking argument in method wrapper_CUDA_addmm)": "devices",
    "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same or "
    "input should be a MKLDNN tensor and weight is a dense tensor": "devices",
    "Input type (torch.HalfTensor) and bias type (torch.FloatTensor) should be": "dtypes",
    "expected scalar type Half but found Float": "dtypes",
    "CUDA error: device-side assert triggered\nCUDA kernel errors might be": "device_assert",
    "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; ...)": "out_of_memory",
    "a and b must have same reduction dim, but got [3, 5] X [4, 4].": "matrix_shape",
    "one of the variables needed for gradient computation has been modified by an inplace operation"
    ": [torch.cuda.FloatTensor [3, 4]], which is output 0 of SigmoidBackward0, is at version 1; "
    "expected version 0 instead. Hint: the backtrace further above": "modified_in_place",
}


@pytest.mark.parametrize(("message", "kind"), WORDINGS.items())
def test_other_wordings(message: str, kind: str) -> None:
    explanation = explain(RuntimeError(message))
    assert explanation.kind == kind
    assert explanation.layer is None
    assert explanation.source is None


# --- where it happened -------------------------------------------------------------------------


def test_backward_failure_is_placed_by_the_parameters_before_it() -> None:
    explanation = failure_of(write_saved_output)
    assert (explanation.layer, explanation.near) == (None, "layers.1.up")
    assert "after layer 'layers.1.up'" in explanation.text()
    assert "detect=True" in explanation.text()
    assert "Probably the next operation, Mul" in explanation.text()


@pytest.mark.parametrize("function", [Scale, ScaleShape, ScaleDevice, ScaleComplex, ScaleNumber])
def test_custom_function_is_placed(function: type[Scale]) -> None:
    assert failure_of(lambda: go_back_through(function)).near == "layers.1.up"


def test_custom_function_in_many_places_is_not_pinned_down() -> None:
    model = nn.Sequential(Block(lambda h: Scale.apply(h, 1)), Block(lambda h: Scale.apply(h, 1)))
    explanation = failure_of(lambda: model(x()).sum().backward())
    assert (explanation.layer, explanation.near) == (None, None)
    assert any("2 of them" in fact and "0.up, 1.up" in fact for fact in explanation.facts)
    assert any("Scale.backward is at" in fact for fact in explanation.facts)


def test_input_of_a_layer_written_later() -> None:
    model = Net()

    def run() -> None:
        h = torch.tanh(model.layers[0](x()) * 1)
        y = model.head(h)
        h += 1
        (y.sum() + h.sum()).backward()

    explanation = failure_of(run)
    assert explanation.layer == "head"
    assert any("mat1" in fact for fact in explanation.facts)
    assert any("output of Add" in fact for fact in explanation.facts)
    assert not any("optimizer" in fact for fact in explanation.facts)


def test_writing_under_no_grad_is_not_blamed_on_an_operation() -> None:
    def act(h: Tensor) -> Tensor:
        h = torch.relu(h)
        y = h.pow(2)
        with torch.no_grad():
            h.add_(1)
        return y

    model = Net(act)
    explanation = failure_of(lambda: model(x()).sum().backward(), model)
    assert any(fact.startswith("Probably the output of Relu was") for fact in explanation.facts)
    assert not any("done in place" in fact for fact in explanation.facts)


def test_detection_finds_the_line_of_the_forward_pass() -> None:
    with (
        pytest.warns(UserWarning, match="Error detected in SigmoidBackward0"),
        pytest.raises(RuntimeError) as caught,
        explained(detect=True),
    ):
        write_saved_output()
    line = caught.value.explanation.forward
    assert line.code == "h = torch.sigmoid(h)"
    assert line.file == __file__
    assert any("h.mul_(2)" in fact for fact in caught.value.explanation.facts)
    assert not torch.is_anomaly_enabled()


def test_without_reading_saved_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchfmri._explain.backward_clues.saved_tensor_errors", lambda node: {})
    explanation = failure_of(write_saved_output)
    assert (explanation.layer, explanation.near) == (None, "layers.1.up")
    assert any(fact.startswith("Probably the only Sigmoid") for fact in explanation.facts)
    explanation = failure_of(step_too_early)
    assert any("'head.weight'" in fact and "may be" in fact for fact in explanation.facts)


def test_saved_tensors_packed_by_others_are_left_alone() -> None:
    unpacked = []

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(1)
        return tensor

    model = Net()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        h = torch.tanh(model(x()))
    written = torch.sigmoid(h)
    loss = (written * h).sum()
    written.mul_(2)

    with pytest.raises(RuntimeError, match="inplace operation") as caught:
        loss.backward()
    before = len(unpacked)
    assert explain(caught.value).kind == "modified_in_place"
    assert len(unpacked) == before


def test_name_comes_from_the_model_that_is_given() -> None:
    model = Net()

    def run(part: nn.Module) -> None:
        part(x(3, 5))

    def fail() -> None:
        run(model.layers[2])

    assert failure_of(fail, model).layer == "layers.2.up"
    assert failure_of(fail, nn.Linear(2, 2)).layer is None
    assert "not a layer of the model" in failure_of(fail, nn.Linear(2, 2)).text()


def test_shared_module_has_the_name_under_its_caller() -> None:
    block = Block()
    model = nn.Sequential(Block(), Block(), Block())
    model[0].up = block.up
    model[2].up = block.up
    model[0].forward = lambda h: h  # type: ignore[method-assign]
    assert failure_of(lambda: model[2](x(3, 5)), model).layer == "2.up"


def test_wrapper_prefixes_are_not_part_of_the_name() -> None:
    model = nn.DataParallel(Net())
    assert failure_of(lambda: model(x(3, 5)), model).layer == "layers.0.up"


def test_error_between_the_layers_of_a_module_is_of_that_module() -> None:
    explanation = failure_of(in_net(lambda h: h + torch.ones(5)))
    assert (explanation.layer, explanation.module) == ("layers.1", "Block")
    assert explanation.source is not None
    assert explanation.source.code.startswith('"sizes": Case') or "h + torch.ones(5)" in (
        explanation.source.code
    )


def test_line_of_a_library_is_told_too() -> None:
    explanation = failure_of(feed_cache_twice)
    assert explanation.operation is not None
    assert "transformers" in explanation.operation.file
    assert explanation.source is not None
    assert explanation.source.function == "feed_cache_twice"


def test_how_far_a_backward_pass_came() -> None:
    class Broken(Scale):
        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> object:
            raise ValueError("user")

    def run() -> None:
        model = Net(lambda h: torch.tanh(Broken.apply(h, torch.ones(8))))
        loss = model(x()).sum()
        loss.backward(retain_graph=retain)

    retain = False
    explanation = failure_of(run)
    assert explanation.kind == "unknown"
    assert explanation.source is not None
    assert explanation.source.code == 'raise ValueError("user")'
    (fact,) = explanation.facts
    assert fact.endswith("the operation Broken, after layer 'layers.1.up'.")
    retain = True
    assert failure_of(run).facts == ()


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("run", "kind", "layer"),
    [
        (lambda: Net().cuda()(x()), "devices", "layers.0.up"),
        (lambda: Wrap(nn.Conv2d(3, 4, 3).cuda())(x(1, 3, 8, 8)), "devices", "body.1"),
        (
            lambda: Net().cuda()(torch.ones(1, 4, device="cuda").expand(2**40, 4)),
            "out_of_memory",
            ...,
        ),
        (lambda: Net().cuda()(x().cuda().half()), "dtypes", "layers.0.up"),
    ],
)
def test_on_a_gpu(run: Callable[[], object], kind: str, layer: str) -> None:
    explanation = failure_of(run)
    assert explanation.kind == kind
    assert layer is ... or explanation.layer == layer


@pytest.mark.accelerator
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_backward_on_a_gpu() -> None:
    def act(h: Tensor) -> Tensor:
        h = torch.sigmoid(h)
        h.mul_(2)
        return h

    model = Net(act).cuda()
    explanation = failure_of(lambda: model(x().cuda()).sum().backward(), model)
    assert (explanation.kind, explanation.near) == ("modified_in_place", "layers.1.up")


# --- negative controls -------------------------------------------------------------------------


def raise_in_layer(error: Exception) -> Callable[[], object]:
    def act(h: Tensor) -> Tensor:
        raise error

    return in_net(act)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("my pool: CUDA out of memory"),
        RuntimeError("the size of tensor a (6) must match the size of tensor b (12)"),
        ValueError("Target 5 is out of bounds."),
        IndexError("index out of range in self"),
        RuntimeError("inference tensor of the Bayesian model is missing"),
        RuntimeError("element 0 of tensors does not require grad"),
        KeyError("layer"),
    ],
    ids=str,
)
def test_words_of_others_are_not_taken_for_those_of_torch(error: Exception) -> None:
    explanation = failure_of(raise_in_layer(error))
    assert explanation.kind == "unknown"
    assert not explanation.recognised
    assert explanation.layer == "layers.1"
    assert explanation.source is not None
    assert explanation.source.code == "raise error"
    assert "none of the failures" in explanation.text()


def test_double_size_without_a_cache_is_only_a_mismatch() -> None:
    assert failure_of(in_net(lambda h: h + torch.ones(16))).kind == "sizes"


def test_other_size_with_a_cache_is_only_a_mismatch() -> None:
    def act(h: Tensor, past_key_values: Tensor = torch.ones(5)) -> Tensor:  # noqa: B008
        return h + past_key_values

    assert failure_of(in_net(act)).kind == "sizes"


def test_index_outside_an_embedding_is_not_an_embedding() -> None:
    assert failure_of(in_net(lambda h: h.index_select(0, torch.tensor([9])))).kind == "unknown"
    assert failure_of(lambda: [1][3]).kind == "unknown"


def test_type_mismatch_beside_a_target_is_not_of_the_loss() -> None:
    def run() -> None:
        target = torch.zeros(3)  # as in a training loop, where the model fails
        torch.bmm(x(1, 3, 4).long(), x(1, 4, 3 + 0 * len(target)))

    assert failure_of(run).kind == "dtypes"


def test_cause_is_explained_where_another_error_hides_it() -> None:
    def run() -> None:
        try:
            Net()(x(3, 5))
        except RuntimeError as error:
            raise ValueError("step 12 failed") from error

    explanation = failure_of(run)
    assert (explanation.kind, explanation.layer) == ("matrix_shape", "layers.0.up")


def test_module_that_is_being_built_is_no_layer() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            torch.ones(3).view(2, 2)

    explanation = failure_of(Broken)
    assert (explanation.kind, explanation.layer) == ("view_shape", None)


# --- the block ---------------------------------------------------------------------------------


def test_explained_error_is_also_of_the_original_class() -> None:
    with pytest.raises(RuntimeError) as caught, explained():
        Net()(x(3, 5))
    error = caught.value
    assert isinstance(error, ExplainedError)
    assert type(error).__name__ == "ExplainedRuntimeError"
    assert type(error.__cause__) is RuntimeError
    assert error.args == error.__cause__.args
    assert str(error).startswith(f"{error.__cause__}\n\nWhat ")
    assert "layer 'layers.0.up' (Linear), forward pass" in str(error)
    assert explain(error) is error.explanation


@pytest.mark.parametrize(
    ("name", "cls"),
    [("memory cuda", torch.OutOfMemoryError), ("index", IndexError), ("one value", ValueError)],
)
def test_old_except_clauses_go_on_working(name: str, cls: type[Exception]) -> None:
    with pytest.raises(cls) as caught, explained():
        CASES[name].run()
    assert isinstance(caught.value, ExplainedError)


def test_unknown_error_passes_on_as_the_same_object_with_a_note() -> None:
    error = KeyError("layer")
    with pytest.raises(KeyError) as caught, explained():
        raise_in_layer(error)()
    assert caught.value is error
    assert error.__cause__ is None
    (note,) = error.__notes__
    assert "layer 'layers.1' (Block)" in note


def test_class_of_the_user_is_never_replaced() -> None:
    class Stop(torch.OutOfMemoryError):
        pass

    error = Stop("CUDA out of memory")
    with pytest.raises(Stop) as caught, explained():
        raise_in_layer(error)()
    assert caught.value is error
    assert "no memory left" in error.__notes__[0]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), GeneratorExit()], ids=repr)
def test_interruption_passes_untouched(error: BaseException) -> None:
    def act(h: Tensor) -> Tensor:
        raise error

    with pytest.raises(type(error)) as caught, explained():
        Net(act)(x())
    assert caught.value is error
    assert not hasattr(error, "__notes__")


def test_our_own_errors_pass_untouched() -> None:
    with pytest.raises(InspectionError) as caught, explained():
        torchfmri.Inspector(Net()).watch("nowhere")
    assert not isinstance(caught.value, ExplainedError)
    assert not hasattr(caught.value, "__notes__")


def test_inner_block_explains() -> None:
    with pytest.raises(ExplainedError) as caught, explained(nn.Linear(2, 2)), explained():
        Net()(x(3, 5))
    assert caught.value.explanation.layer == "layers.0.up"
    assert not isinstance(caught.value.__cause__, ExplainedError)


def test_failure_of_the_explanation_does_not_hide_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("torchfmri._explain.entry_points.find_failure", fail)
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught, explained():
        Net()(x(3, 5))
    assert caught.value.__notes__ == ["torchfmri could not explain this: ZeroDivisionError: ours"]


@pytest.mark.parametrize("check_nan", [True, False])
def test_anomaly_detection_is_restored(check_nan: bool) -> None:
    with torch.autograd.set_detect_anomaly(True, check_nan=check_nan):
        with explained(detect=True):
            assert torch.is_anomaly_check_nan_enabled() == check_nan
        assert torch.is_anomaly_enabled()
        assert torch.is_anomaly_check_nan_enabled() == check_nan
    with explained(detect=True):
        assert torch.is_anomaly_enabled()
        assert not torch.is_anomaly_check_nan_enabled()
    assert not torch.is_anomaly_enabled()
    with pytest.raises(KeyboardInterrupt), explained(detect=True):
        raise KeyboardInterrupt
    assert not torch.is_anomaly_enabled()


def test_nothing_is_left_on_the_model() -> None:
    model = Net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ExplainedError), explained(model, detect=True):
        model(x(3, 5))
    assert all(torch.equal(before[key], each) for key, each in model.state_dict().items())
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())
    assert set(vars(model)) == set(vars(Net()))


def test_explanation_holds_no_tensors() -> None:
    models = [Net()]
    gone = weakref.ref(models[0])
    explanation = failure_of(lambda: models[0](x(3, 5)))
    models.clear()
    gc.collect()
    assert gone() is None
    assert explanation.layer == "layers.0.up"


def test_off_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFMRI", "off")
    with explained(detect=True):
        assert not torch.is_anomaly_enabled()
    with pytest.raises(RuntimeError) as caught, explained():
        Net()(x(3, 5))
    assert type(caught.value) is RuntimeError


def test_explained_error_survives_pickling() -> None:
    with pytest.raises(ExplainedError) as caught, explained():
        CASES["index"].run()
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is type(caught.value)
    assert again.args == caught.value.args
    assert again.explanation == caught.value.explanation


@pytest.mark.parametrize(
    "original",
    [KeyError("a"), OSError(2, "no such file"), ValueError(), StopIteration(3)],
    ids=repr,
)
def test_any_builtin_can_carry_an_explanation(original: Exception) -> None:
    original.detail = "kept"  # type: ignore[attr-defined]
    error = explained_error(original, explain(original))
    assert isinstance(error, type(original))
    assert error.args == original.args
    assert error.detail == "kept"  # type: ignore[attr-defined]
    assert str(error).startswith(str(original))
    assert getattr(error, "errno", None) == getattr(original, "errno", None)


def test_failure_of_a_clue_is_told_and_costs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("torchfmri._explain.backward_clues.nodes_of", fail)
    explanation = failure_of(write_saved_output)
    assert explanation.kind == "modified_in_place"
    assert "(Reading more failed: ZeroDivisionError: ours)" in explanation.facts


# --- how it is asked for and shown -------------------------------------------------------------


def test_last_error_of_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys, "last_value", raising=False)
    with pytest.raises(InspectionError, match="no exception to explain"):
        explain()
    monkeypatch.setattr(sys, "last_value", ValueError("x"), raising=False)
    assert explain().error == "ValueError: x"


def test_bad_arguments() -> None:
    with pytest.raises(InspectionError, match="takes an exception, not 'text'"):
        explain("text")  # type: ignore[arg-type]
    with pytest.raises(InspectionError, match=r"model=.net.: give a model: an nn\.Module, not str"):
        explain(ValueError(), model="net")  # type: ignore[arg-type]
    with pytest.raises(InspectionError, match=r"model=.net.: give a model: an nn\.Module, not str"):
        explained("net")  # type: ignore[arg-type]


def test_text_fits_the_width_and_html_is_escaped() -> None:
    explanation = failure_of(
        raise_in_layer(ValueError("<script>alert(1)</script> " + "long " * 300))
    )
    assert max(map(len, explanation.text(60).splitlines())) <= 60
    html = explanation._repr_html_()
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert "<code>layers.1</code>" in html


def test_every_kind_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "errors.md").read_text(encoding="utf-8")
    kinds = {failure.kind for failure in FAILURES} | {"hook_raised"}
    assert not [kind for kind in sorted(kinds) if f"`{kind}`" not in page]
