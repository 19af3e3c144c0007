"""Does anything that torchfmri reads do harm? Random damage to all its files, and to models.

Each mutation changes one file of a folder: its bytes, what it is (a pipe, a link, a sparse file),
or its content with every checksum put right. Then the folder is read as a user reads it. What must
not happen is counted: an error that is not ours, ten seconds without an answer, a gigabyte of
memory, a file opened outside of the folder, a row missing without a word, a value that is wrong.
"""

import argparse
import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import torchfmri
from benchmarks._mutations import change_on_purpose, damage_file
from benchmarks._single_files import (
    Reading,
    make_contrast,
    make_history,
    make_inspection,
    make_lesions,
    make_states,
    read_contrast,
    read_history,
    read_inspection,
    read_lesions,
    read_states,
)
from torchfmri import Anatomy, InspectionError, Scan, ScannedSequence, Tokens
from torchfmri.cli import COMMANDS
from torchfmri.cli import main as command_line

REPLAY = [command for command in COMMANDS if command.name == "replay"]
SECONDS, BYTES = 10.0, 1 << 30
SHARES = {
    "scan": 0.5, "incident": 0.22, "old_incident": 0.08, "history": 0.05, "inspection": 0.05,
    "contrast": 0.04, "lesions": 0.02, "states": 0.02, "model": 0.02,
}  # fmt: skip
UNGUARDED = ("old_incident", "states", "model")
"""What has no checksums of ours: damage may go unnoticed, and must do no harm."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    """How many mutations were refused, reported or harmless, and what went wrong with which."""
    memory = "/dev/shm"  # folders are made and removed thousands of times
    folder = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None))
    try:
        return _fuzz(arguments.mutations, arguments.seed, folder)
    finally:
        shutil.rmtree(folder)


class Harm(Exception):  # noqa: N818 it is not an error but a finding
    """Something that must not happen."""


# -- what is read --------------------------------------------------------------------------------


def make_scan(folder: Path) -> None:
    anatomy = Anatomy.of_widths(["embed", "mlp"], ["Embedding", "MLP"], [8, 6], [4, 4])
    meta = {"model": "tiny", "missed": {"head": "no tokens"}, "loss": "cross entropy"}
    for number, length in enumerate((3, 0, 2)):
        values = np.random.default_rng(number).random((length, 8), np.float32)
        tokens = Tokens(
            np.arange(length), tuple(b"word"[:each] for each in range(length)),
            values[:, 0].copy(), values[:, 1].copy(), values[:, 2] > 0.5, values[:, 3] > 0.5,
        )  # fmt: skip
        sequence = ScannedSequence(
            f"sequence {number}", tokens, {"activation": values[:, :2].copy()},
            {"activation": values[:, :4].copy()}, checks={"live_difference": 1e-6},
        )  # fmt: skip
        Scan(anatomy, [sequence], meta).save(folder, append=number > 0)


def read_scan(folder: Path) -> Reading:
    scan = torchfmri.load(folder)
    rows = {}
    for sequence in scan:
        arrays = [sequence.tokens.ids, *sequence.layers.values(), *sequence.voxels.values()]
        text = repr((sequence.condition, dict(sequence.checks), sequence.tokens.spelling))
        rows[sequence.name] = text.encode() + b"".join(each.tobytes() for each in arrays)
    words = scan.verify()
    shown = repr(scan) + scan._repr_html_()
    if rows:
        with contextlib.suppress(InspectionError):  # the first sequence may be damaged
            shown += scan.table(width=80)
    return Reading(rows, words, shown)


class Spread(nn.Module):
    """Divides by a standard deviation that is 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.std(1, keepdim=True)


