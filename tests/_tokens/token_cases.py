"""Layers and models for token gradients, each with inputs: the smallest that show the thing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from oracles import numbers
from token_oracles import Copies, rows
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

Inputs = tuple[Any, ...]


@dataclass
class Case:
    """A model, what it is called with, and what is known of it.

    Attributes:
        name: Of the case.
        build: Makes the model, float32; the test converts it.
        inputs: The arguments.
        grid: (b, s) of what the model is handed, where further axes lie inside a token.
        rules: Name of a parameter -> the rule that must have fired.
        samples: Which axis of each input is that of samples, for per-sample gradients; None
            where samples cannot be run alone.
        missing: Parameters that are refused, by name, with a word of the reason.
        tolerance: In float64; larger where the model itself computes in float32.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    grid: tuple[int, int] | None = None
    rules: dict[str, str] = field(default_factory=dict)
    samples: tuple[int | None, ...] | None = (0,)
    missing: dict[str, str] = field(default_factory=dict)
    tolerance: float = 1e-12

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = self.build()
        for parameter in model.parameters():  # nothing is zero or one by accident
            with torch.no_grad():
                parameter.add_(0.3 * torch.randn(parameter.shape))
        return model.to(dtype)

    def arguments(self, dtype: torch.dtype = torch.float64) -> Inputs:
        torch.manual_seed(1)
        return tuple(
            each.to(dtype)
            if hasattr(each, "is_floating_point") and each.is_floating_point()
            else each.to(dtype)
            if not isinstance(each, Tensor) and hasattr(each, "batch_sizes")
            else tuple(one.to(dtype) for one in each)
            if isinstance(each, tuple) and not hasattr(each, "batch_sizes")
            else each
            for each in self.inputs()
        )


def _x(*shape: int) -> Callable[[], Inputs]:
    return lambda: (numbers(*shape),)


def _ids(count: int, *shape: int) -> Callable[[], Inputs]:
    return lambda: (torch.randint(count, shape, generator=torch.Generator().manual_seed(5)),)


LAYERS: list[Case] = []


def _layer(name: str, build: Callable[[], nn.Module], *shape: int, **more: Any) -> None:
    LAYERS.append(Case(name, build, _x(*shape), **more))


# -- Linear and its kin --------------------------------------------------------------------------

_layer("linear 3-D", lambda: nn.Linear(4, 3), 2, 5, 4, rules={"weight": "linear", "bias": "linear"})
_layer("linear without bias", lambda: nn.Linear(4, 3, bias=False), 2, 5, 4)
_layer("linear 2-D", lambda: nn.Linear(4, 3), 5, 4)
_layer("linear 1-D", lambda: nn.Linear(4, 3), 4, samples=None)
_layer("linear 4-D", lambda: nn.Linear(4, 3), 2, 3, 2, 4)
_layer("linear one token", lambda: nn.Linear(4, 3), 1, 1, 4)
_layer("linear one unit", lambda: nn.Linear(1, 1), 2, 3, 1)
_layer("linear one output", lambda: nn.Linear(4, 1), 2, 3, 4)
_layer("bilinear", lambda: _Twice(nn.Bilinear(4, 4, 3)), 2, 3, 4)
_layer("bilinear without bias", lambda: _Twice(nn.Bilinear(4, 4, 2, bias=False)), 2, 3, 4)
_layer("prelu one", lambda: nn.Sequential(nn.Linear(4, 3), nn.PReLU()), 2, 3, 4)
_layer("prelu per channel", lambda: nn.Sequential(nn.Conv1d(2, 3, 1), nn.PReLU(3)), 2, 2, 5)
_layer("prelu per channel 2-D", lambda: nn.Sequential(nn.Linear(4, 3), nn.PReLU(3)), 5, 4)


