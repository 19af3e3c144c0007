"""The experiment behind `torchfmri routing`: many runs, and what they show.

`tasks` makes the data, `training_run` lists the variants and is one run that can be killed and goes
on, `many_runs` is all of them, and `report` shows the results.
"""

from torchfmri.routing.experiment.many_runs import Experiment
from torchfmri.routing.experiment.report import table, to_data, write_figures
from torchfmri.routing.experiment.tasks import GridPuzzles, write_puzzles
from torchfmri.routing.experiment.training_run import VARIANTS, RunPlan
