"""The figures of `tiercache plan`: how much of a model's KV each tier holds, and when a load pays.

    layers  the layers that a config.json describes: attention, windows, experts, recurrent states
    model   the whole model, as bytes and FLOPs for each token
    known   models and GPUs by name
    sizes   the figures

Nothing here needs a GPU, the network or a daemon.
"""
