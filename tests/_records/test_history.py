"""The record that a Monitor keeps: statistics over steps."""

import csv
import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from torchfmri import Monitor
from torchfmri._records.history import COLUMNS, FIELDS, History, Series, Step
from torchfmri.exceptions import InspectionError, LayerNotFoundError
from torchfmri.statistics import Statistics, calculate_statistics

FC, OUT, WEIGHT = (
    Series("fc", "activations"),
    Series("out", "gradients"),
    Series("fc.weight", "parameters"),
)


def statistics(values: Tensor) -> Statistics:
    return calculate_statistics(values)


def make_history(steps: int = 4, length: int = 10) -> History:
    """`fc` at every step, `out` from the second on, an update at every other one."""
    history = History(length)
    for number in range(steps):
        found = {FC: statistics(torch.arange(1.0, 5.0) + number)}
        step = Step(number * 2, loss=1.0 / (number + 1))
        if number:
            found[OUT] = statistics(torch.tensor([number, -math.inf, math.nan, 0.0]))
        if number % 2 == 0:
            step.parameters = ("fc.weight",)
            step.updates = np.array([[1.0], [4.0]])
        history.append(step, found)
    return history


def test_values_over_steps() -> None:
    history = make_history()
    assert history.values("fc", "activations", "mean").tolist() == [2.5, 3.5, 4.5, 5.5]
    assert history.steps.tolist() == [0, 2, 4, 6]
    assert history.loss.tolist() == [1.0, 1 / 2, 1 / 3, 1 / 4]
    assert np.isnan(history.values("out", "gradients", "max")[0])
    assert history.values("out", "gradients", "max")[1:].tolist() == [1.0, 2.0, 3.0]
    assert history.values("out", "gradients", "nan")[1:].tolist() == [1, 1, 1]
    assert history.values("out", "gradients", "inf")[1:].tolist() == [1, 1, 1]
    assert history.layers == ["fc", "out"]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(width=32, allow_subnormal=False), min_size=1, max_size=12))
def test_every_field_equals_that_of_the_statistics(numbers: list[float]) -> None:
    found = statistics(torch.tensor(numbers))
    history = History(2, with_histograms=1)
    history.append(Step(0), {FC: found})
    kept = {name: history.values(*FC, name)[0] for name in FIELDS}
    for name in set(FIELDS) - {"rms", "l2"}:
        assert np.array_equal(kept[name], float(getattr(found, name)), equal_nan=True), name
    if found.finite:
        assert math.isclose(kept["l2"], found.l2, rel_tol=1e-12)
        assert math.isclose(kept["rms"] ** 2 * found.finite, found.l2**2, rel_tol=1e-9)
    history.append(Step(1), {})  # the histogram of the first step is dropped now
    again = history.statistics(*FC, 0)
    assert again.histogram is None
    for name in ("count", "mean", "std", "min", "max", "nan", "pos_inf", "neg_inf", "zero"):
        assert np.array_equal(getattr(again, name), float(getattr(found, name)), equal_nan=True)


def test_matrix_has_a_row_per_layer() -> None:
    history = make_history()
    names, values = history.matrix("activations", "max")
    assert names == ["fc"]
    assert values.tolist() == [[4.0, 5.0, 6.0, 7.0]]
    names, values = history.matrix("updates")
    assert names == ["fc.weight"]
    assert values[0, ::2].tolist() == [0.25, 0.25]
    assert np.isnan(values[0, 1::2]).all()
    assert history.values("fc.weight", "updates").tolist()[0] == 0.25


def test_the_oldest_steps_are_forgotten() -> None:
    history = make_history(steps=20, length=5)
    assert len(history) == 5
    assert history.steps.tolist() == [30, 32, 34, 36, 38]
    assert history.values("fc", field="mean").tolist() == [17.5, 18.5, 19.5, 20.5, 21.5]


def test_histograms_are_kept_of_recent_steps_only() -> None:
    history = make_history(steps=20, length=30)
    with_histogram = [bool(step.statistics) for step in history]
    assert with_histogram == [False] * 4 + [True] * 16


