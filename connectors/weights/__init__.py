"""Whether a model still is what it was: shared by the connectors of all engines.

    sample         a few elements of every tensor
    module_facts   attributes and code of modules
"""
