"""A zoo of backward passes that are wrong, each in a way that people really get wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class Elementwise(nn.Module):
    """A layer that applies a function of one tensor."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x)


class Weighted(nn.Module):
    """A layer that applies a function of x, a square weight and a bias."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x, self.weight, self.bias)


# -- element by element ----------------------------------------------------------------------


class MissingTerm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * x.sigmoid()  # and x * sigmoid'(x)


class WrongSign(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.cos()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * x.sin()


class ForgottenMask(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class WrongScale(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


class NearlyRight(Function):
    """The tanh approximation of GELU with the derivative of the exact one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x, approximate="tanh")

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        normal = torch.exp(-x.square() / 2) / (2 * torch.pi) ** 0.5
        return g * (torch.special.ndtr(x) + x * normal)


class Clipped(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clamp(-1, 1)


class Noisy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * (1 + 0.1 * torch.randn_like(g))


class NotFinite(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * 2 * x.square() / (x - x)


# -- along an axis ---------------------------------------------------------------------------


class SoftmaxWithoutSum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        p = x.softmax(-1)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (p,) = ctx.saved_tensors
        return p * g


class UnflippedCumsum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.cumsum(-1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.cumsum(-1)


class FirstOfBatch(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return (g[:1] * 2).expand_as(g)


class LastPositionForgotten(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        g = g * 2
        g[-1, -1] = 0
        return g


class NormWithoutMean(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rstd = (x.var(-1, keepdim=True, unbiased=False) + 1e-5).rsqrt()
        y = (x - x.mean(-1, keepdim=True)) * rstd
        ctx.save_for_backward(y, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        y, rstd = ctx.saved_tensors
        return rstd * (g - y * (g * y).mean(-1, keepdim=True))  # and - g.mean(-1)


class NormWithoutEpsilon(Function):
    """Deviates in the fifth digit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        r = x.square().mean(-1, keepdim=True).rsqrt()
        y = x * r
        return r * (g - y * (g * y).mean(-1, keepdim=True))


class MaxToAll(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.amax(-1, keepdim=True) + 0 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return (g.sum(-1, keepdim=True) / ctx.shape[-1]).expand(ctx.shape)


# -- with parameters -------------------------------------------------------------------------


class Linear(Function):
    """Right; those below change one thing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return g @ weight, g.T @ x, g.sum(0)


class TransposedWeight(Linear):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return g @ weight, x.T @ g, g.sum(0)


class TransposedInput(Linear):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return g @ weight.T, g.T @ x, g.sum(0)


class BiasMean(Linear):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return g @ weight, g.T @ x, g.mean(0)


class BiasWrongAxis(Linear):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return g @ weight, g.T @ x, g[:WIDTH].sum(1)


class NoWeightGradient(Linear):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        _, weight = ctx.saved_tensors
        return g @ weight, None, g.sum(0)


class TooFewGradients(Linear):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return g @ weight, g.T @ x


class WrongShape(Linear):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return g @ weight, (g.T @ x)[:-1], g.sum(0)


class WeightOfTheFuture(Linear):
    """Keeps the input in a place where it is overwritten before the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        kept = x.clone()
        ctx.kept, ctx.weight = kept, weight
        y = x @ weight.T + bias
        kept.mul_(0.5)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g @ ctx.weight, g.T @ ctx.kept, g.sum(0)


class InPlaceOnSaved(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        y = x.square()
        x.add_(1)  # without mark_dirty
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * 2 * x


class Swapped(Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return g * a, g * b


class OverwritingEmbedding(Function):
    """The gradient of a repeated index is the last one instead of the sum."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = weight.shape
        return weight[index]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        found = g.new_zeros(ctx.shape)
        found[index] = g
        return None, found


class ConvolutionPadding(Function):
    """The gradient of the weight forgets the padding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.conv1d(x, weight, padding=1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        inner = F.pad(x[..., 1:-1], (1, 1))
        return (
            torch.nn.grad.conv1d_input(x.shape, weight, g, padding=1),
            torch.nn.grad.conv1d_weight(inner, weight.shape, g, padding=1),
        )


# -- attention -------------------------------------------------------------------------------


class Attention(Function):
    """Causal attention of one head: wrong as `mistake` says."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mistake: str) -> Tensor:
        allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        scores = q @ k.mT * q.shape[-1] ** -0.5
        p = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        ctx.save_for_backward(q, k, v, p, scores.softmax(-1))
        ctx.mistake = mistake
        return p @ v

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        q, k, v, p, unmasked = ctx.saved_tensors
        scale = 1.0 if ctx.mistake == "scale" else q.shape[-1] ** -0.5
        if ctx.mistake == "mask":
            p = unmasked
        dp = g @ v.mT
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
        if ctx.mistake == "query":
            ds = ds.detach()
            return ds @ q, ds.mT @ q, p.mT @ g, None
        return ds @ k, ds.mT @ q, p.mT @ g, None


class AttentionLayer(nn.Module):
    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.mistake = mistake
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return Attention.apply(*self.qkv(x).chunk(3, -1), self.mistake)


class GroupedKeys(Function):
    """The heads of a group share keys; the gradient takes the first head's instead of the sum."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor) -> Tensor:
        ctx.save_for_backward(q, k)
        return torch.einsum("rsd,td->rst", q, k)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        q, k = ctx.saved_tensors
        return torch.einsum("rst,td->rsd", g, k), torch.einsum("st,sd->td", g[0], q[0])


class GroupedLayer(nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return GroupedKeys.apply(q, k)


# -- without a Function ----------------------------------------------------------------------


class DetachedNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.detach().norm(dim=-1, keepdim=True)


class DataNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.data.mean()


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.inner(x)
        return y.requires_grad_()


class HookedBlock(nn.Module):
    """Its layers are right; a hook in its own code doubles the gradient between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if h.requires_grad:
            h.register_hook(lambda g: 2 * g)
        return self.down(h)


class FreeFunctionBlock(nn.Module):
    """Its layers are right; a function in its own code is not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(MissingTerm.apply(self.up(x)))


class OtherNoise(nn.Module):
    """A checkpoint that draws other random numbers when it runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def _run(self, x: Tensor) -> Tensor:
        return F.dropout(self.inner(x), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._run, x, use_reentrant=False, preserve_rng_state=False)


class OnTheClass(Function):
    """Keeps its input on the class, so that the second call overwrites that of the first."""

    kept: Tensor

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        OnTheClass.kept = x
        return x.square()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2 * OnTheClass.kept


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.square = Elementwise(OnTheClass)

    def forward(self, x: Tensor) -> Tensor:
        return self.square(x) + self.square(x.sin())


# -- second derivatives ----------------------------------------------------------------------


class SavedIntermediate(Function):
    """Right once: autograd does not know how the saved tensor came about."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return g * y


class DetachedBackward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * 3 * x.detach().square()


# -- the zoo ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wrong:
    """A wrong layer, and what the verification has to say about it.

    Attributes:
        make: Makes it; it takes and returns (n, WIDTH), unless `data` is given.
        of: The gradients that are wrong.
        says: What the reason has to contain.
        inside: Where the mistake is, below the layer itself.
        data: What it takes instead.
        second: Whether only the second derivative is wrong.
    """

    make: Callable[[], nn.Module]
    of: set[str]
    says: str = ""
    inside: str = ""
    data: Callable[[], Any] | None = None
    second: bool = field(default=False)


class IndexLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3))

    def forward(self, index: Tensor) -> Tensor:
        return OverwritingEmbedding.apply(index, self.weight)


class ConvolutionLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return ConvolutionPadding.apply(x, self.weight)


class ProductLayer(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return Swapped.apply(a, b)


def one(function: Any, says: str = "", **options: Any) -> Wrong:
    return Wrong(lambda: Elementwise(function), {"input x"}, says, **options)


def weighted(function: Any, *of: str, says: str = "") -> Wrong:
    return Wrong(lambda: Weighted(function), set(of), says)


ZOO: dict[str, Wrong] = {
    "missing term": one(MissingTerm, "off by"),
    "wrong sign": one(WrongSign, "-1 times"),
    "forgotten mask": one(ForgottenMask, "off by"),
    "wrong scale": one(WrongScale, "0.6667 times"),
    "nearly right": one(NearlyRight, "off by"),
    "clipped gradient": one(Clipped, "off by"),
    "random gradient": one(Noisy, "from one backward pass to the next"),
    "NaN gradient": one(NotFinite, "NaN or Inf"),
    "softmax without the sum": one(SoftmaxWithoutSum),
    "cumsum not flipped": one(UnflippedCumsum),
    "only the first of the batch": one(FirstOfBatch),
    "last position forgotten": one(LastPositionForgotten),
    "norm without mean": one(NormWithoutMean),
    "norm without epsilon": one(NormWithoutEpsilon),
    "maximum to all": one(MaxToAll),
    "input written without saying so": one(InPlaceOnSaved),
    "transposed weight": weighted(TransposedWeight, "weight"),
    "transposed input": weighted(TransposedInput, "input x"),
    "bias mean": weighted(BiasMean, "bias", says="0.125 times"),
    "bias along the wrong axis": weighted(BiasWrongAxis, "bias"),
    "no gradient of the weight": weighted(NoWeightGradient, "weight", says="no gradient arrives"),
    "too few gradients": weighted(TooFewGradients, "backward pass", says="incorrect number"),
    "gradient of another shape": weighted(WrongShape, "backward pass", says="shape"),
    "saved and overwritten": weighted(WeightOfTheFuture, "weight", says="0.5 times"),
    "swapped gradients": Wrong(
        ProductLayer, {"input a", "input b"}, data=lambda: tuple(torch.randn(2, 4, 3))
    ),
    "repeated index": Wrong(IndexLayer, {"weight"}, data=lambda: torch.tensor([0, 1, 1, 4])),
    "convolution without padding": Wrong(
        ConvolutionLayer, {"weight"}, data=lambda: torch.randn(2, 2, 7)
    ),
    "attention without scale": Wrong(
        lambda: AttentionLayer("scale"), {"input x", "qkv.weight", "qkv.bias"}
    ),
    "attention without mask": Wrong(
        lambda: AttentionLayer("mask"), {"input x", "qkv.weight", "qkv.bias"}
    ),
    "attention with queries for keys": Wrong(
        lambda: AttentionLayer("query"), {"input x", "qkv.weight", "qkv.bias"}
    ),
    "keys of a group": Wrong(
        GroupedLayer, {"input k"}, data=lambda: (torch.randn(3, 4, 2), torch.randn(5, 2))
    ),
    "detached statistics": Wrong(DetachedNorm, {"input x"}),
    ".data": Wrong(DataNorm, {"input x"}),
    "no_grad": Wrong(Frozen, {"input x", "inner.weight", "inner.bias"}, "no gradient arrives"),
    "hook between layers": Wrong(
        HookedBlock, {"input x", "up.weight", "up.bias"}, "2 times the derivative"
    ),
    "free function in a block": Wrong(FreeFunctionBlock, {"input x", "up.weight", "up.bias"}),
    "checkpoint with other noise": Wrong(OtherNoise, {"input x", "inner.weight", "inner.bias"}),
    "kept on the class": Wrong(CalledTwice, {"input x"}),
    "saved intermediate, second derivative": one(SavedIntermediate, second=True),
    "detached backward, second derivative": one(DetachedBackward, second=True),
}
