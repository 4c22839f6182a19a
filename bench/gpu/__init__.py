"""The parts of `make gpu-check`: everything that only a GPU can show, in one run with a deadline.

    runner        runs parts as processes with limits, writes results as they come, and the table at the end
    parts         what is run, in which order, and how long it may take
    tell          how a part says what it found
    wheels        packages for a machine without a network: gathered here, installed there
    place         the device under test; in a rehearsal the CPU, with stand-ins

    environment, registering, gpu_tests, transfers, engine, direct, engines, faults, benchmarks    the parts

A part is a module with a function `run`. bench/README.md describes the results.
"""