def make_subject() -> tuple[nn.Module, torch.Tensor, nn.Module]:
    """What an incident is replayed with."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Spread()), torch.ones(1, 4), nn.MSELoss()


def make_incident(folder: Path, value: float = 1.0) -> None:
    model, _, loss = make_subject()
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = torchfmri.Incidents(folder, weights=True)
    monitor = torchfmri.Monitor(
        model, optimizer, on_nonfinite="raise", incidents=options, loss=loss
    )
    batch = torch.full((2, 4), value)
    with contextlib.suppress(torchfmri.NonFiniteError), monitor.step():
        loss(model(batch), batch).backward()
        optimizer.step()


def make_old_incident(folder: Path) -> None:
    """An incident as version 0.1 wrote it: JSON without checksums, `.npz` files."""
    make_incident(folder)
    for path in folder.rglob("*.json"):
        make_old(path)


def make_old(path: Path) -> None:
    """Write a file of an incident as version 0.1 did, and the arrays that belong to it."""
    record = json.loads(path.read_bytes())
    tensors = path.with_suffix(".safetensors")
    if tensors.exists():
        from safetensors.numpy import load_file

        np.savez(path.with_suffix(".npz"), **load_file(tensors))
        tensors.unlink()
        path.write_text(json.dumps(record["data"], indent=1))
        return
    new = ("format", "version", "crc32", "incident", "files")
    kept = {key: each for key, each in record.items() if key not in new}
    path.write_text(json.dumps(kept, indent=1) + "\n")


def read_incident(folder: Path) -> Reading:
    rows, words = {}, []
    for name, more in (("told", []), ("run", ["--factory", "benchmarks.fuzz:make_subject"])):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = command_line(["replay", str(folder), "--json", *more], REPLAY)
        if "\x1b" in out.getvalue() + err.getvalue():
            raise Harm("a control character was shown")
        if code == 2:
            raise InspectionError(err.getvalue())
        said = json.loads(out.getvalue())
        words += said.pop("notes")
        rows[name] = json.dumps(said).encode()
    return Reading(rows, tuple(each for each in words if not each.startswith("Name your model")))


def make_model(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    with contextlib.redirect_stderr(io.StringIO()):
        LlamaForCausalLM(config).save_pretrained(folder)


def read_model(folder: Path) -> Reading:
    torchfmri.load_model(folder)
    return Reading({})


SUBJECTS: dict[str, tuple[Callable[[Path], None], Callable[[Path], Reading]]] = {
    "scan": (make_scan, read_scan),
    "incident": (make_incident, read_incident),
    "old_incident": (make_old_incident, read_incident),
    "history": (make_history, read_history),
    "inspection": (make_inspection, read_inspection),
    "contrast": (make_contrast, read_contrast),
    "lesions": (make_lesions, read_lesions),
    "states": (make_states, read_states),
    "model": (make_model, read_model),
}


# -- what must not happen ------------------------------------------------------------------------

_watched: list[Path] = []
_opened: list[str] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _watched and isinstance(arguments[0], str | bytes):
        path = Path(os.path.normpath(os.path.abspath(os.fsdecode(arguments[0]))))  # noqa: PTH100
        if not any(path.is_relative_to(each) for each in _watched):
            _opened.append(str(path))


sys.addaudithook(_audit)


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Raise `Harm` for a hang, for memory, and for files that are opened outside of the folder."""
    here = Path(torchfmri.__file__).parent
    libraries = [Path(each) for each in {sys.prefix, sys.base_prefix, *sys.path[1:]} if each]
    _opened.clear()
    _watched[:] = [folder, here, Path(__file__).parent, Path("/proc"), Path("/sys"), *libraries]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def stop(*_: Any) -> None:
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    except TimeoutError as error:
        raise Harm(f"no answer after {SECONDS:.0f} s") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        _watched.clear()
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    if grown > BYTES:
        raise Harm(f"{grown / 1e9:.1f} GB of memory")
    if _opened:
        raise Harm(f"opened {_opened[0]}")


def _judge(subject: str, folder: Path, expected: Reading, on_purpose: bool) -> str:
    """What became of a mutation; `Harm` for what must not."""
    try:
        with watched(folder), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = SUBJECTS[subject][1](folder)
        if "\x1b" in found.shown:
            raise Harm("a control character was shown")
    except InspectionError as error:
        if not on_purpose and subject == "incident" and "The model raised" in str(error):
            raise Harm(f"damage was blamed on the model: {error}") from error
        return "refused"
    except Exception as error:
        if isinstance(error, Harm):
            raise
        raise Harm(f"{type(error).__name__}: {str(error)[:200]}") from error
    if on_purpose or subject in UNGUARDED:  # whoever knows the checksum can write anything
        return "read"
    for name, row in found.rows.items():
        if expected.rows.get(name) != row:
            raise Harm(f"{name!r} is wrong")
    missing = expected.rows.keys() - found.rows.keys()
    if subject == "history":  # without its last files it is that of a run which ended earlier
        missing = {name for name in missing if name < max(found.rows)}
    if missing and not found.words:
        raise Harm(f"{sorted(missing)} is missing without a word")
    return "reported" if found.words else "harmless"


def _mutate(
    mutations: int, choose: random.Random, place: Path
) -> Iterator[tuple[str, bool, float]]:
    """What became of each mutation, whether that is harmful, and how long it took."""
    folder, secret = place / "read", place / "secret"
    for subject, share in SHARES.items():
        original = place / subject
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            SUBJECTS[subject][0](original)
            expected = SUBJECTS[subject][1](original)
        for number in range(round(share * mutations)):
            shutil.copytree(original, folder, copy_function=shutil.copyfile)
            on_purpose = subject not in ("model", "states") and choose.random() < 0.5
            if on_purpose:
                how = f"{change_on_purpose(folder, choose)} on purpose"
            else:
                path = choose.choice(sorted(each for each in folder.rglob("*") if each.is_file()))
                how = f"{path.name}: {damage_file(path, secret, choose)}"
            begun = time.perf_counter()
            outcome, harmful = "", False
            try:
                outcome = f"{subject}_{_judge(subject, folder, expected, on_purpose)}"
            except Harm as found:
                outcome, harmful = f"{subject} {number}, {how}: {found}", True
            yield outcome, harmful, time.perf_counter() - begun
            shutil.rmtree(folder)
        shutil.rmtree(original)


def _fuzz(mutations: int, seed: int, place: Path) -> dict[str, Any]:
    """Count what becomes of so many mutations; Ctrl-C ends it with what was found so far."""
    outcomes: Counter[str] = Counter()
    harm: list[str] = []
    slowest = 0.0
    with contextlib.suppress(KeyboardInterrupt):
        for outcome, harmful, seconds in _mutate(mutations, random.Random(seed), place):
            if harmful:
                harm.append(outcome)
            else:
                outcomes[outcome] += 1
            slowest = max(slowest, seconds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return {
        "mutations": sum(outcomes.values()) + len(harm),
        "asked_for": mutations,
        "harmful": len(harm),
        "slowest_seconds": slowest,
        "peak_gigabytes": peak,
        **dict(sorted(outcomes.items())),
        "harm": harm[:50],
    }
