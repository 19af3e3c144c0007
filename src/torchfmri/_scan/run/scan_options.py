"""`ScanOptions`: what a scan measures, and of which layers.

Users make it for `Scanner` and `scan_dataset`, `scan` makes it from its arguments. It checks every
value that can be judged without the model. Fields are public: a new one needs a default that
changes nothing, an entry in the documentation, an argument of `scan` where one prompt may want it,
and a line in `description.py` if two scans that differ in it must not share a folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchfmri._arguments import check_flag, check_number
from torchfmri._model import Pattern, check_pattern
from torchfmri._scan.run.mean_vectors import AUTO, check_choices
from torchfmri._scan.run.scan_loss import OwnLoss
from torchfmri.exceptions import InspectionError

PER = ("position", "cached", "token_loss", None)


@dataclass(frozen=True)
class ScanOptions:
    """The choices of a scan: what is measured, and of which layers.

    Attributes:
        per: Which gradient: "position", "token_loss", "cached", or None for activations alone.
        layers: Which layers, by pattern.
        voxel: How many neighbouring units are one voxel, where no head or expert says otherwise.
        loss: Over the "generated" tokens, over "all", or a function of output, ids and generated;
            by default over what was generated, and over all tokens where nothing was.
        tensors: Layers whose activations are kept in full, by pattern.
        live: Take the activations while the model generates; False: from the pass alone.
        verify: Also run `generate` once more without any hook, and compare the tokens.
        vectors: Over which tokens the mean of each layer's signed activation is kept: some of
            "all", "prompt", "generated" and "last" (special tokens never count), or None. "auto"
            is "all", "generated" and "last" in the scan of a dataset, and None otherwise.
        vector_bytes: How much of a sequence the mean vectors may take. If those of all layers take
            more, only blocks, attention and MLP have one; the notes of the scan say so.
        attention: Read the attention of every head and keep its scores; a pattern over layers
            also keeps the whole patterns of those.
        lens: Read every block's output through the model's own head: what it would say next.
        experts: Keep which experts the routers of a mixture choose.
        features: Dictionaries of features, {place: object with encode, or function}; or one that
            knows its place.
        feature_count: How many features of a token are kept at most.
        heads: Also watch what each attention head wrote: the input of `o_proj`, as a layer
            `o_proj.input` whose voxels are heads. It has activations, and no gradients.

    Examples:
        >>> from torchfmri import ScanOptions
        >>> ScanOptions(per="token_loss", layers="*.mlp").voxel
        64
    """

    per: str | None = "position"
    layers: Pattern = "*"
    voxel: int = 64
    loss: str | OwnLoss | None = None
    tensors: Pattern | None = None
    live: bool = True
    verify: bool = False
    vectors: str | Sequence[str] | None = AUTO
    vector_bytes: int = 1 << 20
    attention: bool | Pattern = False
    lens: bool = False
    experts: bool = False
    features: object | None = None
    feature_count: int = 32
    heads: bool = False

    def __post_init__(self) -> None:
        if self.per not in PER:
            known = "'position', 'token_loss', 'cached' or None"
            raise InspectionError(f"per={self.per!r}: choose {known}.")
        check_number("voxel", self.voxel, 1, "the number of units of a voxel, such as 64")
        check_choices(self.vectors)
        check_number("vector_bytes", self.vector_bytes, 0, "how many bytes of a sequence")
        check_flag("live", self.live)
        check_flag("verify", self.verify)
        check_flag("lens", self.lens)
        check_flag("experts", self.experts)
        check_number("feature_count", self.feature_count, 1, "features to keep, such as 32")
        if not isinstance(self.attention, bool):
            check_pattern(self.attention)
        check_flag("heads", self.heads)
        check_pattern(self.layers)
        if self.tensors is not None:
            check_pattern(self.tensors)
