"""The learner: reads the data set, issues cohorts of prompt tasks, trains on scored groups, publishes weights.

Read it in this order: `loop` (the steps), `cohorts` (what is issued and gathered; no I/O), `coordinator` (streams and
checkpoint service), `trainer` (DeepSpeed), `losses`.
"""
