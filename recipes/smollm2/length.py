"""Prompts and reward of `smollm2_length.yaml`: one question about one thing, answered in about so many words.

The recipe names `rows` as a source of data and `near` as a reward function; both are plain functions, as yours may be.
"""

TEMPLATES = (
    "What is {}?",
    "Why do people like {}?",
    "Tell me about {}.",
    "How would you describe {} to a child?",
    "What should I know about {}?",
)
_LISTED = (
    "bread, rain, the moon, a violin, winter, chess, honey, a bicycle, the sea, coffee, gravity, a library, "
    "football, a volcano, tea, a garden, gold, a dream, electricity, a bridge, wool, the heart, a map, cheese, "
    "a forest, photography, salt, a robot, the internet, a horse, painting, ice, a clock, chocolate, a desert, "
    "jazz, a river, glass, a school, bees, a ship, poetry, the sun, a mountain, bamboo, a city, silk, a train, "
    "dancing, a mirror, paper, wind, an island, soup, a telescope, friendship, rice, a castle, thunder, a cat, "
    "running, a window, olive oil, a festival, snow, a doctor, cotton, a lighthouse, music, an apple, a market, "
    "swimming, copper, a whale, spring, a novel, a kite, clay, a wedding, oxygen, an owl, a farm, cinnamon, fire"
)
THINGS = _LISTED.split(", ")
HELDOUT_THINGS = 20


def rows(part: str) -> list[dict[str, str]]:
    """Questions about the last `HELDOUT_THINGS` things (part "heldout"), or about all others (part "train")."""
    things = THINGS[-HELDOUT_THINGS:] if part == "heldout" else THINGS[:-HELDOUT_THINGS]
    return [{"question": template.format(thing)} for template in TEMPLATES for thing in things]


def near(completions: list[str], words: int, **_: object) -> list[float]:
    """1 for an answer of exactly `words` words, falling in a straight line to 0 at none and at twice as many."""
    return [max(0.0, 1.0 - abs(len(text.split()) - words) / words) for text in completions]
