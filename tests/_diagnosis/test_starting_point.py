"""What is said about initial weights and number formats is what was measured."""

import torch
from torch import Tensor, nn

from torchfmri import Finding, diagnose

Batch = tuple[Tensor, Tensor]


def named(name: str, model: nn.Module, batch: Batch, loss: nn.Module) -> Finding:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    found = diagnose(model, [batch], loss, optimizer, 5, show=False).findings
    assert name in [each.problem for each in found]
    return next(each for each in found if each.problem == name)


def test_one_large_matrix_is_not_counted_twice() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 4))
    with torch.no_grad():
        model[0].weight.mul_(100)
    batch = torch.randn(32, 16), torch.arange(32) % 4
    finding = named("init_too_large", model, batch, nn.CrossEntropyLoss())
    assert "matrices in all" not in finding.text
    assert finding.evidence["matrices"] == 1


class Half(nn.Module):
    """Two float16 branches; the gradient of one is too small for the format."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.lost = (nn.Linear(16, 1).half() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = x.half()
        return self.large(h).float() + 1e-12 * self.lost(h).float()


def test_layers_whose_gradients_are_all_0_have_no_share_of_small_ones() -> None:
    torch.manual_seed(0)
    batch = torch.randn(32, 16), 30 + torch.randn(32, 1)
    finding = named("half_underflow", Half(), batch, nn.MSELoss())
    assert finding.layers == ("lost", "lost.bias", "lost.weight")
    assert "%" not in finding.text
    assert "All float16 gradients of 'lost', 'lost.bias', 'lost.weight' are 0" in finding.text
    assert finding.evidence == {"subnormal_share": 0.0, "flushed": 3}
