"""The user's model: the names of its layers, and running it without leaving a trace.

`patterns` and `layers` turn wildcards into names and modules. `blocks`, `block_places`, `places`
and `place_table` find `L9H6` in a block, a model, a stored scan. `snapshot` and `generators` put
back what a pass changed, also on Ctrl-C (`process`, with the off switch) and one thread at a time
(`threads`). `copies` are trained in place of the user's model, `passes` runs the user's data,
`optimizer_steps` and `step_calls` notice steps, and `named_models` and `factory` load named models.
"""

from torchfmri._model.block_places import Place
from torchfmri._model.blocks import Block, Ranges, find_stacks, width_in
from torchfmri._model.copies import TrainingCopies, copy_training, shared_outside
from torchfmri._model.factory import FORM, Subject, find_factory, kinds_of, load_subject
from torchfmri._model.generators import RandomState, random_state
from torchfmri._model.layers import (
    Pattern,
    check_pattern,
    each_once,
    every_module,
    every_parameter,
    find_layers,
    first_names,
    leaf_layers,
    named_layers,
    named_parameters,
    runnable,
    unwrap,
)
from torchfmri._model.named_models import CHOICES, NamedModel, load_model
from torchfmri._model.optimizer_steps import (
    Concerns,
    OptimizerSteps,
    check_optimizers,
    needs_closure,
)
from torchfmri._model.passes import (
    TARGET_NAMES,
    Loss,
    acts_on_gradients,
    arguments_for,
    check_differentiable,
    device_of,
    loss_in,
    loss_of,
    needs_target,
    own_loss,
    prepare_backward,
    refuse_list,
    refuse_meta,
    refuse_scripted,
    run_backward,
    spared_grad,
    thawed,
)
from torchfmri._model.patterns import (
    check_names,
    match_all,
    match_names,
    nearest_names,
    not_found,
)
from torchfmri._model.place_table import place_table, stored_layers
from torchfmri._model.places import input_layers, names_in_block, parse_place, places_of
from torchfmri._model.process import (
    compiled_code_as_eager,
    ending_by_signals,
    kept_whole,
    switched_off,
    whole_restorations,
)
from torchfmri._model.snapshot import copy_of_data, evaluating, generators_restored, unchanged
from torchfmri._model.step_calls import CallListener, StepCalls
from torchfmri._model.threads import TrainedModel, one_thread, own_turn, resting, watched
