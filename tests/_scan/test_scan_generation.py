"""A scan while a model generates: the tokens of plain `generate`, and activations that are true.

Live activations are compared, layer by layer and position by position, with hooks of the tests' own
on one plain pass over the finished sequences (`scan_oracles.py`).
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from oracles import whole_numbers
from scan_oracles import (
    LANGUAGE_MODELS,
    activations,
    build,
    is_close,
    left_padded,
    prompts,
    rms,
    surprisals,
    voxels_of,
)
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, StoppingCriteria, StoppingCriteriaList

import torchfmri
from torchfmri import InspectionError, LiveToken, Scan

# The fast tier keeps half of the cases of each test; the slow tier runs the others.
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.one_in(2)]
STEPS = 6
FLOAT32, FLOAT64, BFLOAT16 = 3e-6, 3e-7, 3e-2  # a scan keeps its numbers in float32
PER_BATCH = ("rotary_emb", "wpe")  # positions: of the batch, or the same for all of it
HEADS = ("lm_head", "")


def plain(model: Any, rows: list[list[int]], **options: Any) -> Tensor:
    ids, mask = left_padded(rows)
    options = {"max_new_tokens": STEPS, "do_sample": False, **options}
    return model.generate(ids, attention_mask=mask, **options)


def cut(ids: Tensor, start: int, end: int | None = 2) -> list[list[int]]:
    """The generated tokens of each row, up to and including the ending token."""
    rows = ids[:, start:].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def written(scan: Scan) -> list[list[int]]:
    return [each.tokens.ids[each.tokens.generated].tolist() for each in scan]


def finished(scan: Scan, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Ids and mask of what was read and written: padded on the left, then on the right."""
    longest = max(map(len, rows))
    width = longest + max(map(len, written(scan)))
    ids, mask = torch.zeros(len(scan), width).long(), torch.zeros(len(scan), width).long()
    for row, each in enumerate(scan):
        first = longest - len(rows[row * len(rows) // len(scan)])
        where = slice(first, first + len(each))
        ids[row, where] = torch.from_numpy(each.tokens.ids)
        mask[row, where] = 1
    return ids, mask


def fed(scan: Scan, mask: Tensor) -> list[np.ndarray]:
    """Which columns of each sequence the model was run on while generating: all but the newest."""
    width = mask.shape[1]
    return [np.flatnonzero(mask[row].numpy()) < width - 1 for row in range(len(scan))]


def assert_activations(
    scan: Scan, model: nn.Module, rows: list[list[int]], tolerance: float, live: bool = True
) -> None:
    """Every layer, voxel and position equals a plain pass; live ones are there where they ran."""
    ids, mask = finished(scan, rows)
    truth = activations(model, ids, mask)
    start = max(map(len, rows))
    compared = 0
    for layer in scan.layers:
        if layer.endswith(PER_BATCH) and len(scan) > 1:
            continue
        several = truth.get(layer)
        column = scan.layers.index(layer)
        for row, (each, ran) in enumerate(zip(scan, fed(scan, mask), strict=True)):
            ours = torch.from_numpy(each.layers["activation"][:, column])
            if several is None:  # never called as a module
                assert ours.isnan().all()
                continue
            where = mask[row].bool()
            expected = rms(torch.cat([one[row] for one in several], -1))[where]
            if live:
                expected[torch.from_numpy(~ran)] = torch.nan
                if layer == "lm_head":  # runs on the last position of the prompt alone
                    expected[: int(where[:start].sum()) - 1] = torch.nan
            assert is_close(ours, expected, tolerance), (layer, row, ours, expected)
            known = ~expected.isnan()
            for voxel, units in voxels_of(scan.anatomy, layer):
                ours = torch.from_numpy(each.voxels["activation"][:, voxel])
                parts = torch.cat([one[row][..., units] for one in several], -1)
                assert is_close(ours[known], rms(parts)[where][known], tolerance), (layer, voxel)
                compared += 1
    assert compared > 15


# -- the same tokens, true activations -----------------------------------------------------------


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_tokens_are_those_of_generate_and_activations_are_true(name: str) -> None:
    """A padded batch of two, whose rows may end early."""
    model = build(name)
    expected = cut(plain(model, prompts()), 7)
    scan = torchfmri.scan(model, None, prompts(), STEPS, per=None)
    assert written(scan) == expected
    assert_activations(scan, model, prompts(), FLOAT32)
    assert [each.padding for each in scan] == [
        max(map(len, expected)) - len(expected[0]),
        3 + max(map(len, expected)) - len(expected[1]),
    ]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, FLOAT64), (torch.bfloat16, BFLOAT16)], ids=str
)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gemma", "mistral", "mamba", "falcon"])
def test_other_dtypes(name: str, dtype: torch.dtype, tolerance: float) -> None:
    model = build(name, dtype)
    expected = cut(plain(model, prompts()), 7)
    scan = torchfmri.scan(model, None, prompts(), STEPS, per=None)
    assert written(scan) == expected
    assert_activations(scan, model, prompts(), tolerance)


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gpt2", "mamba"])
def test_a_single_prompt_is_seen_in_every_layer(name: str) -> None:
    """One row alone: its positions are its own, so that no layer is left out."""
    model = build(name)
    row = prompts()[:1]
    scan = torchfmri.scan(model, None, row[0], STEPS, per=None, eos_token_id=66)
    assert written(scan) == cut(plain(model, row, eos_token_id=66), 7, 66)
    assert_activations(scan, model, row, FLOAT32)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gemma", "mistral", "phi", "falcon",
                                  "mamba", "qwen3-moe"])  # fmt: skip
def test_sampled_tokens(name: str) -> None:
    """With the same seed, and without one from the same random state, which is then put back."""
    model = build(name)
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.5, "top_k": 0}
    torch.manual_seed(3)
    expected = cut(plain(model, prompts(), **options), 7)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    scan = torchfmri.scan(model, None, prompts(), STEPS, per=None, seed=3, **options)
    assert written(scan) == expected
    assert torch.equal(torch.get_rng_state(), before)
    other = cut(plain(model, prompts(), **options), 7)
    torch.set_rng_state(before)
    scan = torchfmri.scan(model, None, prompts(), STEPS, per="position", **options)
    assert written(scan) == other != expected
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_is_changed_while_it_generates_is_noticed() -> None:
    """The comparison can fail: one layer that answers otherwise moves tokens and activations."""
    model = build("llama")
    scan = torchfmri.scan(model, None, prompts(), STEPS, per=None)
    norm = model.get_submodule("model.layers.1.input_layernorm")
    with torch.no_grad():
        norm.weight.mul_(1.01)
    with pytest.raises(AssertionError):
        assert_activations(scan, model, prompts(), FLOAT32)


