"""Static figures: each draws on `ax` or on a new figure, and returns the Axes.

This module is public: `torchfmri.visualization.plots`. Nothing here shows a window, changes
matplotlib's settings, or registers a figure with pyplot (except in a notebook, which shows only
those). `plot_histogram(...).figure.savefig(path)` saves. A new figure gets a file of its own and a
line here. Names and arguments are documented, and must stay.
"""

from torchfmri.visualization._compare import plot_compare
from torchfmri.visualization._depth import plot_statistics
from torchfmri.visualization._feature_maps import plot_feature_maps
from torchfmri.visualization._histogram import plot_histogram

__all__ = ["plot_compare", "plot_feature_maps", "plot_histogram", "plot_statistics"]
