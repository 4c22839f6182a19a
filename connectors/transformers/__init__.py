"""The parts of `transformers_cache`, one folder up: what model is served, and whether it is still the same.

    model   can this model be served, and what do its blocks hold
    watch   what the model computes right now, looked at before each use
"""
