import argparse
import json
import subprocess
import sys

import pytest

import torchfmri
from torchfmri import InspectionError, cli


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


def test_a_process_that_has_nothing_to_say(capsys: pytest.CaptureFixture[str]) -> None:
    """Of several processes only the first writes, so that --json is one document."""
    silent = command(lambda options: ({}, "", 1))
    assert cli.main(["try"], silent) == cli.main(["try", "--json"], silent) == 1
    assert capsys.readouterr().out == ""


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