@pytest.mark.parametrize(
    ("name", "layer"), [("gpt2", "transformer.wpe"), ("llama", "model.rotary_emb")]
)
def test_positions_of_a_padded_batch_are_seen(name: str, layer: str) -> None:
    model = build(name)
    scan = torchfmri.scan(model, None, prompts(), STEPS, per=None)
    ids, mask = finished(scan, prompts())
    truth = activations(model, ids, mask)[layer][0]
    column = scan.layers.index(layer)
    for row, ran in enumerate(fed(scan, mask)):
        ours = torch.from_numpy(scan[row].layers["activation"][ran, column])
        assert is_close(ours, rms(truth[row])[mask[row].bool()][torch.from_numpy(ran)], FLOAT32)


@pytest.mark.parametrize("per", [None, "position", "cached"])
def test_a_layer_that_is_called_twice_has_the_rms_of_both_calls(per: Any) -> None:
    """Phi calls one dropout behind its attention and behind its MLP."""
    model = build("phi")
    scan = torchfmri.scan(model, None, prompts(), STEPS, per=per)
    assert_activations(scan, model, prompts(), FLOAT32, live=per is None)


# -- ways to generate ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"cache_implementation": "dynamic"},
        {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
        {"min_new_tokens": STEPS},
        {"return_dict_in_generate": True, "output_scores": True},
        {"eos_token_id": [66, 27]},
    ],
    ids=["no cache", "static", "dynamic", "penalty", "minimum", "dictionary", "ends"],
)
@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_ways_to_generate(name: str, options: dict[str, Any]) -> None:
    model = build(name)
    found = plain(model, prompts(), **options)
    found = found if isinstance(found, Tensor) else found.sequences
    end = 27 if "eos_token_id" in options else 2
    scan = torchfmri.scan(model, None, prompts(), STEPS, per=None, **options)
    assert written(scan) == cut(found, 7, end)
    # Without a cache every step runs the whole sequence, the head on the last position alone.
    assert_activations(scan, model, prompts(), FLOAT32)


def test_several_sequences_for_each_prompt() -> None:
    model = build("qwen3")
    options: dict[str, Any] = {"do_sample": True, "num_return_sequences": 3, "temperature": 1.5}
    torch.manual_seed(5)
    expected = cut(plain(model, prompts(), **options), 7)
    scan = torchfmri.scan(model, None, prompts(), STEPS, per=None, seed=5, **options)
    assert written(scan) == expected
    assert len(scan) == 6
    assert [each.tokens.ids[0] for each in scan] == [row[0] for row in prompts() for _ in range(3)]
    assert_activations(scan, model, prompts(), FLOAT32)


def test_several_sequences_by_configuration() -> None:
    config = GenerationConfig(
        num_return_sequences=2, do_sample=True, pad_token_id=0, eos_token_id=2
    )
    scan = torchfmri.scan(build("qwen3"), None, prompts()[0], STEPS, generation_config=config)
    assert len(scan) == 2


def test_what_a_given_configuration_leaves_open_is_the_models() -> None:
    model, config = build("llama"), GenerationConfig(do_sample=False)
    model.generation_config.pad_token_id = 2
    rows = [prompts()[0], prompts()[1], [*prompts()[1][:-1], 2]]
    expected = plain(model, rows, generation_config=config)
    assert len({len(each) for each in cut(expected, 7)}) > 1, "no row ends early"
    scan = torchfmri.scan(model, None, rows, STEPS, per=None, generation_config=config)
    assert written(scan) == cut(expected, 7)


def test_texts_that_end_an_answer_by_configuration() -> None:
    model, tokenizer = torchfmri.load_model("tiny")
    config = GenerationConfig(stop_strings=["girl", "."], do_sample=False)
    prompt = "Once upon a time there was a little"
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    options: dict[str, Any] = {"generation_config": config, "tokenizer": tokenizer}
    expected = model.generate(ids, max_new_tokens=12, **options)[0, ids.shape[1] :].tolist()
    assert len(expected) < 12, "no text ended it"
    scan = torchfmri.scan(model, tokenizer, prompt, 12, per=None, generation_config=config)
    assert written(scan) == [expected]


def test_rows_that_end_early_where_padding_is_the_ending_token() -> None:
    """SmolLM2's way: what comes after the end is cut by its position, never by its id."""
    model = build("llama")
    model.generation_config.pad_token_id = 2
    row = [*prompts()[1][:-1], 2]  # the prompt itself holds the ending token
    rows = [prompts()[0], prompts()[1], row]
    ids, mask = left_padded(rows, filler=2)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False)
    lengths = {len(each) for each in cut(expected, 7)}
    assert len(lengths) > 1, "no row ends early"
    scan = torchfmri.scan(model, None, rows, STEPS, per=None)
    assert written(scan) == cut(expected, 7)
    assert scan[2].tokens.ids[: len(row)].tolist() == row
    assert_activations(scan, model, rows, FLOAT32)