class _Twice(nn.Module):
    """A layer that takes two inputs, given one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(x, x.flip(-1).sin())


def _hf_conv1d() -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    return Conv1D(3, 4)


_layer("transformers Conv1D", _hf_conv1d, 2, 5, 4, rules={"weight": "conv1d_of_transformers"})

# -- convolutions --------------------------------------------------------------------------------

_SAME = {"weight": "convolution", "bias": "convolution"}
_layer("conv1d", lambda: nn.Conv1d(4, 6, 3), 2, 4, 7, rules=_SAME)
_layer("conv1d padded", lambda: nn.Conv1d(4, 6, 3, padding=2), 2, 4, 7)
_layer("conv1d stride", lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), 2, 4, 8)
_layer("conv1d dilation", lambda: nn.Conv1d(4, 6, 3, dilation=2), 2, 4, 9)
_layer("conv1d groups", lambda: nn.Conv1d(4, 6, 3, groups=2), 2, 4, 6)
_layer("conv1d depthwise", lambda: nn.Conv1d(4, 4, 3, groups=4, padding=2), 2, 4, 6)
_layer("conv1d depthwise multiplier", lambda: nn.Conv1d(3, 6, 2, groups=3, stride=3), 2, 3, 8)
_layer("conv1d same", lambda: nn.Conv1d(4, 3, 4, padding="same"), 2, 4, 6)
_layer("conv1d same dilation", lambda: nn.Conv1d(4, 3, 2, padding="same", dilation=3), 2, 4, 6)
_layer("conv1d valid", lambda: nn.Conv1d(4, 3, 4, padding="valid"), 2, 4, 6)
_layer("conv1d one position", lambda: nn.Conv1d(4, 3, 5, bias=False), 2, 4, 5)
_layer("conv1d circular", lambda: nn.Conv1d(2, 3, 3, padding=2, padding_mode="circular"), 2, 2, 5)
_layer("conv1d reflect", lambda: nn.Conv1d(2, 3, 3, padding=2, padding_mode="reflect"), 2, 2, 5)
_layer("conv1d replicate", lambda: nn.Conv1d(2, 3, 3, padding=1, padding_mode="replicate"), 2, 2, 5)
_layer("conv1d unbatched", lambda: nn.Conv1d(4, 3, 2), 4, 6, samples=None)
_layer("conv2d", lambda: nn.Conv2d(2, 4, 3), 2, 2, 5, 4)
_layer("conv2d uneven", lambda: nn.Conv2d(2, 4, (2, 3), (2, 1), (1, 0), (1, 2)), 2, 2, 5, 6)
_layer("conv2d groups", lambda: nn.Conv2d(4, 6, 2, groups=2, stride=2, padding=1), 2, 4, 4, 3)
_layer("conv2d same", lambda: nn.Conv2d(2, 3, (2, 3), padding="same"), 2, 2, 3, 4)
_layer("conv2d valid", lambda: nn.Conv2d(2, 3, (2, 3), padding="valid"), 2, 2, 3, 4)
_layer(
    "conv2d reflect", lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="reflect"), 2, 2, 3, 4
)
_layer("conv2d patches", lambda: nn.Conv2d(3, 4, 2, stride=2), 2, 3, 4, 4)
_layer("conv2d one by one", lambda: nn.Conv2d(3, 4, 1), 2, 3, 2, 3)
_layer("conv2d unbatched", lambda: nn.Conv2d(2, 3, 2), 2, 3, 4, samples=None)
_layer("conv2d one channel", lambda: nn.Conv2d(1, 1, 2), 2, 1, 3, 3)
_layer("conv3d", lambda: nn.Conv3d(2, 3, 2), 2, 2, 3, 3, 2)
_layer(
    "conv3d all", lambda: nn.Conv3d(2, 4, (2, 1, 2), (2, 1, 1), (1, 0, 1), groups=2), 2, 2, 3, 2, 3
)
_layer("conv3d same", lambda: nn.Conv3d(2, 2, (2, 3, 1), padding="same"), 1, 2, 2, 3, 2)
_T1, _T2, _T3 = nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d
_layer("transposed 1d", lambda: _T1(3, 4, 3), 2, 3, 5, rules={"weight": "transposed_convolution"})
_layer("transposed 1d all", lambda: _T1(4, 6, 3, 2, 1, 1, groups=2, dilation=2), 2, 4, 4)
_layer("transposed 1d padded", lambda: _T1(2, 3, 2, padding=2, bias=False), 2, 2, 6)
_layer("transposed 2d", lambda: _T2(2, 3, 2, stride=2), 2, 2, 3, 2)
_layer("transposed 2d all", lambda: _T2(2, 4, (3, 2), (2, 1), (1, 1), (1, 0), 2), 2, 2, 3, 3)
_layer("transposed 3d", lambda: _T3(2, 2, (1, 2, 2), (1, 2, 1)), 2, 2, 2, 2, 2)
_layer("transposed 1d unbatched", lambda: _T1(3, 2, 2), 3, 5, samples=None)
_layer("transposed 1d kept length", lambda: _T1(3, 3, 3, padding=1), 2, 3, 5)


# -- norms ---------------------------------------------------------------------------------------

_layer("layer norm", lambda: nn.LayerNorm(5), 2, 4, 5, rules={"weight": "layer_norm"})
_layer("layer norm without bias", lambda: nn.LayerNorm(5, bias=False), 2, 4, 5)
_layer("layer norm two axes", lambda: nn.LayerNorm((3, 5)), 2, 4, 3, 5)
_layer("layer norm three axes", lambda: nn.LayerNorm((2, 3, 2)), 3, 2, 3, 2)
_layer("layer norm 2-D", lambda: nn.LayerNorm(5, eps=0.1), 4, 5)
_layer("rms norm", lambda: nn.RMSNorm(5), 2, 4, 5, rules={"weight": "rms_norm"})
_layer("rms norm epsilon", lambda: nn.RMSNorm(5, eps=0.1), 2, 4, 5)
_layer("rms norm two axes", lambda: nn.RMSNorm((3, 2)), 2, 4, 3, 2)
_layer("group norm", lambda: nn.GroupNorm(2, 4), 2, 4, 5, rules={"weight": "group_norm"})
_layer("group norm 2d", lambda: nn.GroupNorm(4, 4), 2, 4, 2, 3)
_layer("group norm all", lambda: nn.GroupNorm(1, 4, eps=0.1), 3, 4)
_layer("instance norm 1d", lambda: nn.InstanceNorm1d(4, affine=True), 2, 4, 5)
_layer("instance norm 1d unbatched", lambda: nn.InstanceNorm1d(4, affine=True), 4, 5, samples=None)
_layer("instance norm 2d", lambda: nn.InstanceNorm2d(4, affine=True), 2, 4, 2, 3)
_layer("instance norm 3d", lambda: nn.InstanceNorm3d(2, affine=True), 2, 2, 2, 3, 2)
_layer(
    "instance norm eval",
    lambda: _ran(nn.InstanceNorm1d(4, affine=True, track_running_stats=True), 3, 4, 5),
    2,
    4,
    5,
)
_layer(
    "batch norm 1d", lambda: nn.BatchNorm1d(4), 3, 4, samples=None, rules={"weight": "batch_norm"}
)
_layer("batch norm 1d positions", lambda: nn.BatchNorm1d(4), 2, 4, 5, samples=None)
_layer("batch norm 2d", lambda: nn.BatchNorm2d(4), 2, 4, 2, 3, samples=None)
_layer("batch norm 3d", lambda: nn.BatchNorm3d(2), 2, 2, 2, 1, 2, samples=None)
_layer("batch norm eval", lambda: _ran(nn.BatchNorm1d(4), 3, 4, 5), 2, 4, 5)
_layer("batch norm 2d eval", lambda: _ran(nn.BatchNorm2d(3), 3, 3, 2, 2), 2, 3, 2, 3)
_layer(
    "batch norm without statistics",
    lambda: nn.BatchNorm1d(4, track_running_stats=False).eval(),
    3,
    4,
    2,
    samples=None,
)


def _ran(module: nn.Module, *shape: int) -> nn.Module:
    """A norm with statistics of its own, in eval mode."""
    module(torch.randn(*shape) * 2 + 1)
    return module.eval()


class _HFNorm(nn.Module):
    """A norm as transformers writes them (Llama)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


