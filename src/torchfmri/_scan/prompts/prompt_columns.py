"""Find the columns of a table of prompts: the layers, voxels, heads or units of a question.

`PromptRows` and `fit_glm` call `chosen_columns`. It returns what the columns are and where they
stand in the tables of a sequence; both must have the same order, since values are taken by these
places.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from torchfmri._contrast import PromptColumns
from torchfmri._model import nearest_names
from torchfmri._scan.prompts.prompt_vectors import vectors_of
from torchfmri._scan.prompts.question import Question, ValueSource
from torchfmri._scan.record.anatomy import KINDS
from torchfmri._scan.record.reading import matching_layers
from torchfmri.exceptions import InspectionError, LayerNotFoundError

_KINDS = np.array(KINDS, object)


def chosen_columns(
    source: ValueSource, question: Question
) -> tuple[PromptColumns, NDArray[np.int64]]:
    """Return the columns that a source has, and their places in the tables of a sequence."""
    anatomy = source.anatomy
    chosen = matching_layers(question.layers, anatomy.layers, source.meta)
    if question.level == "unit":
        return _units(source, question, chosen)
    types = np.array(anatomy.types, object)
    names = np.array(anatomy.layers, object)
    if question.level == "layer":
        places = np.array([anatomy.index[name] for name in chosen], np.int64)
        nothing = np.zeros(len(places), np.int64)
        kind = np.full(len(places), "layer", object)
        return PromptColumns(names[places], types[places], kind, nothing, nothing), places
    wanted = np.isin(anatomy.layer, [anatomy.index[name] for name in chosen])
    if question.level == "head":
        wanted &= anatomy.kind == KINDS.index("head")
        if not wanted.any():
            raise InspectionError(
                "None of the chosen layers has heads: the voxels of q_proj, k_proj, v_proj and "
                "(heads=True) o_proj.input are, where the configuration says how large a head is."
            )
    places = np.flatnonzero(wanted)
    owner = anatomy.layer[places]
    return PromptColumns(
        names[owner],
        types[owner],
        _KINDS[anatomy.kind[places]],
        anatomy.start[places].astype(np.int64),
        anatomy.count[places].astype(np.int64),
    ), places


def _units(
    source: ValueSource, question: Question, chosen: Sequence[str]
) -> tuple[PromptColumns, NDArray[np.int64]]:
    first = next(iter(source.sequences), None)
    found = {} if first is None else vectors_of(first, question.tokens)
    layers = [layer for layer in chosen if layer in found]
    if not layers:
        raise LayerNotFoundError(
            str(question.layers),
            nearest_names(str(question.layers), list(found)),
            len(found),
            "scan[0].vectors",
        )
    types = source.anatomy.types
    widths = [len(found[layer]) for layer in layers]
    count = sum(widths)
    columns = PromptColumns(
        np.repeat(np.array(layers, object), widths),
        np.repeat(np.array([types[source.anatomy.index[each]] for each in layers], object), widths),
        np.full(count, "unit", object),
        np.concatenate([np.arange(width) for width in widths]),
        np.ones(count, np.int64),
    )
    return columns, np.arange(count)
