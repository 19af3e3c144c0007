"""RNN, GRU and LSTM, step by step, because their kernels show nothing of what is inside.

Tokens are time steps, and each has a copy of the weights of its own. The layer is computed again
with one product per step; the gradients of those products and what they multiplied are the factors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from torchfmri._tokens.algebra.factors import Term
from torchfmri._tokens.rules.uses import NotUnderstoodError

RECURRENT = (nn.RNN, nn.GRU, nn.LSTM)


class _Unrolled:
    """One evaluation of a recurrent layer, remembering every product.

    Attributes:
        products: Name of the weight -> per step (time, x (b, i), product (b, o)).
    """

    def __init__(self, module: Any, lengths: Tensor | None) -> None:
        self._module, self._lengths = module, lengths
        self._weights = {
            name: each.detach().requires_grad_() for name, each in module._parameters.items()
        }
        self.products: dict[str, list[tuple[int, Tensor, Tensor]]] = defaultdict(list)

    def run(self, x: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Outputs (s, b, o) and last states, from inputs (s, b, i) and first states."""
        module = self._module
        ends: list[list[Tensor]] = [[] for _ in states]
        for layer in range(module.num_layers):
            outputs = []
            for direction in range(2 if module.bidirectional else 1):
                number = layer * (2 if module.bidirectional else 1) + direction
                first = [each[number] for each in states]
                output, last = self._direction(x, first, layer, direction)
                outputs.append(output)
                for kept, each in zip(ends, last, strict=True):
                    kept.append(each)
            x = torch.cat(outputs, -1)
            if layer < module.num_layers - 1:
                x = F.dropout(x, module.dropout, module.training)
        return x, [torch.stack(each) for each in ends]

    def _direction(
        self, x: Tensor, state: list[Tensor], layer: int, direction: int
    ) -> tuple[Tensor, list[Tensor]]:
        suffix = f"l{layer}{'_reverse' if direction else ''}"
        steps = reversed(range(len(x))) if direction else range(len(x))
        outputs: dict[int, Tensor] = {}
        for time in steps:
            new = _CELLS[self._module.mode](self, time, x[time], state, suffix)
            if self._lengths is None:
                outputs[time], state = new[0], new
                continue
            here = (time < self._lengths)[:, None]
            outputs[time] = torch.where(here, new[0], 0.0)
            state = [torch.where(here, one, old) for one, old in zip(new, state, strict=True)]
        return torch.stack([outputs[time] for time in range(len(x))]), state

    def product(self, time: int, name: str, x: Tensor) -> Tensor:
        """The product W x + b for one step, remembered."""
        weight, bias = self._weights[f"weight_{name}"], self._weights.get(f"bias_{name}")
        made = F.linear(x, weight, bias)
        self.products[name].append((time, x, made))
        return made


def _rnn(activation: Callable[[Tensor], Tensor]) -> Callable[..., list[Tensor]]:
    def step(run: _Unrolled, time: int, x: Tensor, state: list[Tensor], at: str) -> list[Tensor]:
        both = run.product(time, f"ih_{at}", x) + run.product(time, f"hh_{at}", state[0])
        return [activation(both)]

    return step


def _gru(run: _Unrolled, time: int, x: Tensor, state: list[Tensor], at: str) -> list[Tensor]:
    from_x = run.product(time, f"ih_{at}", x).chunk(3, -1)
    from_h = run.product(time, f"hh_{at}", state[0]).chunk(3, -1)
    reset, update = (torch.sigmoid(from_x[k] + from_h[k]) for k in (0, 1))
    new = torch.tanh(from_x[2] + reset * from_h[2])
    return [(1 - update) * new + update * state[0]]


def _lstm(run: _Unrolled, time: int, x: Tensor, state: list[Tensor], at: str) -> list[Tensor]:
    both = run.product(time, f"ih_{at}", x) + run.product(time, f"hh_{at}", state[0])
    enter, forget, cell, leave = both.chunk(4, -1)
    memory = torch.sigmoid(forget) * state[1] + torch.sigmoid(enter) * torch.tanh(cell)
    hidden = torch.sigmoid(leave) * torch.tanh(memory)
    if f"weight_hr_{at}" in run._weights:
        hidden = run.product(time, f"hr_{at}", hidden)
    return [hidden, memory]


_CELLS: dict[str, Callable[..., list[Tensor]]] = {
    "RNN_TANH": _rnn(torch.tanh),
    "RNN_RELU": _rnn(torch.relu),
    "GRU": _gru,
    "LSTM": _lstm,
}