def test_rows_that_a_stopping_criterion_ended_are_cut() -> None:
    class Stop(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
            return torch.tensor([input_ids.shape[1] >= 9, input_ids.shape[1] >= 12])

    model, options = build("qwen3"), {"eos_token_id": 66, "pad_token_id": 0}
    stops = StoppingCriteriaList([Stop()])
    scan = torchfmri.scan(model, None, prompts(), STEPS, stopping_criteria=stops, **options)
    assert [len(each) for each in written(scan)] == [2, 5]


@pytest.mark.parametrize("per", [None, "position", "cached", "token_loss"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_prompt_of_one_token_and_one_new_token(name: str, per: Any) -> None:
    model = build(name)
    for row, steps in (([9], 1), ([9], 3), (prompts()[0], 1)):
        expected = plain(model, [row], max_new_tokens=steps, eos_token_id=66)[0].tolist()
        scan = torchfmri.scan(model, None, row, steps, per=per, eos_token_id=66)
        assert scan.tokens.ids.tolist() == expected
        assert scan.tokens.generated.tolist() == [False] * len(row) + [True] * steps
        column = scan.layers.index("lm_head")
        found = np.isnan(scan.only.layers["activation"][:, column])
        assert found[-1] == (per is None)
        if per is not None:
            assert not found.any()
            assert scan.only.checks["live_difference"] < 1e-5
            gradient = scan.only.layers["gradient"]
            assert np.isnan(gradient[-1]).all()
            assert np.isfinite(gradient[-2, column])


# -- the user's cache ----------------------------------------------------------------------------


def cache_of(model: Any, ids: Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    return cache


def contents(cache: DynamicCache) -> list[Tensor]:
    return [each.clone() for layer in cache.layers for each in (layer.keys, layer.values)]


@pytest.mark.parametrize("held", [0, 1, 4, 6])
def test_the_user_s_cache_is_used_and_not_written_into(held: int) -> None:
    model = build("qwen3")
    ids = torch.tensor(prompts()[:1])
    expected = plain(model, prompts()[:1], eos_token_id=66)[0].tolist()
    cache = DynamicCache() if not held else cache_of(model, ids[:, :held])
    before = contents(cache) if held else []
    scan = torchfmri.scan(model, None, ids, STEPS, per=None, past_key_values=cache, eos_token_id=66)
    assert scan.tokens.ids.tolist() == expected
    assert cache.get_seq_length() == held
    if held:
        after = contents(cache)
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    column = scan.layers.index("model.norm")
    unknown = np.flatnonzero(np.isnan(scan.only.layers["activation"][:, column]))
    assert unknown.tolist() == [*range(held), len(expected) - 1]
    whole = torchfmri.scan(model, None, ids, STEPS, past_key_values=cache, eos_token_id=66)
    assert not np.isnan(whole.only.layers["activation"][:, column]).any()
    assert whole.only.checks["live_difference"] < 1e-5


def test_verification_with_the_user_s_cache() -> None:
    model = build("qwen3")
    ids = torch.tensor(prompts()[:1])
    scan = torchfmri.scan(
        model, None, ids, STEPS, per=None, verify=True, eos_token_id=66,
        past_key_values=cache_of(model, ids[:, :4]),
    )  # fmt: skip
    assert scan.only.checks["tokens_identical"] is True


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 4}], ids=["greedy", "sampled"])
def test_verification_runs_generate_once_more(options: dict[str, Any]) -> None:
    scan = torchfmri.scan(build("qwen3"), None, prompts(), STEPS, verify=True, **options)
    assert [each.checks["tokens_identical"] for each in scan] == [True, True]


def test_verification_can_fail() -> None:
    """A model that answers otherwise when a hook is on it."""
    model = build("llama")
    head = model.lm_head

    def turned(module: nn.Module, arguments: Any) -> Any:
        watched = len(model.model.norm._forward_hooks) > 0
        return (arguments[0].flip(-1),) if watched else None

    head.register_forward_pre_hook(turned)
    scan = torchfmri.scan(model, None, prompts()[0], STEPS, per=None, verify=True)
    assert scan.only.checks["tokens_identical"] is False


# -- the same tokens fed twice -------------------------------------------------------------------


LONG = 1187


def long_llama() -> tuple[Any, Tensor]:
    model = build("llama", max_position_embeddings=4096)
    return model, whole_numbers(5, 67, 1, LONG, seed=1)


def twice(model: Any, ids: Tensor) -> Tensor:
    """Seed of many wrong numbers: one pass to look inside, another to answer, one cache."""
    cache = DynamicCache()
    model(input_ids=ids, past_key_values=cache, use_cache=True)
    again = model(input_ids=ids, past_key_values=cache, use_cache=True)
    return torch.cat([ids, again.logits[:, -1:].argmax(-1)], 1)


def test_the_same_sequence_fed_twice_is_refused() -> None:
    model, ids = long_llama()
    hooks = sum(len(each._forward_hooks) for each in model.modules())
    with pytest.raises(InspectionError) as caught:
        torchfmri.scan(model, None, ids, 4, decode=twice)
    for words in ("1187", "2374", "fed twice", "cache", "ids[:, -1:]"):
        assert words in str(caught.value)
    assert sum(len(each._forward_hooks) for each in model.modules()) == hooks


def test_feeding_twice_is_wrong_without_an_error() -> None:
    """Why it is refused: transformers answers, and the answer is another one."""
    model, ids = long_llama()
    with torch.no_grad():
        right = model(ids).logits[:, -1]
        cache = cache_of(model, ids)
        wrong = model(ids, past_key_values=cache).logits[:, -1]
        proper = model(ids[:, -1:], past_key_values=cache_of(model, ids[:, :-1])).logits[:, -1]
    assert cache.get_seq_length() == 2 * LONG
    assert float((right - wrong).abs().max()) > 1e-4
    assert float((right - proper).abs().max()) < 1e-6


def test_the_whole_sequence_at_every_step_is_refused() -> None:
    def whole(model: Any, ids: Tensor) -> Tensor:
        cache = DynamicCache()
        for _ in range(3):
            logits = model(ids, past_key_values=cache).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        return ids

    with pytest.raises(InspectionError, match="fed twice"):
        torchfmri.scan(build("qwen3"), None, prompts()[0], 4, decode=whole)


def test_a_cache_that_holds_the_prompt_already_is_refused() -> None:
    model, ids = long_llama()
    cache = cache_of(model, ids)
    with pytest.raises(InspectionError) as caught:
        torchfmri.scan(model, None, ids, 4, past_key_values=cache)
    for words in ("1187", "2374", "fed twice"):
        assert words in str(caught.value)
    assert cache.get_seq_length() == LONG


@pytest.mark.parametrize("per", [None, "position"])
def test_one_step_fed_twice_is_refused(per: Any) -> None:
    """The prompt is in the cache, and its last token is fed again."""

    def again(model: Any, ids: Tensor) -> Tensor:
        cache = cache_of(model, ids)
        token = ids[:, -1:]
        for _ in range(3):
            token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, token], 1)
        return ids

    with pytest.raises(InspectionError, match="twice"):
        torchfmri.scan(build("qwen3"), None, prompts()[0], 4, per=per, decode=again)


def test_ours_runs_64_steps_behind_1187_tokens() -> None:
    model, ids = long_llama()
    expected = model.generate(ids, max_new_tokens=64, do_sample=False, eos_token_id=66)
    scan = torchfmri.scan(model, None, ids, 64, eos_token_id=66)
    assert scan.tokens.ids.tolist() == expected[0].tolist()
    assert int(scan.tokens.generated.sum()) == 64
    assert scan.only.checks["live_difference"] < 1e-4
    assert scan.only.checks["gradient_residual"] < 1e-4
    assert scan.only.layers["gradient"].shape == (LONG + 64, len(scan.layers))


