"""How cores are shared out."""

import pytest

from offbeat.config import Recipe
from offbeat.config.load import parse_recipe
from offbeat.local.threads import cores_available, share_threads


def changed(recipe: Recipe, **sections: dict[str, object]) -> Recipe:
    tree = recipe.model_dump(mode="json")
    for section, values in sections.items():
        tree[section] |= values
    return parse_recipe(tree, source="test")


def test_two_cores_are_one_each(recipe: Recipe) -> None:
    shares = share_threads(recipe, 2)
    assert shares == {"learner": 1, "generator": 1, "reward": 1, "checkpoint": 1}


def test_halves_are_divided_among_processes(recipe: Recipe) -> None:
    many = changed(recipe, learner={"ranks": 2}, generator={"replicas": 4})
    shares = share_threads(many, 16)
    assert shares == {"learner": 4, "generator": 2, "reward": 2, "checkpoint": 1}


def test_taking_turns_gives_all_cores_to_both(recipe: Recipe) -> None:
    synchronous = changed(recipe, schedule={"max_lag": 0})
    shares = share_threads(synchronous, 8)
    assert (shares["learner"], shares["generator"]) == (8, 8)


def test_settings_win(recipe: Recipe) -> None:
    explicit = changed(
        recipe, learner={"threads": 3}, generator={"threads": 5}, reward={"threads": 7}
    )
    shares = share_threads(explicit, 2)
    assert shares == {"learner": 3, "generator": 5, "reward": 7, "checkpoint": 1}


@pytest.mark.parametrize("cores", [1, 2, 3, 64])
def test_nobody_gets_nothing(recipe: Recipe, cores: int) -> None:
    crowd = changed(recipe, learner={"ranks": 8}, generator={"replicas": 8}, reward={"replicas": 0})
    assert min(share_threads(crowd, cores).values()) >= 1


def test_there_is_a_core() -> None:
    assert cores_available() >= 1