def recurrent_terms(
    module: Any,
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
    gradients: Mapping[str, Tensor | None],
    outputs: Mapping[str, Any],
) -> tuple[tuple[int, int], dict[str, Term]]:
    """The tokens and the terms of every weight of a recurrent layer, by name in the module.

    Args:
        module: An RNN, GRU or LSTM.
        arguments: What it was called with.
        keywords: Likewise.
        gradients: dL/d its outputs, by path.
        outputs: The outputs of the call, by path, to compare with.

    Raises:
        NotUnderstoodError: The outputs cannot be computed again.
    """
    if (
        module.dropout
        and module.training
        and module.num_layers > 1
        and any(each.is_cuda for each in module.parameters())
    ):
        raise NotUnderstoodError("the GPU's kernel draws its dropout by itself")
    x, lengths, is_batched = _steps_first(module, arguments, keywords)
    given = arguments[1] if len(arguments) > 1 else keywords.get("hx")
    states = _states(module, x, given, is_batched)
    run = _Unrolled(module, lengths)
    result, last = run.run(x, states)
    pairs = _pairs(module, result, last, gradients, outputs, arguments, keywords, is_batched)
    return _terms(module, run, pairs, x.shape[:2], is_batched)


def recurrent_input(arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """What a recurrent layer reads: a tensor or a packed sequence."""
    return arguments[0] if arguments else keywords["input"]


def _steps_first(
    module: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[Tensor, Tensor | None, bool]:
    """The input as (s, b, i), the lengths of packed samples, and whether there is a batch axis."""
    x = recurrent_input(arguments, keywords)
    if isinstance(x, PackedSequence):
        padded, lengths = pad_packed_sequence(x)
        return padded.detach(), lengths.to(padded.device), True
    if x.ndim == 2:
        return x.detach()[:, None], None, False
    return (x.transpose(0, 1) if module.batch_first else x).detach(), None, True


def _states(module: Any, x: Tensor, given: Any, is_batched: bool) -> list[Tensor]:
    several = module.mode == "LSTM"
    if given is not None:
        states = [each.detach() for each in (given if several else (given,))]
        return states if is_batched else [each[:, None] for each in states]
    count = module.num_layers * (2 if module.bidirectional else 1)
    width = getattr(module, "proj_size", 0) or module.hidden_size
    widths = [width, module.hidden_size] if several else [width]
    return [x.new_zeros(count, x.shape[1], each) for each in widths]


def _pairs(
    module: Any,
    result: Tensor,
    last: list[Tensor],
    gradients: Mapping[str, Tensor | None],
    outputs: Mapping[str, Any],
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any],
    is_batched: bool,
) -> list[tuple[Tensor, Tensor]]:
    """What was computed again, each with its gradient."""
    x = recurrent_input(arguments, keywords)
    made = {"0": result.transpose(0, 1) if module.batch_first and is_batched else result}
    if isinstance(x, PackedSequence):
        made = {
            "0.data": nn.utils.rnn.pack_padded_sequence(
                result, pad_packed_sequence(x)[1], enforce_sorted=x.sorted_indices is None
            ).data
        }
    if not is_batched:
        made["0"] = result[:, 0]
        last = [each[:, 0] for each in last]
    paths = ("1.0", "1.1") if module.mode == "LSTM" else ("1",)
    made |= dict(zip(paths, last, strict=True))
    for path, tensor in made.items():
        seen = outputs.get(path)
        if seen is not None and not seen.equals(tensor):
            raise NotUnderstoodError("computed step by step it gave another output")
    return [(tensor, g) for path, tensor in made.items() if (g := gradients.get(path)) is not None]


def _terms(
    module: Any,
    run: _Unrolled,
    pairs: list[tuple[Tensor, Tensor]],
    size: torch.Size,
    is_batched: bool,
) -> tuple[tuple[int, int], dict[str, Term]]:
    made = [product for several in run.products.values() for _, _, product in several]
    brought = iter(
        torch.autograd.grad(
            [each for each, _ in pairs], made, [each for _, each in pairs], allow_unused=True
        )
    )
    s, b = size
    batch_first = module.batch_first or not is_batched
    terms: dict[str, Term] = {}
    for name, several in run.products.items():
        g = several[0][2].new_zeros(s, b, several[0][2].shape[-1])
        x = several[0][1].new_zeros(s, b, several[0][1].shape[-1])
        for time, multiplied, _ in several:
            gradient = next(brought)
            x[time] = multiplied.detach()
            if gradient is not None:
                g[time] = gradient
        if batch_first:
            g, x = g.transpose(0, 1), x.transpose(0, 1)
        rows = g.reshape(s * b, 1, -1)
        terms[f"weight_{name}"] = Term((rows, x.reshape(s * b, 1, -1)))
        if f"bias_{name}" in run._weights:
            terms[f"bias_{name}"] = Term((rows,))
    return ((b, s) if batch_first else (s, b)), terms
