"""A Monitor inside other trainers and loggers; each needs its own package.

`huggingface` and `lightning` hold a callback for their Trainer, `writers` the writers for
TensorBoard and Weights & Biases. They are public modules and are imported one by one.
"""
