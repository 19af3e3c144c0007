"""The viewer: a page for scans and training runs, live or replayed, or in a notebook.

`board` is what can be shown, whatever it comes from; a new kind of result becomes visible by a
subclass of `Board`, and further data of a known one by a `Panel`. `tiles` makes pictures of tables,
`desk` answers a page's questions. `site` says who may ask, `client` is one open page, `server` puts
them on a port of this machine. `widget` brings the page into a notebook, with a `still` picture for
when its kernel is gone, `page` into one file. The page itself is TypeScript in `viewer/`, built
into `static/`.
"""

from torchfmri._viewer.board import LAYERS, TRACKS, Board, Entry, Health, Metric, Overlay, Panel
from torchfmri._viewer.desk import Desk
from torchfmri._viewer.diff_board import DiffBoard
from torchfmri._viewer.growing import GrowingTable
from torchfmri._viewer.page import whole_page
from torchfmri._viewer.run_board import RunBoard, RunView, ViewedRun, runs_in
from torchfmri._viewer.server import Crosshair, View, serve
from torchfmri._viewer.widget import widget_of
