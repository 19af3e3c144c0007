"""Side-by-side costs: what watching a model adds to a plain run, for us and for our peers.

One subject per module; `python -m benchmarks SUBJECT --json` runs it. A subject exposes
`add_arguments(parser)` and `main(arguments) -> dict`.
"""
