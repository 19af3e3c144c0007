"""Differentiate each token's own loss by itself (`per="token_loss"`).

`gradients` is the object that users hold and `gradient` its result for one parameter. `loss_pass`
runs the backward passes in chunks, `vector_jacobian` computes them, and `routes` decides for each
parameter whether the factors in `matrix_calls` explain its gradient or whether it is formed in
full. `token_losses` makes the losses. `dots` is a separate way to inner products with a direction,
in forward mode and without hooks.
"""