class _PlusOneNorm(_HFNorm):
    """One that is centred at zero (Gemma)."""

    def forward(self, x: Tensor) -> Tensor:
        return (1 + self.weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


class _OddNorm(_HFNorm):
    """Called a norm, but none: it must not be taken for one."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + 1e-5)


class _PerHead(nn.Module):
    """Queries normed per head, (b, heads, s, d) or (b, s, heads, d)."""

    def __init__(self, norm: nn.Module, swapped: bool) -> None:
        super().__init__()
        self.proj, self.norm, self.swapped = nn.Linear(6, 6), norm, swapped

    def forward(self, x: Tensor) -> Tensor:
        q = self.proj(x).unflatten(-1, (2, 3))
        return self.norm(q.transpose(1, 2) if self.swapped else q)

    def token_reference(self, copies: Copies, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        weight, bias = (copies(each, b, s) for each in self.proj.parameters())
        q = rows(x, weight, bias).unflatten(-1, (2, 3))
        own = {
            name: copies(each, b, s).flatten(0, 1) for name, each in self.norm.named_parameters()
        }
        tokens = torch.arange(b * s).view(b, s, 1, 1)
        made: Any = 0
        for token in range(b * s):
            alone = {name: each[token] for name, each in own.items()}
            made = made + torch.where(tokens == token, functional_call(self.norm, alone, q), 0.0)
        return made.transpose(1, 2) if self.swapped else made


def _hf_norm(name: str) -> nn.Module:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    return {"llama": LlamaRMSNorm, "gemma": GemmaRMSNorm, "t5": T5LayerNorm}[name](5)


_layer("norm like Llama's", lambda: _HFNorm(5), 2, 4, 5, rules={"weight": "own_rms_norm"})
_layer("norm like Gemma's", lambda: _PlusOneNorm(5), 2, 4, 5, rules={"weight": "own_rms_norm"})
_layer("norm that is none", lambda: _OddNorm(5), 2, 4, 5)
_layer("LlamaRMSNorm", lambda: _hf_norm("llama"), 2, 4, 5, tolerance=1e-6)
_layer("GemmaRMSNorm", lambda: _hf_norm("gemma"), 2, 4, 5, tolerance=1e-6)
_layer("T5LayerNorm", lambda: _hf_norm("t5"), 2, 4, 5, tolerance=1e-6)
for _swapped in (False, True):
    for _text, _norm in (
        ("RMSNorm", lambda: nn.RMSNorm(3)),
        ("Llama's", lambda: _HFNorm(3)),
        ("LayerNorm", lambda: nn.LayerNorm(3)),
    ):
        _layer(
            f"{_text} per head {'b h s d' if _swapped else 'b s h d'}",
            lambda norm=_norm, swapped=_swapped: _PerHead(norm(), swapped),
            2,
            4,
            6,
            grid=(2, 4),
        )
        _layer(
            f"{_text} per head {'b h s d' if _swapped else 'b s h d'}, as many heads as positions",
            lambda norm=_norm, swapped=_swapped: _PerHead(norm(), swapped),
            3,
            2,
            6,
        )

# -- embeddings ----------------------------------------------------------------------------------


def _embedding(name: str, build: Callable[[], nn.Module], *shape: int, **more: Any) -> None:
    LAYERS.append(Case(name, build, _ids(4, *shape), **more))


_embedding("embedding", lambda: nn.Embedding(4, 3), 2, 5, rules={"weight": "embedding"})
_embedding("embedding padding", lambda: nn.Embedding(4, 3, padding_idx=1), 2, 5)
_embedding("embedding negative padding", lambda: nn.Embedding(4, 3, padding_idx=-1), 2, 5)
_embedding("embedding sparse", lambda: nn.Embedding(4, 3, sparse=True), 2, 5)
_embedding(
    "embedding by frequency",
    lambda: nn.Embedding(4, 3, scale_grad_by_freq=True),
    2,
    5,
    samples=None,
)
_embedding("embedding 1-D", lambda: nn.Embedding(4, 3), 5)
_embedding("embedding scalar", lambda: nn.Embedding(4, 3), samples=None)
_embedding("embedding 3-D", lambda: nn.Embedding(4, 3), 2, 3, 2)
_embedding("embedding one row", lambda: nn.Embedding(5, 1), 2, 4)
for _mode in ("sum", "mean", "max"):
    _embedding(f"embedding bag {_mode}", lambda mode=_mode: nn.EmbeddingBag(4, 3, mode=mode), 3, 4)
_embedding("embedding bag padding", lambda: nn.EmbeddingBag(4, 3, mode="sum", padding_idx=1), 3, 4)

LAYERS.append(
    Case(
        "embedding bag offsets",
        lambda: nn.EmbeddingBag(4, 3, mode="sum"),
        lambda: (torch.tensor([0, 1, 3, 3, 2, 1, 0]), torch.tensor([0, 3, 4])),
        samples=None,
    )
)
LAYERS.append(
    Case(
        "embedding bag weighted",
        lambda: _Weighted(),
        lambda: (torch.tensor([[0, 1], [3, 3]]), numbers(2, 2)),
        samples=(0, 0),
    )
)


class _Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(4, 3, mode="sum")

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        return self.bag(ids, per_sample_weights=weights)


# -- recurrent -----------------------------------------------------------------------------------


def _recurrent(name: str, build: Callable[[], nn.Module], inputs: Any = None, **more: Any) -> None:
    more.setdefault("samples", (0,))
    LAYERS.append(Case(name, build, inputs or _x(2, 4, 3), **more))


def _states(count: int, *widths: int, batch: tuple[int, ...] = (2,)) -> Any:
    made = tuple(numbers(count, *batch, width, seed=7 + k) for k, width in enumerate(widths))
    return made if len(made) > 1 else made[0]


_F = {"batch_first": True}
_recurrent("rnn tanh", lambda: nn.RNN(3, 4, **_F), rules={"weight_ih_l0": "unrolled RNN_TANH"})
_recurrent("rnn relu", lambda: nn.RNN(3, 7, nonlinearity="relu", **_F))
_recurrent("rnn all", lambda: nn.RNN(3, 4, 2, bidirectional=True, **_F))
_recurrent("gru", lambda: nn.GRU(3, 4, **_F), rules={"weight_ih_l0": "unrolled GRU"})
_recurrent("gru all", lambda: nn.GRU(3, 2, 2, bidirectional=True, **_F))
_recurrent("lstm", lambda: nn.LSTM(3, 4, **_F), rules={"weight_hh_l0": "unrolled LSTM"})
_recurrent("lstm without bias", lambda: nn.LSTM(3, 4, bias=False, **_F))
_recurrent("lstm all", lambda: nn.LSTM(3, 2, 3, bidirectional=True, **_F))
_recurrent("lstm projected", lambda: nn.LSTM(3, 4, 2, proj_size=2, bidirectional=True, **_F))
_recurrent("lstm steps first", lambda: nn.LSTM(3, 4, 2), _x(4, 2, 3), samples=(1,))
_recurrent("gru steps first", lambda: nn.GRU(3, 4), _x(4, 2, 3), samples=(1,))
_recurrent("lstm unbatched", lambda: nn.LSTM(3, 4, 2), _x(5, 3), samples=None)
_recurrent("gru unbatched first", lambda: nn.GRU(3, 4, **_F), _x(5, 3), samples=None)
_recurrent(
    "gru with a state",
    lambda: nn.GRU(3, 4, 2, **_F),
    lambda: (numbers(2, 4, 3), _states(2, 4)),
    samples=(0, 1),
)
_recurrent(
    "lstm with states",
    lambda: nn.LSTM(3, 4, **_F),
    lambda: (numbers(2, 4, 3), _states(1, 4, 4)),
    samples=None,
)
_recurrent(
    "rnn unbatched with a state",
    lambda: nn.RNN(3, 4),
    lambda: (numbers(5, 3), _states(1, 4, batch=())),
    samples=None,
)
_recurrent("lstm dropout", lambda: nn.LSTM(3, 4, 2, dropout=0.5, **_F), samples=None)
_recurrent(
    "gru dropout steps first", lambda: nn.GRU(3, 4, 3, dropout=0.5), _x(4, 2, 3), samples=None
)


def _packed(sorted_: bool, first: bool = True) -> Callable[[], Inputs]:
    lengths = [4, 2, 1] if sorted_ else [2, 4, 1]

    def make() -> Inputs:
        x = numbers(3, 4, 3) if first else numbers(4, 3, 3)
        return (pack_padded_sequence(x, torch.tensor(lengths), first, enforce_sorted=sorted_),)

    return make


_recurrent("lstm packed", lambda: nn.LSTM(3, 4, 2, **_F), _packed(True), samples=None)
_recurrent(
    "gru packed unsorted both ways",
    lambda: nn.GRU(3, 2, 2, bidirectional=True, **_F),
    _packed(False),
    samples=None,
)
_recurrent("rnn packed steps first", lambda: nn.RNN(3, 4), _packed(False, False), samples=None)


class _Cells(nn.Module):
    """A cell that is called once per step."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        made = []
        for step in x.unbind(1):
            state = self.cell(step, state)
            made.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(made, 1)

    def token_reference(self, copies: Copies, x: Tensor) -> Tensor:
        """Step t of a sample is computed with that step's copy of the weights."""
        b, s, _ = x.shape
        own = {name: copies(each, b, s) for name, each in self.cell.named_parameters()}
        samples = []
        for i in range(b):
            state: Any = None
            made = []
            for t in range(s):
                copy = {name: each[i, t] for name, each in own.items()}
                state = functional_call(self.cell, copy, (x[i : i + 1, t], state))
                made.append(state[0] if isinstance(state, tuple) else state)
            samples.append(torch.stack(made, 1))
        return torch.cat(samples)


class _OneCell(nn.Module):
    """A cell that is called once."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor, *state: Any) -> Any:
        return self.cell(x, *state)


_recurrent(
    "gru cell once",
    lambda: _OneCell(nn.GRUCell(3, 4)),
    lambda: (numbers(2, 3), numbers(2, 4)),
    samples=(0, 0),
)
_recurrent(
    "rnn cell once",
    lambda: _OneCell(nn.RNNCell(3, 4)),
    lambda: (numbers(2, 3), numbers(2, 4)),
    samples=(0, 0),
)

# -- attention -----------------------------------------------------------------------------------


class _Attention(nn.Module):
    """Self or cross attention."""

    def __init__(self, *arguments: Any, call: dict[str, Any] | None = None, **keywords: Any):
        super().__init__()
        self.attention = nn.MultiheadAttention(*arguments, **keywords)
        self.call = call or {}

    def forward(self, query: Tensor, memory: Tensor | None = None, value: Any = None) -> Any:
        memory = query if memory is None else memory
        value = memory if value is None else value
        return self.attention(query, memory, value, **self.call)[0]


def _attention(name: str, keywords: dict[str, Any], *inputs: tuple[int, ...], **more: Any) -> None:
    call, keywords = more.pop("call", {}), {"batch_first": True} | keywords
    more.setdefault("samples", tuple(0 for _ in inputs))
    build = lambda: _Attention(4, 2, call=call, **keywords)  # noqa: E731
    made = lambda: tuple(numbers(*each, seed=k) for k, each in enumerate(inputs))  # noqa: E731
    LAYERS.append(Case(f"attention {name}", build, made, **more))


_CAUSAL = torch.ones(3, 3, dtype=torch.bool).triu(1)
_HIDDEN = torch.tensor([[False, False, True], [False, False, False]])
_attention("self", {}, (2, 3, 4))
_attention("without weights", {}, (2, 3, 4), call={"need_weights": False})
_attention("without bias", {"bias": False}, (2, 3, 4))
_attention("steps first", {"batch_first": False}, (3, 2, 4), samples=(1,))
_attention("cross", {}, (2, 3, 4), (2, 5, 4))
_attention("cross steps first", {"batch_first": False}, (3, 2, 4), (5, 2, 4), samples=(1, 1))
_attention("kdim vdim", {"kdim": 3, "vdim": 2}, (2, 3, 4), (2, 5, 3), (2, 5, 2))
_attention("zero key", {"add_zero_attn": True}, (2, 3, 4))
_attention("bias_k", {"add_bias_kv": True}, (2, 3, 4))
_attention(
    "bias_k steps first", {"add_bias_kv": True, "batch_first": False}, (3, 2, 4), samples=(1,)
)
_attention("causal", {}, (2, 3, 4), call={"attn_mask": _CAUSAL, "need_weights": False})
_attention(
    "causal flag",
    {},
    (2, 3, 4),
    call={"attn_mask": _CAUSAL, "need_weights": False, "is_causal": True},
)
_attention("padded keys", {}, (2, 3, 4), call={"key_padding_mask": _HIDDEN}, samples=None)
_attention("unbatched", {}, (3, 4), samples=None)
_attention("per head weights", {}, (2, 3, 4), call={"average_attn_weights": False})


class _ThreeInputs(nn.Module):
    """Attention whose query, key and value are three computed tensors of one length."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x.sin(), x.cos(), need_weights=False)[0]


_layer("attention three inputs", _ThreeInputs, 2, 3, 4)


class _Decoder(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.layer(x, memory)


def _encoder(**keywords: Any) -> nn.Module:
    settings = {"dim_feedforward": 5, "dropout": 0.0, "batch_first": True} | keywords
    return nn.TransformerEncoderLayer(4, 2, **settings)


def _decoder(**keywords: Any) -> nn.Module:
    settings = {"dim_feedforward": 5, "dropout": 0.0, "batch_first": True} | keywords
    return _Decoder(nn.TransformerDecoderLayer(4, 2, **settings))


_layer("encoder layer", _encoder, 2, 3, 4)
_layer("encoder layer norm first", lambda: _encoder(norm_first=True, activation="gelu"), 2, 3, 4)
_layer("encoder layer steps first", lambda: _encoder(batch_first=False), 3, 2, 4, samples=(1,))
_layer("encoder layer dropout", lambda: _encoder(dropout=0.3), 2, 3, 4, samples=None)
_layer("encoder", lambda: nn.TransformerEncoder(_encoder(), 2, enable_nested_tensor=False), 2, 3, 4)
LAYERS.append(
    Case(
        "decoder layer",
        _decoder,
        lambda: (numbers(2, 3, 4), numbers(2, 5, 4, seed=1)),
        samples=(0, 0),
    )
)
# -- free parameters -----------------------------------------------------------------------------

FREE: list[Case] = []


def _free(name: str, build: Callable[[], nn.Module], *shape: int, **more: Any) -> None:
    FREE.append(Case(name, build, _x(*shape), **more))


class _Positions(nn.Module):
    """A positional embedding that is sliced and added."""

    def __init__(self, shape: tuple[int, ...] = (1, 6, 4)) -> None:
        super().__init__()
        self.position, self.proj = nn.Parameter(torch.randn(shape)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        position = self.position
        return self.proj(x) + (
            position[:, : x.shape[1]] if position.ndim == 3 else position[: x.shape[1]]
        )


class _PositionsMixed(_Positions):
    """The same, and positions are mixed afterwards in the same forward."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.proj(x) + self.position[:, : x.shape[1]]
        return (h @ h.mT).softmax(-1) @ h

    def token_reference(self, copies: Copies, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        own = copies(self.position, b, s)  # (b, s, 1, 6, 4): token s reads row s of its copy
        read = torch.stack([own[:, t, 0, t] for t in range(s)], 1)
        h = rows(x, copies(self.proj.weight, b, s), copies(self.proj.bias, b, s)) + read
        return (h @ h.mT).softmax(-1) @ h


class _PositionIds(nn.Module):
    """GPT-2's positions: an Embedding called with (1, s) ids, broadcast over the batch."""

    def __init__(self, flat: bool = False) -> None:
        super().__init__()
        self.wte, self.wpe, self.flat = nn.Embedding(5, 4), nn.Embedding(6, 4), flat

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        return (self.wte(ids) + self.wpe(places if self.flat else places[None])).tanh()

    def token_reference(self, copies: Copies, ids: Tensor) -> Tensor:
        b, s = ids.shape
        words, places = copies(self.wte.weight, b, s), copies(self.wpe.weight, b, s)
        made = [[words[i, t, ids[i, t]] + places[i, t, t] for t in range(s)] for i in range(b)]
        return torch.stack([torch.stack(each) for each in made]).tanh()


class _Scale(nn.Module):
    """Layer scale."""

    def __init__(self, shape: tuple[int, ...] = (4,)) -> None:
        super().__init__()
        self.gamma, self.proj = nn.Parameter(torch.randn(shape)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gamma * self.proj(x).tanh()


class _Gate(nn.Module):
    """A learned gate: one number."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.gate, self.proj = nn.Parameter(torch.randn(shape)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate.tanh() * self.proj(x)


class _GateAndShift(nn.Module):
    """Two parameters in one expression, and a function of one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.shift, x, self.scale) * torch.sigmoid(x * self.scale)


class _ClassToken(nn.Module):
    """ViT: a class token before the patches, positions added, then mixed."""

    def __init__(self, mixed: bool) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 4))
        self.position, self.mixed = nn.Parameter(torch.randn(1, 4, 4)), mixed

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        return (h @ h.mT).softmax(-1) @ h if self.mixed else h

    def token_reference(self, copies: Copies, x: Tensor) -> Tensor:
        b, s = len(x), x.shape[1] + 1
        first = copies(self.token, b, s)[:, 0, 0]
        place = copies(self.position, b, s)
        read = torch.stack([place[:, t, 0, t] for t in range(s)], 1)
        h = torch.cat([first, x], 1) + read
        return (h @ h.mT).softmax(-1) @ h if self.mixed else h


class _LogitScale(nn.Module):
    """CLIP's temperature on features."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale, self.proj = nn.Parameter(torch.randn(())), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.logit_scale.exp() * F.normalize(self.proj(x), dim=-1)


class _Functional(nn.Module):
    """A weight used as a function's argument."""

    def __init__(self, act: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.act = act
        self.w = nn.Parameter(torch.randn(shapes[0]))
        if len(shapes) > 1:
            self.v = nn.Parameter(torch.randn(shapes[1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x, self.w, self.v) if hasattr(self, "v") else self.act(x, self.w)


def _function(
    name: str, act: Any, *shapes: tuple[int, ...], x: Any = (2, 5, 4), **more: Any
) -> None:
    FREE.append(Case(name, lambda: _Functional(act, *shapes), _x(*x), **more))


_free("positions", _Positions, 2, 5, 4)
_free("positions without batch axis", lambda: _Positions((6, 4)), 2, 5, 4)
_free("positions whole", lambda: _Positions((1, 5, 4)), 2, 5, 4)
_free("positions then mixed", _PositionsMixed, 2, 5, 4)
FREE.append(Case("positions by ids", _PositionIds, _ids(5, 2, 4)))
FREE.append(Case("positions by flat ids", lambda: _PositionIds(True), _ids(5, 2, 4)))
_free("layer scale", _Scale, 2, 5, 4)
_free("layer scale 1 1 h", lambda: _Scale((1, 1, 4)), 2, 5, 4)
_free("gate", _Gate, 2, 5, 4)
_free("gate of one", lambda: _Gate((1,)), 2, 5, 4)
_free("gate and shift", _GateAndShift, 2, 5, 4)
_free("class token", lambda: _ClassToken(False), 2, 3, 4)
_free("class token then mixed", lambda: _ClassToken(True), 2, 3, 4)
_free("logit scale", _LogitScale, 2, 5, 4)
_function("F.linear", F.linear, (3, 4))
_function("F.linear with bias", F.linear, (3, 4), (3,))
_function("F.linear 2-D", F.linear, (3, 4), (3,), x=(5, 4))
_function("x @ w", lambda x, w: x @ w, (4, 3))
_function("x @ w.T", lambda x, w: x @ w.T, (3, 4))
_function("x @ w + b", lambda x, w, v: x @ w + v, (4, 3), (3,))
_function("x @ part of w", lambda x, w: x @ w[:4, 1:3], (5, 4))
_function("x @ slices of w", lambda x, w: (x @ w[:, :2]).tanh() * (x @ w[:, 2:]), (4, 4))
_function("chunks of w", lambda x, w: sum(F.linear(x, each).sin() for each in w.chunk(2)), (4, 4))
_function("vector", lambda x, w: (x @ w)[..., None], (4,))
_function("vector einsum", lambda x, w: torch.einsum("bsi,i->bs", x, w)[..., None], (4,))
_function("w @ x columns", lambda x, w: (w @ x.mT).mT, (3, 4))
_function("einsum bsi,oi->bso", lambda x, w: torch.einsum("bsi,oi->bso", x, w), (3, 4))
_function("einsum bsi,io->bso", lambda x, w: torch.einsum("bsi,io->bso", x, w), (4, 3))
_function("einsum heads", lambda x, w: torch.einsum("bsi,hid->bshd", x, w).flatten(2), (2, 4, 3))
_function(
    "einsum heads last", lambda x, w: torch.einsum("bsi,idh->bshd", x, w).flatten(2), (4, 3, 2)
)
_function(
    "einsum out of heads",
    lambda x, w: torch.einsum("bshd,hdo->bso", x.unflatten(-1, (2, 2)), w),
    (2, 2, 3),
)
_function("einsum elementwise", lambda x, w: torch.einsum("bsi,i->bsi", x, w), (4,))
_function(
    "einsum per head",
    lambda x, w: torch.einsum("bshd,hde->bshe", x.unflatten(-1, (2, 2)), w).flatten(2),
    (2, 2, 3),
)
_function(
    "bmm heads",
    lambda x, w: (
        torch.bmm(x.unflatten(-1, (2, 2)).permute(2, 0, 1, 3).flatten(1, 2), w)
        .unflatten(1, (-1, 5))
        .permute(1, 2, 0, 3)
        .flatten(2)
    ),
    (2, 2, 3),
)
_function(
    "all experts",
    lambda x, w: torch.einsum("bsi,eio->bseo", x, w).softmax(2).square().sum(2),
    (3, 4, 2),
)
_function("F.layer_norm", lambda x, w, v: F.layer_norm(x, (4,), w, v), (4,), (4,))
_function("F.rms_norm", lambda x, w: F.rms_norm(x, (4,), w), (4,))
_function("F.conv1d causal", lambda x, w: F.conv1d(F.pad(x.mT, (2, 0)), w, groups=4).mT, (4, 1, 3))
_function("F.embedding", lambda x, w: F.embedding((x[..., 0].abs() * 3).long() % 5, w), (5, 3))
_function("w[ids]", lambda x, w: w[(x[..., 0].abs() * 3).long() % 5].tanh(), (5, 3))
_function("F.prelu", lambda x, w: F.prelu(x.mT, w).mT, (4,))
_function("where", lambda x, w: torch.where(x > 0, x, w * x), (4,))
_function("w twice", lambda x, w: (x @ w).tanh() @ w, (4, 4))
_function("w and its transpose", lambda x, w: (x @ w).tanh() @ w.T, (4, 3))
_function("w three times", lambda x, w: ((x @ w).tanh() @ w).tanh() @ w.T, (4, 4))
_function("low rank", lambda x, w, v: x @ w @ v, (4, 2), (2, 3))
_function("low rank merged", lambda x, w, v: x @ (w @ v), (4, 2), (2, 3))
_function("normed weight", lambda x, w: F.linear(x, F.normalize(w, dim=1)), (3, 4))
_function("softmax of w", lambda x, w: x * w.softmax(0), (4,))
_function("outer", lambda x, w: (x[..., :1] * w).cumsum(-1), (4,))
_function("scaled by a number", lambda x, w: 3 * (x * w) - w, (4,))
_function("inplace add", lambda x, w: x.clone().add_(w), (4,))
_function("inplace mul", lambda x, w: x.clone().mul_(w), (4,))
_function("cosine with w", lambda x, w: F.cosine_similarity(x, w, dim=-1)[..., None], (4,))
_function("distance to codes", lambda x, w: torch.cdist(x, w), (3, 4))
_function(
    "complex rotation",
    lambda x, w: torch.view_as_real(
        torch.view_as_complex(x.unflatten(-1, (2, 2))) * torch.polar(torch.ones_like(w), w)
    ).flatten(2),
    (2,),
)
_function("addbmm", lambda x, w: torch.baddbmm(x[..., :3], x, w.expand(len(x), 4, 3)), (4, 3))
_function("gather", lambda x, w: w.expand(len(x), 5, 4).gather(2, (x.abs() * 3).long() % 4), (4,))
_function("one row, two ways", lambda x, w: (x * w).tanh() + x @ w.T, (1, 4))
_function("one column, two ways", lambda x, w: (x * w[:, 0]).tanh() + x @ w, (4, 1))
_function("one row, two ways in parts", lambda x, w: (x * w[0]).sin() + F.linear(x, w), (1, 4))
_function("2-D tokens", lambda x, w: (x @ w).relu() * 2, (4, 3), x=(5, 4))


class _Written(_Functional):
    """The same with its reference written out: positions are mixed after the use."""

    def __init__(self, act: Any, reference: Any, *shapes: tuple[int, ...]) -> None:
        super().__init__(act, *shapes)
        self.reference = reference

    def token_reference(self, copies: Copies, x: Tensor) -> Tensor:
        b, s = x.shape[:2]
        own = [copies(each, b, s) for each in self.parameters()]
        return self.reference(x, *own)


def _written(
    name: str, act: Any, reference: Any, *shapes: tuple[int, ...], x: Any = (2, 5, 4)
) -> None:
    FREE.append(Case(name, lambda: _Written(act, reference, *shapes), _x(*x)))


def _mix(h: Tensor) -> Tensor:
    return (h @ h.mT).softmax(-1) @ h


def _each(w: Tensor) -> Tensor:
    """Row t of the copy of token t, (b, s, s, ...) -> (b, s, ...)."""
    return torch.stack([w[:, t, t] for t in range(w.shape[1])], 1)


def _set_first(x: Tensor, w: Tensor) -> Tensor:
    h = x.clone()
    h[:, 0] = w
    return _mix(h)


def _put_where(x: Tensor, w: Tensor) -> Tensor:
    h = x.clone()
    h[x[..., 0] > 0] = w
    return _mix(h)


def _heads(x: Tensor, w: Tensor) -> Tensor:
    """A number per head, heads before positions, as many heads as positions or not."""
    return (x.unflatten(-1, (2, 2)).transpose(1, 2) * w[:, None, None]).transpose(1, 2).flatten(2)


def _pooled(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).mean(1)


def _relative(x: Tensor, w: Tensor) -> Tensor:
    """T5: a bias by distance, added to the scores."""
    s = x.shape[1]
    place = torch.arange(s)
    return (x @ x.mT + w[place[:, None] - place + 4]).softmax(-1) @ x


def _relative_reference(x: Tensor, w: Tensor) -> Tensor:
    s = x.shape[1]
    place = torch.arange(s)
    bias = torch.stack([w[:, t, t - place + 4] for t in range(s)], 1)  # (b, query, key)
    return (x @ x.mT + bias).softmax(-1) @ x


_written(
    "mixed after F.linear", lambda x, w: _mix(F.linear(x, w)), lambda x, w: _mix(rows(x, w)), (3, 4)
)
_written("mixed after x @ w", lambda x, w: _mix(x @ w), lambda x, w: _mix(rows(x, w.mT)), (4, 3))
_written("mixed after scale", lambda x, w: _mix(x * w), lambda x, w: _mix(x * w), (4,))
_written(
    "mixed before and after", lambda x, w: _mix(_mix(x) * w), lambda x, w: _mix(_mix(x) * w), (4,)
)
_written("pooled after scale", _pooled, _pooled, (4,))
_written(
    "pooled after mask",
    lambda x, w: (x * w).masked_fill(x > 1, 0.0).sum(1),
    lambda x, w: (x * w).masked_fill(x > 1, 0.0).sum(1),
    (4,),
)
_written(
    "last token @ w",
    lambda x, w: x[:, -1] @ w,
    lambda x, w: torch.einsum("bi,bio->bo", x[:, -1], w[:, -1]),
    (4, 3),
)
_written(
    "every other token @ w",
    lambda x, w: _mix(x[:, ::2] @ w),
    lambda x, w: _mix(rows(x[:, ::2], w[:, ::2].mT)),
    (4, 3),
)
_written("first token set", _set_first, lambda x, w: _mix(torch.cat([w[:, :1], x[:, 1:]], 1)), (4,))
_written(
    "masked tokens set", _put_where, lambda x, w: _mix(torch.where(x[..., :1] > 0, w, x)), (4,)
)
for _case in FREE[-2:]:
    _case.missing = {"w": "mixes positions"}
_written(
    "mask token",
    lambda x, w: _mix(torch.where(x[..., :1] > 0, w, x)),
    lambda x, w: _mix(torch.where(x[..., :1] > 0, w, x)),
    (1, 1, 4),
)
FREE[-1].build = lambda: _Written(
    lambda x, w: _mix(torch.where(x[..., :1] > 0, w, x)),
    lambda x, w: _mix(torch.where(x[..., :1] > 0, w[:, :, 0, 0], x)),
    (1, 1, 4),
)
_written("relative bias", _relative, _relative_reference, (9,))
_written(
    "chosen tokens @ w",
    lambda x, w: _mix(x.gather(1, x[..., :1].argsort(1)[:, :3].expand(-1, -1, 4)) @ w),
    lambda x, w: _mix(rows(x, w.mT).gather(1, x[..., :1].argsort(1)[:, :3].expand(-1, -1, 3))),
    (4, 3),
)
_written(
    "selected by mask @ w",
    lambda x, w: (x[x[..., 0] > 0] @ w).tanh().sum(0),
    lambda x, w: rows(x, w.mT)[x[..., 0] > 0].tanh().sum(0),
    (4, 3),
)
FREE[-1].samples = None  # their outputs are added up
_written(
    "rolled",
    lambda x, w: _mix(x.roll(1, 1) * w),
    lambda x, w: _mix(x.roll(1, 1) * w.roll(1, 1)),
    (4,),
)
_written(
    "flipped @ w",
    lambda x, w: _mix(x.flip(1) @ w),
    lambda x, w: _mix(rows(x, w.mT).flip(1)),
    (4, 3),
)
_written(
    "swapped and back",
    lambda x, w: _mix((x.transpose(0, 1) @ w).transpose(0, 1)),
    lambda x, w: _mix(rows(x, w.mT)),
    (4, 3),
    x=(3, 3, 4),
)
_written(
    "square everything",
    lambda x, w: _mix((x.mT.contiguous().mT @ w) * w[0]),
    lambda x, w: _mix(rows(x, w.mT) * w[:, :, 0]),
    (3, 3),
    x=(3, 3, 3),
)
_function("per head", _heads, (2,))
_function("per head as many as positions", _heads, (2,), x=(2, 2, 4))
_function(
    "beside the features", lambda x, w: torch.cat([x, w.expand(len(x), 5, 2)], -1).tanh(), (2,)
)
_function("stacked", lambda x, w: torch.stack([x, w.expand_as(x)], -1).flatten(2).sin(), (4,))
_written(
    "token mixing",
    lambda x, w: w @ x,
    lambda x, w: torch.einsum("bts,bsh->bth", _each(w), x),
    (5, 5),
)
_written(
    "token mixing F.linear",
    lambda x, w: F.linear(x.mT, w).mT,
    lambda x, w: torch.einsum("bts,bsh->bth", _each(w), x),
    (5, 5),
)
_written(
    "token mixing einsum",
    lambda x, w: torch.einsum("ts,bsh->bth", w, x),
    lambda x, w: torch.einsum("bts,bsh->bth", _each(w), x),
    (5, 5),
)
_written("suffix", lambda x, w: _mix(torch.cat([x, w.expand(2, 1, 4)], 1)), None, (1, 4))


class _Suffix(nn.Module):
    """Learned tokens after the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return _mix(torch.cat([x, self.w.expand(len(x), -1, -1)], 1))

    def token_reference(self, copies: Copies, x: Tensor) -> Tensor:
        b, s = len(x), x.shape[1] + 2
        own = copies(self.w, b, s)
        extra = torch.stack([own[:, s - 2, 0], own[:, s - 1, 1]], 1)
        return _mix(torch.cat([x, extra], 1))


FREE[-1] = Case("suffix", _Suffix, _x(2, 3, 4))


class _LoRA(nn.Module):
    """A frozen weight and a low-rank one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 3)
        self.base.requires_grad_(False)
        self.lora_a, self.lora_b = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * F.linear(F.linear(x, self.lora_a), self.lora_b)


_free("LoRA", _LoRA, 2, 5, 4)


def _weight_norm() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))


def _old_weight_norm() -> nn.Module:
    return nn.utils.weight_norm(nn.Linear(4, 3))


def _spectral() -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)).eval()