# -- a loop of the user's own --------------------------------------------------------------------


def right_loop(steps: int) -> Any:
    def loop(model: Any, ids: Tensor) -> Tensor:
        cache, new = DynamicCache(config=model.config), ids
        for _ in range(steps):
            logits = model(input_ids=new, past_key_values=cache, use_cache=True).logits
            new = logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, new], 1)
        return ids

    return loop


def test_an_own_loop_is_watched_as_generate_is() -> None:
    model, row = build("qwen3"), prompts()[0]
    ours = torchfmri.scan(model, None, row, 5, per=None, decode=right_loop(5))
    theirs = torchfmri.scan(model, None, row, 5, per=None, eos_token_id=66)
    assert ours.tokens.ids.tolist() == theirs.tokens.ids.tolist()
    norm = ours.layers.index("model.norm")
    np.testing.assert_allclose(
        ours.only.layers["activation"][:, norm], theirs.only.layers["activation"][:, norm], 1e-6
    )
    # A loop that asks for all logits has the prompt's surprisal too.
    assert np.isfinite(ours.tokens.surprisal[1:]).all()


def test_an_own_loop_may_write_more_than_max_new_tokens() -> None:
    scan = torchfmri.scan(build("qwen3"), None, prompts()[0], 2, decode=right_loop(5))
    assert int(scan.tokens.generated.sum()) == 5


def test_an_own_loop_without_a_cache_may_run_a_sequence_twice() -> None:
    def loop(model: Any, ids: Tensor) -> Tensor:
        for _ in range(3):
            model(ids, use_cache=False)
            logits = model(ids, use_cache=False).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        return ids

    model = build("qwen3")
    scan = torchfmri.scan(model, None, prompts()[0], 3, decode=loop)
    assert scan.only.checks["live_difference"] < 1e-5


def test_an_own_loop_gets_no_mask() -> None:
    with pytest.raises(InspectionError, match=r"decode=.*without a mask.*one by one"):
        torchfmri.scan(build("qwen3"), None, prompts(), 3, decode=right_loop(3))
    rows = [row[:4] for row in prompts()]
    scan = torchfmri.scan(build("qwen3"), None, rows, 3, decode=right_loop(3))
    assert max(each.checks["live_difference"] for each in scan) < 1e-5


def test_an_own_loop_that_feeds_the_prompt_in_parts() -> None:
    def loop(model: Any, ids: Tensor) -> Tensor:
        cache = cache_of(model, ids[:, :3])
        logits = model(ids[:, 3:], past_key_values=cache).logits
        return torch.cat([ids, logits[:, -1:].argmax(-1)], 1)

    model = build("qwen3")
    scan = torchfmri.scan(model, None, prompts()[0][:6], 1, per=None, decode=loop)
    assert_activations_but_head(scan, model)
    truth = surprisals(model, torch.from_numpy(scan.tokens.ids)[None])[0][0]
    assert is_close(torch.from_numpy(scan.tokens.surprisal[1:]), truth, FLOAT32)


def assert_activations_but_head(scan: Scan, model: nn.Module) -> None:
    truth = activations(model, torch.from_numpy(scan.tokens.ids)[None])
    for layer in scan.layers:
        if not layer.endswith(PER_BATCH):
            ours = scan.only.layers["activation"][:-1, scan.layers.index(layer)]
            expected = rms(truth[layer][0][0])[:-1]
            assert is_close(torch.from_numpy(ours), expected, FLOAT32), layer


def test_chunked_prefill_has_no_wrong_surprisal() -> None:
    model = build("qwen3")
    options = {"prefill_chunk_size": 3, "eos_token_id": 66}
    scan = torchfmri.scan(model, None, prompts()[0], STEPS, per=None, **options)
    truth = surprisals(model, torch.from_numpy(scan.tokens.ids)[None])[0][0].numpy()
    ours = scan.tokens.surprisal[1:]
    known = ~np.isnan(ours)
    assert known[-STEPS:].all()
    np.testing.assert_allclose(ours[known], truth[known], rtol=1e-5)


# -- from the pass alone -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("beam search", {"num_beams": 3}),
        ("guidance", {"guidance_scale": 1.5}),
        ("assisted", {"prompt_lookup_num_tokens": 2}),
        ("assisted", {"assistant_model": "llama"}),
    ],
    ids=["beams", "guidance", "prompt lookup", "assistant"],
)
def test_methods_that_run_other_tokens_are_read_from_the_pass(
    words: str, options: dict[str, Any]
) -> None:
    model, row = build("llama"), prompts()[:1]
    if "assistant_model" in options:
        options = {"assistant_model": build("llama", num_hidden_layers=1)}
    expected = cut(plain(model, row, eos_token_id=66, **options), 7, 66)
    for per in ("position", None):
        scan = torchfmri.scan(model, None, row[0], STEPS, per=per, eos_token_id=66, **options)
        assert written(scan) == expected
        assert any(words in note and "pass" in note for note in scan.meta["notes"])
        assert "live_difference" not in scan.only.checks
        assert_activations(scan, model, row, FLOAT32, live=False)


def test_live_false_takes_everything_from_the_pass() -> None:
    model = build("llama")
    scan = torchfmri.scan(model, None, prompts(), STEPS, per=None, live=False)
    assert written(scan) == cut(plain(model, prompts()), 7)
    assert_activations(scan, model, prompts(), FLOAT32, live=False)


# -- modules without generate --------------------------------------------------------------------


