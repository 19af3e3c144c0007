"""Hidden states that another engine exported, as one side of a comparison.

vLLM writes one safetensors file per request (`ExampleHiddenStatesConnector`): `hidden_states` of
shape (tokens, layers, units) and `token_ids` of shape (tokens,). Which layers these are stands in
the engine's own configuration, not in the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchfmri._arguments import check_path, is_list, is_whole, require
from torchfmri._compare.matching import EXPORTED, EXPORTED_MODEL
from torchfmri._compare.run import kept_value
from torchfmri._files import list_names, map_file, parse_tensors, printable, size_of
from torchfmri._records import Call, Inspection, Record, tensor_of
from torchfmri.exceptions import FileFormatError

_ENDING = ".safetensors"
_STATES, _IDS = EXPORTED, "token_ids"
_ONLY = "exported hidden states are activations only: no gradients were compared"


class _Request(NamedTuple):
    name: str
    states: Tensor
    ids: Tensor


def import_hidden_states(
    folder: str | PathLike[str], tokenizer: Any = None, *, layers: Sequence[int | str] | None = None
) -> Inspection:
    """Read hidden states that vLLM or another engine exported, as an inspection (activations).

    `torchfmri.compare(model, import_hidden_states(...))` runs the model on the same tokens.

    Args:
        folder: A folder of safetensors files, one per request, or one such file.
        tokenizer: To write tokens as texts, and to see whether it is the one that was used.
        layers: What the layers are: the numbers given to vLLM as eagle_aux_hidden_state_layer_ids,
            where n is what enters layer n (so the output of layer n - 1, and 0 the embedding), or
            the names of layers. Without them layers are matched by order and shape.

    Raises:
        FileFormatError: There are no such files, or one is damaged or only half written.
        InspectionError: `layers` does not fit, or the tokenizer is another one.
    """
    place = check_path("folder", folder)
    requests = [_read(path) for path in _files(place)]
    counts = {request.states.shape[1:] for request in requests}
    if len(counts) > 1:
        raise FileFormatError(
            str(place), f"its files hold other layers and units: {sorted(map(tuple, counts))}"
        )
    number = requests[0].states.shape[1]
    names = _names(layers, number)
    _check_vocabulary(requests, tokenizer)
    longest = max(len(request.ids) for request in requests)
    ids = torch.zeros(len(requests), longest, dtype=torch.long, device="cpu")
    kept = torch.zeros(len(requests), longest, dtype=torch.bool, device="cpu")
    states = torch.zeros(number, len(requests), longest, requests[0].states.shape[2],
                         dtype=requests[0].states.dtype, device="cpu")  # fmt: skip
    for row, request in enumerate(requests):
        count = len(request.ids)
        ids[row, :count], kept[row, :count] = request.ids, True
        states[:, row, :count] = request.states.transpose(0, 1)
    return _inspection(names, states, ids, kept, tokenizer)


def _inspection(
    names: Sequence[str], states: Tensor, ids: Tensor, kept: Tensor, tokenizer: Any
) -> Inspection:
    records = {}
    for order, (name, tensor) in enumerate(zip(names, states, strict=True)):
        record = Record(name, "exported", frozenset({"activations"}))
        call = Call(name, 0, order)
        call._values["activations", ""] = kept_value("", tensor)
        record.calls.append(call)
        records[name] = record
    inspection = Inspection(EXPORTED_MODEL, records)
    inspection.token_ids, inspection.kept = ids, kept
    inspection.notes[_ONLY] = [""]
    if tokenizer is not None:
        texts = [tokenizer.decode([int(each)]) for each in ids[kept]]
        inspection.tokens = tuple(texts)
    return inspection


def _files(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise FileFormatError(str(place), "there is no such folder")
    names = sorted(name for name in list_names(place) if name.endswith(_ENDING))
    if not names:
        found = ", ".join(map(printable, list_names(place)[:5]))
        packed = " Unpack .zst files first." if ".zst" in found else ""
        there = f", only {found}.{packed}" if found else ": it is empty"
        raise FileFormatError(str(place), f"it holds no {_ENDING} file{there}")
    return [place / name for name in names]


def _read(path: Path) -> _Request:
    tensors, _ = parse_tensors(map_file(path, size_of(path)), path.name)
    absent = [name for name in (_STATES, _IDS) if name not in tensors]
    if absent:
        raise FileFormatError(
            path.name, f"it has no {absent[0]!r}, only {', '.join(map(repr, tensors)) or 'nothing'}"
        )
    try:
        states, ids = (
            tensor_of(tensors[name], tensors[name].values.shape) for name in (_STATES, _IDS)
        )
    except ValueError as error:
        raise FileFormatError(path.name, f"its tensors cannot be read: {error}") from error
    if not states.is_floating_point():
        dtype = str(states.dtype).removeprefix("torch.")
        raise FileFormatError(path.name, f"{_STATES} is {dtype}; activations are floating point")
    if not ids.numel():
        raise FileFormatError(path.name, f"{_IDS} is empty: it holds no token to compare")
    if states.ndim != 3 or ids.ndim != 1:
        raise FileFormatError(
            path.name,
            f"{_STATES} is {tuple(states.shape)} and {_IDS} is {tuple(ids.shape)}; they should be "
            "(tokens, layers, units) and (tokens,)",
        )
    if len(states) != len(ids):
        raise FileFormatError(
            path.name, f"it has the states of {len(states)} tokens and the ids of {len(ids)}"
        )
    return _Request(path.stem, states, _whole(ids, path.name))


def _whole(ids: Tensor, file: str) -> Tensor:
    """Return token ids as whole numbers, also if the file has them as floats.

    Raises:
        FileFormatError: They are no token ids, or their dtype has rounded them.
    """
    values = ids.double()
    wrong = (values != values.floor()) | (values < 0) | values.isinf()
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise FileFormatError(
            file, f"{_IDS}[{first}] is {values[first]:g}; tokens are whole numbers from 0"
        )
    if ids.is_floating_point() and len(ids):
        exact, largest = round(2 / torch.finfo(ids.dtype).eps), int(values.max())
        if largest > exact:
            dtype = str(ids.dtype).removeprefix("torch.")
            raise FileFormatError(
                file,
                f"{_IDS} is {dtype}, which rounds whole numbers above {exact}, and the largest is "
                f"{largest}: write it as int64",
            )
    return ids.long()


def _names(layers: Sequence[int | str] | None, number: int) -> list[str]:
    if layers is None:
        return [f"{_STATES}.{index}" for index in range(number)]
    fits = is_list(layers) and len(layers) == number
    require(fits, "layers", layers, f"the files hold {number} layers: name each of them, in order")
    for each in layers:
        known = isinstance(each, str) or (is_whole(each) and each >= 0)
        require(known, "one of layers", each, "give a number from 0, or the name of a layer")
    found = [_name(each) for each in layers]
    require(len(set(found)) == number, "layers", layers, "name each layer once")
    return found


def _name(layer: int | str) -> str:
    if isinstance(layer, str):
        return layer
    return "embed_tokens" if layer == 0 else f"layers.{layer - 1}"


def _check_vocabulary(requests: Sequence[_Request], tokenizer: Any) -> None:
    size = len(tokenizer) if hasattr(tokenizer, "__len__") else None
    if size is None:
        return
    for request in requests:
        largest = int(request.ids.max()) if len(request.ids) else 0
        if largest >= size:
            raise FileFormatError(
                request.name + _ENDING,
                f"it has token {largest}, and the tokenizer knows {size} tokens only: it is "
                "another one. Give the tokenizer of the model that was exported",
            )
