"""Makes the policy that a run starts from, when the recipe has a `prepare` section. `python -m services.learner.prepare`."""
