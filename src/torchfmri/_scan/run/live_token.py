"""`LiveToken`, one token with its activations right after the model has been run on it.

Users get it in `on_token` and from `stream`; `live_board` shows it. `BatchRun` makes tokens from
steps with the function that `live_tokens` returns. The fields are public and are numpy arrays on
the CPU, so nothing a user keeps holds GPU memory. Tokens come in order of position, and padding is
left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchfmri._scan.run.live import LiveStep
from torchfmri._scan.run.measurements import rms_by_layer, rms_by_voxel
from torchfmri._scan.run.prompt import EncodedPrompt
from torchfmri._scan.run.spelling import Speller
from torchfmri._scan.run.subject import ScanSubject


@dataclass(frozen=True, eq=False)
class LiveToken:
    """One token, right after the model has been run on it.

    Attributes:
        row: Of the batch.
        position: In its sequence, counted from 0 without padding.
        id: The token.
        spelling: Its bytes.
        generated: Whether the model wrote it.
        surprisal: -log p in nats; nan where the model gave no logits for it.
        entropy: Of the distribution that it was drawn from.
        activation: (layer,) rms of each layer; nan for the last token of all, which is not run.
        voxels: (voxel,) rms.
        special: Whether it is one of the tokenizer's special tokens, such as the end of a text.

    Examples:
        >>> import torchfmri
        >>> model, tokenizer = torchfmri.load_model("tiny")
        >>> said = []
        >>> scan = torchfmri.scan(model, tokenizer, "Once upon", 2, on_token=said.append)
        >>> said[0].generated, said[-1].generated
        (False, True)
        >>> said[-2].activation.shape == (len(scan.layers),)
        True
    """

    row: int
    position: int
    id: int
    spelling: bytes
    generated: bool
    surprisal: float
    entropy: float
    activation: NDArray[np.float32]
    voxels: NDArray[np.float32]
    special: bool = False


def live_tokens(
    subject: ScanSubject, prompt: EncodedPrompt, speller: Speller
) -> Callable[[LiveStep], Iterator[LiveToken]]:
    """A function from a step to its tokens, in order of position; padding is left out."""
    start = prompt.ids.shape[1]
    padding = (prompt.mask == 0).sum(1).tolist()

    def tell(step: LiveStep) -> Iterator[LiveToken]:
        layers = rms_by_layer(step.activation, subject).float().cpu()
        voxels = rms_by_voxel(step.activation, subject).float().cpu()
        surprisal, entropy = step.surprisal.tolist(), step.entropy.tolist()
        kept = step.kept.tolist()
        for column, tokens in enumerate(zip(*step.ids.tolist(), strict=True)):
            position = step.first + column
            for row, token in enumerate(tokens):
                if not kept[row][column]:
                    continue
                generated = position >= start
                yield LiveToken(
                    row=row,
                    position=position - padding[row],
                    id=token,
                    spelling=speller.spell([token])[0],
                    generated=generated,
                    surprisal=surprisal[row][column],
                    entropy=entropy[row][column],
                    activation=layers[row, column].numpy(),
                    voxels=voxels[row, column].numpy(),
                    special=speller.is_special(token),
                )

    return tell
