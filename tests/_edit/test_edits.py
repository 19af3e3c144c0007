"""Every kind of edit at every place, compared with a forward pass that is written out."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import torchfmri
from tests._edit.written_out import logits_of, unchanged
from tests.architectures import ARCHITECTURES, tokens
from torchfmri import Edit

S = 9
PLACES = {
    "blocks.1.hook_resid_pre": 16, "blocks.0.hook_attn_out": 16, "blocks.1.hook_mlp_out": 16,
    "blocks.0.hook_resid_post": 16, "blocks.1.attn.hook_q": 16, "blocks.0.attn.hook_k": 8,
    "blocks.1.attn.hook_v": 8, "blocks.0.attn.hook_z": 16, "blocks.1.mlp.hook_pre": 24,
    "blocks.0.mlp.hook_pre_linear": 24, "blocks.0.mlp.hook_post": 24,
}  # fmt: skip
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 0.15}
Old = Callable[[Tensor], Tensor]


def subject(dtype: torch.dtype = torch.float64, attention: str = "eager") -> nn.Module:
    return ARCHITECTURES["llama"].build(attention, attention_dropout=0.0).eval().to(dtype)


def ids() -> Tensor:
    return tokens(S, batch=2)


def kinds(width: int, dtype: torch.dtype) -> dict[str, tuple[Edit, Old]]:
    """Each kind of edit, and the same as a function of the old value, written by hand."""
    draw = torch.Generator().manual_seed(3)
    direction = torch.randn(width, generator=draw, dtype=torch.float64).to(dtype)
    donor = torch.randn(2, S, width, generator=draw, dtype=torch.float64).to(dtype)
    return {
        "zero": (Edit.zero(), lambda x: x * 0),
        "scale": (Edit.scale(-0.5), lambda x: x * -0.5),
        "add": (Edit.add(direction, 3.0), lambda x: x + 3.0 * direction),
        "replace": (Edit.replace(donor), lambda _: donor),
        "mean": (Edit.mean(donor), lambda x: donor.double().mean((0, 1)).to(dtype).expand_as(x)),
        "function": (Edit.function(lambda x: x.square() + 0.5), lambda x: x.square() + 0.5),
    }


PARTS = {
    "everything": ({}, (slice(None), slice(None), slice(None))),
    "two tokens": ({"tokens": [1, 7]}, (slice(None), [1, 7], slice(None))),
    "from a token on": ({"tokens": slice(3, None)}, (slice(None), slice(3, None), slice(None))),
    "the last token": ({"tokens": -1}, (slice(None), slice(-1, None), slice(None))),
    "units": ({"units": [0, 3, 5]}, (slice(None), slice(None), [0, 3, 5])),
    "a row": ({"rows": 1}, (slice(1, 2), slice(None), slice(None))),
    "units of a token of a row": (
        {"rows": [1], "tokens": [2], "units": range(4)},
        (slice(1, 2), slice(2, 3), slice(0, 4)),
    ),
}


def expected(model: nn.Module, place: str, old: Old, key: tuple) -> Tensor:
    def change(name: str, value: Tensor) -> Tensor:
        if name != place:
            return value
        new = value.clone()
        new[key] = old(value)[key]
        return new

    with torch.no_grad():
        return logits_of(model, ids(), change)


def actual(model: nn.Module, edits: dict[str, Edit]) -> Tensor:
    with torch.no_grad(), torchfmri.edited(model, edits):
        return model(input_ids=ids()).logits


def test_the_forward_pass_that_is_written_out_is_that_of_the_model() -> None:
    model = subject()
    with torch.no_grad():
        assert (logits_of(model, ids(), unchanged) - model(ids()).logits).abs().max() < 1e-9


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["zero", "scale", "add", "replace", "mean", "function"])
def test_every_kind_at_every_place(kind: str, dtype: torch.dtype) -> None:
    for attention in ("eager", "sdpa"):
        model = subject(dtype, attention)
        plain = model(ids()).logits
        for place, width in PLACES.items():
            edit, old = kinds(width, dtype)[kind]
            wanted = expected(model, place, old, PARTS["everything"][1])
            found = actual(model, {place: edit})
            assert (found - wanted).abs().max() < TOLERANCE[dtype] * 3, place
            assert (found - plain).abs().max() > 10 * TOLERANCE[torch.float32], place


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", ["zero", "add", "replace", "function"])
def test_every_kind_on_every_part(kind: str, part: str) -> None:
    model = subject()
    where, key = PARTS[part]
    for place in ("blocks.0.attn.hook_z", "blocks.1.hook_resid_pre"):
        edit, old = kinds(16, torch.float64)[kind]
        found = actual(model, {place: edit.at(**where)})
        assert (found - expected(model, place, old, key)).abs().max() < 1e-9
        assert not torch.equal(found, model(ids()).logits)


def test_a_head_is_its_units_of_z() -> None:
    model = subject()
    wanted = expected(model, "blocks.1.attn.hook_z", torch.zeros_like, (..., slice(8, 12)))
    for edits in (
        {"L1H2": "zero"},
        {"blocks.1.attn.hook_z": Edit.zero().at(heads=2)},
        {"blocks.1.attn.hook_z": Edit.zero().at(heads=[2])},
        {"L1H2": lambda z: z * 0},
        {"L1H2": torch.zeros(4, dtype=torch.float64)},
    ):
        assert (actual(model, edits) - wanted).abs().max() < 1e-9


@pytest.mark.parametrize(("place", "heads"), [("z", 4), ("q", 4), ("k", 2), ("v", 2)])
def test_functions_see_heads_as_in_transformer_lens(place: str, heads: int) -> None:
    model, name = subject(), f"blocks.1.attn.hook_{place}"
    shapes = []

    def act(value: Tensor) -> Tensor:
        shapes.append(tuple(value.shape))
        new = value.clone()
        new[:, :, 1] *= -2.0
        return new

    wanted = expected(model, name, lambda x: x * -2.0, (..., slice(4, 8)))
    assert (actual(model, {name: act}) - wanted).abs().max() < 1e-9
    actual(model, {name: Edit.function(act).at(heads=[0, 1], tokens=[3, 5])})
    actual(model, {f"L1H1.{place}": Edit.function(lambda x: shapes.append(tuple(x.shape)) or x)})
    actual(model, {name: Edit.function(lambda x: shapes.append(tuple(x.shape)) or x).at(units=[1])})
    assert shapes == [(2, S, heads, 4), (2, 2, 2, 4), (2, S, 4), (2, S, 1)]


@pytest.mark.parametrize("kind", ["replace", "mean", "resample", "add"])
def test_donors_with_an_axis_of_heads(kind: str) -> None:
    model, draw = subject(), torch.Generator().manual_seed(3)
    donor = torch.randn(2, S, 4, 4, generator=draw, dtype=torch.float64)
    make = getattr(Edit, kind)
    for place in ("blocks.1.attn.hook_z", "L1H2"):
        flat = actual(model, {place: make(donor.flatten(-2))})
        assert torch.equal(actual(model, {place: make(donor)}), flat)
    assert not torch.equal(flat, model(ids()).logits)


def test_features_of_a_dictionary_are_taken_out() -> None:
    model, name = subject(), "blocks.0.hook_resid_post"
    draw = torch.Generator().manual_seed(3)
    out = torch.randn(16, 40, generator=draw, dtype=torch.float64)

    class Dictionary:
        def encode(self, x: Tensor) -> Tensor:
            return (x @ out).relu()

        def decode(self, found: Tensor) -> Tensor:
            return found @ out.T + 0.3

    def by_hand(x: Tensor) -> Tensor:
        both = (x @ out[:, [4, 9]]).relu()
        return x - both[..., :1] * out[:, 4] - both[..., 1:] * out[:, 9]

    found = actual(model, {name: Edit.without_features(Dictionary(), [4, 9])})
    assert (found - expected(model, name, by_hand, PARTS["everything"][1])).abs().max() < 1e-9
    assert not torch.equal(found, model(ids()).logits)
    with pytest.raises(torchfmri.InspectionError, match=r"decode\(features\)"):
        Edit.without_features(torch.relu, [1])


def test_voxels_are_those_of_a_scan() -> None:
    model = subject()
    edits = {"model.layers.0.self_attn.q_proj": Edit.zero().at(voxels=[1, 3])}
    key = (..., [4, 5, 6, 7, 12, 13, 14, 15])  # heads of four units
    wanted = expected(model, "blocks.0.attn.hook_q", torch.zeros_like, key)
    assert (actual(model, edits) - wanted).abs().max() < 1e-9


def test_several_edits_at_once_and_wildcards() -> None:
    model = subject()
    with torch.no_grad():

        def change(name: str, value: Tensor) -> Tensor:
            if name.endswith("hook_mlp_out"):
                return value * 0.5
            if name.endswith("hook_z"):
                value = value.clone()
                value[..., 4:8] = 0
            return value

        wanted = logits_of(model, ids(), change)
    found = actual(model, {"L*.mlp": Edit.scale(0.5), "L*H1": Edit.zero()})
    assert (found - wanted).abs().max() < 1e-9


def test_tokens_of_each_row_by_a_mask() -> None:
    model = subject()
    mask = torch.zeros(2, S, dtype=torch.bool)
    mask[0, 2] = mask[1, 5] = True
    place = "blocks.0.hook_resid_post"
    for kind in ("zero", "add", "replace"):
        edit, old = kinds(16, torch.float64)[kind]
        found = actual(model, {place: edit.at(tokens=mask)})
        assert (found - expected(model, place, old, (mask,))).abs().max() < 1e-9


def test_a_donor_of_other_positions() -> None:
    model = subject()
    donor = torch.randn(1, 20, 16, dtype=torch.float64)
    place = "blocks.0.hook_resid_post"
    edit = Edit.replace(donor, source=[11, 3]).at(tokens=[2, 6])

    def change(name: str, value: Tensor) -> Tensor:
        if name == place:
            value = value.clone()
            value[:, 2], value[:, 6] = donor[0, 11], donor[0, 3]
        return value

    with torch.no_grad():
        wanted = logits_of(model, ids(), change)
    assert (actual(model, {place: edit}) - wanted).abs().max() < 1e-9


def test_resampled_values_are_drawn_by_position_alone() -> None:
    model = subject()
    pool = torch.randn(50, 16, dtype=torch.float64)
    seen = []
    edits = {"blocks.0.hook_resid_post": Edit.resample(pool, seed=4)}
    with torch.no_grad(), torchfmri.edited(model, edits):
        handle = model.model.layers[0].register_forward_hook(lambda *a: seen.append(a[2]))
        model(ids())
        model(ids()[:, :5])
        handle.remove()
    values = [each[0] if isinstance(each, tuple) else each for each in seen]
    assert torch.equal(values[0][:, :5], values[1])
    rows = values[0].reshape(-1, 16)
    assert all(bool((row == pool).all(1).any()) for row in rows)
    assert len({int((row == pool).all(1).nonzero()[0, 0]) for row in rows}) > 10


# -- ways to run ---------------------------------------------------------------------------------


def test_without_edits_nothing_changes_and_after_them_neither() -> None:
    model = subject(torch.float32)
    before = model(ids()).logits
    with torchfmri.edited(model, {"L0": Edit.scale(1.0)}):
        assert torch.equal(model(ids()).logits, before)
    with torchfmri.edited(model, {"L0": "zero"}):
        assert not torch.equal(model(ids()).logits, before)
    assert torch.equal(model(ids()).logits, before)
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("checkpoint", ["none", "reentrant", "non-reentrant"])
def test_gradients_flow_and_replays_see_the_same_edit(checkpoint: str) -> None:
    model = subject()
    model.config.use_cache = False
    direction = torch.randn(16, dtype=torch.float64, requires_grad=True)

    def change(name: str, value: Tensor) -> Tensor:
        if name == "blocks.0.hook_attn_out":
            return value + 0.7 * direction
        if name == "blocks.1.attn.hook_z":
            value = value.clone()
            value[:, [3], 4:8] = 0
        return value

    wanted = gradients(model, logits_of(model, ids(), change).logsumexp(-1).sum())
    (steered,) = torch.autograd.grad(
        logits_of(model, ids(), change).logsumexp(-1).sum(), [direction]
    )
    if checkpoint != "none":
        options = {"use_reentrant": checkpoint == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        model.train()
    edits = {"L0.attn": Edit.add(direction, 0.7), "L1H1": Edit.zero().at(tokens=[3])}
    model.zero_grad()
    with torchfmri.edited(model, edits):
        model(ids()).logits.logsumexp(-1).sum().backward()
    assert direction.grad is not None
    torch.testing.assert_close(direction.grad, steered, rtol=0, atol=1e-9)
    for parameter, each in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, each, rtol=0, atol=1e-8)


def test_autocast() -> None:
    model = subject(torch.float32)
    direction = torch.randn(16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        handle = model.model.layers[0].self_attn.register_forward_hook(
            lambda m, i, o: (o[0] + direction.to(o[0].dtype), *o[1:])
        )
        wanted = model(ids()).logits
        handle.remove()
        with torchfmri.edited(model, {"L0.attn": Edit.add(direction)}):
            assert torch.equal(model(ids()).logits, wanted)
        assert not torch.equal(model(ids()).logits, wanted)


@pytest.mark.slow
def test_a_compiled_model_runs_with_its_edits() -> None:
    model = subject(torch.float32)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        plain = compiled(ids()).logits
        wanted = actual(model, {"L0H1": Edit.zero()})
        with torchfmri.edited(compiled, {"L0H1": "zero"}):
            assert torch.equal(compiled(ids()).logits, wanted)
        assert torch.equal(compiled(ids()).logits, plain)


# -- generating ----------------------------------------------------------------------------------

GENERATING = {
    "steering everywhere": lambda: {"L0": Edit.add(torch.linspace(-2, 2, 16, dtype=torch.float64))},
    "a head": lambda: {"L1H2": Edit.zero()},
    "from position 6 on": lambda: {
        "L0": Edit.add(torch.linspace(-2, 2, 16, dtype=torch.float64)).at(tokens=slice(6, None))
    },
    "one generated token": lambda: {"blocks.0.hook_resid_post": Edit.zero().at(tokens=[11])},
    "resampled": lambda: {"L0": Edit.resample(torch.randn(40, 16, dtype=torch.float64), seed=1)},
}


@pytest.mark.parametrize("edits", GENERATING)
def test_generating_with_a_cache_is_the_same_as_without(edits: str) -> None:
    model = subject()
    torch.manual_seed(1)
    chosen = GENERATING[edits]()
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True,
               "return_dict_in_generate": True, "eos_token_id": None}  # fmt: skip
    with torchfmri.edited(model, chosen):
        cached = model.generate(ids(), use_cache=True, **options)
        whole = model.generate(ids(), use_cache=False, **options)
    plain = model.generate(ids(), **options)
    assert torch.equal(cached.sequences, whole.sequences)
    for one, other in zip(cached.logits, whole.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
    last = [torch.stack(each.logits) for each in (cached, plain)]
    assert not torch.allclose(*last)


def test_a_token_of_the_future_is_edited_when_it_is_fed() -> None:
    model = subject()
    seen: list[int] = []

    def note(x: Tensor) -> Tensor:
        seen.append(x.shape[1])
        return x

    with torchfmri.edited(model, {"L0": Edit.function(note).at(tokens=[0, 10])}) as counts:
        model.generate(ids(), max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert seen == [1, 1]
    assert counts == {"L0": 2}


# -- patching ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_patching_everything_downstream_is_the_donor_bit_for_bit(dtype: torch.dtype) -> None:
    model = subject(dtype)
    inspector = torchfmri.Inspector(model, keep="tensors")
    inspector.watch("L*")
    others = tokens(S, seed=11, batch=2)
    with torch.no_grad():
        donor = inspector.run_inspection({"input_ids": others})
        wanted = model(others).logits
        assert not torch.equal(model(ids()).logits, wanted)
        for places in (["L*"], ["L1"]):
            edits = {place: Edit.replace(donor) for place in places}
            assert torch.equal(actual(model, edits), wanted)


# -- beside other instruments --------------------------------------------------------------------


def test_an_inspector_sees_the_edited_values_and_edits_itself() -> None:
    model = subject()
    inspector = torchfmri.Inspector(model, keep="tensors")
    inspector.watch("model.layers.0", what=["activations", "gradients"])
    inspector.edit("L0", Edit.zero().at(tokens=[2]))
    assert list(inspector.edits) == ["L0"]
    inspection = inspector.run_inspection({"input_ids": ids()}, loss=lambda o: o.logits.sum())
    values = inspection["model.layers.0"].activations
    assert bool((values[:, 2] == 0).all())
    assert not bool((values[:, 3] == 0).any())
    inspector.unedit()
    inspection = inspector.run_inspection({"input_ids": ids()}, loss=lambda o: o.logits.sum())
    assert not bool((inspection["model.layers.0"].activations[:, 2] == 0).any())
    with torchfmri.edited(model, {"L0": "zero"}):
        inspection = inspector.run_inspection({"input_ids": ids()}, loss=lambda o: o.logits.sum())
    assert bool((inspection["model.layers.0"].activations == 0).all())


def test_token_gradients_of_an_edited_model() -> None:
    model = subject()
    edits = {"L0H1": Edit.zero(), "L0.mlp": Edit.scale(0.3)}
    with (
        torchfmri.edited(model, edits),
        torchfmri.token_gradients(model, "*.{o,q}_proj") as found,
    ):
        model(ids()).logits.logsumexp(-1).sum().backward()
    name = "model.layers.0.self_attn.o_proj.weight"
    parameter = dict(model.named_parameters())[name]
    torch.testing.assert_close(found[name].sum(), parameter.grad, rtol=0, atol=1e-9)
    assert bool((parameter.grad[:, 4:8] == 0).all())


def test_a_scan_of_an_edited_model() -> None:
    model, tokenizer = torchfmri.load_model("tiny")
    plain = torchfmri.scan(model, tokenizer, "Once upon a time", max_new_tokens=4)
    with torchfmri.edited(model, {"L0.mlp": "zero"}) as counts:
        scan = torchfmri.scan(model, tokenizer, "Once upon a time", max_new_tokens=4)
    column = scan.layers.index("model.layers.0.mlp")
    metric = next(iter(scan[0].layers))
    assert bool((scan[0].layers["activation"][:, column] == 0).all()), metric
    assert not bool((plain[0].layers["activation"][:, column] == 0).any())
    assert counts["L0.mlp"] > 4


# -- no trace ------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_hooks_left(model: nn.Module) -> Iterator[None]:
    before = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    yield
    assert before == [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_nothing_stays_after_an_error(error: type[BaseException]) -> None:
    model = subject()

    def fail(_: Tensor) -> Tensor:
        raise error("stop")

    with no_hooks_left(model):
        with pytest.raises(error, match="stop"), torchfmri.edited(model, {"L1": fail}):
            model(ids())
        with pytest.raises(error), torchfmri.edited(model, {"L1": "zero"}):
            raise error("the body")


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFMRI", "off")
    model = subject()
    plain = model(ids()).logits
    with torchfmri.edited(model, {"L1": "zero"}) as counts:
        assert torch.equal(model(ids()).logits, plain)
    assert counts == {"L1": 0}


def test_a_copy_made_in_the_block_is_not_edited() -> None:
    import copy

    model = subject()
    plain = model(ids()).logits
    with torchfmri.edited(model, {"L1": "zero"}):
        model(ids())
        twin = copy.deepcopy(model)
        assert torch.equal(twin(ids()).logits, plain)
    hooks = [
        each for module in twin.modules() for each in vars(module).items() if "hook" in each[0]
    ]
    assert not [name for name, found in hooks if name.startswith("_forward") and found]


def test_convolutions_have_channels_as_units() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    x = torch.randn(2, 3, 8, 8)
    with torchfmri.edited(model, {"0": Edit.zero().at(units=[1])}):
        found = model(x)
    wanted = model(x).clone()
    wanted[:, 1] = 0
    assert torch.equal(found, wanted)


def test_rows_of_experts_are_tokens() -> None:
    model = ARCHITECTURES["mixtral"].build(experts="eager").eval().double()
    found = []
    edits = {"model.layers.0.mlp.gate": Edit.function(lambda x: found.append(x.shape) or x)}
    batch = tokens(S, batch=2)
    with torch.no_grad(), torchfmri.edited(model, edits):
        model(batch)
    with torch.no_grad():
        with torchfmri.edited(model, {"L0.mlp": Edit.zero().at(tokens=[2])}):
            seen = model(batch).logits
        assert not torch.allclose(seen[:, 2], model(batch).logits[:, 2])
    assert torch.allclose(seen[:, :2], model(batch).logits[:, :2])
    assert found[0][0] == 2 * S


@pytest.mark.parametrize("length", [2, S])
def test_positions_of_a_donor_count_whatever_shape_it_has(length: int) -> None:
    # A donor of the selected part's own shape is not taken as it is: source says what goes where.
    model, place = subject(), "blocks.0.hook_resid_post"
    at = [4, 5] if length == 2 else list(range(S))
    draw = torch.Generator().manual_seed(5)
    donor = torch.randn(2, length, 16, generator=draw, dtype=torch.float64)
    edit = Edit.replace(donor, source=list(range(length))[::-1]).at(tokens=at)

    def old(value: Tensor) -> Tensor:
        new = value.clone()
        new[:, at] = donor.flip(1)
        return new

    wanted = expected(model, place, old, PARTS["everything"][1])
    assert (actual(model, {place: edit}) - wanted).abs().max() < 1e-9


def test_a_part_is_narrowed_step_by_step() -> None:
    once = actual(subject(), {"L0": Edit.zero().at(units=1, tokens=2)})
    twice = actual(subject(), {"L0": Edit.zero().at(units=1).at(tokens=2)})
    assert torch.equal(once, twice)


def test_sources_are_kept_whatever_is_selected_first() -> None:
    donor = torch.randn(2, 3, 16, dtype=torch.float64)
    edit = Edit.replace(donor, source=[0, 1])
    one = actual(subject(), {"blocks.0.attn.hook_z": edit.at(heads=3).at(tokens=[4, 5])})
    other = actual(subject(), {"blocks.0.attn.hook_z": edit.at(tokens=[4, 5]).at(heads=3)})
    assert torch.equal(one, other)
    assert not torch.equal(one, subject()(ids()).logits)


def test_sources_of_tokens_counted_from_the_end() -> None:
    donor = torch.randn(2, 3, 16, dtype=torch.float64)
    places = ([-1, 2], [S - 1, 2])
    one, other = (
        actual(subject(), {"L0": Edit.replace(donor, source=[-1, 0]).at(tokens=at)})
        for at in places
    )
    assert torch.equal(one, other)
    new = actual(subject(), {"L0": Edit.replace(donor, source=[2, 0]).at(tokens=places[1])})
    assert torch.equal(one, new)


def test_an_edit_does_not_follow_the_lists_that_it_was_made_of() -> None:
    class Halves:
        def encode(self, values: Tensor) -> Tensor:
            return values * 2

        def decode(self, features: Tensor) -> Tensor:
            return features / 2

    value = torch.randn(2, 3, 8)
    chosen, tokens, mask = [1, 3], [0], torch.ones(2, S, dtype=torch.bool)
    listed, counted = (
        Edit.without_features(Halves(), each) for each in (chosen, (n for n in [1, 3]))
    )
    at, masked = Edit.zero().at(tokens=tokens), Edit.zero().at(tokens=mask)
    chosen.clear()
    tokens[0] = 2
    mask.zero_()
    wanted = value.clone()
    wanted[..., [1, 3]] = 0
    for edit in (listed, counted):
        assert torch.equal(edit.values(value), wanted)
        assert torch.equal(edit.values(value), wanted)  # a generator is not used up
    assert at.tokens == [0]
    assert bool(masked.tokens.all())


def test_the_mean_of_whole_numbers_is_not_cut() -> None:
    values, model = torch.tensor([[1, 2], [2, 5]]), nn.Sequential(nn.Tanh())
    with torchfmri.edited(model, {"0": Edit.mean(values)}):
        assert model(torch.zeros(1, 2)).tolist() == [[1.5, 3.5]]
