"""The parts of `transformers_cache`, one folder up: which models are served, and whether one is unchanged.

calls      which calls of generate are served, and how transformers prepares them
model      whether this model can be served, and the form of its blocks
watch      what the model computes right now, checked before each use
values     its attributes
code       the functions that it runs
packages   which of these belong to a package with a version
"""
