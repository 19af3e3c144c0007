"""The walk over an autograd graph."""

import torch

from torchfmri._torch import nodes_behind


def test_each_node_comes_once_and_the_nearest_first() -> None:
    x = torch.ones(2, requires_grad=True)
    square = x * x
    total = (square + square).sum()
    names = [node.name() for node in nodes_behind([None, total.grad_fn, total.grad_fn])]
    expected = ["SumBackward0", "AddBackward0", "MulBackward0", "torch::autograd::AccumulateGrad"]
    assert names == expected


def test_there_is_nothing_behind_a_leaf() -> None:
    assert not list(nodes_behind([torch.ones(2, requires_grad=True).grad_fn]))
