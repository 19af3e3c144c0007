"""The name under which files that were saved while hooks were attached know the class."""

from torchfmri._torch.hooks import Hook

__all__ = ["Hook"]
