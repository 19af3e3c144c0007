"""The names by which saved files know our hooks: one saved while hooks were attached has them.

Nothing of ours imports this file; pickle does. It stays as long as such files may be loaded, and
holds no code.
"""

from torchfmri._torch import Hook, ReplacingHook

__all__ = ["Hook", "ReplacingHook"]