class Recurrent(nn.Module):
    """Ids -> logits, with nothing of transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(67, 16)
        self.mixer = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 67)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.mixer(self.embedding(ids))[0])


@pytest.mark.parametrize("per", [None, "position", "token_loss"])
def test_any_module_from_ids_to_logits(per: Any) -> None:
    model = Recurrent()
    rows = [row[:4] for row in prompts()]
    ids = torch.tensor(rows)
    for _ in range(STEPS):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], 1)
    scan = torchfmri.scan(model, None, rows, STEPS, per=per)
    assert [each.tokens.ids.tolist() for each in scan] == ids.tolist()
    truth = activations(model, ids)
    for layer in ("embedding", "mixer", "head"):
        column = scan.layers.index(layer)
        for row in range(2):
            ours = torch.from_numpy(scan[row].layers["activation"][:-1, column])
            assert is_close(ours, rms(truth[layer][0][row])[:-1], FLOAT32)
    if per is not None:
        assert scan[0].checks["gradient_residual"] < 1e-5
    with pytest.raises(InspectionError, match=r"no generate\(\).*num_beams.*decode="):
        torchfmri.scan(model, None, rows, STEPS, num_beams=2)


def test_sampling_a_module_without_generate() -> None:
    model, row = Recurrent(), prompts()[0]
    one, same, other = (
        torchfmri.scan(model, None, row, STEPS, per=None, seed=seed, do_sample=True).tokens.ids
        for seed in (1, 1, 2)
    )
    assert one.tolist() == same.tolist() != other.tolist()


def test_an_ending_token_of_a_module_without_generate() -> None:
    model, rows = Recurrent(), [row[:4] for row in prompts()]
    free = torchfmri.scan(model, None, rows, STEPS, per=None)
    end = int(free[0].tokens.ids[5])
    scan = torchfmri.scan(model, None, rows, STEPS, per="position", eos_token_id=end)
    for each, before in zip(scan, free, strict=True):
        whole = before.tokens.ids.tolist()
        stop = whole.index(end, 4) + 1 if end in whole[4:] else len(whole)
        assert each.tokens.ids.tolist() == whole[:stop]


def test_prompts_of_different_lengths_need_a_model_that_takes_a_mask() -> None:
    with pytest.raises(InspectionError, match=r"Recurrent\.forward takes no attention_mask"):
        torchfmri.scan(Recurrent(), None, prompts(), STEPS)


class Small(nn.Module):
    """A module in the manner of courses: a config, a generate() of its own, logits and loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = {"block_size": 64}
        self.wte, self.wpe = nn.Embedding(67, 16), nn.Embedding(64, 16)
        self.mlp, self.lm_head = nn.Linear(16, 16), nn.Linear(16, 67, bias=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, None]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        return self.lm_head(x + self.mlp(x).cumsum(1)), None

    @torch.no_grad()
    def generate(
        self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None
    ) -> Tensor:
        for _ in range(max_new_tokens):
            idx = torch.cat([idx, self(idx)[0][:, -1:].argmax(-1)], 1)
        return idx


def test_a_generate_that_is_not_that_of_transformers() -> None:
    model, row = Small(), prompts()[0]
    scan = torchfmri.scan(model, None, row, STEPS)
    assert scan.tokens.ids.tolist() == model.generate(torch.tensor([row]), STEPS)[0].tolist()
    assert scan.only.checks["live_difference"] < 1e-5


def test_a_module_with_a_config_predicts_the_next_token() -> None:
    model, row = Small(), prompts()[0]
    scan = torchfmri.scan(model, None, row, 0)
    logs = torch.log_softmax(model(torch.tensor([row]))[0][0], -1).detach()
    expected = -logs[:-1].gather(-1, torch.tensor(row)[1:, None])[:, 0]
    np.testing.assert_allclose(scan.tokens.surprisal[1:], expected.numpy(), rtol=1e-5)
    assert "given those before it" in scan.meta["loss"]


# -- text that is only read ----------------------------------------------------------------------


