"""Watch a model during the user's own forward and backward pass (`per="position"`).

`gradients` is the object that users hold. `plan` and `plans` decide what to watch, `capture`
receives calls, `arrivals` gradients and `owners` layers that are run again; `passes` and
`token_map` say which tokens a call worked on. `norms` reduces calls to numbers, and `runs` joins
passes. `account` and `checks` record what came and whether it adds up; `verification` tests it by
experiment. Nothing here may change the user's results or keep the graph alive.
"""
