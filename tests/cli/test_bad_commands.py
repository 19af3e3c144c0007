"""Bad command lines: one line that names the value and what to do, and the exit code 2.

Each row stands for a command line; `{...}` are files of the fixture `files`.
"""

import shlex
from pathlib import Path

import pytest

from torchfmri import cli

SUBJECT = """
import torch
from torch import nn

def good():
    return nn.Linear(2, 2), torch.ones(3, 2), lambda output: output.sum()

def trained():
    model = nn.Linear(2, 2)
    batches = [(torch.ones(3, 2), torch.zeros(3, 2))] * 2
    return model, batches, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1)

def nothing():
    return None

def number():
    return 7

def words():
    return "a model"

def alone():
    return nn.Linear(2, 2)

def many():
    return nn.Linear(2, 2), 1, 2, 3, 4

def raises():
    raise ValueError("the factory fails with its own words")

def breaks():
    raise RuntimeError("the factory fails with its own words")

def fails():
    return nn.Linear(2, 2), torch.ones(3, 9), lambda output: output.sum()

def odd_loss():
    return nn.Linear(2, 2), torch.ones(3, 2), "mean"

model = nn.Linear(2, 2)
seven = 7
"""

# Subcommands that take a factory are told wrong ones in the same way.
FACTORIES = [
    "{py}", "{py}:", ":good", "no.py:good", "no_module:good", "{py}:goood", "{py}:model",
    "{py}:seven", "{py}:nothing", "{py}:number", "{py}:words", "{py}:many", "{py}:raises",
    "{py}:breaks",
    "torch.nn:Lineaar", "{folder}:good", "no module:good", "''", "{text}:good",
]  # fmt: skip
NO_WHOLE = ["x", "1.5", "''", "nan"]
ROWS = [
    # What argparse refuses.
    "dmeo", "scann --prompt hi", "--prompt hi", "scan", "scan --prompt", "scan --colour red",
    "scan --prompt a --dataset {rows} --out {new}", "scan hello", "verify", "cost", "advise",
    "diagnose", "replay", "verify {py}:good extra", "demo extra", "routing extra", "--jsonn",
    *(f"scan --prompt hi --max-new-tokens {each}" for each in NO_WHOLE),
    *(f"scan --prompt hi --voxel {each}" for each in NO_WHOLE),
    *(f"scan --prompt hi --seed {each}" for each in NO_WHOLE),
    *(f"scan --dataset {{rows}} --out {{new}} --batch {each}" for each in NO_WHOLE),
    *(f"demo --max-new-tokens {each}" for each in NO_WHOLE),
    *(f"verify {{py}}:good --directions {each}" for each in NO_WHOLE),
    *(f"cost {{py}}:good --rounds {each}" for each in NO_WHOLE),
    *(f"advise {{py}}:good --combine {each}" for each in NO_WHOLE),
    *(f"diagnose {{py}}:trained --steps {each}" for each in NO_WHOLE),
    *(f"replay {{folder}} --rank {each}" for each in NO_WHOLE),
    *(f"routing --seeds {each}" for each in NO_WHOLE),
    *(f"routing --workers {each}" for each in NO_WHOLE),
    *(f"cost {{py}}:good --batch {each}" for each in ("x", "1,x", "1.5", "''", "1;2")),
    *(f"cost {{py}}:good --batch 1,2 --predict {each}" for each in ("8", "x", "8x", "axb")),
    *(f"lesion --prompt hi --answer ' there' --batch {each}" for each in (*NO_WHOLE, "0", "-1")),
    "lesion", "lesion --prompt hi", "lesion --prompts {rows}", "lesion --prompts {bad}",
    "lesion --prompts {empty}", "lesion --prompts {folder}", "lesion --prompts no.jsonl",
    "lesion --prompts {rows} --answer ' there'", "lesion --prompt hi --answer ''",
    "lesion --prompt hi --answer ' there' --of headz", "lesion --prompt hi --answer ' a' --top 0",
    "lesion --prompt hi --answer ' a' --metric logit_difference",
    "lesion --prompt hi --answer ' a' --foil ' a'", "lesion --prompt hi --answer ' a' --edit cut",
    "lesion --prompt hi --answer ' a' --picture map.xyz",
    "lesion --prompt hi --answer ' a' --model t", "lesion --prompt hi --answer ' a' --out {text}",
    "lesion --prompt hi --answer ' a' --out {folder}",
    "scan --prompt hi --per token", "scan --prompt hi --loss mean", "scan --prompt hi --dtype int8",
    "scan --prompt hi --temperature hot", "routing --signal nothing", "routing --lengths",
    "routing --lengths x",
    # What we refuse.
    *(f"scan --prompt hi --max-new-tokens {each}" for each in ("-1", "99999999999999999999")),
    *(f"scan --prompt hi --voxel {each}" for each in ("0", "-3")),
    "scan --prompt hi --seed 99999999999999999999",
    *(f"scan --dataset {{rows}} --out {{new}} --batch {each}" for each in ("0", "-1")),
    "scan --prompt hi --model tinny", "scan --prompt hi --model {folder}",
    "scan --prompt hi --model {text}", "scan --prompt hi --model /no/such/folder",
    "scan --prompt hi --device gpu", "scan --prompt hi --layers mpl",
    "scan --prompt hi --tensors mpl",
    "scan --prompt hi --temperature 0.5", "scan --prompt hi --out {text}",
    "scan --prompt hi --out {folder}", "scan --prompt hi --out {folder} --overwrite",
    "scan --prompt hi --picture {folder}", "scan --prompt hi --picture {folder}/x.docx",
    "scan --prompt hi --page {folder}", "scan --prompt hi --field x", "scan --prompt hi --strict",
    "scan --prompt hi --batch 2", "scan --prompt hi --condition-field x",
    "scan --dataset {rows}", "scan --dataset no.jsonl --out {new}",
    "scan --dataset {folder} --out {new}", "scan --dataset {empty} --out {new}",
    "scan --dataset {text} --out {new}", "scan --dataset {rows} --out {new} --field question",
    "scan --dataset {bad} --out {new} --strict", "scan --dataset {rows} --out {text}",
    "scan --dataset {rows} --out {folder}", "scan --dataset {rows} --out {new} --picture x.png",
    "scan --dataset {rows} --out {new} --page x.html",
    "scan --dataset {rows} --out {new} --overwrite",
    "demo --max-new-tokens -1 --model tiny --out {new}", "demo --model tinny --out {new}",
    "demo --out {text} --model tiny --max-new-tokens 1",
    *(f"verify {each}" for each in FACTORIES), *(f"cost {each}" for each in FACTORIES),
    *(f"advise {each}" for each in FACTORIES),
    *(f"diagnose {each}" for each in FACTORIES if each != "{py}"),
    *(f"replay {{folder}} --factory {each}" for each in FACTORIES[:8]),
    "verify {py}:alone", "verify {py}:good --layers mpl", "verify {py}:good --expected mpl",
    "verify {py}:good --directions 0", "verify {py}:good --directions -1", "verify {py}:fails",
    "verify {py}:odd_loss", "cost {py}:good --rounds -1", "cost {py}:good --batch 0,1",
    "cost {py}:good --batch 1", "cost {py}:good --predict 8x8", "cost {py}:odd_loss",
    "cost {py}:good --batch 1,2 --predict 0x1",
    "advise {py}:good --rounds 0", "advise {py}:good --combine -1", "advise {py}:odd_loss",
    "advise {py}:good --optimizer Adamm", "advise {py}:good --optimizer Optimizer",
    "diagnose {py}:trained --steps 0", "diagnose {py}:trained --steps -1",
    "diagnose {py}:good", "diagnose no.py", "diagnose {py}:trained --steps 1 --plot {folder}",
    "diagnose {py}:trained --steps 1 --plot {folder}/x.docx",
    "diagnose {py}:trained --steps 1 --plot /no/such/folder/x.png",
    "replay no", "replay {folder}", "replay {text}", "replay {folder} --rank -1",
    "replay {folder} --rank 99",
    "repair", "repair no", "repair {text}", "repair {folder}", "repair .", "repair /", "repair ''",
    f"repair {'x' * 300}", f"replay {'x' * 300}",
    "view", "view no", "view {text}", "view {folder} no", "view {rows} --port x", "view {empty}",
    "chat --model tinny", "chat --per x", "chat --port x", "chat --model tiny --max-new-tokens x",
    "contrast", "contrast no", "contrast {text}", "contrast {folder}",
    "contrast {folder} --alpha x",
    "compare", "compare no", "compare no no", "compare {text} {text}", "compare {folder} {folder}",
    "compare --model tinny --a attn=eager", "compare --model tiny --a x",
    "lens", "lens --prompt", "lens --prompt hi --position x", "lens --prompt hi --top 0",
    "lens --prompt hi --position 99",
    "lens --prompt hi --token 'two words'", "lens --prompt hi --against 'two words'",
    "lens --prompt hi --model tinny", "lens --prompt hi --picture {folder}/x.docx",
    "scan --prompt hi --attention mpl",
    "routing --seeds 0 --out {new}", "routing --seeds -1 --out {new}",
    "routing --hidden-size 7 --out {new}",
    "routing --hidden-size 0 --out {new}", "routing --blocks 0 --out {new}",
    "routing --heads 0 --out {new}", "routing --heads 3 --out {new}",
    "routing --heads -1 --out {new}",
    "routing --workers 0 --out {new}", "routing --workers -1 --out {new}",
    "routing --lengths 0 --out {new}", "routing --lengths -3 --out {new}",
    "routing --puzzles no --out {new}", "routing --puzzles {folder} --out {new}",
    "routing --checkpoint-every 0 --out {new}", "routing --checkpoint-every -1 --out {new}",
    "routing --seeds 1 --steps 1 --out {text}",
]  # fmt: skip


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """The files that the rows name, and nothing else in the folder in which they run."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    (tmp_path / "here").mkdir()
    for name, text in (
        ("subject.py", SUBJECT),
        ("text.txt", "no JSON"),
        ("rows.jsonl", '{"prompt": "hi"}\n'),
        ("bad.jsonl", '{"prompt": "hi"}\n{broken\n'),
        ("empty.jsonl", ""),
    ):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path / "here")
    names = ("folder", "subject.py", "text.txt", "rows.jsonl", "bad.jsonl", "empty.jsonl", "new")
    keys = ("folder", "py", "text", "rows", "bad", "empty", "new")
    return {key: tmp_path / name for key, name in zip(keys, names, strict=True)}


@pytest.mark.one_in(10)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("row", ROWS)
def test_a_bad_command_line(
    row: str, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    before = {each: each.read_bytes() for each in files["py"].parent.rglob("*") if each.is_file()}
    arguments = shlex.split(row.format(**files))
    try:
        code = cli.main(arguments)
    except SystemExit as stop:
        code = int(stop.code or 0)
    output = capsys.readouterr()
    assert code == 2
    assert output.out == ""
    last = output.err.strip().splitlines()[-1]
    assert ": error: " in last, output.err
    message = last.partition(": error: ")[2]
    assert len(message.split()) > 4
    kept = {each: each.read_bytes() for each in before}
    assert kept == before
    left = [each for each in Path.cwd().rglob("*") if "__pycache__" not in each.parts]
    assert left == []


def test_there_are_enough() -> None:
    assert len(ROWS) == len(set(ROWS)) > 150
    assert {row.split()[0] for row in ROWS} >= {each.name for each in cli.COMMANDS}