@pytest.mark.parametrize("per", [None, "position", "cached", "token_loss"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_reading_without_writing(name: str, per: Any) -> None:
    model = build(name)
    scan = torchfmri.scan(model, None, prompts(), 0, per=per)
    assert [each.tokens.ids.tolist() for each in scan] == prompts()
    assert not any(each.tokens.generated.any() for each in scan)
    ids, mask = left_padded(prompts())
    assert_read(scan, model, ids, mask)
    truth = surprisals(model, ids, mask)
    for row, each in enumerate(scan):
        first = int((mask[row] == 0).sum())
        assert np.isnan(each.tokens.surprisal[0])
        for ours, expected in zip((each.tokens.surprisal, each.tokens.entropy), truth, strict=True):
            np.testing.assert_allclose(ours[1:], expected[row, first:].numpy(), rtol=2e-5)


def assert_read(scan: Scan, model: nn.Module, ids: Tensor, mask: Tensor) -> None:
    truth = activations(model, ids, mask)
    for layer in scan.layers:
        if layer.endswith(PER_BATCH):
            continue
        for row, each in enumerate(scan):
            ours = torch.from_numpy(each.layers["activation"][:, scan.layers.index(layer)])
            several = torch.cat([one[row] for one in truth[layer]], -1)
            assert is_close(ours, rms(several)[mask[row].bool()], FLOAT32), layer


@pytest.mark.parametrize("per", [None, "position", "token_loss"])
def test_an_encoder_is_read(per: Any) -> None:
    """BERT predicts each token at its own position: there is no surprisal of the next one."""
    model = build("bert")
    scan = torchfmri.scan(model, None, prompts(), 0, per=per)
    assert_read(scan, model, *left_padded(prompts()))
    if per is None:
        return
    assert "at its own position" in scan.meta["loss"]
    assert all(np.isnan(each.tokens.surprisal).all() for each in scan)
    column = scan.layers.index("cls.predictions.decoder")
    for each in scan:
        assert np.isfinite(each.layers["gradient"][:, column]).all()  # the last column as well


def test_an_encoder_without_a_head_needs_a_loss() -> None:
    """As MiniLM: hidden states, no logits."""
    model = build("bert").bert
    scan = torchfmri.scan(model, None, prompts()[0], 0, per=None)
    assert_read(scan, model, *left_padded(prompts()[:1]))
    with pytest.raises(InspectionError, match=r"no logits.*loss=.*per=None"):
        torchfmri.scan(model, None, prompts()[0], 0)

    def own(output: Any, ids: Tensor, generated: Tensor) -> Tensor:
        assert not generated.any()
        return output.last_hidden_state.square().sum()

    scan = torchfmri.scan(model, None, prompts()[0], 0, loss=own)
    hidden = torch.from_numpy(scan.only.layers["activation"])[
        :, scan.layers.index("encoder.layer.1.output.LayerNorm")
    ]
    gradient = scan.only.layers["gradient"][
        :, scan.layers.index("encoder.layer.1.output.LayerNorm")
    ]
    # d(sum x^2)/dx = 2 x: the norm is 2 * rms * sqrt(16).
    assert is_close(torch.from_numpy(gradient), 8 * hidden.double(), 1e-5)
    assert "own" in scan.meta["loss"]


def test_an_encoder_cannot_write() -> None:
    with pytest.raises(InspectionError, match=r"BertForMaskedLM.*max_new_tokens=0"):
        torchfmri.scan(build("bert"), None, prompts()[0], 4)


def test_an_encoder_that_counts_its_positions_otherwise() -> None:
    from transformers import RobertaConfig, RobertaForMaskedLM

    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=67, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    model = RobertaForMaskedLM(config).eval()
    batch = torchfmri.scan(model, None, prompts(), 0, per=None)
    alone = torchfmri.scan(model, None, prompts()[1], 0, per=None)
    np.testing.assert_allclose(
        batch[1].layers["activation"], alone.only.layers["activation"], rtol=1e-4
    )


@pytest.mark.parametrize("steps", [0, 4])
def test_an_encoder_with_a_decoder_is_refused(steps: int) -> None:
    with pytest.raises(InspectionError, match=r"T5ForConditionalGeneration.*encoder.*decoder"):
        torchfmri.scan(build("t5"), None, prompts()[0], steps)


@pytest.mark.parametrize("name", ["jamba", "minimax", "recurrent-gemma"])
def test_a_cache_with_more_than_keys_and_values_cannot_be_held_constant(name: str) -> None:
    model = build(name)
    words = rf"per='cached' holds.*{type(model).__name__}.*Use per='position'"
    with pytest.raises(InspectionError, match=words):
        torchfmri.scan(model, None, prompts()[0], STEPS, per="cached", eos_token_id=66)
    scan = torchfmri.scan(model, None, prompts()[0], STEPS, eos_token_id=66)
    assert scan.only.checks["gradient_residual"] < 1e-5


def test_a_recurrent_state_is_no_cache() -> None:
    with pytest.raises(InspectionError, match=r"MambaForCausalLM.*per='position'"):
        torchfmri.scan(build("mamba"), None, prompts()[0], 4, per="cached")


# -- tokens as they come -------------------------------------------------------------------------


def events_of(model: nn.Module, rows: Any, **options: Any) -> tuple[list[LiveToken], Scan]:
    found: list[LiveToken] = []
    scan = torchfmri.scan(model, None, rows, STEPS, on_token=found.append, **options)
    return found, scan


@pytest.mark.parametrize("per", [None, "position", "cached"])
@pytest.mark.parametrize(
    "options",
    [{}, {"use_cache": False}, {"num_return_sequences": 2, "do_sample": True, "seed": 1}],
    ids=["plain", "no cache", "two"],
)
def test_events_are_the_scan(options: dict[str, Any], per: Any) -> None:
    model = build("llama")
    events, scan = events_of(model, prompts(), per=per, **options)
    by_row = [[each for each in events if each.row == row] for row in range(len(scan))]
    assert sum(map(len, by_row)) == len(events)
    for own, sequence in zip(by_row, scan, strict=True):
        assert [each.position for each in own] == list(range(len(sequence)))
        assert [each.id for each in own] == sequence.tokens.ids.tolist()
        assert [each.generated for each in own] == sequence.tokens.generated.tolist()
        assert [each.spelling for each in own] == list(sequence.tokens.spelling)
        for kind, ours in (("layers", "activation"), ("voxels", "voxels")):
            told = np.stack([getattr(each, ours) for each in own])
            kept = getattr(sequence, kind)["activation"]
            known = ~np.isnan(told)
            assert known[:-1].any(1).all()
            np.testing.assert_array_equal(told[known], kept[known])
        told = np.array([each.surprisal for each in own])
        known = ~np.isnan(told)
        assert (known >= sequence.tokens.generated).all()
        np.testing.assert_allclose(told[known], sequence.tokens.surprisal[known], rtol=1e-4)
        told = np.array([each.entropy for each in own])
        np.testing.assert_allclose(told[known], sequence.tokens.entropy[known], rtol=1e-4)


def test_events_come_while_the_model_runs() -> None:
    """The first generated token is told before the last one is drawn."""
    model = build("llama")
    passes: list[int] = []
    model.register_forward_hook(lambda *_: passes.append(1))
    seen: list[tuple[int, int]] = []
    torchfmri.scan(
        model, None, prompts()[0], STEPS, per=None, eos_token_id=66,
        on_token=lambda each: seen.append((each.position, len(passes))),
    )  # fmt: skip
    first = seen[0][1]
    assert [count - first for _, count in seen] == [0] * 7 + [*range(1, STEPS), STEPS - 1]


def test_a_stream_gives_the_same_tokens_and_scan() -> None:
    model = build("llama")
    events, scan = events_of(model, prompts())
    with torchfmri.stream(model, None, prompts(), STEPS) as stream:
        with pytest.raises(InspectionError, match="all tokens have been read"):
            _ = stream.scan
        told = list(stream)
    assert [(each.row, each.position, each.id) for each in told] == [
        (each.row, each.position, each.id) for each in events
    ]
    for one, other in zip(stream.scan, scan, strict=True):
        for metric in one.layers:
            np.testing.assert_array_equal(one.layers[metric], other.layers[metric])


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"live": False}], ids=["beams", "pass"])
def test_events_without_live_activations(options: dict[str, Any]) -> None:
    events, scan = events_of(build("llama"), prompts()[0], **options)
    assert [each.id for each in events] == scan.tokens.ids.tolist()


# -- what a scan says about itself ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "mixtral"])
def test_the_live_difference_leaves_padding_out(name: str) -> None:
    scan = torchfmri.scan(build(name), None, prompts(), STEPS)
    assert max(each.checks["live_difference"] for each in scan) < 1e-5


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_the_live_difference_is_rounding(name: str) -> None:
    model = build(name)
    scan = torchfmri.scan(model, None, prompts()[0], STEPS, eos_token_id=66)
    assert 0 < scan.only.checks["live_difference"] < 2e-6
    assert scan.only.checks["gradient_residual"] < 1e-5
    assert scan.only.checks["greedy_tokens"] is True


def test_a_cache_that_counts_no_positions() -> None:
    """Recurrent states beside attention: the cache says that it holds nothing, at every step."""
    model = build("recurrent-gemma")
    scan = torchfmri.scan(model, None, prompts()[0], STEPS, eos_token_id=66)
    assert written(scan) == cut(plain(model, prompts()[:1], eos_token_id=66), 7, 66)
    assert 0 < scan.only.checks["live_difference"] < 2e-6


