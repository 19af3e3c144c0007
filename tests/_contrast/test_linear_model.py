"""The linear model and the probe: against statsmodels, and against the slow way."""

import numpy as np
import pytest
from prompt_tables import make_table

from torchfmri import InspectionError
from torchfmri._contrast import GLM, Level, classify, first_level
from torchfmri._contrast.classification import accuracies

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def make_glm(prompts: int = 20, columns: int = 4, seed: int = 0) -> GLM:
    random = np.random.default_rng(seed)
    design = np.stack([np.ones(prompts), np.arange(prompts) % 2, random.normal(size=prompts)], 1)
    names = ("Intercept", "condition[T.b]", "length")
    slopes = random.normal(1.0, 1.0, (prompts, columns))
    return GLM(
        formula="condition + length + surprisal",
        levels={
            "": Level(names=names, design=design, values=random.normal(size=(prompts, columns))),
            "surprisal": Level(names=("surprisal",), design=np.ones((prompts, 1)), values=slopes),
        },
        columns=make_table(["a"], columns).columns,
        prompts=tuple(map(str, range(prompts))),
        metric="activation",
        level="voxel",
        tokens="all tokens",
        model="tiny",
    )


@pytest.mark.parametrize("term", ["condition[T.b]", "length", "condition[T.b] - length"])
def test_coefficients_are_those_of_statsmodels(term: str) -> None:
    api = pytest.importorskip("statsmodels.api")
    glm = make_glm()
    found = glm.contrast(term)
    level = glm.levels[""]
    weights = [0.0, float("condition" in term), 1.0 if term == "length" else -("length" in term)]
    for column in range(4):
        fitted = api.OLS(level.values[:, column], level.design).fit()
        expected = fitted.t_test(np.array(weights))
        np.testing.assert_allclose(found.effect[column], expected.effect.item(), **CLOSE)
        np.testing.assert_allclose(found.t[column], expected.tvalue.item(), **CLOSE)
        np.testing.assert_allclose(found.p[column], expected.pvalue.item(), **CLOSE)
        assert found.dof[column] == fitted.df_resid


def test_several_coefficients_are_an_f_of_statsmodels() -> None:
    api = pytest.importorskip("statsmodels.api")
    glm = make_glm()
    found = glm.contrast(["condition[T.b]", "length"])
    for column in range(4):
        fitted = api.OLS(glm.levels[""].values[:, column], glm.design).fit()
        expected = fitted.f_test(np.eye(3)[1:])
        np.testing.assert_allclose(found.f[column], float(expected.fvalue), **CLOSE)
        np.testing.assert_allclose(found.p[column], float(expected.pvalue), **CLOSE)


def test_a_slope_is_a_test_of_the_prompts_slopes() -> None:
    stats = pytest.importorskip("scipy.stats")
    glm = make_glm()
    found = glm.contrast("surprisal")
    expected = stats.ttest_1samp(glm.levels["surprisal"].values, 0)
    np.testing.assert_allclose(found.t, expected.statistic, **CLOSE)
    np.testing.assert_allclose(found.p, expected.pvalue, **CLOSE)


def test_the_first_level_is_a_regression_over_tokens() -> None:
    api = pytest.importorskip("statsmodels.api")
    random = np.random.default_rng(0)
    regressors, values = random.normal(size=(12, 2)), random.normal(size=(12, 3))
    found = first_level(values, regressors)
    assert found is not None
    for column in range(3):
        fitted = api.OLS(values[:, column], api.add_constant(regressors)).fit()
        whole = np.r_[found[0][column], found[1][:, column]]
        np.testing.assert_allclose(whole, fitted.params, **CLOSE)
    assert first_level(values[:3], regressors[:3]) is None  # nothing is left to fit
    assert first_level(values, np.ones((12, 1))) is None  # the same at every token
    one = first_level(values[:1], np.empty((1, 0)))
    assert one is not None
    np.testing.assert_array_equal(one[0], values[0])


def test_models_that_cannot_be_fitted() -> None:
    glm = make_glm()
    for term, message in (
        ("nothing", "The terms are 'Intercept'"),
        ("length - surprisal", "different units"),
        ({"length": 0.0}, "has no weight"),
    ):
        with pytest.raises(InspectionError, match=message):
            glm.contrast(term)
    with pytest.raises(InspectionError, match="height_control='max'"):
        glm.contrast("length", height_control="max")
    with pytest.raises(InspectionError, match="nothing is left"):
        make_glm(3).contrast("length")
    level = glm.levels[""]
    same = Level(level.names, np.ones_like(level.design), level.values)
    broken = GLM(**{**vars(glm), "levels": {"": same}})
    with pytest.raises(InspectionError, match="follow from each other"):
        broken.contrast("length")