_free("weight norm", _weight_norm, 2, 5, 4)
_free("old weight norm", _old_weight_norm, 2, 5, 4)
_free("spectral norm", _spectral, 2, 5, 4)
_free(
    "weight norm inside",
    lambda: nn.Sequential(nn.Linear(4, 4), _weight_norm(), nn.Tanh(), nn.Linear(3, 2)),
    2,
    5,
    4,
)


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, w)
        return x**3 * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return g * 3 * x**2 * w, (g * x**3).flatten(0, -2).sum(0)


class _Custom(nn.Module):
    """A parameter that goes into an autograd.Function."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return _Cube.apply(x, self.w)


_free("custom function", _Custom, 2, 5, 4)

# -- tied and repeated ---------------------------------------------------------------------------

REPEATED: list[Case] = []


class _Tied(nn.Module):
    """Embedding and head with one weight."""

    def __init__(self, called: bool = True) -> None:
        super().__init__()
        self.embed, self.mlp = nn.Embedding(6, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        h = h + self.mlp(h).tanh()
        return self.head((h @ h.mT).softmax(-1) @ h)


class _TiedByHand(nn.Module):
    """A head that is no module: F.linear with the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.embed(ids).sin(), self.embed.weight)

    def token_reference(self, copies: Copies, ids: Tensor) -> Tensor:
        own = copies(self.embed.weight, *ids.shape)
        read = own.gather(2, ids[..., None, None].expand(-1, -1, 1, 4))[:, :, 0]
        return rows(read.sin(), own)


