"""The command `torchfmri chat`: type a prompt into the page and watch the model answer.

The page's thread puts prompts into a queue, and one thread of ours answers them: a model is never
run by two threads at once. A prompt that fails is reported on the page, and the next one is
answered. `_WAITING` and the words may change freely.
"""

from __future__ import annotations

import queue
import sys
import threading
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np

from torchfmri._arguments import check_number
from torchfmri._model import load_model
from torchfmri._scan import (
    TELL_EVERY,
    LiveBoard,
    LiveToken,
    Scanner,
    ScanOptions,
    longest_sequence,
)
from torchfmri._text import plural, printable
from torchfmri._viewer import View
from torchfmri.cli.options import CommandOptions, Result
from torchfmri.cli.view import add_server_arguments, served
from torchfmri.exceptions import InspectionError

_WAITING, _NAMED = 8, 40
"""Prompts that may wait for the model."""


def add_arguments(parser: CommandOptions) -> None:
    """Add the options of `torchfmri chat`."""
    parser.model()
    parser.path("--out", "keep the scans in this folder, too", "NAME.fmri")
    gradients = ("cached", "position", "token_loss", "none")
    parser.choice("--per", gradients, "which gradient; none for activations alone", "cached")
    parser.number("--max-new-tokens", 128, "largest number of new tokens of an answer")
    add_server_arguments(parser)


class _Stopped(Exception):  # noqa: N818 - nothing went wrong
    """The answer is not wanted any more."""


class Chat:
    """A model that answers what is typed, one prompt after the other, while it is scanned.

    Args:
        scanner: Scans the model.
        board: What the page shows.
        tokens: How many tokens an answer has at most.
        out: Where scans are kept; None keeps them in memory.
        chat: Whether prompts are wrapped as a user's messages.
    """

    def __init__(
        self, scanner: Scanner, board: LiveBoard, tokens: int, out: Path | None, *, chat: bool
    ) -> None:
        self._scanner, self.board, self._tokens = scanner, board, tokens
        self._out, self._chat, self._number = out, chat, 0
        self._waiting: queue.Queue[str | None] = queue.Queue(_WAITING + 1)
        self._stopping, self._now = False, ""
        self._dropped: list[str] = []
        self._thread = threading.Thread(target=self._work, name="torchfmri-chat", daemon=True)
        self._thread.start()

    def ask(self, prompt: str) -> None:
        """Answer a prompt when those before it are answered.

        Raises:
            InspectionError: Too many are waiting, or it is empty.
        """
        if not prompt.strip():
            raise InspectionError("The prompt is empty.")
        if self._waiting.qsize() >= _WAITING:
            raise InspectionError(f"{_WAITING} prompts are waiting. Try again later.")
        self._waiting.put(prompt)
        self._say(self._now)

    def close(self) -> None:
        """Stop at the next token, and wait until the model is left alone.

        A program must not end while a thread runs code of torch: that would abort it.
        """
        self._stopping = True
        self._waiting.put(None)
        self._thread.join()
        if self._dropped:
            told = ", ".join(map(_quoted, self._dropped))
            print(f"torchfmri chat: not answered: {told}", file=sys.stderr, flush=True)
            self._dropped.clear()

    def _say(self, now: str) -> None:
        """Show what is worked on, and how many prompts wait for it."""
        self._now = now
        waiting = self._waiting.qsize()
        queue = f"{plural(waiting, 'prompt')} waiting" if waiting and not self._stopping else ""
        self.board.now = ", ".join(filter(None, (now, queue)))

    def _on_token(self, token: LiveToken) -> None:
        if self._stopping:
            raise _Stopped
        self.board.on_token(token)
        if np.isnan(token.activation).all() and self._scanner.options.per is not None:
            # The last token is written and never run: what follows is the pass for gradients.
            self._say("Computing gradients: they appear when they are complete")

    def _check_length(self, prompt: str) -> None:
        """Refuse a prompt that is longer than the sequences that the model was made for."""
        longest, tokenizer = longest_sequence(self._scanner.model), self.board.tokenizer
        if longest is None or tokenizer is None:
            return
        count = len(tokenizer(prompt)["input_ids"])
        if count > longest:
            raise InspectionError(
                f"It has {plural(count, 'token')}, and the model was made for {longest:,} at most. "
                "Shorten it."
            )

    def _work(self) -> None:
        while (prompt := self._waiting.get()) is not None:
            if self._stopping:
                self._dropped.append(prompt)
                continue
            self._number += 1
            name = f"{self._number:03d} {' '.join(prompt.split())[:40]}"
            self.board.begin(name)
            self.board.problem = ""
            self._say("Answering")
            scan = None
            try:
                self._check_length(prompt)
                told: dict[str, Any] = {"on_token": self._on_token, "tell_every": TELL_EVERY}
                greedy: dict[str, Any] = {"names": [name], "generate": {"do_sample": False}}
                scan = self._scanner.scan(prompt, self._tokens, chat=self._chat, **told, **greedy)
                if self._out is not None:
                    scan.save(self._out, append=self._out.exists())
            except _Stopped:
                self._dropped.append(prompt)
            except Exception as error:  # whatever a tokenizer or a model raises for this prompt
                known = isinstance(error, InspectionError | OSError | RuntimeError)
                said = str(error) if known else f"{type(error).__name__}: {error}"
                self.board.problem = f"{_quoted(prompt)} failed: {said}"
                told_by = f"torchfmri chat: prompt {self._number}, {self.board.problem}"
                print(told_by, file=sys.stderr, flush=True)
            self._say("")
            self.board.finish(scan)


def _quoted(prompt: str) -> str:
    """A prompt as messages name it: on one line, and cut where it is long."""
    text = printable(" ".join(prompt.split()))
    return f"“{text}”" if len(text) <= _NAMED else f"“{text[:_NAMED].rstrip()}…”"


def start(options: Namespace) -> tuple[Chat, View]:
    """Load the model and serve its page."""
    check_number("--max-new-tokens", options.max_new_tokens, 1, "how many tokens to generate")
    print(f"torchfmri chat: loading {options.model}", file=sys.stderr, flush=True)
    named = load_model(options.model)
    per = None if options.per == "none" else options.per
    scanner = Scanner(named.model, named.tokenizer, ScanOptions(per=per))
    chat = getattr(named.tokenizer, "chat_template", None) is not None
    anatomy, meta = scanner.describe("Hello", options.max_new_tokens, chat=chat)
    board = LiveBoard(anatomy, meta)
    board.tokenizer = named.tokenizer
    answers = Chat(scanner, board, options.max_new_tokens, options.out, chat=chat)
    view = served(options, board, "chat", on_prompt=answers.ask, on_close=answers.close)
    board.changed = view.changed
    return answers, view


def run(options: Namespace) -> Result:
    """Serve until Ctrl-C."""
    _, view = start(options)
    with view:
        view.wait()
    kept = str(options.out) if options.out is not None and options.out.exists() else None
    return {"url": view.url, "scan": kept}, f"kept in {kept}" if kept else "", 0
