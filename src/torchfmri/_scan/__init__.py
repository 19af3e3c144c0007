"""`scan`: a language model watched token by token, and the record that is left of it.

`run` lets the model answer and measures it; `record` is one scanned sequence and what can be read
from it; `store` keeps scans on disk; `pictures` makes tables, figures and the page; `prompts` makes
tables by prompt, for contrasts. `scan_record` is the `Scan` that users hold; `two_scans` compares
two. Something new to keep per sequence is a tensor in `store/packing.py`, written and read there.
"""

from torchfmri._scan.loading import load
from torchfmri._scan.pictures.bands import layer_bands
from torchfmri._scan.prompts.question import condition_of
from torchfmri._scan.record.anatomy import Anatomy
from torchfmri._scan.record.blocks import outline_of
from torchfmri._scan.record.reading import Reading
from torchfmri._scan.record.sequence import ScannedSequence, Tokens
from torchfmri._scan.run.dataset import DatasetScan, scan_rows
from torchfmri._scan.run.dataset_rows import DatasetRow, rows_of
from torchfmri._scan.run.entry_points import scan, scan_dataset, stream
from torchfmri._scan.run.lenses import attribute_inputs, attribute_logit, lens
from torchfmri._scan.run.live_board import TELL_EVERY, LiveBoard
from torchfmri._scan.run.live_token import LiveToken
from torchfmri._scan.run.model_call import (
    is_causal,
    logits_of,
    refuse_unknown_ids,
    takes,
)
from torchfmri._scan.run.probe import longest_sequence
from torchfmri._scan.run.prompt import encode
from torchfmri._scan.run.refusals import refuse_two_stacks, refuse_without_tokens
from torchfmri._scan.run.scan_options import ScanOptions
from torchfmri._scan.run.scanner import Scanner
from torchfmri._scan.run.stream import ScanStream
from torchfmri._scan.scan_record import Scan
from torchfmri._scan.store.repair import repair
from torchfmri._scan.store.saving import require_replaceable
from torchfmri._scan.two_scans import contrast
from torchfmri._scan.viewing import board_of, difference_of, view
