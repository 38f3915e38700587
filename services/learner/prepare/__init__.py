"""Makes the policy that a run starts from, as the recipe's `prepare` section says. Used by `offbeat prepare`."""
