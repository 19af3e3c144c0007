"""Run a language model and measure it: from a prompt to scanned sequences.

`entry_points` has the public functions, `scanner` checks what was asked for, `batch_run` runs one
batch. While the model generates, `live` and `live_hooks` record (`recorded_generation`,
`recorded_parts` and `compiled_step` in compiled code); `gradient_pass`, `cached_pass` and
`token_loss_pass` each are one kind of gradient over the finished sequence. `subject`, `probe` and
`token_axis` find out which layers have tokens; `readings` reduces values, and `batch_rows` cuts the
batch into sequences. `dataset` scans many prompts into a folder, `lenses` reads one prompt without
a scan.
"""
