"""A transformer block of four SparseProtoLinear layers, with its rotary positions and its cache.

`RoutingLanguageModel` stacks these blocks. `MoIETransformerBlock`, `Prototypes` and `KeyValueCache`
are public; the names of a block's parameters are in saved checkpoints and must not change. With a
cache, tokens read one by one must give the same logits as tokens read together, which
`test_routing.py` checks. How attention is computed may change freely as long as that test passes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchfmri._arguments import check_number
from torchfmri.exceptions import InspectionError
from torchfmri.routing.sparse_proto_linear import SparseProtoLinear

_ROTARY_BASE = 10_000.0


class KeyValueCache:
    """Keys and values of earlier tokens; each forward pass appends its own.

    Examples:
        >>> import torch
        >>> cache = KeyValueCache()
        >>> keys, values = cache.append(0, torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
        >>> cache.length
        3
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        """The number of tokens read so far."""
        return next(iter(self._kept.values()))[0].shape[2] if self._kept else 0

    def append(self, block: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values of a block, and return all so far, (b, heads, s, head size)."""
        if block in self._kept:
            before = self._kept[block]
            keys, values = torch.cat((before[0], keys), 2), torch.cat((before[1], values), 2)
        self._kept[block] = keys, values
        return keys, values


class Rotary(NamedTuple):
    """The cosines and sines of the angles, (b, 1, s, head size)."""

    cosine: Tensor
    sine: Tensor

    def turn(self, x: Tensor) -> Tensor:
        """Return x (b, heads, s, head size) turned by the angles, in the dtype that x has."""
        first, second = x.chunk(2, -1)
        turned = x * self.cosine + torch.cat((-second, first), -1) * self.sine
        return turned.to(x.dtype)


def rotary(positions: Tensor, head_size: int) -> Rotary:
    """Return the angles of these positions, (b, s), for heads of an even size."""
    steps = torch.arange(0, head_size, 2, device=positions.device, dtype=torch.float32)
    angles = positions[:, None, :, None] * _ROTARY_BASE ** (-steps / head_size)
    angles = torch.cat((angles, angles), -1)
    return Rotary(angles.cos(), angles.sin())


class Prototypes(NamedTuple):
    """The prototypes in use in one block, (o, i) each: what the next block builds upon."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor


class BlockContext(NamedTuple):
    """The values that all blocks of one forward pass share.

    Attributes:
        rotary: The angles of the positions.
        mask: (b, 1, s, all s), True where attention may look; None: at itself and before.
        cache: Keys and values of earlier tokens, if there are any.
    """

    rotary: Rotary
    mask: Tensor | None = None
    cache: KeyValueCache | None = None


class BlockOutput(NamedTuple):
    """The output of a block, which the next block receives."""

    hidden: Tensor
    prototypes: Prototypes


class MoIETransformerBlock(nn.Module):
    """Attention whose queries, keys, values and output come from SparseProtoLinear layers.

    Args:
        hidden_size: Size of the residual stream.
        heads: How many heads; each of an even size.
        number: Which block of its model it is; the cache is kept under it.

    Examples:
        >>> import torch
        >>> block = MoIETransformerBlock(hidden_size=16, heads=2)
        >>> block(torch.randn(2, 5, 16)).hidden.shape
        torch.Size([2, 5, 16])
    """

    def __init__(self, hidden_size: int, heads: int, number: int = 0) -> None:
        super().__init__()
        check_heads(hidden_size, heads)
        self.heads, self.head_size, self.number = heads, hidden_size // heads, number
        self.norm = nn.RMSNorm(hidden_size)
        self.query = SparseProtoLinear(hidden_size, hidden_size)
        self.key = SparseProtoLinear(hidden_size, hidden_size)
        self.value = SparseProtoLinear(hidden_size, hidden_size)
        self.output = SparseProtoLinear(hidden_size, hidden_size)

    def forward(
        self,
        hidden: Tensor,
        context: BlockContext | None = None,
        inherited: Prototypes | None = None,
    ) -> BlockOutput:
        """Return the residual stream after this block, and the prototypes it used.

        Args:
            hidden: (b, s, i).
            context: Positions, mask and cache; by default a sequence from its start.
            inherited: The prototypes of the block before, which this block's are added to.
        """
        context = context or self._context(hidden)
        of = inherited or (None, None, None, None)
        x = self.norm(hidden)
        query = context.rotary.turn(self._split(self.query(x, of[0])))
        key = context.rotary.turn(self._split(self.key(x, of[1])))
        value = self._split(self.value(x, of[2]))
        if context.cache is not None:
            key, value = context.cache.append(self.number, key, value)
        causal = context.mask is None and query.shape[2] > 1
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=context.mask, is_causal=causal
        )
        joined = attended.transpose(1, 2).flatten(2)
        return BlockOutput(hidden + self.output(joined, of[3]), self.prototypes(inherited))

    def prototypes(self, inherited: Prototypes | None = None) -> Prototypes:
        """Return the prototypes in use, given those of the block before."""
        layers = (self.query, self.key, self.value, self.output)
        of = inherited or (None, None, None, None)
        return Prototypes(
            *(layer.effective_prototypes(p) for layer, p in zip(layers, of, strict=True))
        )

    def _context(self, hidden: Tensor) -> BlockContext:
        positions = torch.arange(hidden.shape[1], device=hidden.device)
        return BlockContext(rotary(positions[None], self.head_size))

    def _split(self, x: Tensor) -> Tensor:
        """Return x (b, s, heads * head size) as (b, heads, s, head size)."""
        return x.view(*x.shape[:-1], self.heads, self.head_size).transpose(1, 2)


def check_heads(hidden_size: int, heads: int) -> None:
    """Raise if heads do not divide a hidden size into even parts, which rotary positions need.

    Raises:
        InspectionError: It names both.
    """
    for name, value in (("hidden_size", hidden_size), ("heads", heads)):
        check_number(name, value, 1, "give a number from 1 upwards")
    if hidden_size % heads or (hidden_size // heads) % 2:
        raise InspectionError(
            f"{heads} heads do not divide a hidden size of {hidden_size} into even parts, "
            f"which rotary positions need. Give a multiple of {2 * heads}."
        )
