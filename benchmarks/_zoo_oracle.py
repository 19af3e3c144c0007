"""Whose gradient is whose in a model that nobody wrote out: the tokens of rows found by nudging.

Every position is made to attend to itself alone. Then one token's embedding is nudged, and the rows
of a layer that move are that token's. In a causal model that mixes positions all the same (a
convolution, a recurrence) a row belongs to the last token that moves it. With the true attention,
`e` is added to what the layer returns, and `e.grad` is what reaches each row; a layer that treats
rows one by one, which is checked, is then differentiated row by row. Each sample runs alone.

What cannot be told in this way is not judged, with the reason.
"""

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks._zoo import LENGTH, TARGET_LENGTH, Small

NUDGE, MOVED = 1e-5, 1e-11
MOST_TOKENS, MOST_ROWS = 80, 400
LENGTHS = {LENGTH, TARGET_LENGTH}
ONCE = "once "  # of a position, for all samples together
Token = tuple[str, int]
Reading = dict[str, Tensor]


class NotJudgedError(Exception):
    """The oracle has no answer."""


@dataclass
class Call:
    """One call of a module with parameters of its own, for one sample."""

    module: nn.Module
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    outputs: list[Tensor]
    probes: list[Tensor] = field(default_factory=list)
    movers: list[set[Token]] = field(default_factory=list)

    @property
    def output(self) -> Tensor:
        return self.outputs[0]

    @property
    def gradients(self) -> list[Tensor]:
        return [
            torch.zeros_like(each) if probe.grad is None else probe.grad
            for each, probe in zip(self.outputs, self.probes, strict=True)
        ]

    @property
    def alive(self) -> Tensor:
        """Which rows a gradient reaches."""
        return sum(self.rows(each).abs().amax(-1) for each in self.gradients) > 0  # type: ignore

    @property
    def is_convolution(self) -> bool:
        return isinstance(self.module, nn.modules.conv._ConvNd)

    def rows(self, tensor: Tensor) -> Tensor:
        """What the module returned as (rows, units)."""
        if self.is_convolution:
            tensor = tensor.movedim(1, -1)
        return tensor.reshape(-1, tensor.shape[-1]) if tensor.ndim else tensor.view(1, 1)


def logits_of(output: Any) -> Tensor:
    """The logits, or the first tensor of what a model returned."""
    found = getattr(output, "logits", None)
    return found if isinstance(found, Tensor) else output[0]


def loss_of(logits: Tensor, first: int = 0) -> Tensor:
    """A loss whose samples do not meet; `first` is the number of the first sample."""
    generator = torch.Generator().manual_seed(first)
    total = torch.zeros((), dtype=logits.dtype)
    for number, sample in enumerate(logits):
        generator.manual_seed(first + number)
        weights = torch.randn(sample.shape, generator=generator, dtype=torch.float32)
        total = total + (sample * weights.to(sample)).sum()
    return total


@dataclass
class ZooTruth:
    """What is known of a model.

    Attributes:
        readings: For each judged parameter the answers that are right.
        unjudged: The others, with the reason.
        alone: The gradients of each sample alone.
    """

    readings: dict[str, list[Reading]]
    unjudged: dict[str, str]
    alone: dict[str, list[Tensor]]


def zoo_truth(small: Small) -> ZooTruth:
    """The truth of a small model, sample by sample."""
    samples = [_Sample(small, number) for number in range(2)]
    truth = ZooTruth({}, {}, {})
    for name, parameter in small.model.named_parameters():
        alone = [each.gradients.get(id(parameter)) for each in samples]
        if any(each is None for each in alone):
            continue
        truth.alone[name] = alone  # type: ignore[assignment]
        try:
            truth.readings[name] = _joined([each.readings(parameter) for each in samples])
        except NotJudgedError as error:
            truth.unjudged[name] = str(error)
    return truth


