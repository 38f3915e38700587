"""Data sets: rows from a source (`sources`), prompts from rows (`prompts`)."""
