"""A transformer block of four SparseProtoLinear layers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchfmri._arguments import check_number
from torchfmri.exceptions import InspectionError
from torchfmri.routing.key_value_cache import KeyValueCache
from torchfmri.routing.rotary import Rotary, rotary
from torchfmri.routing.sparse_proto_linear import SparseProtoLinear


class Prototypes(NamedTuple):
    """The prototypes in use in one block, (o, i) each: what the next block builds upon."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor


class BlockContext(NamedTuple):
    """What all blocks of one forward pass share.

    Attributes:
        rotary: The angles of the positions.
        mask: (b, 1, s, all s), True where attention may look; None: at itself and before.
        cache: Keys and values of earlier tokens, if there are any.
    """

    rotary: Rotary
    mask: Tensor | None = None
    cache: KeyValueCache | None = None


class BlockOutput(NamedTuple):
    """What a block hands on."""

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
        """The residual stream after this block, and the prototypes it used.

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
        """The prototypes in use, given those of the block before."""
        layers = (self.query, self.key, self.value, self.output)
        of = inherited or (None, None, None, None)
        return Prototypes(
            *(layer.effective_prototypes(p) for layer, p in zip(layers, of, strict=True))
        )

    def _context(self, hidden: Tensor) -> BlockContext:
        positions = torch.arange(hidden.shape[1], device=hidden.device)
        return BlockContext(rotary(positions[None], self.head_size))

    def _split(self, x: Tensor) -> Tensor:
        """(b, s, heads * head size) -> (b, heads, s, head size)."""
        return x.view(*x.shape[:-1], self.heads, self.head_size).transpose(1, 2)


def check_heads(hidden_size: int, heads: int) -> None:
    """Raise where heads do not divide a hidden size into even parts, which rotary positions need.

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
