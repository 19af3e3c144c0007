"""Values by prompt: which tokens count, which prompts are compared, and tables of them.

`Scan.contrast`, `glm` and `classify` and `torchfmri.contrast` come through here; the statistics are
in the room `_contrast`, which knows nothing of scans. `question` holds what the user asked,
`token_choice` the tokens, `prompt_values` makes the table.
"""
