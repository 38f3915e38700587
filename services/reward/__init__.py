"""The reward worker: scores the completions of rollouts, and hands the groups on to the learner.

Read it in this order: `records` (what a sample is), `functions` (what scores it), `calling` (how a function is
called), `scoring` (how values become a score), `worker` (the loop), `server` (how the process is put together).
"""
