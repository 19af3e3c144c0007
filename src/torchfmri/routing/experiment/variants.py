"""The table of what the experiment compares: from what the routing learns.

`Experiment` and `torchfmri routing --signal` take their names from `VARIANTS`. A new variant is an
entry here. Names stand in result files and on the command line: do not rename them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torchfmri.routing.goodness import agreement, harmony, helpfulness, worth_over_tokens
from torchfmri.routing.meta_loss import Divergence, MetaLoss, Price


@dataclass(frozen=True)
class Variant:
    """One way to train the routing.

    Attributes:
        title: In a few words.
        meta_loss: What it learns from; None: from the main loss only.
        signal: Whose learning cost.
        mode: Whether the main loss trains it too ("joint") or not ("strict").
    """

    title: str
    meta_loss: MetaLoss | None
    signal: Literal["token", "aggregate"] = "token"
    mode: Literal["strict", "joint"] = "strict"


VARIANTS: Mapping[str, Variant] = {
    "token": Variant("strict, each token's own cost", Divergence()),
    "aggregate": Variant("strict, cost of the batch", Divergence(), "aggregate"),
    "token-and-unit": Variant(
        "strict, scaled over tokens and units", Divergence(worth_over_tokens, "tokens_and_units")
    ),
    "joint-token": Variant(
        "main loss and each token's own cost", Divergence(weight=0.3), mode="joint"
    ),
    "dense": Variant("main loss alone", None, mode="joint"),
    "l1-weak": Variant("main loss and a lower price", Price(0.1), mode="joint"),
    "l1": Variant("main loss and a price on weights", Price(0.4), mode="joint"),
    "l1-strong": Variant("main loss and a higher price", Price(2.0), mode="joint"),
    "helpfulness": Variant(
        "main loss and first-order effect", Divergence(helpfulness, weight=0.3), mode="joint"
    ),
    "agreement": Variant(
        "main loss and agreeing gradients", Divergence(agreement, weight=0.3), mode="joint"
    ),
    "agreement-strong": Variant(
        "main loss and agreeing gradients, more of it", Divergence(agreement), mode="joint"
    ),
    "harmony": Variant("main loss and no conflict", Divergence(harmony, weight=0.3), mode="joint"),
}
