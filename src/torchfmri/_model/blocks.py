"""The blocks of a transformer: which layers are a block's attention, MLP and norms, and its heads.

`block_places` asks for the parts of a block; lenses, lesions and scans ask for the stacks.
Architectures give these parts different names. The tables below hold the names, the likeliest
first, because the first that fits is taken; names may be added. What no table knows is refused by
name, never guessed. How a fused projection is cut into heads is known per class (`_ARRANGEMENT`):
its shape does not tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchfmri.exceptions import InspectionError

ATTENTION = ("self_attn", "self_attention", "attn", "attention", "SelfAttention")
CROSS_ATTENTION = ("encoder_attn", "cross_attn", "crossattention", "EncDecAttention")
MLP = ("mlp", "ffn", "feed_forward", "block_sparse_moe", "moe", "DenseReluDense")
PROJECTIONS: Mapping[str, tuple[str, ...]] = {
    "q": ("q_proj", "query", "q", "q_lin", "q_b_proj"),
    "k": ("k_proj", "key", "k", "k_lin"),
    "v": ("v_proj", "value", "v", "v_lin"),
    "o": ("o_proj", "out_proj", "c_proj", "dense", "o", "out_lin", "wo", "proj"),
    "gate": ("gate_proj", "wi_0"),
    "up": ("up_proj", "c_fc", "fc1", "dense_h_to_4h", "fc_in", "lin1", "wi_1", "wi"),
    "down": ("down_proj", "c_proj", "fc2", "dense_4h_to_h", "fc_out", "lin2", "wo"),
}
"""What architectures call the projections of attention and of MLPs, the likeliest first."""
MIDDLE_NORMS = (
    *("pre_feedforward_layernorm", "post_attention_layernorm", "ln_2", "layernorm_after"),
    *("layer_norm2", "norm_2", "ln2"),
)
"""The norm that reads the stream between attention and MLP, if both are one after the other."""
_FUSED = ("c_attn", "query_key_value", "qkv_proj", "Wqkv", "qkv")
# How the units of one fused projection are arranged: all queries, then all keys, then all values
# ("blocks"), or the query, key and value of each head side by side ("heads").
_ARRANGEMENT = {
    "GPT2Attention": "blocks",
    "Phi3Attention": "blocks",
    "MptAttention": "blocks",
    "GPTNeoXAttention": "heads",
    "BloomAttention": "heads",
}
_HEAD_COUNTS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "encoder_attention_heads")
_KEY_VALUE_COUNTS = ("num_key_value_heads", "num_kv_heads")
_PARALLEL = ("use_parallel_residual", "parallel_attn", "new_decoder_architecture")

Ranges = tuple[tuple[int, int], ...]
"""First and last + 1 of runs of neighbouring units."""


@dataclass(frozen=True, eq=False)
class Block:
    """One block of a stack.

    Attributes:
        name: Its layer.
        index: Its number in the stack.
        inside: The layers inside, named from the block on -> module; the block itself is "".
        config: The configuration of the model (transformers); None without one.
    """

    name: str
    index: int
    inside: Mapping[str, nn.Module]
    config: Any = None

    def find(self, names: Iterable[str], below: str = "") -> str | None:
        """Return the first layer inside (or inside `below`) whose last name is one of these."""
        before = f"{below}." if below else ""
        for name in names:
            for each in self.inside:
                if each.startswith(before) and each.rpartition(".")[2] == name and each != below:
                    return each
        return None

    def full(self, inner: str) -> str:
        """Return the name of a layer inside, from the model on."""
        return f"{self.name}.{inner}" if inner else self.name

    @property
    def kind(self) -> str:
        """The class of the block."""
        return type(self.inside[""]).__name__

    def attention(self, cross: bool = False) -> str:
        """Return the layer inside that is its attention.

        Raises:
            InspectionError: The block has no attention of a known name.
        """
        found = self.find(CROSS_ATTENTION if cross else ATTENTION)
        if found is None:
            kind = "cross-attention" if cross else "attention"
            raise InspectionError(
                f"Block {self.name!r} ({self.kind}) has no {kind} that torchfmri knows: none of "
                f"its layers is called {', '.join(CROSS_ATTENTION if cross else ATTENTION)}."
            )
        return found

    def output_projection(self, cross: bool = False) -> str:
        """Return the layer that mixes the heads; its input is `z`, head after head.

        Raises:
            InspectionError: There is no such layer, or it is never called as a module.
        """
        attention = self.attention(cross)
        found = self.find(PROJECTIONS["o"], attention)
        if isinstance(self.inside[attention], nn.MultiheadAttention):
            raise InspectionError(
                f"{self.full(attention)!r} is an nn.MultiheadAttention, which uses the weight of "
                "its out_proj directly: its heads never stand in a layer's input. Name the whole "
                f"layer: {self.full(attention)!r}."
            )
        if found is None:
            raise InspectionError(
                f"The attention {self.full(attention)!r} ({type(self.inside[attention]).__name__}) "
                f"has no output projection of a known name ({', '.join(PROJECTIONS['o'])})."
            )
        return found

    def heads(self, cross: bool = False) -> int:
        """Return how many heads its attention has, as the attention or the configuration says.

        Raises:
            InspectionError: Neither the attention nor the configuration says how many.
        """
        attention = self.attention(cross)
        inner = (each for key, each in self.inside.items() if f"{key}.".startswith(f"{attention}."))
        places = [*inner, getattr(self.inside[attention], "config", None), self.config]
        count = _first_number(places, _HEAD_COUNTS)
        if count is None:
            raise InspectionError(
                f"How many heads {self.full(attention)!r} has is not known: neither the layer nor "
                f"the model's config has one of {', '.join(_HEAD_COUNTS)}."
            )
        return count

    def key_value_heads(self, cross: bool = False) -> int:
        """Return how many heads the keys and values of its attention have."""
        attention = self.attention(cross)
        places = [getattr(self.inside[attention], "config", None), self.config]
        return _first_number(places, _KEY_VALUE_COUNTS) or self.heads(cross)

    def projection(self, which: str, cross: bool = False) -> tuple[str, int, list[Ranges]]:
        """Return the layer that makes queries, keys or values, its width, and the units of a head.

        Args:
            which: "q", "k" or "v".
            cross: Whether cross-attention is meant.

        Raises:
            InspectionError: There is no such layer, or it holds all three in an unknown order.
        """
        attention = self.attention(cross)
        heads = self.heads(cross) if which == "q" else self.key_value_heads(cross)
        single = self.find(PROJECTIONS[which], attention)
        if single is not None:
            width = width_out(self.inside[single])
            if width is None or width % heads:
                raise InspectionError(
                    f"{self.full(single)!r} has {width} units, which {heads} heads do not divide."
                )
            size = width // heads
            return single, width, [((at, at + size),) for at in range(0, width, size)]
        fused = self.find(_FUSED, attention)
        arrangement = _ARRANGEMENT.get(type(self.inside[attention]).__name__)
        if fused is None or arrangement is None:
            raise InspectionError(
                f"{self.full(attention)!r} ({type(self.inside[attention]).__name__}) has no "
                f"projection of a known name for its {which} ({', '.join(PROJECTIONS[which])})"
                + (f", and how {fused!r} holds it is not known." if fused else ".")
            )
        return fused, *self._cut(fused, which, arrangement, cross)

    def _cut(
        self, fused: str, which: str, arrangement: str, cross: bool
    ) -> tuple[int, list[Ranges]]:
        """Return the width of a fused projection, and the units of each head in it."""
        heads, others = self.heads(cross), self.key_value_heads(cross)
        width = width_out(self.inside[fused]) or 0
        number = "qkv".index(which)
        if arrangement == "heads":
            size = width // (3 * heads)
            starts = [(3 * head + number) * size for head in range(heads)]
        else:
            size = width // (heads + 2 * others)
            first = (0, heads, heads + others)[number] * size
            starts = [first + at * size for at in range(heads if which == "q" else others)]
        return width, [((start, start + size),) for start in starts]

    @property
    def is_parallel(self) -> bool:
        """Whether attention and MLP read the same stream, so that nothing is between them."""
        if self.kind == "GPTNeoXLayer" or self.kind.startswith("StableLm"):
            return bool(getattr(self.config, _PARALLEL[0], True))
        return any(getattr(self.config, each, False) for each in _PARALLEL[1:])


def find_stacks(layers: Mapping[str, nn.Module]) -> dict[str, list[Block]]:
    """Return the outermost lists of blocks of a model: the list's name -> its blocks.

    Lists whose blocks have attention come alone, if there are any: other lists (of convolutions
    that make features) are not what people number.

    Args:
        layers: All layers of the model, as `named_layers` gives them.
    """
    config = getattr(layers[""], "config", None)
    found: dict[str, list[Block]] = {}
    for name, module in layers.items():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or _is_inside(name, found):
            continue
        children = [f"{name}.{index}" if name else str(index) for index in range(len(module))]
        if not children or any(each not in layers for each in children):
            continue
        blocks = [_block(layers, each, index, config) for index, each in enumerate(children)]
        if all(len(each.inside) > 1 for each in blocks):
            found[name] = blocks
    attentive = {name: each for name, each in found.items() if _has_attention(each)}
    return attentive or found


def width_in(module: nn.Module) -> int | None:
    """Return how many units the input of a projection has; None if that is not known."""
    return _width(module, 0, "in_features")


def width_out(module: nn.Module) -> int | None:
    """Return how many units the output of a projection has; None if that is not known."""
    return _width(module, 1, "out_features")


def _width(module: nn.Module, axis: int, attribute: str) -> int | None:
    weight = getattr(module, "weight", None)
    if type(module).__name__ == "Conv1D" and weight is not None:  # its weight is (in, out)
        return int(weight.shape[axis])
    size = getattr(module, attribute, None)
    return size if isinstance(size, int) else None


def _block(layers: Mapping[str, nn.Module], name: str, index: int, config: Any) -> Block:
    before = f"{name}."
    inside = {"": layers[name]}
    inside |= {key[len(before) :]: each for key, each in layers.items() if key.startswith(before)}
    own = getattr(layers[name], "config", None)
    return Block(name, index, inside, config if own is None else own)


def _has_attention(blocks: list[Block]) -> bool:
    return any(block.find((*ATTENTION, *CROSS_ATTENTION)) is not None for block in blocks)


def _is_inside(name: str, stacks: Mapping[str, list[Block]]) -> bool:
    return any(name.startswith(f"{each.name}.") for blocks in stacks.values() for each in blocks)


def _first_number(places: Iterable[Any], names: tuple[str, ...]) -> int | None:
    for place in places:
        for name in names:
            number = getattr(place, name, None)
            if isinstance(number, int) and not isinstance(number, bool) and number > 0:
                return number
    return None