def test_the_design_can_be_looked_at() -> None:
    pytest.importorskip("matplotlib")
    glm = make_glm()
    assert glm.terms == ("Intercept", "condition[T.b]", "length", "surprisal")
    assert "condition[T.b]" in glm.table()
    ax = glm.plot_design()
    assert [each.get_text() for each in ax.get_xticklabels()] == list(glm.design_names)
    with pytest.raises(InspectionError, match=r"no prompt '21' among 20\. Nearest: '1'"):
        glm.plot_design("21")
    with pytest.raises(InspectionError, match="no regressors of tokens"):
        glm.table(prompt="1")
    assert not np.array_equal(glm.shuffled(1).design, glm.design)
    np.testing.assert_array_equal(np.sort(glm.shuffled(1).design, 0), np.sort(glm.design, 0))


def test_a_model_is_calibrated_by_exchanging_prompts_or_flipping_slopes() -> None:
    glm = make_glm(columns=30)
    for term in ("condition[T.b]", "surprisal", ["condition[T.b]", "length"]):
        found = glm.contrast(term).calibrate(60).calibration
        assert found is not None
        assert found.found <= found.bound, term
    assert glm.contrast("surprisal").survives.any()  # slopes of 1: the flips make them nothing
    with pytest.raises(InspectionError, match="no exchange of prompts makes it 0"):
        glm.contrast("Intercept").calibrate(3)
    with pytest.raises(InspectionError, match="no difference of mean vectors"):
        glm.contrast("length").direction("layers.0.mlp")


# -- the probe -----------------------------------------------------------------------------------


def slow_accuracy(values: np.ndarray, labels: np.ndarray, fold: np.ndarray) -> float:
    """Fold by fold: scale and fit on the others, predict, and compare."""
    right = np.zeros(len(values))
    for part in np.unique(fold):
        train, test = fold != part, fold == part
        mean, spread = values[train].mean(0), values[train].std(0)
        inner, outer = ((values[each] - mean) / spread for each in (train, test))
        target = 1.0 - 2.0 * labels[train]
        target = target - target.mean()
        width = values.shape[1]
        weights = np.linalg.solve(inner.T @ inner + width * np.eye(width), inner.T @ target)
        right[test] = (outer @ weights > 0) == (labels[test] == 0)
    return float((right[labels == 0].mean() + right[labels == 1].mean()) / 2)


def test_the_probe_is_ridge_regression_fold_by_fold() -> None:
    random = np.random.default_rng(0)
    values = random.normal(size=(24, 6))
    labels = np.stack([random.permutation(np.arange(24) % 2) for _ in range(8)])
    fold = random.permutation(24) % 4
    found = accuracies(values, labels, fold)
    expected = [slow_accuracy(values, row, fold) for row in labels]
    np.testing.assert_allclose(found, expected)


def test_a_layer_that_knows_is_told_from_one_that_does_not() -> None:
    table = make_table(["a"] * 15 + ["b"] * 15, 8)
    table.values[:15, 4:] += 2.0  # the second layer
    found = classify([table], "a - b", is_paired=False, folds=5, permutations=200, seed=0)
    first, second = found.rows
    assert second.accuracy > 0.9
    assert second.p_max <= 0.05
    assert first.p > 0.05
    assert abs(first.null_mean - 0.5) < 0.03
    assert "layers.1.mlp" in found.table()
    pytest.importorskip("pandas")
    assert found.to_dataframe()["layer"].tolist() == ["layers.0.mlp", "layers.1.mlp"]


@pytest.mark.slow
def test_nothing_is_read_from_noise_however_many_features_it_has() -> None:
    found = 0
    for draw in range(60):
        table = make_table(["a"] * 8 + ["b"] * 8, 200, seed=draw)
        found += any(
            row.p_max <= 0.05
            for row in classify(
                [table], "a - b", is_paired=False, folds=4, permutations=99, seed=draw
            ).rows
        )
    assert found <= 9  # the 99 % bound of a true 5 %


def test_probes_that_cannot_be_trained() -> None:
    table = make_table(["a"] * 2 + ["b"] * 2)
    with pytest.raises(InspectionError, match="cannot be divided into 5 folds"):
        classify([table], "a - b", is_paired=False, folds=5, permutations=9, seed=0)
    table.values[0] = np.nan
    with pytest.raises(InspectionError, match="nothing to learn from"):
        classify([table], "a - b", is_paired=False, folds=2, permutations=9, seed=0)


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        (["condition[T.b]", "condition[T.b]"], "follow from each other"),
        (["condition[T.b]", "length", "condition[T.b] - length"], "follow from each other"),
        ([], "list of contrasts is empty. The terms are 'Intercept'"),
        ("loudness", "a term should follow. The terms are 'Intercept'"),
        ({"loudness": 1}, "There is no term 'loudness'"),
    ],
)
def test_terms_that_are_none(terms: object, message: str) -> None:
    with pytest.raises(InspectionError, match=message):
        make_glm().contrast(terms)  # type: ignore[arg-type]
