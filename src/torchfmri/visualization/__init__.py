"""Figures; matplotlib is imported only when one is drawn.

`plots` has the public plots of inspections, whose code is in `_histogram`, `_compare`, `_depth` and
`_feature_maps`; `history_plots` draws histories, `diagnosis_plots` diagnoses, `routing_plots`
routing, `lesion_plots` lesions, `attention_plots` heads and their patterns, `lens_plots` lenses and
attributions. The other files with an underscore draw what they are given as arrays. A new plot is a
`plot_*` function here, and a method of the result that it shows.
"""

from torchfmri.visualization import history_plots, plots
from torchfmri.visualization._brain import Band, Brain, draw_brain
from torchfmri.visualization._colour_scale import meaning, scale_colours
from torchfmri.visualization._figure import (
    MOST_LINES,
    axes_or_new,
    check_picture,
    draw_cells,
    draw_colour_bar,
    escape,
    new_figure,
    save_figure,
    write_above,
)
from torchfmri.visualization._scan_lines import Line, draw_lines, scale_wide
from torchfmri.visualization._token_track import TokenTrack, in_context, token_label
from torchfmri.visualization.attention_plots import plot_attention, plot_heads
from torchfmri.visualization.diagnosis_plots import plot_diagnosis
from torchfmri.visualization.lens_plots import (
    plot_lens,
    plot_logit_attribution,
    plot_token_bars,
)
from torchfmri.visualization.lesion_plots import (
    LesionPicture,
    PatchPicture,
    draw_lesions,
    draw_patches,
)
from torchfmri.visualization.plots import (
    plot_compare,
    plot_feature_maps,
    plot_histogram,
    plot_statistics,
)
from torchfmri.visualization.routing_plots import (
    plot_activation,
    plot_prototypes,
    plot_selectivity,
    plot_tradeoff,
    save,
)

__all__ = [
    "history_plots",
    "plot_activation",
    "plot_attention",
    "plot_compare",
    "plot_diagnosis",
    "plot_feature_maps",
    "plot_heads",
    "plot_histogram",
    "plot_lens",
    "plot_logit_attribution",
    "plot_prototypes",
    "plot_selectivity",
    "plot_statistics",
    "plot_token_bars",
    "plot_tradeoff",
    "plots",
    "save_figure",
]
