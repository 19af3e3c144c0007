"""From one call of a layer to the factors of its parameters, by a rule or by tracking.

`layer_rules` has the closed forms, `recurrent` those of RNN, GRU and LSTM. `trace` follows tokens
through operations, and `operations` says what each one does with their `origins`: `joins`, `sums`,
`layouts` and `grids` are the algebra, `recurrences` places uses in loops. `rerun` runs a layer
again; there `tracker` follows parameters, and `uses` makes terms of it.
"""
