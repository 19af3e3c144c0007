"""Frequent failures of layers, losses, loaders and optimizers, each made to happen for real."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from test_explanation import CASES as OTHER_CASES
from test_explanation import DISTRIBUTED, FAKED, Case, Net, Wrap, assert_explained, failure_of, x
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.utils.data import DataLoader, Dataset

from torchfmri import InspectionError, explain
from torchfmri._explain.entry_points import FAILURES
from torchfmri.reference import AttentionFunction

# --- custom Functions ----------------------------------------------------------------------------


class Keeps(torch.autograd.Function):
    """A linear function that keeps some of (x, weight, bias) and takes out all three."""

    kept = 2

    @classmethod
    def keep(cls, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors[: cls.kept]

    @staticmethod
    def forward(ctx, x, weight, bias):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(*Keeps.keep(x, weight, bias))
        return x @ weight + bias

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        x, weight, bias = ctx.saved_tensors
        return g @ weight.T, x.T @ g, g.sum(0) + 0 * bias


class KeepsMore(Keeps):
    @staticmethod
    def forward(ctx, x, weight, bias):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight, bias)
        return x @ weight + bias

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        kept = ctx.saved_tensors
        x, weight = kept
        return g @ weight.T, x.T @ g, g.sum(0)


class KeepsByNumber(Keeps):
    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return g @ ctx.saved_tensors[5].T, None, None


class KeepsNumber(Keeps):
    @staticmethod
    def forward(ctx, x, weight, bias):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, 0.5)
        return x @ weight + bias


class KeepsAttribute(Keeps):
    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return g * ctx.factor, None, None


class UnpacksShape(Keeps):
    """Not the fault of saved tensors: the gradient has two sizes."""

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        ctx.saved_tensors  # noqa: B018 - read, and in order
        _b, _s, _o = g.shape
        return g, None, None


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return 2 * x

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        return g


def through(function: type[Keeps]) -> Callable[[], object]:
    def run() -> None:
        model = Net(lambda h: function.apply(h, torch.eye(8), torch.ones(8)))
        model(x()).sum().backward()

    return run


# --- layers --------------------------------------------------------------------------------------


class Reader(nn.Module):
    def __init__(self, reads: nn.Module, width: int) -> None:
        super().__init__()
        self.reads, self.head = reads, nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.reads(x))


class Shaper(Reader):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.reads(x).flatten(1))


class SelfAttention(nn.Module):
    def __init__(self, **mask: Tensor) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, **self.mask)[0]


class Fused(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            x,
            x,
            x,
            attn_mask=self.mask,
        )


def recurrent(module: nn.Module, given: Tensor, *state: Tensor) -> Callable[[], object]:
    return lambda: Wrap(module)(given, state if len(state) > 1 else state[0])


def attend(length: int, **mask: Tensor) -> Callable[[], object]:
    return lambda: Wrap(SelfAttention(**mask))(x(2, length, 8))


def fuse(mask: Tensor) -> Callable[[], object]:
    return lambda: Wrap(Fused(mask))(x(2, 2, 5, 8))


def encode_fast() -> None:
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with torch.no_grad():
        Wrap(encoder)(x(2, 5, 8), torch.zeros(4, 4))


# --- what is built -------------------------------------------------------------------------------


class Early(nn.Module):
    def __init__(self, value: object) -> None:
        self.part = value
        super().__init__()


class Buffered(nn.Module):
    def __init__(self) -> None:
        self.register_buffer("table", torch.ones(3))


class Forgetful(nn.Module):
    def __init__(self) -> None:
        self.width = 3

    def forward(self, x: Tensor) -> Tensor:
        return x


class Listed(nn.Module):
    def __init__(self, holder: type = list) -> None:
        super().__init__()
        self.blocks = holder([nn.Linear(2, 2), nn.Linear(2, 2)])


def optimize_listed() -> None:
    model = Listed()
    torch.optim.Adam(model.parameters())


def optimize_frozen() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    torch.optim.SGD([each for each in model.parameters() if each.requires_grad], 0.1)


def optimize_twice() -> None:
    parameters = Net().parameters()
    torch.optim.SGD(parameters, 0.1)
    torch.optim.SGD(parameters, 0.1)


def batches(samples: Sequence[object], **options: object) -> Callable[[], object]:
    return lambda: list(DataLoader(samples, batch_size=2, **options))  # type: ignore[arg-type]


def stacked(samples: list[Tensor]) -> Tensor:
    return torch.stack(samples)


# --- the table -----------------------------------------------------------------------------------

CASES = {
    "kept two": Case(through(Keeps), "saved_tensors", None, "kept 2 tensors, and backward takes 3"),
    "kept three": Case(through(KeepsMore), "saved_tensors", None, "kept 3 tensors, and backward"),
    "kept by number": Case(through(KeepsByNumber), "saved_tensors", None, "kept 2 tensors."),
    "kept a number": Case(through(KeepsNumber), "saved_tensors", "layers.1", "ctx.scale = scale"),
    "not kept": Case(through(KeepsAttribute), "saved_tensors", None, "ctx.factor = ..."),
    "gradcheck in float32": Case(
        lambda: gradcheck(AttentionFunction.apply, [x(2, 3, 64).requires_grad_()] * 3, eps=1e-6),
        "gradcheck",
        None,
        "double precision",
    ),
    "gradcheck": Case(
        lambda: gradcheck(Twice.apply, x().double().requires_grad_()),
        "gradcheck",
        None,
        "verify_gradients",
    ),
    "rows": Case(
        lambda: F.cross_entropy(x(32, 10), torch.zeros(8).long()), "target_shape", None, "4 x 8"
    ),
    "rows shifted": Case(
        lambda: F.cross_entropy(x(28, 10), torch.zeros(24).long()), "target_shape", None, "[:, :-1]"
    ),
    "rows of nll": Case(
        lambda: nn.NLLLoss()(x(6, 10), torch.zeros(4).long()), "target_shape", "", "(6, 10)"
    ),
    "target not flat": Case(
        lambda: F.cross_entropy(x(12, 10), torch.zeros(3, 4).long()),
        "target_shape",
        None,
        "target.flatten()",
    ),
    "scores not flat": Case(
        lambda: F.cross_entropy(x(3, 4, 10), torch.zeros(12).long()),
        "target_shape",
        None,
        "scores.flatten(0, 1)",
    ),
    "binary target of whole numbers": Case(
        lambda: nn.BCEWithLogitsLoss()(x(8), torch.ones(8).long()),
        "target_dtype",
        "",
        "target.float()",
    ),
    "classes last": Case(
        lambda: F.cross_entropy(x(2, 7, 11), torch.full((2, 7), 10)),
        "target_shape",
        None,
        "dimension 1, of size 7, was taken for the classes",
    ),
    "image": Case(
        lambda: F.cross_entropy(x(2, 3, 8, 8), torch.zeros(2, 8, 9).long()),
        "target_shape",
        None,
        "movedim(-1, 1)",
    ),
    "trailing": Case(
        lambda: F.cross_entropy(x(4, 3), torch.zeros(4, 1).long()),
        "target_shape",
        None,
        "target.squeeze(-1)",
    ),
    "no batch": Case(
        lambda: F.cross_entropy(x(9), torch.zeros(4).long()), "target_shape", None, "unsqueeze(0)"
    ),
    "binary": Case(
        lambda: nn.BCELoss()(torch.rand(5, 1), torch.ones(5)), "target_shape", "", "view_as(scores)"
    ),
    "binary logits": Case(
        lambda: F.binary_cross_entropy_with_logits(x(6, 7), torch.ones(6)),
        "target_shape",
        None,
        "one_hot(target.long(), 7)",
    ),
    "cat": Case(lambda: torch.cat([x(31, 4), x(30, 4)], 1), "sizes", None, "odd size was halved"),
    "cat far": Case(lambda: torch.cat([x(3, 4), x(3, 9)]), "sizes", None, "torch.cat(tensors, dim"),
    "cat dimensions": Case(lambda: torch.cat([x(3, 4), x(3)]), "sizes", None, "x.unsqueeze(dim)"),
    "stack": Case(lambda: torch.stack([x(6), x(9)]), "sizes", None, "pad_sequence"),
    "bmm": Case(lambda: torch.bmm(x(2, 3, 4), x(2, 5, 6)), "sizes", None, "transpose(1, 2)"),
    "lstm": Case(
        lambda: Reader(nn.LSTM(4, 6), 6)(x(3, 2, 4)),
        "not_a_tensor",
        "head",
        "output, state = self.reads(...)",
    ),
    "gru in sequence": Case(
        lambda: Wrap(nn.Sequential(nn.GRU(4, 6), nn.ReLU()))(x(3, 2, 4)),
        "not_a_tensor",
        "body.1.1",
        "nn.Sequential passes on",
    ),
    "tuple in forward": Case(
        lambda: Shaper(nn.RNN(4, 6), 6)(x(3, 2, 4)), "not_a_tensor", "", "'reads' (RNN)"
    ),
    "tuple to a norm": Case(
        lambda: Wrap(nn.BatchNorm1d(4))((x(3, 4), 1)), "not_a_tensor", "body.1", "x = x[0]"
    ),
    "tuple to a convolution": Case(
        lambda: Wrap(nn.Conv1d(4, 2, 1))((x(3, 4, 5),)), "not_a_tensor", "body.1", "x = x[0]"
    ),
    "nothing": Case(lambda: Wrap(nn.Linear(4, 2))(None), "not_a_tensor", "body.1", "layer before"),
    "state of batch": Case(
        recurrent(nn.GRU(4, 6), x(3, 2, 4), x(1, 5, 6)), "hidden_state", "body.1", "batch of 2"
    ),
    "state of swapped input": Case(
        recurrent(nn.LSTM(4, 6), x(2, 3, 4), x(1, 2, 6), x(1, 2, 6)),
        "hidden_state",
        "body.1",
        "batch_first=True",
    ),
    "state swapped": Case(
        recurrent(nn.GRU(4, 6, batch_first=True), x(2, 3, 4), x(2, 1, 6)),
        "hidden_state",
        "body.1",
        "state.transpose(0, 1)",
    ),
    "state dimensions": Case(
        recurrent(nn.GRU(4, 6), x(3, 2, 4), x(2, 6)), "hidden_state", "body.1", "batch at hand"
    ),
    "state of a cell": Case(
        recurrent(nn.GRUCell(4, 6), x(3, 4), x(2, 6)), "hidden_state", "body.1", "batch at hand"
    ),
    "one state": Case(
        recurrent(nn.LSTM(4, 6), x(3, 2, 4), x(1, 2, 6)), "hidden_state", "body.1", "(h_0, c_0)"
    ),
    "cell": Case(lambda: Wrap(nn.LSTMCell(4, 6))(x(3, 9)), "features", "body.1", "4 features"),
    "recurrent dimensions": Case(
        lambda: Wrap(nn.GRU(4, 6))(x(2, 3, 5, 4)), "dimensions", "body.1", "x.flatten(1, 2)"
    ),
    "mask": Case(
        attend(5, attn_mask=torch.zeros(4, 4)),
        "attention_shapes",
        "body.1.attention",
        "for this length",
    ),
    "mask per sample": Case(
        attend(6, attn_mask=torch.zeros(2, 6, 6)),
        "attention_shapes",
        "body.1.attention",
        "repeat_interleave",
    ),
    "padding": Case(
        attend(5, key_padding_mask=torch.zeros(5, 2).bool()),
        "attention_shapes",
        "body.1.attention",
        "mask.t()",
    ),
    "padding of whole numbers": Case(
        attend(5, key_padding_mask=torch.ones(2, 5).long()),
        "attention_shapes",
        "body.1.attention",
        "attention_mask == 0",
    ),
    "fused": Case(fuse(torch.zeros(2, 5)), "attention_shapes", "body.1", "mask[:, None, None, :]"),
    "fused length": Case(fuse(torch.zeros(7, 7)), "attention_shapes", "body.1", "mask[:, None]"),
    "fast path": Case(encode_fast, "attention_shapes", "body.1.self_attn", "padding mask"),
    "logits": Case(
        lambda: F.binary_cross_entropy(torch.tensor([3.5, -1.0]), torch.ones(2)),
        "probabilities",
        None,
        "runs from -1 to 3.5",
    ),
    "not a number": Case(
        lambda: nn.BCELoss()(torch.tensor([0.5, torch.nan]), torch.ones(2)),
        "probabilities",
        "",
        "1 of 2 values are NaN",
    ),
    "labels": Case(
        lambda: nn.BCELoss()(torch.rand(2), torch.tensor([1.0, 2.0])),
        "probabilities",
        "",
        "The target runs from 1 to 2",
    ),
    "gather": Case(
        lambda: x(3, 4).gather(1, torch.zeros(5, 2).long()), "gather", None, "index[:, None]"
    ),
    "gather dimensions": Case(
        lambda: x(3, 4).gather(1, torch.zeros(3).long()), "gather", None, "squeeze(1)"
    ),
    "gather floats": Case(
        lambda: x(3, 4).gather(1, torch.zeros(3, 1)), "gather", None, "index.long()"
    ),
    "scatter": Case(
        lambda: x(3, 4).scatter(1, torch.zeros(3, 2).long(), x(3, 1)), "gather", None, "index"
    ),
    "gather beyond": Case(
        lambda: x(3, 4).gather(1, torch.full((3, 1), 6)), "index_bounds", None, "index.max()"
    ),
    "sampling": Case(
        lambda: torch.tensor([0.5, float("nan")]).multinomial(1), "sampling", None, "isfinite()"
    ),
    "sampling logits": Case(
        lambda: torch.tensor([-1.0, 2.0]).multinomial(1), "sampling", None, "logits.softmax(-1)"
    ),
    "sampling zeros": Case(lambda: torch.zeros(3).multinomial(1), "sampling", None, "isfinite()"),
    "one-hot of -1": Case(
        lambda: nn.functional.one_hot(torch.tensor([-1, 2]), 3),
        "negative_class",
        None,
        "min() >= 0",
    ),
    "one-hot too large": Case(
        lambda: nn.functional.one_hot(torch.tensor([1, 3]), 3), "negative_class", None, "max() <"
    ),
    "heads": Case(lambda: nn.MultiheadAttention(10, 3), "attention_heads", None, "divisors"),
    "dimension": Case(lambda: x(3).softmax(1), "no_dimension", None, "shape on the line above"),
    "numpy": Case(lambda: x(3).requires_grad_().numpy(), "numpy_of_graph", None, ".detach()"),
    "collate": Case(batches([x(3), x(4)]), "collate", None, "Entry 0 has size [3], entry 1 [4]"),
    "collate pairs": Case(batches([(x(3), 0), (x(9), 1)]), "collate", None, "[9]"),
    "collate own": Case(batches([x(3), x(5)], collate_fn=stacked), "collate", None, "[5]"),
    "collate lists": Case(batches([[1, 2], [1]]), "collate", None, "different lengths"),
    "collate nothing": Case(batches([None, None]), "collate", None, "__getitem__"),
    "einsum": Case(
        lambda: torch.einsum("bij,bjk->bik", x(2, 3, 4), x(2, 5, 6)),
        "einsum",
        None,
        "'j' stands for 4 and 5",
    ),
    "einsum letters": Case(
        lambda: torch.einsum("bij,jk->bik", x(2, 3, 4), x(1, 4, 6)),
        "einsum",
        None,
        "'jk' has 2 letters for 3 dimensions",
    ),
    "einsum output": Case(
        lambda: torch.einsum("ij,jk->iz", x(3, 4), x(4, 6)), "einsum", None, "output subscript z"
    ),
    "layer early": Case(
        lambda: Early(nn.Linear(2, 2)), "module_init", None, "attribute 'part' of Early"
    ),
    "parameter early": Case(
        lambda: Early(nn.Parameter(x(2))), "module_init", None, "super().__init__()"
    ),
    "buffer early": Case(Buffered, "module_init", None, "attribute 'table' of Buffered"),
    "never": Case(lambda: Forgetful()(x()), "module_init", None, "__init__ of Forgetful"),
    "no parameters": Case(
        optimize_listed,
        "optimizer_parameters",
        None,
        "'blocks' is a plain list of 2 modules",
    ),
    "frozen": Case(optimize_frozen, "optimizer_parameters", None, "none of its 2 parameters"),
    "used up": Case(optimize_twice, "optimizer_parameters", None, "not a stored generator"),
    "model to optimizer": Case(
        lambda: torch.optim.SGD(Net(), 0.1),  # type: ignore[arg-type]
        "optimizer_parameters",
        None,
        "not the model",
    ),
    "no leaf": Case(
        lambda: torch.optim.SGD([x().requires_grad_() * 2], 0.1),
        "optimizer_parameters",
        None,
        "requires_grad_()",
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_frequent_failure_is_explained(case: Case) -> None:
    assert_explained(case)


@pytest.mark.slow
def test_failure_in_a_worker_of_a_loader() -> None:
    assert_explained(Case(batches([x(3), x(6)], num_workers=1), "collate", None, "[6]"))
    assert failure_of(batches(Items(), num_workers=1)).kind == "sizes", "not when collating"


def test_every_failure_of_the_table_is_provoked() -> None:
    provoked = {each.kind for each in (*CASES.values(), *OTHER_CASES.values(), DISTRIBUTED)}
    assert {failure.kind for failure in FAILURES} == (provoked | FAKED) - {"hook_raised"}


def test_place_of_a_function_that_keeps_too_little() -> None:
    explanation = failure_of(through(Keeps))
    assert explanation.near == "layers.1.up"
    assert explanation.phase == "backward"
    assert explanation.source is not None
    assert explanation.source.code == "x, weight, bias = ctx.saved_tensors"


def test_saved_tensors_are_recognised_without_the_source() -> None:
    code = """
