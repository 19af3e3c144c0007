"""What is attached for a block is gone after it, however the block ends."""

from collections.abc import Iterator

import pytest
from torch import nn
from torch.utils.hooks import RemovableHandle

from torchfmri._torch import hooked


def test_hooks_are_on_inside_and_gone_after_an_error() -> None:
    module = nn.Linear(1, 1)
    hooks = (module.register_forward_hook(lambda *_: None) for _ in range(2))

    def fail_inside() -> None:
        with hooked(hooks):
            assert len(module._forward_hooks) == 2
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert not module._forward_hooks


def test_a_hook_that_cannot_be_registered_takes_off_those_before_it() -> None:
    module = nn.Linear(1, 1)

    def handles() -> Iterator[RemovableHandle]:
        yield module.register_forward_hook(lambda *_: None)
        assert module._forward_hooks
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), hooked(handles()):
        pytest.fail("the block must not be entered")
    assert not module._forward_hooks
