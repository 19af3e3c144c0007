"""Whether and how anything is attached to a model at all.

The entry points of the package ask `switched_off` first, and run models inside
`compiled_code_as_eager`. The compiler's stance belongs to the whole process: users are counted, so
that the last one out restores what the first one in found, whatever the threads. torch._dynamo is
not imported if nobody else has imported it: that takes long, and nothing can have been compiled.
The count must stay exact, or the user's compiled models would stay eager.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from torchfmri._model.interruption import whole_restorations


def switched_off() -> bool:
    """Whether the environment says TORCHFMRI=off: every attachment is then a no-op."""
    return os.environ.get("TORCHFMRI", "").strip().lower() in ("off", "0", "false", "no")


def compiled_code_as_eager() -> AbstractContextManager[Any]:
    """Run compiled modules eagerly: compiled code calls no hooks that were added after it.

    The compiled code is kept and used again afterwards.
    """
    if "torch._dynamo" not in sys.modules:  # nothing can have been compiled; the import is slow
        return nullcontext()
    return _stance()


_lock = threading.Lock()
_users = 0
_outer: Any = None


@contextmanager
def _stance() -> Iterator[None]:
    """Force eager execution while anybody needs it.

    The stance belongs to the whole process: the first one in keeps what was there before and the
    last one out restores it, in whichever order and thread they come and go.
    """
    global _users, _outer
    with whole_restorations():
        with _lock:
            _users += 1
            if _users == 1:
                _outer = torch.compiler.set_stance("force_eager")
        try:
            yield
        finally:
            with _lock:
                _users -= 1
                if _users == 0:
                    _outer.__exit__(None, None, None)
                    _outer = None