class _Repeat(nn.Module):
    """One layer called several times on the same tokens."""

    def __init__(self, layer: nn.Module, times: int) -> None:
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.layer(x).tanh()
        return x


class _RepeatAndMix(_Repeat):
    """The same, with positions mixed between the calls."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = (self.layer(x) + self.layer(x.tanh())).tanh()
            x = (x @ x.mT).softmax(-1) @ x
        return x


class _Siblings(nn.Module):
    """Two modules with one weight but biases of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x).tanh())


class _SomeTokensAgain(nn.Module):
    """A layer on all tokens, and again on some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh()[:, ::2])

    def token_reference(self, copies: Copies, x: Tensor) -> Tensor:
        own = [copies(each, *x.shape[:2]) for each in self.layer.parameters()]
        some = [each[:, ::2] for each in own]
        return rows(rows(x, *own).tanh()[:, ::2], *some)


class _TwoLengths(nn.Module):
    """One layer on two token axes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.avg_pool1d(self.layer(x).tanh().mT, 2).mT)


def _repeat(name: str, build: Callable[[], nn.Module], *shape: int, **more: Any) -> None:
    REPEATED.append(Case(name, build, _x(*shape), **more))


REPEATED.append(Case("tied", _Tied, _ids(6, 2, 4)))
REPEATED.append(Case("tied by hand", _TiedByHand, _ids(6, 2, 4)))
_repeat("linear twice", lambda: _Repeat(nn.Linear(4, 4), 2), 2, 5, 4)
_repeat("linear three times", lambda: _Repeat(nn.Linear(4, 4), 3), 2, 5, 4)
_repeat("linear twice 2-D", lambda: _Repeat(nn.Linear(4, 4), 2), 5, 4)
_repeat("linear twice and mixed", lambda: _RepeatAndMix(nn.Linear(4, 4), 2), 2, 5, 4)
_repeat("layer norm twice", lambda: _Repeat(nn.LayerNorm(4), 2), 2, 5, 4)
_repeat("rms norm three times", lambda: _Repeat(nn.RMSNorm(4), 3), 2, 5, 4)
_repeat("norm like Llama's twice", lambda: _Repeat(_HFNorm(4), 2), 2, 5, 4)
_repeat("conv twice", lambda: _Repeat(nn.Conv1d(4, 4, 3, padding=1), 2), 2, 4, 5)
_repeat("conv groups twice", lambda: _Repeat(nn.Conv1d(4, 4, 3, padding=1, groups=2), 2), 2, 4, 5)
_repeat("conv2d twice", lambda: _Repeat(nn.Conv2d(2, 2, 3, padding=1), 2), 2, 2, 3, 2)
_repeat("transposed twice", lambda: _Repeat(_T1(3, 3, 3, padding=1), 2), 2, 3, 4)
_repeat("scale twice", lambda: _Repeat(_Scale(), 2), 2, 5, 4)
_repeat("function twice", lambda: _Repeat(_Functional(F.linear, (4, 4)), 2), 2, 5, 4)
_repeat("attention twice", lambda: _Repeat(_Attention(4, 2, batch_first=True), 2), 2, 3, 4)
_repeat("siblings", _Siblings, 2, 5, 4)
_repeat("some tokens again", _SomeTokensAgain, 2, 4, 4)
_repeat("two lengths", _TwoLengths, 2, 4, 4)
_repeat("gru cell per step", lambda: _Cells(nn.GRUCell(3, 4)), 2, 4, 3)
_repeat("lstm cell per step", lambda: _Cells(nn.LSTMCell(3, 4)), 2, 4, 3)
_repeat("rnn cell per step", lambda: _Cells(nn.RNNCell(3, 4)), 2, 4, 3)

