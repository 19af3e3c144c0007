"""Tables, labels and words for terminals and notebooks.

`table` shows statistics, `grid` shows anything else in columns. `columns` fits
columns into a terminal, `labels` shortens names, `rows` and `words` write numbers.
`progress` is the bar on standard error.
"""

from torchfmri._arguments import few
from torchfmri._files import printable
from torchfmri._text.columns import (
    ASCII,
    BLOCKS,
    BOLD,
    DIM,
    RED,
    Column,
    encodable,
    line_width,
    output_style,
    paragraph,
    terminal_text,
)
from torchfmri._text.grid import Grid
from torchfmri._text.labels import display_width, layer_label, shorten, take, wrap
from torchfmri._text.progress import Progress, in_notebook
from torchfmri._text.rows import (
    Row,
    describe_bad,
    describe_state,
    group_reasons,
    number_text,
    plural,
    probability_text,
    say_note,
    say_reasons,
    share_text,
    star,
)
from torchfmri._text.table import html_table, text_table
from torchfmri._text.words import (
    apart,
    bytes_text,
    change_text,
    flops_text,
    how_many,
    listed,
    percent,
    seconds_text,
)
