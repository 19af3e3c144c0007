"""What cannot be edited, and how it is said."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchfmri
from tests.architectures import ARCHITECTURES, tokens
from torchfmri import Edit, InspectionError, Inspector, LayerNotFoundError
from torchfmri._edit import EditPasses


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return ARCHITECTURES["llama"].build("eager").eval()


def ids() -> Tensor:
    return tokens(9, batch=2)


NAN = torch.full((16,), torch.nan)

AT_ONCE: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing matches": (lambda: {"modell.layers.0": "zero"}, "No layer matches 'modell.layers.0'"),
    "no such head": (lambda: {"L0H9": "zero"}, "4 heads, 0 to 3"),
    "a head of a layer without heads": (
        lambda: {"L0.mlp": Edit.zero().at(heads=1)},
        "'L0.mlp' has no heads.*'L0H0'",
    ),
    "a word": (lambda: {"L0": "ablate"}, "The edit of 'L0' is 'ablate'. Give 'zero'"),
    "a class": (lambda: {"L0": torch.nn.Linear}, "Give 'zero'"),
    "no edits": (dict, "give {place: edit}"),
    "a list": (lambda: ["L0"], "give {place: edit}"),
    "twice the same place": (
        lambda: {"L0H1": "zero", "blocks.0.attn.hook_z": Edit.scale(2.0)},
        "Two edits meet in the inputs of layer 'model.layers.0.self_attn.o_proj'",
    ),
    "twice the same tokens": (
        lambda: {"L0": Edit.zero().at(tokens=[1, 2]), "model.layers.0": Edit.zero().at(tokens=2)},
        "Two edits meet",
    ),
    "a pattern": (lambda: {"blocks.0.attn.hook_pattern": "zero"}, "handed to no layer"),
    "the stream in the middle": (
        lambda: {"blocks.0.hook_resid_mid": "zero"},
        "edit hook_attn_out or hook_resid_post",
    ),
    "units of a head": (lambda: {"L0H1": Edit.zero().at(units=0)}, "one head already"),
    "NaN direction": (lambda: {"L0": Edit.add(NAN)}, "direction has 16 of 16 values that are NaN"),
    "NaN donor": (lambda: {"L0": NAN}, "donor has 16 of 16"),
    "NaN factor": (lambda: {"L0": Edit.scale(float("nan"))}, "factor=nan"),
    "infinite factor": (lambda: {"L0": Edit.scale(float("inf"))}, "finite number"),
    "a direction that is a list": (lambda: {"L0": Edit.add([1.0])}, "give a tensor"),
    "no function": (lambda: {"L0": Edit.function(3)}, "give a function of a tensor"),
    "tokens that are a text": (lambda: {"L0": Edit.zero().at(tokens="all")}, "tokens='all'"),
    "heads and units": (lambda: {"L0": Edit.zero().at(heads=1, units=2)}, "both select units"),
    "sources without tokens": (
        lambda: {"L0": Edit.replace(torch.zeros(1, 9, 16), source=[1]).at(tokens=slice(2))},
        "source names 1 positions",
    ),
    "a donor that has no such layer": (
        lambda: {"L0": Edit.replace({"other": None})},
        "has nothing of layer 'model.layers.0'. Watch that layer",
    ),
}


@pytest.mark.parametrize("case", AT_ONCE)
def test_refused_before_the_model_runs(model: nn.Module, case: str) -> None:
    make, words = AT_ONCE[case]
    with (
        pytest.raises((InspectionError, KeyError), match=words),
        torchfmri.edited(model, make()),
    ):
        pytest.fail("the block ran")


WHILE_RUNNING: dict[str, tuple[Callable[[], Any], str]] = {
    "a donor of another length": (
        lambda: {"L0": torch.zeros(2, 5, 16)},
        r"donor of shape \(2, 5, 16\) does not fit 'L0'.*\(2, 9, 16\)",
    ),
    "a donor of another width": (lambda: {"L0": torch.zeros(2, 9, 8)}, "does not fit 'L0'"),
    "a donor with other rows": (lambda: {"L0": torch.zeros(3, 9, 16)}, "does not fit"),
    "a direction of another width": (lambda: {"L0": Edit.add(torch.zeros(5))}, "does not fit"),
    "a unit too many": (lambda: {"L0": Edit.zero().at(units=16)}, "no unit of layer.* 16 among 16"),
    "a row too many": (lambda: {"L0": Edit.zero().at(rows=2)}, "no row 2 among 2"),
    "a voxel too many": (lambda: {"L0": Edit.zero().at(voxels=1)}, "no voxel of layer"),
    "a function of another shape": (
        lambda: {"L0": lambda x: x[:, :1]},
        r"returned \(2, 1, 16\), and the value has the shape \(2, 9, 16\)",
    ),
    "a function of nothing": (lambda: {"L0": lambda _: None}, "returned NoneType"),
    "a function that makes NaN": (lambda: {"L0": lambda x: x / 0}, "returned NaN or infinite"),
    "a mask for other rows": (
        lambda: {"L0": Edit.zero().at(tokens=torch.ones(3, 9, dtype=torch.bool))},
        "tokens has 3 rows, and the batch has 2",
    ),
    "drawn values of another width": (
        lambda: {"L0": Edit.resample(torch.randn(4, 15))},
        r"width 15 cannot be drawn for 'L0': .* has 16 units.*Give values",
    ),
    "drawn values of another width for a head": (
        lambda: {"L0H1": Edit.resample(torch.randn(4, 15))},
        "width 15 cannot be drawn for 'L0H1'",
    ),
    "no token of the sequence": (
        lambda: {"L0": Edit.zero().at(tokens=[30])},
        "The edit of 'L0' never acted: .* called once, but no",
    ),
}


@pytest.mark.parametrize("case", WHILE_RUNNING)
def test_refused_when_the_value_is_there(model: nn.Module, case: str) -> None:
    make, words = WHILE_RUNNING[case]
    before = [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules()]
    with pytest.raises(InspectionError, match=words), torchfmri.edited(model, make()):
        model(ids())
    after = [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules()]
    assert before == after


def test_an_edit_of_a_layer_that_is_never_called() -> None:
    model = nn.MultiheadAttention(8, 2)
    x = torch.randn(3, 1, 8)
    with (
        pytest.raises(InspectionError, match=r"'out_proj' never acted: .* never called"),
        torchfmri.edited(model, {"out_proj": "zero"}),
    ):
        model(x, x, x)
    with (
        pytest.raises(InspectionError, match="never acted"),
        torchfmri.edited(model, {"out_proj": "zero"}),
    ):
        pass


def test_an_error_in_the_block_comes_before_an_edit_that_never_acted() -> None:
    with pytest.raises(ZeroDivisionError), torchfmri.edited(nn.Linear(2, 2), {"": "zero"}):
        raise ZeroDivisionError


def test_gradients_asked_for_under_no_grad(model: nn.Module) -> None:
    direction = torch.zeros(16, requires_grad=True)
    with (
        pytest.raises(InspectionError, match="grad mode is off"),
        torchfmri.edited(model, {"L0": Edit.add(direction)}),
        torch.no_grad(),
    ):
        model(ids())
    inspector = Inspector(model)
    inspector.watch("L0", "gradients")
    inspector.edit("L0", "zero")
    with pytest.raises(InspectionError, match="grad mode is off"), torch.no_grad():
        inspector.run_inspection({"input_ids": ids()})


def test_an_outer_block_and_an_inner_one(model: nn.Module) -> None:
    with torchfmri.edited(model, {"L0H1": "zero"}):
        with (
            pytest.raises(InspectionError, match="Two edits meet"),
            torchfmri.edited(model, {"L0H1": Edit.scale(2.0)}),
        ):
            pytest.fail("the block ran")
        with torch.no_grad(), torchfmri.edited(model, {"L0H2": "zero"}):
            both = model(ids()).logits
    with torch.no_grad(), torchfmri.edited(model, {"L0H1": "zero", "L0H2": "zero"}):
        assert torch.equal(model(ids()).logits, both)


def test_an_inspector_refuses_at_once_and_keeps_what_it_had(model: nn.Module) -> None:
    inspector = Inspector(model)
    inspector.edit("L0H1", "zero")
    with pytest.raises(InspectionError, match="Two edits meet"):
        inspector.edit("blocks.0.attn.hook_z", "zero")
    with pytest.raises(LayerNotFoundError):
        inspector.edit("model.layerss.0", "zero")
    with pytest.raises(LayerNotFoundError, match=r"inspector.edits"):
        inspector.unedit("L3")
    assert list(inspector.edits) == ["L0H1"]
    inspector.unedit("L0H1")
    assert not inspector.edits


def test_integers_cannot_be_edited() -> None:
    class Counter(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.long()

    model = nn.Sequential(Counter())
    with (
        pytest.raises(InspectionError, match="only floating-point values"),
        torchfmri.edited(model, {"0": "zero"}),
    ):
        model(torch.zeros(2))


def test_another_thread_is_refused(model: nn.Module) -> None:
    errors: list[BaseException] = []

    def call() -> None:
        try:
            model(ids())
        except InspectionError as error:
            errors.append(error)

    with torchfmri.edited(model, {"L0": "zero"}):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        model(ids())
    assert "thread" in str(errors[0])


def test_a_scripted_layer() -> None:
    class Plus(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    with pytest.warns(DeprecationWarning, match="script"):
        model = nn.Sequential(torch.jit.script(Plus()))
    with (
        pytest.raises(InspectionError, match="ScriptModule"),
        torchfmri.edited(model, {"0": "zero"}),
    ):
        pytest.fail("the block ran")


@pytest.mark.parametrize("make", [Edit.mean, Edit.resample])
def test_no_values_at_all(make: Callable[[torch.Tensor], Edit]) -> None:
    with pytest.raises(InspectionError, match=r"\(0, 16\).*give values of the layer"):
        make(torch.empty(0, 16))


def test_a_selection_made_twice() -> None:
    with pytest.raises(InspectionError, match=r"tokens were chosen already: 1, now 2"):
        Edit.zero().at(tokens=1).at(tokens=2)
    with pytest.raises(InspectionError, match="heads and units both select units"):
        Edit.zero().at(heads=0).at(units=2)


REFUSED_WHEN_MADE: dict[str, tuple[Callable[[], Any], str]] = {
    "a donor that is a word": (lambda: Edit.replace("nonsense"), "donor='nonsense'"),
    "a source that is a number": (
        lambda: Edit.replace(torch.zeros(1, 9, 16), source=5),
        "source=5: give a list of positions",
    ),
    "a source of words": (lambda: Edit.replace(torch.zeros(1, 9, 16), source=["a"]), "source="),
    "a source beyond the donor": (
        lambda: Edit.replace(torch.zeros(1, 9, 16), source=[9]),
        "the donor has 9 positions, 0 to 8",
    ),
    "a source of a donor without positions": (
        lambda: Edit.replace(torch.zeros(16), source=[0]),
        r"has to be \(b, s, ...\)",
    ),
    "one token twice": (
        lambda: Edit.replace(torch.zeros(1, 9, 16), source=[0, 1]).at(tokens=[2, 2]),
        "as many different tokens",
    ),
    "complex values": (lambda: Edit.add(torch.zeros(16, dtype=torch.complex64)), "real values"),
    "a class": (lambda: Edit.function(nn.Linear), "give a function of a tensor"),
    "features that are a number": (
        lambda: Edit.without_features(Doubling(), 3),
        "features=3: give a list of numbers",
    ),
}


class Doubling:
    """A dictionary with one feature per unit."""

    def encode(self, values: Tensor) -> Tensor:
        return values * 2

    def decode(self, features: Tensor) -> Tensor:
        return features / 2


@pytest.mark.parametrize("case", REFUSED_WHEN_MADE)
def test_refused_when_the_edit_is_made(case: str) -> None:
    make, words = REFUSED_WHEN_MADE[case]
    with pytest.raises(InspectionError, match=words):
        make()


def test_sources_need_tokens(model: nn.Module) -> None:
    edit = Edit.replace(torch.zeros(2, 9, 16), source=[0])
    with (
        pytest.raises(InspectionError, match=r"'L0' names positions in the donor, source=\[0\]"),
        torchfmri.edited(model, {"L0": edit}),
    ):
        pytest.fail("the block ran")


def test_a_feature_that_the_dictionary_does_not_have(model: nn.Module) -> None:
    edits = {"L0": Edit.without_features(Doubling(), [16])}
    words = "no feature 16: the dictionary has 16, 0 to 15"
    with pytest.raises(InspectionError, match=words), torchfmri.edited(model, edits):
        model(ids())


def test_a_value_without_a_token_axis_has_no_tokens_to_edit() -> None:
    passes = EditPasses()
    assert passes.positions(torch.zeros(2, 5, 3), "h") == (2, 5, 0)  # an image: nothing was fed
    with pytest.raises(InspectionError, match=r"shape \(6, 3\) has no token axis\. Leave"):
        passes.positions(torch.zeros(6, 3), "h")
    passes.feed(2, 3)
    assert passes.positions(torch.zeros(2, 3, 4), "h") == (2, 3, 0)
    assert passes.positions(torch.zeros(6, 4), "h") == (2, 3, 0)  # all tokens in a row
    with pytest.raises(InspectionError, match="no token axis for 2 x 3 tokens"):
        passes.positions(torch.zeros(5, 4), "h")


class Remembers(nn.Module):
    """Takes a cache of its own kind, which does not say how long it is."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(9, 4), nn.Linear(4, 4)

    def forward(self, input_ids: Tensor, past_key_values: object = None, **_: object) -> Tensor:
        found: Tensor = self.layer(self.table(input_ids))
        return found


def test_a_cache_without_a_length_is_refused_and_its_place_is_believed() -> None:
    model, ids = Remembers(), torch.zeros(1, 3, dtype=torch.long)
    edits = {"layer": Edit.zero().at(tokens=[5])}
    with (
        pytest.raises(InspectionError, match="does not say how many tokens are in it"),
        torchfmri.edited(model, edits),
    ):
        model(ids, past_key_values=object())
    with torchfmri.edited(model, edits):
        found = model(ids, past_key_values=object(), cache_position=torch.arange(4, 7))
    assert [bool(each.any()) for each in found[0]] == [True, False, True]


def test_an_edit_that_selects_no_token_counts_the_calls() -> None:
    model, ids = Remembers(), torch.zeros(1, 3, dtype=torch.long)
    for calls, said in ((1, "was called once, but no call had"), (2, "was called 2 times, but no")):
        with (
            pytest.raises(InspectionError, match=said),
            torchfmri.edited(model, {"layer": Edit.zero().at(tokens=[5])}),
        ):
            _ = [model(ids) for _ in range(calls)]