# -- small models --------------------------------------------------------------------------------

MODELS: list[Case] = []


class _Mamba(nn.Module):
    """A gate and a causal depthwise convolution, as in Mamba."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, 8), nn.Linear(4, 4)
        self.conv = nn.Conv1d(4, 4, 3, groups=4, padding=2)
        self.skip, self.decay = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        s = x.shape[1]
        h, gate = self.into(x).chunk(2, -1)
        h = F.silu(self.conv(h.mT)[..., :s].mT)
        h = h * self.skip + (h[..., None] * torch.exp(-self.decay.exp())).sum(-1)
        return self.out(h * F.silu(gate))

    def token_reference(self, copies: Copies, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        own = {name: copies(each, b, s) for name, each in self.named_parameters()}
        h, gate = rows(x, own["into.weight"], own["into.bias"]).chunk(2, -1)
        # Position t of the convolution reads x from t - 2 to t; what lies beyond s is cut off.
        read = F.pad(h, (0, 0, 2, 0)).unfold(1, 3, 1)  # (b, s, channels, 3)
        h = F.silu((read * own["conv.weight"][:, :, :, 0]).sum(-1) + own["conv.bias"])
        h = h * own["skip"] + (h[..., None] * torch.exp(-own["decay"].exp())).sum(-1)
        return rows(h * F.silu(gate), own["out.weight"], own["out.bias"])


class _Router(nn.Module):
    """A mixture of experts: every token goes to its best two, with 3-D weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(3, 5, 4)), nn.Parameter(torch.randn(3, 4, 5))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        result = torch.zeros_like(flat)
        for expert in range(3):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            h = F.linear(F.linear(flat[token], self.up[expert]).tanh(), self.down[expert])
            result = result.index_add(0, token, h * weights[token, place, None])
        return result.view_as(x)