def test_names_of_parameters_are_shared_between_steps() -> None:
    history = History()
    for number in range(3):
        history.append(
            Step(number, parameters=tuple(name for name in "ab"), updates=np.ones((2, 2))), {}
        )
    assert len({id(step.parameters) for step in history}) == 1


def test_what_is_not_there_is_explained() -> None:
    history = make_history()
    with pytest.raises(LayerNotFoundError, match=r"'fcc'.*Nearest: 'fc'"):
        history.values("fcc")
    with pytest.raises(InspectionError, match="of the 'gradients' of 'fc', only activations"):
        history.values("fc", "gradients")
    with pytest.raises(InspectionError, match=r"no statistic 'meann'.*Did you mean 'mean'\?"):
        history.values("fc", field="meann")
    with pytest.raises(InspectionError, match="no 'inputs' in this history, only activations"):
        history.matrix("inputs")
    with pytest.raises(InspectionError, match="no step at position 9: 4 are kept"):
        history.statistics("fc", step=9)
    with pytest.raises(LayerNotFoundError, match=r"fc\.bias"):
        history.update_ratio("fc.bias")
    with pytest.raises(InspectionError, match="length=0: give the number of steps"):
        History(0)
    history.missing["lost"] = "was written in place"
    with pytest.raises(InspectionError, match=r"'lost' \(was written in place"):
        history.values("lost")
    assert "no steps yet" in repr(History())
    assert "steps 0 to 6, 2 series, loss 0.25" in repr(history)


def test_a_step_without_a_series_has_empty_statistics() -> None:
    history = make_history()
    assert history.statistics("out", "gradients", 0).count == 0


def test_scalars() -> None:
    history = make_history()
    history[1].scalars["gradient_scale"] = 8.0
    assert history.scalar("gradient_scale")[1] == 8.0
    assert np.isnan(history.scalar("gradient_scale")[0])
    assert np.isnan(history.scalar("seconds")).all()


def test_csv_jsonl_and_parquet_hold_the_same(tmp_path: Path) -> None:
    history = make_history()
    rows = list(history.rows())
    assert len(rows) == 4 + 3 + 2
    assert [*rows[0]] == [*COLUMNS]
    with history.export(tmp_path / "h.csv").open() as file:
        from_csv = list(csv.DictReader(file))
    from_json = [json.loads(line) for line in history.export(tmp_path / "h.jsonl").open()]
    assert len(from_csv) == len(from_json) == len(rows)
    for row, text, data in zip(rows, from_csv, from_json, strict=True):
        for name, value in row.items():
            if value is None:
                assert text[name] == ""
                assert data[name] is None
            elif isinstance(value, float) and not math.isfinite(value):
                assert isinstance(data[name], str)  # null is what was not seen
                assert repr(float(data[name])) == repr(value)
            else:
                assert data[name] == value
                assert type(value)(text[name]) == value


def test_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    history = make_history()
    table = parquet.read_table(history.export(tmp_path / "h.parquet"))
    assert table.column_names == [*COLUMNS]
    assert repr(table.to_pylist()) == repr(list(history.rows()))
    empty = parquet.read_table(History().export(tmp_path / "none.parquet"))
    assert empty.num_rows == 0


def test_an_unknown_ending_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InspectionError, match=r"'h.xlsx'.*\.csv, \.jsonl, \.parquet"):
        make_history().export(tmp_path / "h.xlsx")


def test_pickle() -> None:
    history = make_history()
    again = pickle.loads(pickle.dumps(history))
    assert list(map(repr, again.rows())) == list(map(repr, history.rows()))


def test_json_lines_tell_a_loss_that_is_nan_from_one_that_was_not_seen(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    monitor = Monitor(model, torch.optim.SGD(model.parameters(), 0.1))
    for told in (1.0, math.nan, -math.inf, None):
        with monitor.step() as step:
            model(torch.ones(3, 2)).sum().backward()
            if told is not None:
                step.loss(told)
    lines = monitor.export(tmp_path / "h.jsonl").read_text().splitlines()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    rows = [json.loads(line, parse_constant=refuse) for line in lines]
    losses = {row["step"]: row["loss"] for row in rows}
    assert losses == {0: 1.0, 1: "NaN", 2: "-Infinity", 3: None}
