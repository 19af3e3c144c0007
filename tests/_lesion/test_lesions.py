"""Lesions compared with a loop of plain forward passes, and with a forward pass written out."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchfmri
from tests._edit.written_out import logits_of, unchanged
from tests.architectures import ARCHITECTURES, tokens
from torchfmri import FileFormatError, InspectionError, LayerNotFoundError, LesionMap, lesion
from torchfmri._lesion.questions import LesionQuestion

Subject = tuple[nn.Module, Any]
PROMPTS = ["Once upon a time there was a little", "The dog ran to the", "She was very"]
ANSWERS = [" girl", " park", " happy and"]


@pytest.fixture(scope="module")
def tiny() -> Subject:
    model, tokenizer = torchfmri.load_model("tiny")
    return model, tokenizer


def small() -> nn.Module:
    return ARCHITECTURES["llama"].build("eager", attention_dropout=0.0).double()


def plain_surprisal(model: nn.Module, tokenizer: Any, prompt: str, answer: str) -> float:
    """Written without any of our code."""
    ids = tokenizer(prompt)["input_ids"]
    answer_ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([ids + answer_ids])).logits[0].double()
    found = logits.log_softmax(-1)[len(ids) - 1 : -1]
    return -float(sum(found[at, token] for at, token in enumerate(answer_ids)))


def zeroed(model: nn.Module, name: str) -> list[Any]:
    """Plain hooks that take a head or an MLP out."""
    block = model.model.layers[int(name[1 : name.index("." if "." in name else "H")])]
    if name.endswith(".mlp"):
        return [block.mlp.register_forward_hook(lambda m, i, o: torch.zeros_like(o))]
    head, size = int(name.partition("H")[2]), model.config.head_dim

    def cut(_: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        z = given[0].clone()
        z[..., head * size : (head + 1) * size] = 0
        return (z,)

    return [block.self_attn.o_proj.register_forward_pre_hook(cut)]


def test_lesions_are_a_loop_of_plain_forward_passes(tiny: Subject) -> None:
    model, tokenizer = tiny
    found = lesion(model, tokenizer, PROMPTS, ANSWERS, batch=7)
    assert len(found.names) == 25
    for row, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        assert found.intact[row] == pytest.approx(
            plain_surprisal(model, tokenizer, prompt, answer), abs=1e-4
        )
        for column, name in enumerate(found.names):
            handles = zeroed(model, name)
            wanted = plain_surprisal(model, tokenizer, prompt, answer)
            for handle in handles:
                handle.remove()
            assert found.lesioned[row, column] == pytest.approx(wanted, abs=2e-4), name
    assert np.abs(found.effect).max() > 1.0


@pytest.mark.parametrize("batch", [1, 3, 32])
def test_lesions_of_a_model_that_is_written_out(batch: int) -> None:
    model = small()
    ids = tokens(8, batch=1)[0]
    found = lesion(model, None, ids, [[5, 9]], of=["heads", "mlps", "attentions"], batch=batch)
    whole = torch.cat([ids, torch.tensor([5])])[None]

    def surprisal(change: Callable[[str, Tensor], Tensor]) -> float:
        model.eval()
        with torch.no_grad():
            logits = logits_of(model, whole, change)[0].log_softmax(-1)
        return -float(logits[7, 5] + logits[8, 9])

    assert found.intact[0] == pytest.approx(surprisal(unchanged), abs=1e-9)
    for column, name in enumerate(found.names):
        block = int(name[1])

        def change(place: str, value: Tensor, name: str = name, block: int = block) -> Tensor:
            if "H" in name and place == f"blocks.{block}.attn.hook_z":
                value = value.clone()
                head = int(name[3])
                value[..., 4 * head : 4 * head + 4] = 0
            elif (name.endswith("mlp") and place == f"blocks.{block}.hook_mlp_out") or (
                name.endswith("attn") and place == f"blocks.{block}.hook_attn_out"
            ):
                return value * 0
            return value

        assert found.lesioned[0, column] == pytest.approx(surprisal(change), abs=1e-9), name


def test_mean_and_resampled_lesions(tiny: Subject) -> None:
    model, tokenizer = tiny
    inspector = torchfmri.Inspector(model, keep="tensors")
    place = "model.layers.1.self_attn.o_proj"
    inspector.watch(place, "inputs")
    values = []
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        ids += tokenizer(answer, add_special_tokens=False)["input_ids"][:-1]
        inspection = inspector.run_inspection({"input_ids": torch.tensor([ids])})
        values.append(inspection[place].tensors("inputs")[0])
    pool = torch.cat(values)
    edits = {"mean": torchfmri.Edit.mean(pool), "resample": torchfmri.Edit.resample(pool, 3)}
    for kind, edit in edits.items():
        found = lesion(model, tokenizer, PROMPTS, ANSWERS, of="L1H2", edit=kind, seed=3)
        for row, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
            with torchfmri.edited(model, {"L1H2": edit}):
                wanted = plain_surprisal(model, tokenizer, prompt, answer)
            assert found.lesioned[row, 0] == pytest.approx(wanted, abs=2e-3)


def test_a_logit_difference_and_a_function_of_ones_own(tiny: Subject) -> None:
    model, tokenizer = tiny
    difference = lesion(
        model, tokenizer, PROMPTS, " girl", " boy", metric="logit_difference", of="mlps"
    )
    girl, boy = (
        tokenizer(each, add_special_tokens=False)["input_ids"][0] for each in (" girl", " boy")
    )

    def own(logits: Tensor, ids: Tensor) -> Tensor:
        return logits[-1, girl] - logits[-1, boy]

    same = lesion(model, tokenizer, PROMPTS, metric=own, of="mlps")
    np.testing.assert_allclose(same.lesioned, difference.lesioned, atol=2e-4)
    assert same.metric == "own"


def test_tokens_that_are_lesioned(tiny: Subject) -> None:
    model, tokenizer = tiny
    found = lesion(model, tokenizer, PROMPTS[0], ANSWERS[0], of="blocks", tokens=[2], batch=2)
    for column, name in enumerate(found.names):
        with torchfmri.edited(model, {name: torchfmri.Edit.zero().at(tokens=[2])}):
            wanted = plain_surprisal(model, tokenizer, PROMPTS[0], ANSWERS[0])
        assert found.lesioned[0, column] == pytest.approx(wanted, abs=2e-4)


def test_voxels(tiny: Subject) -> None:
    model, tokenizer = tiny
    found = lesion(model, tokenizer, PROMPTS[0], ANSWERS[0], of="voxels")
    width = model.config.intermediate_size
    assert len(found.names) == model.config.num_hidden_layers * -(-width // 64)
    edit = torchfmri.Edit.zero().at(units=range(64, min(128, width)))
    with torchfmri.edited(model, {"blocks.2.mlp.hook_post": edit}):
        wanted = plain_surprisal(model, tokenizer, PROMPTS[0], ANSWERS[0])
    assert found.lesioned[0, found.names.index("L2.mlp.v1")] == pytest.approx(wanted, abs=2e-4)


# -- attribution ---------------------------------------------------------------------------------


def test_the_estimate_is_the_derivative_of_the_lesion() -> None:
    """Of a part that is scaled by 1 - e, the change is e times the estimate, for small e."""
    model = small()
    ids = tokens(8, batch=1)[0]
    found = lesion(model, None, ids, [[5]], method="attribution")
    assert not found.is_exact
    model.eval()
    for column, name in enumerate(found.names):
        metrics = []
        for e in (-1e-2, 1e-2):  # the norms are in float32: a smaller step would show rounding
            with torch.no_grad(), torchfmri.edited(model, {name: torchfmri.Edit.scale(1 - e)}):
                metrics.append(-float(model(ids[None]).logits[0, -1].log_softmax(-1)[5]))
        slope = (metrics[1] - metrics[0]) / 2e-2
        assert found.estimate[0, column] == pytest.approx(slope, abs=2e-5, rel=2e-3), name
        assert found.effect[0, column] == found.estimate[0, column]


def test_the_error_of_the_estimate_is_said(tiny: Subject) -> None:
    found = lesion(*tiny, PROMPTS, ANSWERS, of="heads", method="both")
    error = found.estimate_error()
    true, guess = found.effect.mean(0), found.estimate.mean(0)
    assert error["r"] == pytest.approx(np.corrcoef(true, guess)[0, 1])
    assert error["largest"] == np.abs(true - guess).max()
    assert "Attribution patching against the lesions" in found.table()
    only = lesion(*tiny, PROMPTS[0], ANSWERS[0], of="mlps")
    with pytest.raises(InspectionError, match="method='both'"):
        only.estimate_error()


def test_a_frozen_model_is_estimated_and_grad_stays(tiny: Subject) -> None:
    model = small().requires_grad_(False)
    wanted = lesion(small(), None, tokens(8, batch=1)[0], [[5]], method="attribution")
    found = lesion(model, None, tokens(8, batch=1)[0], [[5]], method="attribution")
    np.testing.assert_allclose(found.estimate, wanted.estimate, atol=1e-9)
    assert not any(each.requires_grad or each.grad is not None for each in model.parameters())


# -- no trace, no mixing -------------------------------------------------------------------------


def test_the_model_is_as_it_was() -> None:
    model = small().train()
    state = {name: each.clone() for name, each in model.state_dict().items()}
    random = torch.get_rng_state()
    lesion(model, None, tokens(8, batch=1)[0], [[5]], method="both", of="mlps")
    assert all(each.training for each in model.modules())
    assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


class Mixing(nn.Module):
    """A language model whose rows see each other through statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh())])
        self.norm = nn.BatchNorm1d(8, track_running_stats=False)
        self.head = nn.Linear(8, 20)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.layers[0](self.embedding(input_ids))
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_influence_each_other_are_refused(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, ids = Mixing().to(dtype), torch.tensor([3, 5, 7, 2])
    with pytest.raises(InspectionError, match="Rows of one batch influence each other in Mixing"):
        lesion(model, None, ids, [[4]], of="layers.0.*")
    found = lesion(model, None, ids, [[4]], of="layers.0.*", batch=1)
    with torch.no_grad(), torchfmri.edited(model, {"layers.0.1": "zero"}):
        wanted = -float(model.eval()(ids[None])[0, -1].double().log_softmax(-1)[4])
    assert found.lesioned[0, found.names.index("layers.0.1")] == pytest.approx(wanted, abs=1e-5)


def test_rows_of_a_model_in_bfloat16_are_not_taken_for_mixed(tiny: Subject) -> None:
    model = copy.deepcopy(tiny[0]).bfloat16()
    found = lesion(model, tiny[1], "Once upon a", " time", of="mlps")
    assert np.isfinite(found.effect).all()


# -- files ---------------------------------------------------------------------------------------


def test_an_interrupted_run_goes_on(tiny: Subject, tmp_path: Path) -> None:
    path = tmp_path / "lesions.json"
    seen: list[tuple[int, int, str]] = []

    def stop(done: int, total: int, prompt: str) -> None:
        seen.append((done, total, prompt))
        if done > 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lesion(*tiny, PROMPTS, ANSWERS, of="mlps", batch=5, path=path, on_step=stop)
    assert len(LesionMap.load(path).prompts) == 1
    steps: list[int] = []
    found = lesion(
        *tiny, PROMPTS, ANSWERS, of="mlps", batch=5, path=path,
        on_step=lambda done, *_: steps.append(done),
    )  # fmt: skip
    assert steps == [10, 15]
    assert seen[0] == (5, 15, PROMPTS[0])
    whole = lesion(*tiny, PROMPTS, ANSWERS, of="mlps", batch=5)
    np.testing.assert_array_equal(found.lesioned, whole.lesioned)
    again = LesionMap.load(path)
    np.testing.assert_array_equal(again.lesioned, whole.lesioned)
    assert (again.names, again.prompts, again.answers) == (
        whole.names,
        whole.prompts,
        whole.answers,
    )
    with pytest.raises(InspectionError, match="another model, other prompts or other options"):
        lesion(*tiny, PROMPTS, ANSWERS, of="heads", path=path)


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text("{}")
    with pytest.raises(FileFormatError):
        LesionMap.load(path)


# -- reading -------------------------------------------------------------------------------------


def test_table_picture_and_data(tiny: Subject, tmp_path: Path) -> None:
    found = lesion(*tiny, PROMPTS, ANSWERS)
    text = found.table(5)
    assert found.top(1)[0] in text
    assert "95 % interval" in text
    assert "below 0.05 by chance" in text
    assert "no interval" in lesion(*tiny, PROMPTS[0], ANSWERS[0], of="mlps").table()
    figure = found.plot()
    effect = np.asarray(figure.axes[0].images[0].get_array())
    index = found.names.index("L2H3")
    assert effect[2, 3] == pytest.approx(found.effect.mean(0)[index])
    mlp = found.names.index("L4.mlp")
    assert effect[4, 4] == pytest.approx(found.effect.mean(0)[mlp])
    found.draw(tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 10_000
    data = found.to_dict()
    assert len(data["lesioned"]) == 3
    assert data["mean"] == pytest.approx(found.effect.mean(0).tolist())
    with pytest.raises(LayerNotFoundError, match="L2H3"):
        found.effect_of("L2H33")
    np.testing.assert_array_equal(found.effect_of("L2H3"), found.effect[:, index])


def test_an_answer_that_continues_a_word_is_noted(tiny: Subject) -> None:
    for answer, is_noted in (("girl", True), (" girl", False)):
        found = torchfmri.lesion(*tiny, "there was a little", answer, of="L0.mlp")
        words = "continues the word 'little'; a word of its own is ' girl'."
        assert (words in found.table(width=200)) == is_noted


def question(metric: Any) -> LesionQuestion:
    ids = torch.tensor([1])
    return LesionQuestion("", "", "", ids=ids, answer_ids=ids, foil_id=None, metric=metric)


@pytest.mark.parametrize("kind", [float, np.float64])
def test_a_number_of_a_metric_is_not_rounded(kind: Any) -> None:
    found = question(lambda logits, ids: kind(1.0 + 1e-9)).measure(torch.zeros(2, 1, 3))
    assert found.tolist() == [1.0 + 1e-9] * 2


def test_numbers_of_numpy_and_of_torch_in_turns() -> None:
    given = iter([np.float32(0.5), torch.tensor([2.0]), np.int64(3)])
    found = question(lambda logits, ids: next(given)).measure(torch.zeros(3, 1, 3))
    assert found.tolist() == [0.5, 2.0, 3.0]


def test_a_metric_that_fails_for_one_row_is_named() -> None:
    given = iter([1.0, None])
    with pytest.raises(InspectionError, match="returned NoneType"):
        question(lambda logits, ids: next(given)).measure(torch.zeros(2, 1, 3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_prompt_may_lie_on_another_device_than_its_answer() -> None:
    model, ids = small().cuda(), tokens(8, batch=1)[0]
    found, same = (
        lesion(model, None, each, [[5, 9]], of="mlps").lesioned for each in (ids.cuda(), ids)
    )
    np.testing.assert_array_equal(found, same)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no answer": ({"answers": None}, "is about an answer"),
    "no foil": ({"metric": "logit_difference"}, "give foils="),
    "the same foil": ({"metric": "logit_difference", "foils": " girl"}, "begin with the same"),
    "a metric": ({"metric": "accuracy"}, "choose 'surprisal' or 'logit_difference'"),
    "an edit": ({"edit": "ablate"}, "choose 'zero', 'mean', 'resample'"),
    "a method": ({"method": "fast"}, "choose 'lesion'"),
    "a batch": ({"batch": 0}, "from 1"),
    "of nothing": ({"of": []}, "give one or several of 'heads'"),
    "of what is not there": ({"of": "headz"}, "No layer matches 'headz'"),
    "a pattern": ({"of": "blocks.0.attn.hook_pattern"}, "cannot be lesioned"),
    "too many answers": ({"answers": [" a", " b"]}, "one for each of 1 prompts"),
    "an empty answer": ({"answers": ""}, "it has no tokens"),
    "a metric of several numbers": ({"metric": lambda logits, ids: logits}, "one number"),
    "a metric of nothing": ({"metric": lambda logits, ids: None}, "returned NoneType"),
    "a complex metric": (
        {"metric": lambda logits, ids: logits[0, 0] * 1j},
        r"returned a tensor of shape \(\) and torch.complex64",
    ),
    "a foil that no model knows": (
        {"metric": "logit_difference", "foils": 10**6},
        "Token id 1000000 at position 0 of foil 0",
    ),
    "a negative foil": (
        {"metric": "logit_difference", "foils": -1},
        "Token id -1 at position 0 of foil 0",
    ),
    "a negative answer": ({"answers": -1}, "Token id -1 at position 0 of answer 0"),
    "an answer that is a number": ({"answers": 5.0}, "answers=5.0"),
    "tokens that are a text": ({"tokens": "all"}, "tokens='all'"),
    "tokens that are not there": ({"tokens": [99]}, "never acted"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(tiny: Subject, case: str) -> None:
    change, words = BAD[case]
    arguments: dict[str, Any] = {"answers": " girl", "of": "mlps", **change}
    with pytest.raises(InspectionError, match=words):
        lesion(*tiny, PROMPTS[0], **arguments)


def test_tokens_are_checked_before_the_model_runs(tiny: Subject) -> None:
    calls: list[int] = []
    handle = tiny[0].register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        with pytest.raises(InspectionError, match="tokens='all'"):
            lesion(*tiny, PROMPTS, ANSWERS, tokens="all")
    finally:
        handle.remove()
    assert not calls
