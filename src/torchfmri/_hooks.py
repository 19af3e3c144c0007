"""The name by which saved files know `Hook`: one saved while hooks were attached carries them."""

from torchfmri._torch import Hook

__all__ = ["Hook"]
