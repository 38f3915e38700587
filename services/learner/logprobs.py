"""Log-probs of completion tokens from a causal language model, without full-vocabulary float32 logits in memory.

Legend: B rows, S positions of prompt and completion, T completion positions, V vocabulary.
"""
