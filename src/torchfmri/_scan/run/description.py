"""The meta of a scan: which model it is of, what was measured, and how.

`Scanner` calls `scan_meta` for every scan and for the folder of a dataset, where it becomes
`meta.json`. Keys may be added. All keys but those in `VOLATILE` of `store/meta.py` must be equal
before sequences are added to a stored scan, so a change of `fingerprint` or `config_hash` locks
users out of the scans that they have begun. Folders are cut off the name of the model, because
scans are shared.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import weakref
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from torchfmri._model import every_parameter, unwrap
from torchfmri._scan.run.decoding import Decoding
from torchfmri._scan.run.readouts import describe_readouts
from torchfmri._scan.run.scan_loss import ScanLoss
from torchfmri._scan.run.scan_options import ScanOptions
from torchfmri._scan.run.subject import ScanSubject

_SAMPLES = 64
"""Values of each parameter that go into the fingerprint of the weights."""


def scan_meta(
    model: nn.Module,
    subject: ScanSubject,
    options: ScanOptions,
    loss: ScanLoss | None,
    decoding: Decoding,
    chat: bool,
) -> dict[str, Any]:
    """Plain data, for JSON."""
    model = unwrap(model)
    first = next(iter(model.parameters()), None)
    readouts = describe_readouts(model, options)
    return {
        "model": model_name(model),
        "class": type(model).__name__,
        "config_hash": config_hash(model),
        "weights": fingerprint(model),
        "parameters": subject.parameters,
        "dtype": str(first.dtype).removeprefix("torch.") if first is not None else "",
        "device": str(first.device.type) if first is not None else "cpu",
        "per": options.per,
        "loss": loss.text if loss is not None else None,
        "voxel": options.voxel,
        "live": options.live,
        "chat": chat,
        "max_new_tokens": decoding.max_new_tokens,
        "decoding": {key: _plain(value) for key, value in decoding.options.items()},
        "missed": dict(subject.missed),
        "layer_notes": dict(subject.notes),
        "places": subject.places,
        "order": list(subject.order),
        "versions": _versions(),
        **({"readouts": readouts} if readouts else {}),
    }


def fingerprint(model: nn.Module) -> str:
    """A few digits that change when the weights do: a scan goes on with the same ones alone."""
    digest = hashlib.sha256()
    kept = [
        each for each in every_parameter(model)
        if not each.is_meta and each.numel() and not hasattr(each, "to_local")
    ]  # fmt: skip
    with torch.no_grad():
        some = map(_sample, kept)
        # Joined before they are fetched: each transfer from a GPU waits for it.
        for _, alike in groupby(some, key=lambda each: (each.dtype, each.device)):
            digest.update(torch.cat(list(alike)).to("cpu", torch.float32).numpy().tobytes())
    return digest.hexdigest()[:16]


def _sample(values: Tensor) -> Tensor:
    """Some of the values, from the first on at equal distances."""
    step = -(-values.numel() // _SAMPLES)
    if values.is_contiguous():  # one operation instead of two: a model has hundreds of parameters
        return values.as_strided((-(-values.numel() // step),), (step,))
    return values.reshape(-1)[::step]


def model_name(model: nn.Module) -> str:
    """The name that the model was loaded by, without folders; else its class."""
    name = str(getattr(getattr(model, "config", None), "_name_or_path", "") or "")
    return name.rstrip("/").rpartition("/")[2] or type(model).__name__


def config_hash(model: nn.Module) -> str:
    """A hash of the configuration, or of the names and shapes of the parameters."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_diff_dict"):
        return _hash_of({name: list(each.shape) for name, each in model.named_parameters()})
    whole = repr((type(config), config.to_dict()))
    known = _config_hashes.get(model)
    # transformers take milliseconds to find out what differs from the defaults.
    if known is None or known[0] != whole:
        data = {
            key: value for key, value in config.to_diff_dict().items()
            if key not in ("_name_or_path", "transformers_version", "torch_dtype", "dtype")
        }  # fmt: skip
        known = _config_hashes[model] = (whole, _hash_of(data))
    return known[1]


_config_hashes: weakref.WeakKeyDictionary[nn.Module, tuple[str, str]]
_config_hashes = weakref.WeakKeyDictionary()


def _hash_of(data: Any) -> str:
    text = json.dumps(data, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__


def _versions() -> dict[str, str]:
    names = [each for each in ("torchfmri", "torch", "transformers") if each in sys.modules]
    found = {name: _version(name) for name in names}
    return {
        "python": platform.python_version(),
        **{key: each for key, each in found.items() if each},
    }


@cache
def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""  # run from its source, without being installed
