"""Contrasts of tables: against SciPy and statsmodels, and what is said of bad ones."""

import re
import tempfile
import webbrowser
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompt_tables import make_table

from torchfmri import FileFormatError, InspectionError, LayerNotFoundError, load_contrast
from torchfmri._contrast import (
    Calibration,
    Contrast,
    Direction,
    TestOptions,
    compare,
)
from torchfmri._contrast.corrections import adjust_bonferroni, adjust_fdr
from torchfmri._contrast.remarks import detectable
from torchfmri._contrast.weights import read_weights

stats = pytest.importorskip("scipy.stats")
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def two_groups(first: int = 9, second: int = 14, columns: int = 12, seed: int = 0) -> Contrast:
    return compare(make_table(["a"] * first + ["b"] * second, columns, seed=seed), "a - b")


# -- against the oracles -------------------------------------------------------------------------


@pytest.mark.parametrize("two_sided", [True, False])
def test_welch_is_that_of_scipy(two_sided: bool) -> None:
    table = make_table(["a"] * 9 + ["b"] * 14)
    table.values[9:] *= 3.0  # variances that differ
    found = compare(table, "a - b", options=TestOptions(two_sided=two_sided))
    expected = stats.ttest_ind(
        table.values[:9],
        table.values[9:],
        equal_var=False,
        alternative="two-sided" if two_sided else "greater",
    )
    np.testing.assert_allclose(found.t, expected.statistic, **CLOSE)
    np.testing.assert_allclose(found.dof, expected.df, **CLOSE)
    np.testing.assert_allclose(found.p, expected.pvalue, **CLOSE)
    assert ("one-sided Welch t" in found.summary) is not two_sided
    np.testing.assert_allclose(
        found.effect, table.values[:9].mean(0) - table.values[9:].mean(0), **CLOSE
    )


def test_hedges_g_is_that_of_statsmodels() -> None:
    meta = pytest.importorskip("statsmodels.stats.meta_analysis")
    table = make_table(["a"] * 9 + ["b"] * 14)
    found = compare(table, "a - b")
    first, second = table.values[:9], table.values[9:]
    g, variance = meta.effectsize_smd(
        first.mean(0), first.std(0, ddof=1), 9, second.mean(0), second.std(0, ddof=1), 14
    )
    half = stats.norm.ppf(0.975) * np.sqrt(variance)
    np.testing.assert_allclose(found.g, g, **CLOSE)
    np.testing.assert_allclose(found.ci_low, g - half, **CLOSE)
    np.testing.assert_allclose(found.ci_high, g + half, **CLOSE)


