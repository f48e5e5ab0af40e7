"""The loop: a model, its tools, and rules for how they meet.

`steps` decides and `ledger` judges, both without I/O; `driver` performs. Models and tool servers are behind the
protocols of `models.base` and `tools`.
"""
