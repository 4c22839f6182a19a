"""Detects changes of a model; shared by the connectors of all engines.

sample         a few elements of every tensor
module_facts   attributes and code of modules
"""
