"""The commands that open a page, run as a user runs them, until Ctrl-C."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser import Page
from scans import make_scan

import torchfmri


@contextmanager
def running(*arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A command that serves a page, and the page's address."""
    command = [sys.executable, "-m", "torchfmri", *arguments, "--no-browser", "--json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stderr is not None
        url = next(found[0] for line in process.stderr if (found := re.findall(r"http\S+/", line)))
        yield url, process
    finally:
        process.kill()
        process.communicate()


def interrupted(process: "subprocess.Popen[str]") -> dict[str, object]:
    """What a command prints that is ended by Ctrl-C."""
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    found: dict[str, object] = json.loads(said)
    return found


def leave(page: Page) -> None:
    """Go elsewhere, so that the page does not look for a server that has gone."""
    page.page.goto("about:blank")


@pytest.mark.slow
def test_view_shows_one_scan_or_the_difference_of_two(page: Page, tmp_path: Path) -> None:
    for name in ("a.fmri", "b.fmri"):
        make_scan(blocks=2, tokens=9).save(tmp_path / name)
    with running("view", str(tmp_path / "a.fmri"), str(tmp_path / "b.fmri")) as (url, process):
        page.open(url)
        assert "b.fmri − a.fmri" in page.text("h1")
        leave(page)
        assert interrupted(process)["url"] == url


@pytest.mark.slow
def test_a_live_scan_is_watched_and_kept(page: Page, tmp_path: Path) -> None:
    out = tmp_path / "live.fmri"
    options = ["--model", "tiny", "--prompt", "Once upon", "--max-new-tokens", "6"]
    with running("scan", "--live", *options, "--out", str(out)) as (url, process):
        page.open(url)
        page.until("app.data.sequence.metrics.length > 1 && !app.data.board.going")
        assert process.stderr is not None
        assert any("the page stays until Ctrl-C" in line for line in process.stderr), "it is saved"
        assert page.js("app.data.columns") == len(torchfmri.load(out)[0])
        leave(page)
        interrupted(process)


@pytest.mark.slow
def test_a_chat_answers_what_the_page_suggests(page: Page, tmp_path: Path) -> None:
    out = tmp_path / "chat.fmri"
    options = ["--model", "tiny", "--max-new-tokens", "6", "--out", str(out)]
    with running("chat", *options) as (url, process):
        page.page.goto(url)
        page.page.get_by_role("button", name="Once upon a time").click()
        page.until("app.data.sequence?.metrics.length > 1", timeout=60_000)
        page.settle()
        assert "tiny" in page.text("h1")
        leave(page)
        assert interrupted(process)["scan"] == str(out)
    assert torchfmri.load(out).names == ("001 Once upon a time",)