def test_paired_t_is_that_of_scipy() -> None:
    groups, pairs = ["b", "a"] * 8, [str(k // 2) for k in range(16)]
    table = make_table(groups, pairs=pairs)
    found = compare(table, "a - b", is_paired=True)
    first, second = table.values[1::2], table.values[0::2]
    expected = stats.ttest_rel(first, second)
    np.testing.assert_allclose(found.t, expected.statistic, **CLOSE)
    np.testing.assert_allclose(found.p, expected.pvalue, **CLOSE)
    gaps = first - second
    g = (1 - 3 / (4 * 7 - 1)) * gaps.mean(0) / gaps.std(0, ddof=1)
    np.testing.assert_allclose(found.g, g, **CLOSE)
    half = stats.norm.ppf(0.975) * np.sqrt(1 / 8 + g**2 / 16)
    np.testing.assert_allclose(found.ci_high, g + half, **CLOSE)


def test_f_is_the_analysis_of_variance() -> None:
    table = make_table(["a"] * 5 + ["b"] * 7 + ["c"] * 6)
    found = compare(table, ["a - b", "a - c"])
    expected = stats.f_oneway(table.values[:5], table.values[5:12], table.values[12:])
    np.testing.assert_allclose(found.f, expected.statistic, **CLOSE)
    np.testing.assert_allclose(found.p, expected.pvalue, **CLOSE)
    assert (found.test, found.dof_num) == ("F", 2)
    assert (found.dof == 15).all()
    assert np.isnan(found.t).all()  # F is not called t
    assert np.isnan(two_groups().f).all()


def test_f_of_one_of_several_contrasts_is_that_of_statsmodels() -> None:
    api = pytest.importorskip("statsmodels.api")
    table = make_table(["a"] * 5 + ["b"] * 7 + ["c"] * 6 + ["d"] * 4)
    found = compare(table, [{"a": 1, "b": -1}, "c - d"])
    design = np.array([[float(each == name) for name in "abcd"] for each in table.groups])
    for column in range(3):
        fitted = api.OLS(table.values[:, column], design).fit()
        expected = fitted.f_test(np.array([[1, -1, 0, 0], [0, 0, 1, -1]]))
        np.testing.assert_allclose(found.f[column], float(expected.fvalue), **CLOSE)
        np.testing.assert_allclose(found.p[column], float(expected.pvalue), **CLOSE)


def test_weights_over_three_groups_are_welchs() -> None:
    """Two halves of one group against the other, computed term by term."""
    table = make_table(["a"] * 6 + ["b"] * 8 + ["c"] * 7)
    found = compare(table, "a - 0.5 * b - 0.5 * c")
    parts = [table.values[:6], table.values[6:14], table.values[14:]]
    weights = (1.0, -0.5, -0.5)
    terms = [w**2 * p.var(0, ddof=1) / len(p) for w, p in zip(weights, parts, strict=True)]
    effect = sum(w * p.mean(0) for w, p in zip(weights, parts, strict=True))
    dof = sum(terms) ** 2 / sum(t**2 / (len(p) - 1) for t, p in zip(terms, parts, strict=True))
    np.testing.assert_allclose(found.t, effect / np.sqrt(sum(terms)), **CLOSE)
    np.testing.assert_allclose(found.dof, dof, **CLOSE)


@pytest.mark.parametrize("is_paired", [False, True])
def test_weights_are_taken_as_written(is_paired: bool) -> None:
    """Twice the weights are twice the effect; t, p and g do not change."""
    table = make_table(["a"] * 8 + ["b"] * 8, pairs=[str(k) for k in range(8)] * 2)
    once = compare(table, "a - b", is_paired=is_paired)
    twice = compare(table, "2 * a - 2 * b", is_paired=is_paired)
    means = table.values[:8].mean(0) - table.values[8:].mean(0)
    np.testing.assert_allclose(twice.effect, 2 * means, **CLOSE)
    for name in ("t", "dof", "p", "g", "ci_low", "ci_high"):
        np.testing.assert_allclose(getattr(twice, name), getattr(once, name), **CLOSE)
    assert (twice.question, twice.weights.tolist()) == ("2 * a - 2 * b", [[2, -2]])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_corrections_are_those_of_scipy(p: list[float]) -> None:
    values = np.array(p)
    np.testing.assert_allclose(adjust_fdr(values), stats.false_discovery_control(values))
    np.testing.assert_allclose(adjust_bonferroni(values), np.minimum(values * len(p), 1))
    with_gap = adjust_fdr(np.insert(values, 0, np.nan))  # what is no test does not count as one
    assert np.isnan(with_gap[0])
    np.testing.assert_allclose(with_gap[1:], adjust_fdr(values))


# -- relabelling ---------------------------------------------------------------------------------


def test_all_relabellings_of_few_prompts_are_those_of_scipy() -> None:
    table = make_table(["a"] * 4 + ["b"] * 5, 3)
    found = compare(table, "a - b", options=TestOptions(test="permutation"))

    def welch(x: np.ndarray, y: np.ndarray, axis: int) -> np.ndarray:
        return np.abs(stats.ttest_ind(x, y, equal_var=False, axis=axis).statistic)

    expected = stats.permutation_test(
        (table.values[:4], table.values[4:]),
        welch,
        vectorized=True,
        n_resamples=np.inf,
        alternative="greater",
    )
    assert found.permutations == 126
    assert "; permutation Welch t over prompts;" in found.summary
    np.testing.assert_allclose(found.p, expected.pvalue, **CLOSE)


def test_all_flips_of_few_pairs_are_counted_one_by_one() -> None:
    table = make_table(["a"] * 6 + ["b"] * 6, 3, pairs=[str(k) for k in range(6)] * 2)
    table.values[:6, 0] += 5.0
    found = compare(
        table,
        "a - b",
        is_paired=True,
        options=TestOptions(test="permutation", height_control="max"),
    )
    gaps = table.values[:6] - table.values[6:]
    signs = 1 - 2 * ((np.arange(64)[:, None] >> np.arange(6)) & 1)
    null = np.abs([stats.ttest_1samp(row[:, None] * gaps, 0).statistic for row in signs])
    np.testing.assert_allclose(found.p, (null >= np.abs(found.t) - 1e-9).mean(0), **CLOSE)
    largest = null.max(1)[:, None]
    np.testing.assert_allclose(found.q, (largest >= np.abs(found.t) - 1e-9).mean(0), **CLOSE)
    assert found.p[0] == 2 / 64  # its own labels, and all exchanged
    assert any("64 relabellings (all): no p is below 0.031" in note for note in found.notes)


def test_drawn_relabellings_of_f_and_t_agree_where_there_are_two_groups() -> None:
    table = make_table(["a"] * 10 + ["b"] * 10 + ["c"] * 3)
    options = TestOptions(test="permutation", permutations=300)
    f = compare(table, ["a - b", "a - c"], options=options)
    assert f.permutations == 301
    assert ((f.p > 0) & (f.p <= 1)).all()


@pytest.mark.parametrize("columns", [1, 7])
def test_blocks_of_columns_change_nothing(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    table = make_table(["a"] * 9 + ["b"] * 14)
    options = TestOptions(height_control="max", permutations=50)
    whole = compare(table, "a - b", options=options)
    monkeypatch.setattr("torchfmri._contrast.prompt_table.BLOCK_BYTES", 8 * 51 * columns)
    parts = compare(table, "a - b", options=options)
    np.testing.assert_allclose(parts.t, whole.t, **CLOSE)
    np.testing.assert_array_equal(parts.q, whole.q)


# -- planted, and null ---------------------------------------------------------------------------


def correlated_tokens(prompts: int, tokens: int, columns: int, seed: int) -> np.ndarray:
    """(prompt, token, column): neighbours resemble each other, and nothing differs."""
    random = np.random.default_rng(seed)
    values = random.normal(size=(prompts, tokens, columns))
    for token in range(1, tokens):
        values[:, token] = 0.95 * values[:, token - 1] + 0.3 * values[:, token]
    return values


@pytest.mark.slow
def test_nothing_is_found_in_nothing_and_a_test_over_tokens_finds_plenty() -> None:
    over_prompts = over_tokens = 0
    for draw in range(200):
        tokens = correlated_tokens(20, 20, 20, draw)
        groups = ["a"] * 10 + ["b"] * 10
        table = make_table(groups, values=tokens.mean(1))
        over_prompts += compare(table, "a - b").survives.any()
        naive = stats.ttest_ind(
            tokens[:10].reshape(-1, 20), tokens[10:].reshape(-1, 20), equal_var=False
        )
        over_tokens += (adjust_fdr(naive.pvalue) <= 0.05).any()
    assert over_prompts <= 19  # the 99 % bound of a true 5 %
    assert over_tokens > 150


@pytest.mark.parametrize("control", ["fdr", "bonferroni", "max"])
def test_planted_effects_are_found_where_they_are(control: str) -> None:
    table = make_table(["a"] * 15 + ["b"] * 15, 200)
    planted = [3, 77, 150]
    table.values[:15, planted] += [3.0, -3.0, 2.5]
    found = compare(table, "a - b", options=TestOptions(height_control=control))
    assert found.survives[planted].all()
    assert found.survives.sum() <= 5
    assert np.sign(found.effect[planted]).tolist() == [1, -1, 1]
    names = {(peak.layer, peak.unit) for peak in found.peaks(3)}
    assert names == {("layers.0.mlp", 192), ("layers.19.mlp", 64), ("layers.37.mlp", 128)}


def test_no_threshold_and_an_uncorrected_one() -> None:
    table = make_table(["a"] * 15 + ["b"] * 15, 200)
    free = compare(table, "a - b", options=TestOptions(height_control="fpr"))
    np.testing.assert_array_equal(free.survives, free.p <= 0.05)
    assert not compare(table, "a - b", options=TestOptions(height_control=None)).survives.any()


def test_calibration_counts_relabellings_that_find_something() -> None:
    found = two_groups(10, 10, 30).calibrate(60)
    assert found.calibration is not None
    assert found.calibration.draws == 60
    assert found.calibration.bound == stats.binom.ppf(0.995, 60, 0.05)
    assert found.calibration.is_within
    said = str(found.calibration)
    assert said.startswith(f"Welch t by voxel, fdr: {found.calibration.found} of 60 relabellings")
    with pytest.raises(InspectionError, match="nothing to calibrate: this contrast has no p-val"):
        two_groups(1, 10).calibrate()
    free = TestOptions(height_control="fpr")
    with pytest.raises(InspectionError, match="bounds the error of each of 12 tests"):
        compare(make_table(["a"] * 6 + ["b"] * 6), "a - b", options=free).calibrate(20)
    assert compare(make_table(["a"] * 6 + ["b"] * 6, 1), "a - b", options=free).calibrate(5)


@pytest.mark.parametrize("draws", [1, 20, 200, 10_000])
@pytest.mark.parametrize("alpha", [0.001, 0.05, 0.5])
def test_the_bound_of_a_calibration_is_that_of_scipy(draws: int, alpha: float) -> None:
    bound = Calibration(path="x", draws=draws, found=0, alpha=alpha).bound
    assert bound == stats.binom.ppf(0.995, draws, alpha)


def test_the_power_note_counts_the_tests_that_are_made() -> None:
    table = make_table(["a"] * 6 + ["b"] * 6)
    table.values[:, :5] = 1.0  # constant: no test
    found = compare(table, "a - b")
    assert "after Bonferroni for 7 tests" in found.notes[0]
    assert "of 7 survive" in found.summary


# -- what is said --------------------------------------------------------------------------------


def test_one_prompt_in_a_group_has_effects_only() -> None:
    table = make_table(["a"] + ["b"] * 9)
    found = compare(table, "a - b", options=TestOptions(height_control="max"))
    assert np.isnan(found.p).all()
    assert np.isnan(found.t).all()
    assert not found.survives.any()
    np.testing.assert_allclose(found.effect, table.values[0] - table.values[1:].mean(0))
    assert "effects only, no p-values: 'a' has one prompt" in found.notes[0]
    assert "effects only" in repr(found)
    sizes = np.abs([peak.effect for peak in found.peaks(None)])
    assert (np.diff(sizes) <= 0).all()
    assert not any("do not vary" in note for note in found.notes)


def test_the_interval_is_named_by_its_level() -> None:
    table = make_table(["a"] * 6 + ["b"] * 6)
    for alpha, said in ((0.001, "99.9% interval"), (0.025, "97.5% interval"), (0.05, "95% int")):
        assert said in compare(table, "a - b", options=TestOptions(alpha)).table(2, 200)


def test_few_prompts_get_a_note_about_power() -> None:
    assert "little power: with 4 prompts" in two_groups(4, 9).notes[0]
    assert two_groups(5, 9).notes[0].startswith("power: ")


@pytest.mark.parametrize("two_sided", [True, False])
@pytest.mark.parametrize("alpha", [0.05, 0.05 / 14_244])
@pytest.mark.parametrize("n_b", [0, 2, 6, 30])
def test_detectable_effects_are_found_in_four_of_five(
    n_b: int, alpha: float, two_sided: bool
) -> None:
    """By SciPy's noncentral t; n_b = 0: pairs."""
    n_a = 6 if n_b != 2 else 2
    found = detectable(n_a, n_b or n_a, alpha, is_paired=n_b == 0, two_sided=two_sided)
    dof, spread = (n_a - 1, 1 / n_a) if n_b == 0 else (n_a + n_b - 2, 1 / n_a + 1 / n_b)
    shift, limit = found / spread**0.5, stats.t.isf(alpha / (1 + two_sided), dof)
    # Given the estimated spread, t is normal: SciPy's own tail fails at such limits.
    power = stats.chi(dof).expect(
        lambda u: (
            stats.norm.sf(limit * u / dof**0.5 - shift)
            + two_sided * stats.norm.cdf(-limit * u / dof**0.5 - shift)
        ),
        limit=500,
    )
    assert power == pytest.approx(0.8, abs=1e-3)


def test_prompts_without_tokens_do_not_count_as_power() -> None:
    table = make_table(["a"] * 8 + ["b"] * 8, 3)
    table.counts[[0, 1, 8]] = 0
    table.values[[0, 1, 8]] = np.nan
    assert f"g = {detectable(6, 7, 0.05):.2f} are found" in compare(table, "a - b").notes[0]
    one_sided = compare(table, "a - b", options=TestOptions(two_sided=False)).notes[0]
    assert f"g = {detectable(6, 7, 0.05, two_sided=False):.2f} are found" in one_sided
    pairs = make_table(["a"] * 8 + ["b"] * 8, 3, pairs=[*"12345678"] * 2)
    pairs.counts[[0, 1, 10]] = 0
    found = compare(pairs, "a - b", is_paired=True).notes[0]
    assert f"g = {detectable(5, 5, 0.05, is_paired=True):.2f} are found" in found


@pytest.mark.parametrize(("each", "ways"), [(2, 6), (3, 20)])
def test_too_few_relabellings_say_that_nothing_can_survive(each: int, ways: int) -> None:
    """Of 20 ways two have the same |t|, so the smallest p of two sides is 0.1."""
    table = make_table(["a"] * each + ["b"] * each)
    found = compare(table, "a - b", options=TestOptions(height_control="max"))
    said = f"nothing can survive at alpha = 0.05: there are only {ways} ways"
    assert any(said in note for note in found.notes)
    one_sided = TestOptions(height_control="max", two_sided=False)
    notes = compare(table, "a - b", options=one_sided).notes
    assert any(said in note for note in notes) == (each == 2)


def test_columns_that_cannot_be_tested_are_kept_and_named() -> None:
    table = make_table(["a"] * 8 + ["b"] * 8, 8)
    table.values[:, 0] = 2.5  # constant
    table.values[:, 1] = np.r_[np.ones(8), np.full(8, 2.0)]  # constant in each group
    table.values[3, 2] = np.nan
    table.values[:, 3] = np.inf
    table.values[8:, 4] = np.nan  # one group has no value at all
    found = compare(table, "a - b", options=TestOptions(height_control="max", permutations=99))
    assert (found.effect[0], found.effect[1]) == (0.0, -1.0)
    assert np.isnan(found.p[[0, 1, 3]]).all()
    assert (found.n_a[2], found.n_b[2]) == (7, 8)
    expected = stats.ttest_ind(
        np.delete(table.values[:8, 2], 3), table.values[8:, 2], equal_var=False
    )
    assert found.p[2] == pytest.approx(expected.pvalue, rel=1e-10)
    assert np.isnan(found.q[2])  # no relabelling of columns with gaps
    text = " ".join(found.notes)
    assert "2 of 8 columns do not vary within the conditions" in text
    assert "1 of 8 columns have no value" in text
    assert "1 of 8 columns lack finite values for some prompts" in text
    assert "1 of 8 columns lack finite values for too many prompts and are not" in text
    whole = compare(table, "a - b")
    assert np.isfinite(whole.q[5:]).all()
    assert len(whole.peaks(None)) == 8


def test_different_lengths_are_mentioned() -> None:
    table = make_table(["a"] * 8 + ["b"] * 8)
    table.counts[:8] = 30 + np.arange(8) % 3
    assert any("differ in length: 31" in note.replace("30.9", "31") for note in two_notes(table))
    table.counts[:] = 1
    assert not any("differ in length" in note for note in two_notes(table))


def two_notes(table: object) -> tuple[str, ...]:
    return compare(table, "a - b").notes  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("contrast", "message"),
    [
        ("a - x", r"'- x' a condition should follow. The conditions are 'a', 'b', 'c - d'"),
        ("a", "add up to 1"),
        ("a - 2 * b", "add up to -1"),
        ({"a": 1, "z": -1}, "no condition 'z'"),
        ({"a": 1, "b": "one"}, "weight of 'b' is 'one'"),
        ([], "empty"),
        (["a - b", "b - a"], "follow from each other"),
        (3, "A contrast is a text"),
        ("a b", "at 'b' a condition should follow"),
        ("a - a", "'a - a' compares nothing"),
        ({"a": 0, "b": 0}, "compares nothing"),
    ],
)
def test_contrasts_that_are_none(contrast: object, message: str) -> None:
    with pytest.raises(InspectionError, match=re.escape(message) if "(" in message else message):
        read_weights(contrast, ["a", "b", "c - d"])  # type: ignore[arg-type]


def test_contrasts_in_words() -> None:
    names = ["a", "c - d", "ä b", "a2"]
    assert read_weights("a - c - d", names).tolist() == [[1, -1, 0, 0]]
    assert read_weights("ä b - .5*a - 0.5 * a2", names).tolist() == [[-0.5, 0, 1, -0.5]]
    assert read_weights(["a - a2", {"a": 1, "ä b": -1}], names).tolist() == [
        [1, 0, 0, -1],
        [1, 0, -1, 0],
    ]


def test_the_order_of_a_contrast_is_that_of_the_question() -> None:
    table = make_table(["a"] * 6 + ["b"] * 6)
    found, turned = compare(table, "a - b"), compare(table, "b - a")
    np.testing.assert_allclose(found.t, -turned.t)
    assert (found.question, turned.question) == ("a - b", "b - a")
    assert turned.conditions == ("b", "a")


def test_pairs_that_are_none() -> None:
    table = make_table(["a"] * 4 + ["b"] * 4, pairs=list("wxyz") + list("wxy") + ["q"])
    found = compare(table, "a - b", is_paired=True)
    assert (found.n_a == 3).all()
    assert any("2 prompts without a partner are left out: 'prompt-3'" in n for n in found.notes)
    twice = make_table(["a", "a", "b"], pairs=["x", "x", "x"])
    with pytest.raises(InspectionError, match="'prompt-0' and 'prompt-1' are both 'a'"):
        compare(twice, "a - b", is_paired=True)
    with pytest.raises(InspectionError, match="has a partner"):
        compare(make_table(["a", "b"], pairs=["x", "y"]), "a - b", is_paired=True)
    three = make_table(["a", "b", "c"], pairs=["x", "x", "x"])
    with pytest.raises(InspectionError, match="two conditions, and the contrast has 3"):
        compare(three, "a - 0.5 * b - 0.5 * c", is_paired=True)


def test_one_condition_is_nothing_to_compare() -> None:
    with pytest.raises(InspectionError, match="All 4 prompts are of one condition, 'a'"):
        compare(make_table(["a"] * 4), "a - b")


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": 0},
        {"alpha": "0.05"},
        {"height_control": "FDR"},
        {"two_sided": 1},
        {"test": "welch"},
        {"permutations": -1},
        {"permutations": 0, "height_control": "max"},
        {"seed": 1.5},
    ],
)
def test_options_that_are_none(options: dict[str, object]) -> None:
    with pytest.raises(InspectionError, match=f"{next(iter(options))}="):
        TestOptions(**options)  # type: ignore[arg-type]


