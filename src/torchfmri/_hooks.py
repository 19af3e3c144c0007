"""The names by which saved files know our hooks: one saved while hooks were attached has them."""

from torchfmri._torch import Hook, ReplacingHook

__all__ = ["Hook", "ReplacingHook"]
