"""`cost` and `advise`: FLOPs, bytes and seconds of every layer; how to save some.

`counted_step` counts (`flops`, `live_memory`), `layer_times` measures time, `growth` and `laws`
extrapolate to other sizes. `trial` tries what `techniques` lists. A FLOP formula is a line of
`RULES` in `flops`; something new to advise is an entry of `TECHNIQUES`.
"""

from torchfmri._cost.advice import Advice, Option
from torchfmri._cost.advice_run import advise
from torchfmri._cost.cost_run import cost
from torchfmri._cost.growth import Growth
from torchfmri._cost.layer_cost import Cost, LayerCost
