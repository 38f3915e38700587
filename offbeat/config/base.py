"""The base of all settings models: strict about keys, frozen once made."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Unknown keys are errors; values can't be changed after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
