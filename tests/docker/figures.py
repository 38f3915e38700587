"""Figures that a try gives beside its outcome: sizes of images, times of starts.

OFFBEAT_DOCKER_FIGURES   file that gets a JSON object a line; default: nothing is kept
"""

import json
import os
from pathlib import Path


def keep(what: str, name: str, value: float, unit: str) -> None:
    """Keeps one figure, such as ``keep("image", "learner", 1.9, "GB")``."""
    path = os.environ.get("OFFBEAT_DOCKER_FIGURES")
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(
                json.dumps({"what": what, "name": name, "value": value, "unit": unit}) + "\n"
            )