class Made(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x
    @staticmethod
    def backward(ctx, g):
        a, b, c, d = ctx.saved_tensors
        return g
"""
    scope: dict[str, object] = {"torch": torch}
    exec(compile(code, "<no file>", "exec"), scope)
    made = scope["Made"]
    explanation = failure_of(lambda: made.apply(x().requires_grad_()).sum().backward())  # type: ignore[attr-defined]
    assert explanation.kind == "saved_tensors"
    assert "Made.forward kept 1 tensors, and backward takes 4." in explanation.facts


# --- pasted messages -----------------------------------------------------------------------------

DOUBLED = (
    "RuntimeError: The size of tensor a (1187) must match the size of tensor b (2374) at "
    "non-singleton dimension 1"
)


TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
    loss = F.cross_entropy(y, t)
ValueError: Expected input batch_size (32) to match target batch_size (8).
"""


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (DOUBLED, "doubled_cache"),
        (DOUBLED.partition(": ")[2], "doubled_cache"),
        (DOUBLED.replace("1187", "18").replace("2374", "9"), "doubled_cache"),
        (DOUBLED.replace("2374", "2375"), "sizes"),
        ("RuntimeError: saved_tensors mismatch", "saved_tensors"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "out_of_memory"),
        (
            TRACEBACK,
            "target_shape",
        ),
        ("ValueError: optimizer got an empty parameter list", "optimizer_parameters"),
    ],
)
def test_pasted_message_is_explained(text: str, kind: str) -> None:
    explanation = explain(text)
    assert explanation.kind == kind
    assert explanation.cure
    assert (explanation.layer, explanation.source) == (None, None)


