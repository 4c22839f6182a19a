"""The figures of `tiercache plan`: how much of a model's KV each tier holds, and when a load pays.

    fields  a config.json whose errors name the field
    layers  the layers that it describes: attention, windows, experts
    states  the recurrent layers among them
    model   all of it, as bytes and FLOPs for each token
    known   models and GPUs by name
    sizes   the figures

Nothing here needs a GPU, the network or a daemon.
"""
