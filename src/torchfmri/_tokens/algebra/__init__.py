"""The mathematics of token gradients, and the results that users read.

`factors` computes with terms (short sums of outer products), `block` with the gradients of token
losses, `grams`, `sketch` and `voxels` compute one quantity each, and `reduced` holds numbers that
were computed during the backward pass. `gradient`, `selection`, `coverage` and `verification` are
the public results. `parameter` describes parameters. Nothing in here knows hooks or passes, so
every formula can be tested by itself against gradients formed in full.
"""