# -- the record ----------------------------------------------------------------------------------


def test_copies_of_prompts_are_named() -> None:
    """A prompt that is there six times is one prompt."""
    values = np.random.default_rng(0).normal(3.0, 1.0, (6, 12))
    groups = ["a"] * 3 + ["b"] * 3
    alone = compare(make_table(groups, values=values), "a - b")
    assert not any("not independent" in each for each in alone.notes)
    copied = make_table(np.repeat(groups, 6).tolist(), values=np.repeat(values, 6, 0))
    found = compare(copied, "a - b")
    assert "3 of 18 prompts of 'a' and 3 of 18 prompts of 'b'" in found.notes[0]


def test_tables_are_tidy(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    found = two_groups()
    frame = found.to_dataframe()
    assert list(frame.columns) == [
        "layer", "module", "kind", "head", "unit", "n_a", "n_b", "effect", "g", "ci_low", "ci_high",
        "t", "dof", "p", "q", "survives",
    ]  # fmt: skip
    np.testing.assert_array_equal(frame["t"], found.t)
    three = compare(make_table(["a"] * 5 + ["b"] * 7 + ["c"] * 6), ["a - b", "a - c"])
    several = three.to_dataframe()
    assert list(several.columns) == [
        "layer", "module", "kind", "head", "unit", "n", "effect", "f", "dof_num", "dof", "p", "q",
        "survives",
    ]  # fmt: skip
    assert (several["n"] == 18).all()
    assert (several["dof_num"] == 2).all()
    assert list(three.tidy([0])[0]) == list(several.columns)
    assert "2, 15" in three.table(3, 120)
    assert frame["head"].isna().all()
    for name in ("x.csv", "x.parquet", "x.json"):
        found.export(tmp_path / name)
    read = pandas.read_csv(tmp_path / "x.csv", float_precision="round_trip")
    np.testing.assert_array_equal(read["p"], found.p)
    np.testing.assert_array_equal(pandas.read_parquet(tmp_path / "x.parquet")["g"], found.g)
    assert pandas.read_json(tmp_path / "x.json")["unit"].tolist() == frame["unit"].tolist()
    with pytest.raises(InspectionError, match=r"one of \.csv, \.parquet, \.json"):
        found.export(tmp_path / "x.xlsx")
    assert "layers.0.mlp[64:128]" in found.table(None, 200)  # type: ignore[arg-type]
    with pytest.raises(LayerNotFoundError):
        found.peaks(layers="*.attn")


def test_a_contrast_is_saved_and_loaded(tmp_path: Path) -> None:
    table = make_table(["ä"] * 9 + ["b"] * 14, scans=("x.fmri",))
    options = TestOptions(height_control="max", permutations=20)
    found = compare(table, "ä - b", options=options).calibrate(3)
    found.save(tmp_path / "x.contrast")
    again = load_contrast(tmp_path / "x.contrast")
    for name in ("effect", "g", "ci_low", "t", "dof", "p", "q", "p_max", "survives", "n_a"):
        np.testing.assert_array_equal(getattr(again, name), getattr(found, name))
    for name in ("question", "conditions", "prompts", "notes", "calibration", "scans"):
        assert getattr(again, name) == getattr(found, name)
    assert again.columns.names == found.columns.names
    assert repr(again) == repr(found)
    with pytest.raises(InspectionError, match="nothing to calibrate"):
        again.calibrate()
    data = bytearray((tmp_path / "x.contrast").read_bytes())
    data[-3] ^= 1
    (tmp_path / "y.contrast").write_bytes(data)
    with pytest.raises(FileFormatError, match="checksum"):
        load_contrast(tmp_path / "y.contrast")
    (tmp_path / "z.contrast").write_bytes(b"nothing of ours")
    with pytest.raises(FileFormatError):
        load_contrast(tmp_path / "z.contrast")


def test_contrasts_without_a_direction_say_why(tmp_path: Path) -> None:
    two_groups().save(tmp_path / "x.contrast")
    with pytest.raises(InspectionError, match="saved without mean vectors"):
        load_contrast(tmp_path / "x.contrast").direction("layers.0.mlp")
    table = make_table(["a"] * 4 + ["b"] * 4 + ["c"] * 4)
    with pytest.raises(InspectionError, match=r"F-test asks several things .* of one of them"):
        compare(table, ["a - b", "b - c"]).direction("layers.0.mlp")


def test_a_direction_needs_finite_vectors_and_a_known_layer() -> None:
    def vectors(groups: Mapping[int, int], count: int) -> dict[str, np.ndarray]:
        assert dict(groups) == {place: int(place > 2) for place in range(6)}
        means, gap = np.array([[1.0] * 3, [4.0] * 3]), np.ones((count, 3))
        gap[0, 1] = np.nan
        return {"layers.0.mlp": means, "layers.1.mlp": gap}

    table = make_table(["a"] * 3 + ["b"] * 3, vectors=vectors, places=np.arange(6))
    found = compare(table, "a - b")
    np.testing.assert_allclose(found.direction("layers.0.mlp").vector, -3.0)
    with pytest.raises(InspectionError, match="not finite in 1 of 3 units"):
        found.direction("layers.1.mlp")
    with pytest.raises(LayerNotFoundError):
        found.direction("layers.9.mlp")


def test_random_directions_are_as_long_and_others() -> None:
    direction = Direction("mlp", np.arange(1.0, 9.0), "a - b", "all tokens")
    drawn = direction.random(5, seed=3)
    np.testing.assert_allclose(np.linalg.norm(drawn, axis=1), direction.norm)
    assert not np.allclose(drawn[0], drawn[1])
    np.testing.assert_array_equal(drawn, direction.random(5, seed=3))


def test_the_page_is_opened_by_an_address_that_browsers_understand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    folder, opened = tmp_path / "100% of #1", list[str]()
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(webbrowser, "open", opened.append)
    report = two_groups().report()
    page = report.open_in_browser()
    assert page.parent == folder
    assert page.read_text(encoding="utf-8") == report.html()
    assert opened == [page.as_uri()]
    assert "100%25%20of%20%231" in opened[0]
    assert report._repr_html_() in report.html()


def test_the_map_and_the_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    table = make_table(["<a>"] * 12 + ["$b$"] * 12, 24)
    table.values[:12, 5] += 5.0
    found = compare(table, {"<a>": 1, "$b$": -1})
    ax = found.plot_contrast()
    ax.figure.savefig(tmp_path / "map.png")
    outlines = [each for each in ax.collections if len(each.get_segments())]
    assert len(outlines) == 1  # one voxel survives: a rectangle of four sides
    assert len(outlines[0].get_segments()) == 4
    ends = np.array(outlines[0].get_segments()).reshape(-1, 2)
    assert (ends[:, 0].min(), ends[:, 0].max()) == (0.5, 1.5)  # it is in block 1
    report = found.report()
    report.save_as_html(tmp_path / "x.html")
    page = (tmp_path / "x.html").read_text("utf-8")
    assert "&lt;a&gt;" in page
    assert "<a>" not in page
    assert "data:image/png;base64," in page
    assert "http" not in page.replace("http-equiv", "")
    assert "Not checked" in page
    shown = found.calibrate(20).report().html()
    assert "of 20 relabellings found anything (1 expected;" in shown


def test_maps_without_tests_and_of_f_are_drawn() -> None:
    pytest.importorskip("matplotlib")
    one = compare(make_table(["a"] + ["b"] * 9), "a - b")
    assert one.plot_contrast().figure.axes[1].get_ylabel().startswith("difference of means")
    f = compare(make_table(["a"] * 4 + ["b"] * 4 + ["c"] * 4), ["a - b", "b - c"])
    ax = f.plot_contrast()
    bar = ax.figure.axes[1]
    assert bar.get_ylabel().startswith("square root of F")
    # A cell has the colour that the bar has at its value.
    place = int(np.argmax(f.f))
    shown = ax.images[0].get_array()[place % 4, place // 4]
    assert bar.get_ylim()[0] == 0
    scale = bar._colorbar.mappable  # type: ignore[attr-defined]
    np.testing.assert_allclose(shown, scale.to_rgba(np.sqrt(f.f[place])))


def test_layers_outside_of_blocks_are_not_on_the_axis_of_blocks() -> None:
    pytest.importorskip("matplotlib")
    table = make_table(["a"] * 6 + ["b"] * 6, 12)
    table.columns.layer[8:] = "lm_head"  # two blocks of four voxels, then four outside
    ax = compare(table, "a - b").plot_contrast()
    assert [each.get_text() for each in ax.get_yticklabels()] == ["mlp", "lm_head"]
    blocks, head = ax.images
    assert blocks.get_array().shape[:2] == (4, 2)
    below = ax.spines["bottom"].get_position()[1]
    assert blocks.get_extent()[2] <= below < head.get_extent()[3]  # the axis is between them


def test_layers_numbered_inside_a_block_are_all_drawn() -> None:
    pytest.importorskip("matplotlib")
    table = make_table(["a"] * 6 + ["b"] * 6, 12)
    names = [f"layers.{k // 6}.experts.{k % 6 // 2}" for k in range(12)]
    table.columns.layer[:] = names
    (image,) = compare(table, "a - b").plot_contrast().images
    assert image.get_array().shape[:2] == (6, 2)  # three experts of two voxels in each block


# -- rounding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["voxel", "unit"])
def test_rounding_is_no_finding_of_pairs(level: str) -> None:
    """Differences of one float32 step that all have one sign, and a real one of 1e-3 beside."""
    random = np.random.default_rng(0)
    first = random.uniform(1.0, 2.0, (12, 4)).astype(np.float32)
    second = np.nextafter(first, np.float32(9.0))
    second[:4] = np.nextafter(second[:4], np.float32(9.0))
    second[:, 3] = first[:, 3] + random.normal(1e-3, 1e-4, 12)
    values = np.concatenate([first, second]).astype(np.float64)
    if level == "unit":  # a unit near 0 is rounded as its layer is
        values[:, 0] = np.r_[np.full(12, 1e-3), np.full(12, 1e-3) + random.normal(1e-7, 1e-8, 12)]
    pairs = [str(each) for each in range(12)] * 2
    table = make_table(["a"] * 12 + ["b"] * 12, values=values, pairs=pairs)
    table.level = level
    for test in ("t", "permutation"):
        found = compare(table, "a - b", is_paired=True, options=TestOptions(test=test))
        assert found.survives.tolist() == [False, False, False, True]
        assert np.isnan(found.p[:3]).all()
    expected = stats.ttest_rel(values[:12, 3], values[12:, 3]).pvalue
    assert compare(table, "a - b", is_paired=True).p[3] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("scale", [0.1, 1e-3, 1e-5])
@pytest.mark.parametrize("case", ["two", "one-sided", "drawn", "pairs", "f"])
def test_relabellings_of_narrow_groups_far_apart_count_themselves(scale: float, case: str) -> None:
    """The true labels reach themselves, their mirror image does, and nothing else does."""
    random = np.random.default_rng(5)
    middle = np.repeat([1.0, 5.0, 3.0] if case == "f" else [5.0, 1.0], 4 if case == "f" else 6)
    values = middle[:, None] + scale * random.normal(size=(12, 6))
    groups = ["a"] * 4 + ["b"] * 4 + ["c"] * 4 if case == "f" else ["a"] * 6 + ["b"] * 6
    pairs = [str(each) for each in range(6)] * 2 if case == "pairs" else None
    table = make_table(groups, values=values, pairs=pairs)
    options = TestOptions(
        test="permutation",
        height_control="max",
        two_sided=case != "one-sided",
        permutations=400 if case in ("drawn", "f") else 1000,
    )
    contrast = ["a - b", "b - c"] if case == "f" else "a - b"
    found = compare(table, contrast, is_paired=case == "pairs", options=options)
    exact = {"two": 2, "one-sided": 1, "pairs": 2}.get(case)
    for p in (found.p, found.q):
        counts = p * found.permutations
        if exact is not None:
            np.testing.assert_allclose(counts, exact)
        else:  # drawn labels may be the true ones by chance
            assert ((counts > 0.99) & (counts < 4)).all()