class _GatheredRouter(_Router):
    """The same by gathering the weights of each token's experts (batched_mm)."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        token = torch.arange(len(flat)).repeat_interleave(2)
        expert = chosen.flatten()
        h = torch.bmm(self.up[expert], flat[token][..., None]).tanh()
        h = torch.bmm(self.down[expert], h)[..., 0] * weights.flatten()[:, None]
        return h.view(len(flat), 2, -1).sum(1).view_as(x)


class _Net(nn.Module):
    """Convolutions and a classifier: several token axes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.GroupNorm(1, 3),
            nn.Conv2d(3, 2, 2, stride=2),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.Linear(8, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class _Flat(nn.Module):
    """Tokens flattened to (b * s, h) before the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.norm = nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.norm(self.layer(self.embed(ids).flatten(0, 1)).tanh())
        return h.unflatten(0, ids.shape)


def _model(name: str, build: Callable[[], nn.Module], *shape: int, **more: Any) -> None:
    MODELS.append(Case(name, build, _x(*shape), **more))


def _mlp(*extra: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), *extra, nn.Linear(6, 3))


_model("mlp with in-place relu", _mlp, 2, 5, 4)
_model(
    "in-place everywhere",
    lambda: _mlp(
        nn.LayerNorm(6), nn.Hardtanh(inplace=True), nn.Linear(6, 6), nn.SiLU(inplace=True)
    ),
    2,
    5,
    4,
)
_model(
    "in-place dropout",
    lambda: _mlp(nn.Linear(6, 6), nn.Dropout(0.4, inplace=True)),
    2,
    5,
    4,
    samples=None,
)
_model("mamba", _Mamba, 2, 5, 4)
_model("router", _Router, 2, 4, 4, grid=(2, 4))
_model("gathered router", _GatheredRouter, 2, 4, 4, grid=(2, 4))
_model("convolutions", _Net, 2, 1, 4, 4)
MODELS.append(Case("flattened tokens", _Flat, _ids(5, 2, 4), grid=(2, 4)))

# -- layouts: the same use of a parameter wherever batch, positions and heads are ----------------

LAYOUTS: list[Case] = []

_TO: dict[str, Callable[[Tensor], Tensor]] = {
    "b s h": lambda x: x,
    "s b h": lambda x: x.transpose(0, 1),
    "(b s) h": lambda x: x.flatten(0, 1),
    "(s b) h": lambda x: x.transpose(0, 1).flatten(0, 1),
    "b n s d": lambda x: x.unflatten(-1, (2, -1)).transpose(1, 2),
    "b s n d": lambda x: x.unflatten(-1, (2, -1)),
    "(b n) s d": lambda x: x.unflatten(-1, (2, -1)).transpose(1, 2).flatten(0, 1),
    "n b s d": lambda x: x.unflatten(-1, (2, -1)).permute(2, 0, 1, 3),
    "s (b n) d": lambda x: x.unflatten(-1, (2, -1)).transpose(0, 1).flatten(1, 2),
}
_USES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[int], tuple[int, ...]]]] = {
    "x @ w": (lambda x, w: x @ w, lambda d: (d, d)),
    "linear": (F.linear, lambda d: (d, d)),
    "part": (lambda x, w: x @ w[:, 1:], lambda d: (d, d + 1)),
    "scale": (lambda x, w: x * w, lambda d: (d,)),
    "add": (lambda x, w: x + 2 * w, lambda d: (d,)),
    "one number": (lambda x, w: torch.sigmoid(w) * x, lambda d: ()),
    "norm": (lambda x, w: F.layer_norm(x, w.shape, w), lambda d: (d,)),
    "einsum": (lambda x, w: torch.einsum("...i,oi->...o", x, w), lambda d: (d, d)),
    "twice": (lambda x, w: (x @ w).tanh() @ w.mT + w[0], lambda d: (d, d)),
    "where": (lambda x, w: torch.where(x > 0, x * w, w), lambda d: (d,)),
    "addcmul": (lambda x, w: torch.addcmul(w, x, w, value=0.5), lambda d: (d,)),
}


class _Layout(nn.Module):
    """A parameter that meets data in some layout; positions are mixed before and after."""

    def __init__(self, layout: str, use: str, width: int) -> None:
        super().__init__()
        self.layout, (self.use, shape) = _TO[layout], _USES[use]
        features = width // 2 if "d" in layout else width
        self.w = nn.Parameter(torch.randn(shape(features)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.use(self.layout(_mix(x)), self.w)
        return _mix(h.flatten(0, -2)).sum(0) * h.sum()

    def token_reference(self, copies: Copies, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        h, own = self.layout(_mix(x)), copies(self.w, b, s).flatten(0, 1)
        tokens = self.layout(torch.arange(b * s).view(b, s, 1).expand_as(x))[..., :1]
        made: Any = 0
        for token in range(b * s):
            made = made + torch.where(tokens == token, self.use(h, own[token]), 0.0)
        return _mix(made.flatten(0, -2)).sum(0) * made.sum()


for _layout in _TO:
    for _use in _USES:
        for _shape in ((2, 3, 4), (2, 2, 4)):  # positions as many as samples, heads and units
            _equal = "" if _shape[0] != _shape[1] else ", equal sizes"
            LAYOUTS.append(
                Case(
                    f"{_use} in {_layout}{_equal}",
                    lambda layout=_layout, use=_use: _Layout(layout, use, 4),
                    _x(*_shape),
                    samples=None,
                )
            )

CASES = [*LAYERS, *FREE, *REPEATED, *MODELS]
