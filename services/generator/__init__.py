"""The generator: takes prompt tasks, samples groups of completions with the newest weights, hands rollouts on."""
