"""Lenses: the stream read as tokens, and logits traced back to what made them.

`stream` runs a model once and keeps its residual stream; `unembedding` is the one place that knows
how a model turns it into logits. `lens` reads every layer's stream through it and `lens_record`
keeps that. `logit_attribution` splits a logit into what heads and MLPs add (`block_parts`,
`frozen_norm`), `input_attribution` into what input tokens add. `experts` reads the routers of
mixtures, `features` any dictionary of features.
"""

from torchfmri._lens.experts import ExpertRouting, RouterReader
from torchfmri._lens.features import (
    FeatureReader,
    FeatureSource,
    feature_labels,
    feature_name,
    find_sources,
)
from torchfmri._lens.input_attribution import METHODS, InputAttribution, attribute_embeddings
from torchfmri._lens.lens import Translate, read_lens, read_stream
from torchfmri._lens.lens_record import Lens
from torchfmri._lens.logit_attribution import LogitAttribution, attribute, refuse_unknown_tokens
from torchfmri._lens.stream import only_stack, run_stream
from torchfmri._lens.unembedding import find_unembedding