def test_a_new_cache_at_each_step_is_noticed() -> None:
    """The same sign, from a loop that forgets what it has read."""

    def forgetful(model: Any, ids: Tensor) -> Tensor:
        new = ids
        for _ in range(3):
            new = model(new, past_key_values=DynamicCache()).logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, new], 1)
        return ids

    with pytest.raises(InspectionError, match="At position 0 the model was fed"):
        torchfmri.scan(build("llama"), None, prompts()[0], STEPS, decode=forgetful)


def test_a_projection_of_the_whole_cache_is_seen_at_every_token() -> None:
    model = build("deepseek-v3")
    scan = torchfmri.scan(model, None, prompts()[0], STEPS, per=None, eos_token_id=66)
    assert not any(name.endswith("kv_b_proj") for name in scan.meta["missed"])
    truth = activations(model, torch.from_numpy(scan.tokens.ids)[None])
    for layer in ("model.layers.0.self_attn.kv_b_proj", "model.layers.1.self_attn.kv_b_proj"):
        ours = torch.from_numpy(scan.only.layers["activation"][:-1, scan.layers.index(layer)])
        assert is_close(ours, rms(truth[layer][0][0])[:-1], FLOAT32)


def test_a_model_that_goes_wrong_with_its_cache_is_said_in_the_table() -> None:
    """As RWKV does in a batch: what `generate` computes is not what a pass over the tokens does."""
    model = build("llama")
    right = torchfmri.scan(model, None, prompts()[0], STEPS, eos_token_id=66)
    assert "check:" not in right.table()

    def other(module: nn.Module, arguments: Any, output: Tensor) -> Tensor | None:
        return output * 1.5 if output.shape[1] == 1 else None

    model.model.norm.register_forward_hook(other)
    wrong = torchfmri.scan(model, None, prompts()[0], STEPS, eos_token_id=66)
    assert re.search(r"check: activations while [^%]* \d\d% apart", wrong.table())


def test_the_live_difference_sees_a_live_value_that_is_not_the_pass_s() -> None:
    """A layer that answers otherwise in steps of one token than in a pass over all of them."""
    model = build("llama")

    def other(module: nn.Module, arguments: Any, output: Tensor) -> Tensor | None:
        return output * 1.01 if output.shape[1] == 1 else None

    model.model.norm.register_forward_hook(other)
    scan = torchfmri.scan(model, None, prompts()[0], STEPS, eos_token_id=66)
    assert 0.005 < scan.only.checks["live_difference"] < 0.02


def test_greedy_tokens_sees_a_token_that_is_not_the_likeliest() -> None:
    model = build("llama")
    inner = model.generate

    def other(*arguments: Any, **options: Any) -> Tensor:
        found = inner(*arguments, **options)
        found[0, -1] = (found[0, -1] + 1) % 60
        return found

    model.generate = other
    scan = torchfmri.scan(model, None, prompts()[0], STEPS, eos_token_id=66)
    assert scan.only.checks["greedy_tokens"] is False


@pytest.mark.parametrize(
    "options",
    [{"do_sample": True, "temperature": 2.0, "seed": 1}, {"no_repeat_ngram_size": 1}],
    ids=["sampled", "without repeats"],
)
def test_greedy_tokens_is_not_asked_of_other_methods(options: dict[str, Any]) -> None:
    scan = torchfmri.scan(build("llama"), None, prompts()[0], STEPS, eos_token_id=66, **options)
    assert "greedy_tokens" not in scan.only.checks


@pytest.mark.parametrize(
    "settings",
    [
        {"exponential_decay_length_penalty": (2, 5.0)},
        {"encoder_repetition_penalty": 0.5},
        {"encoder_no_repeat_ngram_size": 1},
    ],
    ids=["length", "repeated prompt", "prompt's words"],
)
def test_greedy_tokens_is_not_asked_where_the_model_s_own_settings_choose(
    settings: dict[str, Any],
) -> None:
    model = build("llama")
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    scan = torchfmri.scan(model, None, prompts()[0], STEPS, eos_token_id=66)
    assert "greedy_tokens" not in scan.only.checks


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 1, "guidance_scale": 1.0, "penalty_alpha": 0.0},
        {"encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0},
        {"min_p": 0.1, "typical_p": 0.9, "max_time": 1000.0, "output_scores": False},
        {"stopping_criteria": [lambda ids, scores: torch.zeros(len(ids), dtype=torch.bool)]},
    ],
    ids=["one beam", "no penalty", "for samples alone", "stopping"],
)
def test_greedy_tokens_is_asked_beside_options_that_choose_no_token(
    options: dict[str, Any],
) -> None:
    scan = torchfmri.scan(build("llama"), None, prompts()[0], STEPS, eos_token_id=66, **options)
    assert scan.only.checks["greedy_tokens"] is True


