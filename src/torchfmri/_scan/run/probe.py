"""Two short passes without gradients: what a scan finds out about a model before it begins.

`subject.find_subject` makes a `Probe` once for each model and asks it for token axes, layers whose
rows are not in the order of tokens, embeddings and the longest sequence. The two passes differ in
length, since a shape alone does not say which axis is the tokens. Whatever both agree on is
believed; in doubt a layer is left out with a reason, because wrong tokens would look like a result.
The model is left as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._model import compiled_code_as_eager, unchanged, unwrap
from torchfmri._scan.run.head_outputs import listening_to_inputs
from torchfmri._scan.run.model_call import (
    call_model,
    count_embeddings,
    logits_of,
    refuse_unknown_ids,
)
from torchfmri._scan.run.row_order import FollowedPass, first_early
from torchfmri._scan.run.token_axis import Resolved, Shape, first_tensor, resolve
from torchfmri._torch import Hook, hooked

_PROBES = ((2, 5), (2, 7))
"""(b, s) of the two passes: no size of a layer is likely to be both lengths."""
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "block_size")
"""What configurations call the longest sequence that a model takes."""
_ROUNDING, _MOST_ROUNDING = 100, 0.05
"""How far apart rounding may bring equal numbers: in units of the dtype, and at most."""


class _Embeddings:
    """Which embeddings read the tokens in a pass, and which the positions.

    Attributes:
        readers: Those of the tokens.
        firsts: Those of positions -> the number of the first one.
    """

    def __init__(self) -> None:
        self.readers: set[nn.Embedding] = set()
        self.firsts: dict[nn.Embedding, int] = {}

    def called(self, module: nn.Embedding, given: Tensor, tokens: Tensor) -> None:
        """Notice what an embedding was given."""
        b, s = tokens.shape
        if tuple(given.shape) not in ((b, s), (1, s), (s,)):
            return
        if torch.equal(given.expand(b, s), tokens.to(given)):
            self.readers.add(module)
            return
        steps = given.reshape(-1, s)[0].long()
        if torch.equal(steps - steps[0], torch.arange(s, device=steps.device)):
            self.firsts[module] = int(steps[0])

    def also_in(self, other: _Embeddings) -> _Embeddings:
        """What another pass agrees with: in one alone, it may be by chance."""
        both = _Embeddings()
        both.readers = self.readers & other.readers
        both.firsts = dict(self.firsts.items() & other.firsts.items())
        return both

    @property
    def vocabulary(self) -> int | None:
        """How many tokens all of the readers know; None without one."""
        return min((each.num_embeddings for each in self.readers), default=None)

    @property
    def positions(self) -> tuple[int, int | None]:
        """The number of the first position, and how many there is room for; None for no limit."""
        rooms = [(first, each.num_embeddings - first) for each, first in self.firsts.items()]
        return min(rooms, key=lambda room: room[1], default=(0, None))


class Probe:
    """Two short passes of different lengths over a model, and what they tell about it.

    In the first one, two sequences differ in their last token alone. In the second one, all tokens
    are different, and they are followed.

    Args:
        model: The module to run; left as it was.
        modules: The layers to look at.
        ids: (b, s), the token ids of a prompt, at least one.
        inputs: Names of which the input of a module is looked at, and no output.

    Attributes:
        vocabulary: How many tokens the embedding of the ids knows; None where there is none.
        first_position: What the model by itself calls the first position.
        longest: How many positions its table of positions has room for; None without a table.
        looks_ahead: Whether the logits at a position depend on the tokens after it.
        written: Layers into whose output somebody writes after they have returned it.
        order: The layers that are called, in the order in which they finish for the first time.

    Raises:
        InspectionError: A token id is none of the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: Mapping[str, nn.Module],
        ids: Tensor,
        inputs: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self._model, self._modules, self._prompt = model, modules, ids
        self._inputs = inputs or {}
        self._shapes: dict[str, list[list[tuple[Shape, int, int]]]]
        self._shapes = {name: [[], []] for name in (*modules, *self._inputs)}
        self._embeddings = (_Embeddings(), _Embeddings())
        self.written: set[str] = set()
        self.order: list[str] = []
        first, second = _sizes(model)
        with unchanged(model), torch.no_grad(), compiled_code_as_eager():
            model.eval()
            logits = self._run(0, _with_other_end(ids, first))
            known = count_embeddings(unwrap(model)) or self._embeddings[0].vocabulary
            # Different tokens, as equal ones would be in order even after a sort by their values.
            self._ids = _distinct_ids(model, ids, known, 2 * second[1])
            tokens = self._ids.view(second)
            self._followed = FollowedPass(model, tokens, torch.ones_like(tokens))
            self._run(1, tokens, self._followed)
        both = self._embeddings[0].also_in(self._embeddings[1])
        self.vocabulary = both.vocabulary
        self.first_position, self.longest = both.positions
        self.looks_ahead = logits is not None and _differ_before_end(logits)

    def _run(
        self, number: int, tokens: Tensor, followed: FollowedPass | None = None
    ) -> Tensor | None:
        """The logits of every position, if the model returns them."""
        seen: list[tuple[str, Tensor, int]] = []

        def take(name: str, output: Tensor) -> None:
            if not any(self._shapes[name]):
                self.order.append(name)
            self._shapes[name][number].append((tuple(output.shape), *tokens.shape))
            if not output.is_inference():
                seen.append((name, output, output._version))
            if followed is not None:
                followed.called(name, output)

        def embed(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            assert isinstance(module, nn.Embedding)
            given = arguments[0] if arguments else None
            if isinstance(given, Tensor):
                self._embeddings[number].called(module, given, tokens)
                if module in self._embeddings[number].readers:
                    self._refuse_unknown(given, module.num_embeddings)

        with contextlib.ExitStack() as stack:
            stack.enter_context(_listening(self._modules, take))
            stack.enter_context(listening_to_inputs(self._inputs, take))
            for module in self._model.modules():
                if isinstance(module, nn.Embedding):
                    handle = module.register_forward_pre_hook(Hook(embed, module))
                    stack.callback(handle.remove)
            stack.enter_context(followed or contextlib.nullcontext())
            logits = logits_of(call_model(self._model, tokens, torch.ones_like(tokens)))
        self.written |= {name for name, output, version in seen if output._version != version}
        return logits if logits is not None and logits.shape[:2] == tokens.shape else None

    def _refuse_unknown(self, given: Tensor, count: int) -> None:
        if int(given.max()) >= count:
            refuse_unknown_ids(self._model, self._prompt, count)

    def calls(self, name: str) -> int:
        """How often a layer is called in one pass."""
        return len(self._shapes[name][0])

    def axis(self, name: str) -> Resolved | str | None:
        """Where the tokens of a layer are, or why there are none; None if it is never called."""
        passes = self._shapes[name]
        if len({len(each) for each in passes}) > 1:
            counts = " and ".join(str(len(each)) for each in passes)
            return f"it is not called equally often in two passes, but {counts} times"
        return resolve([each[0] for each in passes]) if passes[0] else None

    def disordered(self, axes: Mapping[str, Resolved]) -> dict[str, str]:
        """The layers whose rows are not the tokens in their order -> why.

        Where the rows of some could not be followed, a third pass changes tokens one by one.
        """
        doubts = {name: self._followed.doubt(name, axis) for name, axis in axes.items()}
        found = {name: each.reason for name, each in doubts.items() if each and each.is_certain}
        open_ones = {name: each for name, each in doubts.items() if each and not each.is_certain}
        early = self._moved_early({name: axes[name] for name in open_ones}) if open_ones else {}
        for name, position in early.items():
            found[name] = (
                f"{open_ones[name].reason}, and a change of token {position} moves an earlier row"
            )
        return found

    def _moved_early(self, axes: Mapping[str, Resolved]) -> dict[str, int]:
        """The layers with a row that depends on a later token -> the position of that token.

        A layer of a causal model has none, if its rows are the tokens in their order. Nothing is
        found in a model that is not causal itself.
        """
        here, others = self._ids.view(2, -1)
        s = len(here)
        tokens = here.repeat(s + 1, 1)  # then token t is changed in row t + 1
        tokens[1:].diagonal().copy_(others)
        found: dict[str, int] = {}

        def take(name: str, output: Tensor) -> None:
            rows = axes[name].rows(output, *tokens.shape)
            early = None if rows is None else first_early(rows)
            if early is not None:
                found.setdefault(name, early)

        modules = {name: each for name, each in self._modules.items() if name in axes}
        inputs = {name: each for name, each in self._inputs.items() if name in axes}
        with unchanged(self._model), torch.no_grad(), compiled_code_as_eager():
            self._model.eval()
            with _listening(modules, take), listening_to_inputs(inputs, take):
                logits = logits_of(call_model(self._model, tokens, torch.ones_like(tokens)))
        if logits is None or logits.shape[:2] != tokens.shape or first_early(logits) is not None:
            return {}
        return found


@contextlib.contextmanager
def _listening(
    modules: Mapping[str, nn.Module], take: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Hand over the name and the output of every layer that is called inside."""

    def called(name: str, _: nn.Module, __: object, output: object) -> None:
        tensor = first_tensor(output)
        if tensor is not None:
            take(name, tensor)

    with hooked(
        module.register_forward_hook(Hook(partial(called, name), module))
        for name, module in modules.items()
        if not isinstance(module, torch.jit.ScriptModule)
    ):
        yield


def longest_sequence(model: nn.Module) -> int | None:
    """Return the longest sequence that a model says it takes; None if it says nothing."""
    config = getattr(unwrap(model), "config", None)
    limits = [getattr(config, name, None) for name in _CONTEXT]
    return min([each for each in limits if isinstance(each, int) and each > 0], default=None)


def _sizes(model: nn.Module) -> tuple[tuple[int, int], ...]:
    """(b, s) of the two passes, shorter where the model takes no more."""
    longest = longest_sequence(model)
    if longest is None or longest >= _PROBES[-1][1]:
        return _PROBES
    return tuple((2, max(1, longest - less)) for less in (1, 0))


def _with_other_end(ids: Tensor, size: tuple[int, int]) -> Tensor:
    """The first ids of a prompt in every row, but another one at the end of the second row."""
    some = ids.reshape(-1)[: size[1]]
    tokens = some.repeat(-(-size[1] // some.numel()))[: size[1]].repeat(size[0], 1)
    last = int(tokens[0, -1])
    others = ids[ids != last]
    tokens[1, -1] = others[0] if len(others) else max(last - 1, 0)
    return tokens


def _differ_before_end(logits: Tensor) -> bool:
    """Whether two sequences have different logits before their last position."""
    if logits.shape[1] < 2:
        return False
    limit = min(_ROUNDING * torch.finfo(logits.dtype).eps, _MOST_ROUNDING)
    one, other = logits[:, :-1].float()
    return float((one - other).abs().max()) > limit * float(one.abs().max())


def _distinct_ids(model: nn.Module, ids: Tensor, known: int | None, count: int) -> Tensor:
    """Return `count` ids: first those of a prompt, each once, then others of the `known` first.

    Ids that its configuration names stand for something else than a word, such as an image, and
    are not added. Where there are too few, they are repeated.
    """
    kept = list(dict.fromkeys(ids.reshape(-1).tolist()))[:count]
    known = known or max(kept) + 1
    config = getattr(getattr(unwrap(model), "config", None), "__dict__", {})
    named = {value for key, value in config.items() if "token" in key and isinstance(value, int)}
    others = range(0, known, max(1, known // (4 * count)))
    kept += [each for each in others if each not in named and each not in kept]
    return torch.tensor([*islice(cycle(kept), count)], dtype=ids.dtype, device=ids.device)
