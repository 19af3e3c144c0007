"""A Monitor inside other trainers and loggers; each needs its own package.

`huggingface` and `lightning` hold a callback for their Trainer, `writers` the writers for
TensorBoard, Weights & Biases and trackio, which `dashboards` finds where a trainer has opened one.
They are public modules and are imported one by one.
"""