@pytest.mark.parametrize("per", [None, "position", "cached", "token_loss"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_surprisal_and_entropy(name: str, per: Any) -> None:
    """Equal to an independent computation; without a pass those of the prompt are not known."""
    model = build(name)
    scan = torchfmri.scan(model, None, prompts(), STEPS, per=per)
    ids, mask = finished(scan, prompts())
    truth = surprisals(model, ids, mask)
    for row, each in enumerate(scan):
        where = mask[row].bool().numpy()
        assert np.isnan(each.tokens.surprisal[0])
        assert np.isnan(each.tokens.entropy[0])
        for ours, expected in zip((each.tokens.surprisal, each.tokens.entropy), truth, strict=True):
            known = each.tokens.generated if per is None else np.arange(len(each)) > 0
            assert (~np.isnan(ours) == known).all()
            whole = np.concatenate([[np.nan], expected[row].numpy()])[where]
            np.testing.assert_allclose(ours[known], whole[known], rtol=5e-5)


@pytest.mark.parametrize("per", [None, "position", "cached"])
def test_statistics_are_those_of_the_activations(per: Any) -> None:
    """Of each row's own positions: padding on neither side is counted."""
    model = build("llama")
    scan = torchfmri.scan(model, None, prompts(), STEPS, per=per)
    ids, mask = finished(scan, prompts())
    truth = activations(model, ids, mask)
    for row, ran in enumerate(fed(scan, mask)):
        for layer in scan.layers:
            if layer.endswith(PER_BATCH) or (layer == "lm_head" and per is None):
                continue
            own = truth[layer][0][row][mask[row].bool()].double()
            if per is None:
                own = own[torch.from_numpy(ran)]
            found = scan.statistics(layer, sequence=row)["activations"]
            assert found["count"] == own.numel(), layer
            expected = [own.mean(), own.std(correction=0), own.min(), own.max()]
            ours = [found[key] for key in ("mean", "std", "min", "max")]
            np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-6, err_msg=layer)
            assert found["zero"] == int((own == 0).sum())
            assert found["nan"] == found["inf"] == 0


@pytest.mark.parametrize("per", [None, "position", "cached", "token_loss"])
def test_full_tensors_are_the_activations(per: Any) -> None:
    model = build("qwen3")
    wanted = ["*.mlp", "*.q_norm", "lm_head"]
    scan = torchfmri.scan(model, None, prompts(), STEPS, per=per, tensors=wanted)
    ids, mask = finished(scan, prompts())
    truth = activations(model, ids, mask)
    for row, ran in enumerate(fed(scan, mask)):
        assert {*scan[row].tensors} == {
            *(f"model.layers.{k}.{part}" for k in (0, 1) for part in ("mlp", "self_attn.q_norm")),
            "lm_head",
        }
        for layer, ours in scan[row].tensors.items():
            expected = truth[layer][0][row][mask[row].bool()]
            known = ~np.isnan(ours).any(1)
            assert (known == (ran if per is None else True)).all() or layer == "lm_head"
            assert known.any()
            assert is_close(torch.from_numpy(ours[known]), expected[known], FLOAT32), layer


def test_full_tensors_outside_of_the_layers() -> None:
    try:
        scan = torchfmri.scan(
            build("qwen3"), None, prompts()[0], 2, layers="*.mlp", tensors="*.q_proj"
        )
    except InspectionError:
        return
    assert scan.only.tensors


# -- models that read otherwise than they write --------------------------------------------------

ROBERTA = {
    "vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 24, "max_position_embeddings": 64, "pad_token_id": 1, "bos_token_id": 0,
    "eos_token_id": None, "is_decoder": True, "type_vocab_size": 1,
}  # fmt: skip
ROBERTAS = (
    *("Roberta", "XLMRoberta", "Camembert", "Data2VecText", "XLMRobertaXL"),
    *("RobertaPreLayerNorm", "Xmod"),
)


def roberta(name: str) -> Any:
    config = {**ROBERTA, **({"default_language": "en_XX"} if name == "Xmod" else {})}
    made = getattr(transformers, f"{name}Config")(**config)
    return getattr(transformers, f"{name}ForCausalLM")(made).eval()


@pytest.mark.parametrize("name", ROBERTAS)
@pytest.mark.parametrize("prompt", [[5, 6, 7, 8, 9], [[5, 6, 7, 8, 9], [10, 11, 12]]])
def test_the_pass_is_fed_the_positions_that_generate_feeds(name: str, prompt: Any) -> None:
    """These models count positions from 2, where nobody tells them; generate counts from 0."""
    model = roberta(name)
    for live in (True, False):
        scan = torchfmri.scan(model, None, prompt, 4, live=live, do_sample=False)
        for each in scan:
            assert each.checks["greedy_tokens"]
            assert each.checks.get("live_difference", 0.0) < 1e-5
            ids = torch.from_numpy(each.tokens.ids)[None]
            with torch.no_grad():
                logits = model(ids, position_ids=torch.arange(ids.shape[1])[None]).logits[0]
            expected = -logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            np.testing.assert_allclose(each.tokens.surprisal[1:], expected, rtol=1e-4)


@pytest.mark.parametrize("per", ["position", "cached", "token_loss"])
def test_reading_counts_positions_as_the_model_does_with_padding_too(per: Any) -> None:
    model = roberta("Roberta")
    rows = [[5, 6, 7, 8, 9], [10, 11, 12]]
    together = torchfmri.scan(model, None, rows, 0, per=per)
    for row, each in zip(rows, together, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([row])).logits[0]
        expected = -logits[:-1].log_softmax(-1).gather(-1, torch.tensor(row[1:])[:, None])[:, 0]
        np.testing.assert_allclose(each.tokens.surprisal[1:], expected, rtol=1e-4)
        alone = torchfmri.scan(model, None, row, 0, per=per)
        for metric, values in alone.only.layers.items():
            np.testing.assert_allclose(each.layers[metric], values, rtol=2e-3, atol=1e-6)


def test_a_loop_with_positions_of_its_own() -> None:
    model = roberta("Roberta")

    def decode(model: Any, ids: Tensor) -> Tensor:
        for _ in range(3):
            places = 2 + torch.arange(ids.shape[1])[None]
            logits = model(input_ids=ids, position_ids=places, use_cache=False).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        return ids

    scan = torchfmri.scan(model, None, [5, 6, 7], decode=decode)
    assert scan.only.checks["live_difference"] < 1e-5


def xlnet() -> Any:
    sizes = {"vocab_size": 60, "d_model": 16, "n_layer": 2, "n_head": 4, "d_inner": 24}
    return transformers.XLNetLMHeadModel(transformers.XLNetConfig(**sizes)).eval()


def cpm_ant() -> Any:
    sizes = {
        "vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "dim_head": 4, "dim_ff": 24, "prompt_length": 4,
    }  # fmt: skip
    return transformers.CpmAntForCausalLM(transformers.CpmAntConfig(**sizes)).eval()


def xlm() -> Any:
    sizes = {"vocab_size": 60, "emb_dim": 16, "n_layers": 2, "n_heads": 4}
    return transformers.XLMWithLMHeadModel(transformers.XLMConfig(**sizes)).eval()


@pytest.mark.parametrize("make", [xlnet, cpm_ant, xlm])
def test_a_model_that_looks_ahead_is_refused_for_that_reason(make: Any) -> None:
    model = make()
    for per in ("position", None):
        with pytest.raises(InspectionError, match=f"{type(model).__name__} looks ahead"):
            torchfmri.scan(model, None, [5, 6, 7, 8], 3, per=per)
    read = torchfmri.scan(model, None, [5, 6, 7, 8], 0)
    assert any("looks ahead" in note for note in read.meta["notes"])


def test_a_causal_model_is_not_said_to_look_ahead() -> None:
    for name in ("llama", "mixtral", "mamba", "falcon-alibi"):
        scan = torchfmri.scan(build(name), None, prompts()[0], 2)
        assert not any("looks ahead" in note for note in scan.meta["notes"]), name
