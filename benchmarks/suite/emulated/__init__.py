"""Services whose engine calls sleep for recorded times, so that two cores can hold a whole run without fighting.

Everything else is real: streams, checkpoint service, scheduling, staging, weight transfer, accounts. `python -m
benchmarks.suite.emulated.run` is `offbeat run` with these services in the place of the generator and the learner.
"""
