"""The experiment behind `torchfmri routing`: many runs, and what they show.

`variants` lists what is compared, `tasks` and `grid_puzzles` make the data, `training_run` is one
run that can be killed and goes on, `many_runs` is all of them; `report` and `figures` show the
results.
"""

from torchfmri.routing.experiment.figures import write_figures
from torchfmri.routing.experiment.grid_puzzles import GridPuzzles, write_puzzles
from torchfmri.routing.experiment.many_runs import Experiment
from torchfmri.routing.experiment.report import table, to_data
from torchfmri.routing.experiment.training_run import RunPlan
from torchfmri.routing.experiment.variants import VARIANTS