def test_pasted_exception_is_explained_too() -> None:
    explanation = explain(RuntimeError(DOUBLED))
    assert explanation.kind == "doubled_cache"
    assert "1187 and 2374" in explanation.what
    assert "probably" in explanation.what
    assert "does not tell whether a cache was in use" in explanation.why


@pytest.mark.parametrize(
    "text", ["", "text", "MyPool.PoolError: CUDA out of memory", "KeyError: 'a'"]
)
def test_pasted_text_that_is_no_message_of_torch_is_refused(text: str) -> None:
    with pytest.raises(InspectionError, match="is not a message that it knows"):
        explain(text)


# --- negative controls ---------------------------------------------------------------------------


class Items(Dataset[Tensor]):
    """A dataset whose own code stacks what does not fit."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        return torch.stack([x(3), x(4)])


class Attribute(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x, 1).missing  # type: ignore[attr-defined]


class Iterates(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return list(3)  # type: ignore[call-overload]


def unpack_two() -> None:
    _a, _b, _c = (1, 2)


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (through(UnpacksShape), "unknown"),
        (unpack_two, "unknown"),
        (batches(Items()), "sizes"),
        (lambda: Wrap(Attribute())(x()), "unknown"),
        (lambda: Iterates()(x()), "unknown"),
        (lambda: nn.Linear(2, 2).missing, "unknown"),
        (lambda: x(3, 4).index_select(0, torch.tensor([9])), "unknown"),
        (lambda: F.mse_loss(x(3, 4), x(3, 5)), "sizes"),
        (lambda: x(2, 2, 5, 5).masked_fill(torch.zeros(2, 4).bool(), 0.0), "sizes"),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_similar_failure_of_another_cause_is_not_mistaken(
    run: Callable[[], object], kind: str
) -> None:
    assert failure_of(run).kind == kind


def test_rows_that_differ_are_not_told_to_flatten() -> None:
    explanation = failure_of(lambda: F.cross_entropy(x(32, 10), torch.zeros(8).long()))
    assert "flatten" not in "".join(explanation.cure)


def test_joined_tensors_are_not_told_about_broadcasting() -> None:
    explanation = failure_of(lambda: torch.cat([x(31, 4), x(30, 4)], 1))
    assert "31" in explanation.what
    assert "30" in explanation.what
    assert "broadcast" not in explanation.text()


def test_registered_layers_are_not_called_lost() -> None:
    def run() -> None:
        model = Listed(nn.ModuleList)
        torch.optim.SGD([each for each in model.parameters() if each.dim() > 9], 0.1)

    explanation = failure_of(run)
    assert explanation.kind == "optimizer_parameters"
    assert explanation.facts == ()