def _joined(samples: list[list[Reading]]) -> list[Reading]:
    """The readings of single samples, (s, *shape), one above the other."""
    found = []
    for one, two in zip(*samples, strict=False):
        if one.keys() == two.keys() and all(one[k].shape == two[k].shape for k in one):
            pairs = {kind: torch.stack([one[kind], two[kind]]) for kind in one}
            once = {kind: pairs[kind].sum(0, keepdim=True) for kind in one if kind.startswith(ONCE)}
            found.append(pairs | once)
    if not found:
        raise NotJudgedError("its samples have different tokens")
    return found


# -- one sample ----------------------------------------------------------------------------------


class _Sample:
    def __init__(self, small: Small, number: int) -> None:
        self.small, self.number = small, number
        self.inputs = {name: each[number : number + 1] for name, each in small.inputs.items()}
        self.ids = {n: each for n, each in self.inputs.items() if not each.is_floating_point()}
        self.lengths = {name: each.shape[1] for name, each in self.ids.items()}
        self.anchors: dict[str, tuple[int, int]] = {}
        small.model.zero_grad()
        self.calls, logits = self._run(probes=True)
        loss_of(logits, number).backward()
        self.gradients = {
            id(each): each.grad.clone()
            for each in small.model.parameters()
            if each.grad is not None
        }
        small.model.zero_grad()
        self.causal = self._find_movers()
        self._parts: dict[int, list[tuple[Tensor, list[list[Token]]]]] = defaultdict(list)
        self._reasons: dict[int, str] = {}
        for call in self.calls:
            try:
                self._take_apart(call)
            except NotJudgedError as error:
                for each in call.module.parameters(recurse=False):
                    self._reasons[id(each)] = f"{type(call.module).__name__}: {error}"

    def _run(self, probes: bool = False, nudge: Token | None = None) -> tuple[list[Call], Tensor]:
        """The calls of modules with parameters of their own, and the logits."""
        calls: list[Call] = []

        def nudged(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
            if nudge is None:
                return output
            kind, place = nudge
            if kind in self.anchors and self.anchors[kind][0] == len(calls):
                channels_last = output if output.ndim == 3 else output.flatten(2).mT
                change = torch.zeros_like(channels_last)
                change[:, place] = NUDGE * _direction(change.shape[-1])
                return output + (change if output.ndim == 3 else change.mT.view(output.shape))
            if kind in self.ids and isinstance(module, nn.Embedding):
                words = arguments[0] if arguments else None
                if words is not None and torch.equal(words, self.ids[kind]):
                    change = torch.zeros_like(output)
                    change[:, place] = NUDGE * _direction(output.shape[-1])
                    return output + change
            return output

        def after(module: nn.Module, arguments: Any, keywords: Any, output: Any) -> Any:
            several = list(output) if isinstance(output, tuple) else [output]
            numbers = _floats(several)
            if not numbers:
                return None
            several[numbers[0]] = nudged(module, arguments, several[numbers[0]])
            kept = [several[each].detach().clone() for each in numbers]
            calls.append(Call(module, _kept(arguments), _kept(keywords), kept))
            for each in numbers if probes else ():
                probe = torch.zeros_like(several[each], requires_grad=True)
                calls[-1].probes.append(probe)
                several[each] = several[each] + probe
            return tuple(several) if isinstance(output, tuple) else several[0]

        handles = [
            each.register_forward_hook(after, with_kwargs=True)
            for each in self.small.model.modules()
            if next(each.parameters(recurse=False), None) is not None
        ]
        try:
            with contextlib.nullcontext() if probes else torch.no_grad():
                return calls, logits_of(self.small.model(**self.inputs))
        finally:
            for handle in handles:
                handle.remove()

    def _find_movers(self) -> bool:
        """Note of every row the tokens that move it; whether no logit sees a later token."""
        self.anchors = {} if self.ids else self._find_anchors()
        counts = self.lengths | {name: count for name, (_, count) in self.anchors.items()}
        tokens: list[Token] = [(name, t) for name, count in counts.items() for t in range(count)]
        if not tokens:
            raise NotJudgedError("there is nothing to nudge")
        causal = True
        with each_for_itself():
            plain, logits = self._run()
            if len(plain) != len(self.calls):
                raise NotJudgedError("attention to itself takes another way through the model")
            for call, own in zip(self.calls, plain, strict=True):
                if own.module is not call.module or own.output.shape != call.output.shape:
                    raise NotJudgedError("attention to itself takes another way through the model")
                call.movers = [set() for _ in range(len(call.rows(call.output)))]
            for token in tokens:
                calls, moved_logits = self._run(nudge=token)
                if [each.output.shape for each in calls] != [each.output.shape for each in plain]:
                    raise NotJudgedError("a nudge takes another way through the model")
                for call, before, now in zip(self.calls, plain, calls, strict=True):
                    gap = (call.rows(now.output) - call.rows(before.output)).abs().amax(-1)
                    for row in (gap > MOVED).nonzero()[:, 0].tolist():
                        call.movers[row].add(token)
                gap = (moved_logits - logits).abs().flatten(2).amax(-1) if logits.ndim > 2 else None
                if gap is None or gap.shape[1] != self.lengths.get(token[0]):
                    causal = False
                else:
                    causal &= not bool((gap[0, : token[1]] > MOVED).any())
        return causal

    def _find_anchors(self) -> dict[str, tuple[int, int]]:
        """The calls that make the patches of an image, and fewer of them: {name: (call, count)}."""
        names = {id(each): name for name, each in self.small.model.named_modules()}
        found: dict[str, tuple[int, int]] = {}
        for number, call in enumerate(self.calls):
            smaller = isinstance(call.module, nn.Conv2d) and (
                not found or max(call.module.stride) > 1  # type: ignore[type-var]
            )
            merges = any(word in names[id(call.module)] for word in ("reduction", "downsample"))
            count = len(call.rows(call.output))
            if (smaller or (merges and call.output.ndim == 3)) and 1 < count <= MOST_TOKENS:
                found[f"patches of call {number}"] = (number, count)
        return found

    # -- rows ------------------------------------------------------------------------------------

    def _places(self, call: Call) -> list[list[Token]]:
        """The tokens of a call's rows, in each of the ways that are right; empty: unknown."""
        if not self.anchors:
            return self._places_among(call, call.movers)
        own = next((n for n, (at, _) in self.anchors.items() if self.calls[at] is call), None)
        if own is not None:  # it makes a resolution of its own
            count = self.anchors[own][1]
            return [[(f"{count} patches", place) for place in range(count)]]
        for name in self.anchors:  # the first resolution of which each row is one token
            found = self._places_among(
                call, [{each for each in row if each[0] == name} for row in call.movers]
            )
            if found:
                label = f"{self.anchors[name][1]} patches"
                return [
                    [(label if kind == name else kind, place) for kind, place in reading]
                    for reading in found
                ]
        return []

    def _places_among(self, call: Call, movers: list[set[Token]]) -> list[list[Token]]:
        rows, alive = len(movers), call.alive
        single: list[Token | None] = []
        for each in movers:
            one = next(iter(each)) if len(each) == 1 else None
            if one is None and each and self.causal and len({name for name, _ in each}) == 1:
                one = max(each)
            single.append(one)
        needed = [number for number in range(rows) if alive[number]]
        nobody: Token = ("nobody", 0)  # a row that no gradient reaches
        readings: list[list[Token]] = []
        if all(single[number] is not None for number in needed):
            readings.append([each if each is not None else nobody for each in single])
        if rows == 1:
            readings.append([("sample", 0)])
        if not any(movers):  # made of constants: the positions are those of the place
            fitting = [name for name, length in self.lengths.items() if length == rows]
            if len(fitting) == 1:
                readings.append([(fitting[0], place) for place in range(rows)])
                readings.append([(f"{ONCE}{fitting[0]}", place) for place in range(rows)])
        known = [place for each in single if each is not None for place in (each[1],)]
        constant = all(single[n] is not None or not movers[n] for n in needed)
        in_order = all(one < two for one, two in itertools.pairwise(known))
        if not self.ids and rows > 1 and known and constant and in_order and call.output.ndim == 3:
            readings.append([(f"{rows} rows", place) for place in range(rows)])
        return readings

    def _take_apart(self, call: Call) -> None:
        """Note what every row of a call brings to the module's parameters."""
        below = {id(e) for child in call.module.children() for e in child.parameters()}
        own = {
            name: each
            for name, each in call.module.named_parameters(recurse=False)
            if id(each) in self.gradients and id(each) not in below
        }
        if not own:
            return
        if any(len(call.rows(each)) != len(call.movers) for each in call.outputs):
            raise NotJudgedError("its outputs have different rows")
        if not call.alive.any():
            return
        if len(call.movers) > MOST_ROWS:
            raise NotJudgedError(f"{len(call.movers)} rows")
        places = self._places(call)
        if not places:
            raise NotJudgedError("rows that several tokens move, or none")
        by_row = _row_gradients(call, own)
        for name, each in own.items():
            self._parts[id(each)].append((by_row[name], places))

    def readings(self, parameter: Tensor) -> list[Reading]:
        """The gradient of each token, (s, *shape), in every reading."""
        if id(parameter) in self._reasons:
            raise NotJudgedError(self._reasons[id(parameter)])
        parts = self._parts.get(id(parameter), [])
        found: list[Reading] = []
        for number in range(max([len(places) for _, places in parts], default=1)):
            total: dict[str, Tensor] = {}
            for rows, places in parts:
                chosen = places[min(number, len(places) - 1)]
                for row, (kind, place) in zip(rows, chosen, strict=True):
                    if kind != "nobody":
                        self._table(total, kind, parameter)[place] += row
            found.append(total)
        whole = self.gradients[id(parameter)]
        missed = whole - sum((t.sum(0) for t in found[0].values()), torch.zeros_like(whole))
        if missed.abs().max() > 1e-9 * max(1.0, float(whole.abs().max())):
            raise NotJudgedError("used otherwise than by calls of its module")
        return found

    def _table(self, total: dict[str, Tensor], kind: str, parameter: Tensor) -> Tensor:
        if kind not in total:
            length = self.lengths.get(kind.removeprefix(ONCE), 1)
            if kind.endswith((" rows", " patches")):
                length = int(kind.split()[0])
            total[kind] = torch.zeros(length, *parameter.shape, dtype=parameter.dtype)
        return total[kind]


def _direction(size: int) -> Tensor:
    return torch.linspace(0.5, 1.5, size, dtype=torch.float64)


def _kept(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, tuple):
        return tuple(map(_kept, value))
    return {name: _kept(each) for name, each in value.items()} if type(value) is dict else value


# -- row by row ----------------------------------------------------------------------------------


def _row_gradients(call: Call, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """What every row brings to each of the parameters, {name: (rows, *shape)}."""
    gradients = [call.rows(each) for each in call.gradients]
    if type(call.module) is nn.Linear and len(call.arguments) == 1:
        x = call.arguments[0].reshape(len(gradients[0]), -1)
        found = {"weight": torch.einsum("ro,ri->roi", gradients[0], x), "bias": gradients[0]}
        return {name: found[name] for name in own}
    wanted = [call.rows(each) for each in call.outputs]
    rows: dict[str, list[Tensor]] = {name: [] for name in own}
    with torch.enable_grad():
        single = _one_by_one(call)
        # From the last to the first: a module that keeps a state must not find it.
        for number in reversed(range(len(call.movers))):
            parts: Any = [None] * len(own)
            if call.alive[number]:
                total = torch.zeros((), dtype=torch.float64)
                for y, right, gradient in zip(single(number), wanted, gradients, strict=True):
                    gap = (y.detach() - right[number]).abs().max()
                    if gap > 1e-9 * max(1.0, float(right.abs().max())):
                        raise NotJudgedError("it does not treat rows one by one")
                    total = total + (y * gradient[number]).sum()
                if total.requires_grad:
                    parts = torch.autograd.grad(
                        total, list(own.values()), allow_unused=True, retain_graph=True
                    )
            for (name, parameter), part in zip(own.items(), parts, strict=True):
                rows[name].append(torch.zeros_like(parameter) if part is None else part)
    return {name: torch.stack(several[::-1]) for name, several in rows.items()}


def _floats(values: Any) -> list[int]:
    """Which of the values are tensors of numbers."""
    pairs = enumerate(values)
    return [n for n, each in pairs if isinstance(each, Tensor) and each.is_floating_point()]


def _one_by_one(call: Call) -> Callable[[int], list[Tensor]]:
    """A function that computes one row of what the module returned."""
    if call.is_convolution or isinstance(call.module, nn.Embedding):
        whole = call.rows(call.module(*call.arguments, **call.keywords))
        return lambda number: [whole[number]]
    lead = call.output.shape[:-1]
    values = [*call.arguments, *call.keywords.values()]
    if not any(isinstance(each, Tensor) for each in values):
        raise NotJudgedError("it takes no tensor")

    def alone(value: Any, number: int) -> Any:
        if not isinstance(value, Tensor) or value.shape[: len(lead)] != lead:
            return value
        rest = value.shape[len(lead) :]
        return value.reshape(-1, *rest)[number].reshape(*[1] * len(lead), *rest)

    def row(number: int) -> list[Tensor]:
        arguments = [alone(each, number) for each in call.arguments]
        keywords = {name: alone(each, number) for name, each in call.keywords.items()}
        try:
            output = call.module(*arguments, **keywords)
        except Exception as error:
            raise NotJudgedError("it does not run on a single row") from error
        several = output if isinstance(output, tuple) else (output,)
        found = [several[each] for each in _floats(several)]
        sizes = [each.shape[-1] for each in call.outputs]
        if [each.numel() for each in found] != sizes:
            raise NotJudgedError("it does not treat rows one by one")
        return [each.reshape(-1) for each in found]

    return row


# -- attention to itself -------------------------------------------------------------------------


@contextlib.contextmanager
def each_for_itself() -> Iterator[None]:
    """In attention every position sees itself alone, and nothing of another sequence."""
    kept = (F.scaled_dot_product_attention, F.softmax, torch.softmax, Tensor.softmax)

    def own_value(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        if query.shape[-2] != key.shape[-2]:
            return value.new_zeros(*query.shape[:-1], value.shape[-1])
        groups = query.shape[-3] // value.shape[-3] if query.ndim > 3 else 1
        return value.repeat_interleave(groups, -3) if groups > 1 else value.clone()

    def identity(softmax: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def instead(scores: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
            given = softmax(scores, *arguments, **keywords)
            dim = keywords.get("dim", arguments[0] if arguments else None)
            if scores.ndim < 3 or dim not in (-1, scores.ndim - 1):
                return given
            queries, keys = scores.shape[-2:]
            if queries > 1 and keys in (queries, queries + 1):  # one more: a sink
                return torch.eye(queries, keys, dtype=given.dtype).expand(given.shape)
            return torch.zeros_like(given) if {queries, keys} == LENGTHS else given

        return instead

    F.scaled_dot_product_attention = own_value
    F.softmax, torch.softmax = identity(kept[1]), identity(kept[2])
    Tensor.softmax = identity(kept[3])  # type: ignore[method-assign]
    try:
        yield
    finally:
        F.scaled_dot_product_attention, F.softmax, torch.softmax = kept[:3]
        Tensor.softmax = kept[3]  # type: ignore[method-assign]


def batch_loss(small: Small) -> Tensor:
    """The loss of both samples together."""
    return loss_of(logits_of(small.model(**small.inputs)))
