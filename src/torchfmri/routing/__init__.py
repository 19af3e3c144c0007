"""Routing shaped by token gradients: SparseProtoLinear layers, and what trains them.

The layer, the block and a language model of them; `capture` and `signals` read every call,
`meta_loss` says which units are good for which token, and `LearningDynamics` trains computation and
routing as two streams. A new Goodness is a function in `meta_loss`. `experiment` compares them, and
is not imported from here.
"""

from torchfmri.routing.block import KeyValueCache, MoIETransformerBlock, Prototypes
from torchfmri.routing.language_model import RoutingConfig, RoutingLanguageModel
from torchfmri.routing.learning_dynamics import (
    LearningDynamics,
    StepResult,
    computation_parameters,
    routing_parameters,
)
from torchfmri.routing.meta_loss import (
    Divergence,
    Price,
    agreement,
    harmony,
    helpfulness,
    worth,
    worth_over_tokens,
)
from torchfmri.routing.prototype_map import PrototypeMap, map_prototypes
from torchfmri.routing.scaling import jensen_shannon, mas
from torchfmri.routing.signals import Signals
from torchfmri.routing.sparse_proto_linear import Routing, SparseProtoLinear
from torchfmri.routing.unit_rates import UnitRates
from torchfmri.visualization import (
    plot_activation,
    plot_prototypes,
    plot_selectivity,
    plot_tradeoff,
)

__all__ = [
    "Divergence",
    "KeyValueCache",
    "LearningDynamics",
    "MoIETransformerBlock",
    "Price",
    "PrototypeMap",
    "Prototypes",
    "Routing",
    "RoutingConfig",
    "RoutingLanguageModel",
    "Signals",
    "SparseProtoLinear",
    "StepResult",
    "UnitRates",
    "agreement",
    "computation_parameters",
    "harmony",
    "helpfulness",
    "jensen_shannon",
    "map_prototypes",
    "mas",
    "plot_activation",
    "plot_prototypes",
    "plot_selectivity",
    "plot_tradeoff",
    "routing_parameters",
    "worth",
    "worth_over_tokens",
]

# As in `torchfmri`: a saved model names this package, not the file where its class is defined.
for _name in __all__:
    globals()[_name].__module__ = __name__
del _name
