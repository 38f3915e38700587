"""Which processes a recipe becomes."""

from pathlib import Path

import pytest

from offbeat.config import Recipe
from offbeat.config.load import parse_recipe
from offbeat.errors import ConfigError
from offbeat.local import commands
from offbeat.local.supervisor import ProcessSpec


def specs(recipe: Recipe, **sections: dict[str, object]) -> list[ProcessSpec]:
    tree = recipe.model_dump(mode="json")
    for section, values in sections.items():
        tree[section] |= values
    return commands.worker_specs(
        parse_recipe(tree, source="test"),
        Path("recipe.yaml"),
        redis_url="redis://127.0.0.1:1/0",
        checkpoint_address="127.0.0.1:2",
        cores=2,
    )


def test_one_process_for_each_replica(recipe: Recipe) -> None:
    found = specs(recipe, generator={"replicas": 2}, reward={"replicas": 3})
    names = [spec.name for spec in found]
    assert names == ["generator.0", "generator.1", "reward.0", "reward.1", "reward.2", "learner.0"]


def test_processes_are_told_where_the_others_are(recipe: Recipe) -> None:
    for spec in specs(recipe):
        line = " ".join(spec.command)
        assert f"-m services.{spec.service} --recipe recipe.yaml" in line
        assert "--set redis.url=redis://127.0.0.1:1/0" in line
        assert "--set checkpoint.address=127.0.0.1:2" in line
        assert spec.env["OMP_NUM_THREADS"] == "1"


def test_only_the_learner_ends_the_run_and_it_stops_first(recipe: Recipe) -> None:
    found = specs(recipe)
    assert [spec.service for spec in found if spec.finishes] == ["learner"]
    checkpoint = commands.checkpoint_spec(
        recipe, Path("recipe.yaml"), redis_url="redis://127.0.0.1:1/0", cores=2
    )
    order = {spec.service: spec.stop_order for spec in [*found, checkpoint]}
    assert order["learner"] < order["generator"] == order["reward"] < order["checkpoint"]


def test_several_ranks_go_through_the_launcher(recipe: Recipe) -> None:
    learner = specs(recipe, learner={"ranks": 2})[-1]
    assert learner.command[1:6] == ("-m", "services.learner.launch", "--ranks", "2", "--recipe")


def test_gpus_are_shared_out(recipe: Recipe) -> None:
    assert not any("CUDA_VISIBLE_DEVICES" in spec.env for spec in specs(recipe))
    found = specs(
        recipe,
        generator={"replicas": 2, "devices": [4, 5, 6, 7]},
        reward={"replicas": 2, "devices": [3]},
        learner={"ranks": 3, "devices": [0, 1, 2]},
    )
    shown = [spec.env["CUDA_VISIBLE_DEVICES"] for spec in found]
    assert shown == ["4,5", "6,7", "3", "3", "0,1,2"]


@pytest.mark.parametrize(
    ("section", "values"),
    [("generator", {"replicas": 2, "devices": [0, 1, 2]}), ("learner", {"devices": [0, 1]})],
)
def test_gpus_that_do_not_fit_the_processes(
    recipe: Recipe, section: str, values: dict[str, object]
) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.devices: expected"):
        specs(recipe, **{section: values})


@pytest.mark.parametrize(
    "rpc", [{"bind": "127.0.0.1:50051"}, {"metrics_port": 9000}], ids=["bind", "metrics_port"]
)
def test_replicas_cannot_share_a_fixed_port(recipe: Recipe, rpc: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"generator\.rpc\.\w+: found the fixed port \d+.*port 0"):
        specs(recipe, generator={"replicas": 2, "rpc": rpc})


def test_grace_outlasts_the_longest_drain(recipe: Recipe) -> None:
    assert commands.grace_seconds(recipe) > recipe.generator.rpc.drain_seconds


def test_each_service_gets_only_sections_that_matter(recipe: Recipe) -> None:
    assert "learner" not in commands.recipe_part(recipe, "generator")
    assert commands.recipe_part(recipe, "learner")["schedule"]["steps"] == 3
    assert set(commands.SECTIONS) == set(commands.SERVICES)


@pytest.mark.parametrize(
    ("node", "ranks", "message"),
    [
        (commands.Node(0, 2, "host:1"), 1, "expected a multiple of the 2 nodes, found 1"),
        (commands.Node(0, 2, "host:1"), 3, "expected a multiple of the 2 nodes, found 3"),
        (commands.Node(2, 2, "host:1"), 2, "expected 0 to 1, found 2"),
        (commands.Node(1, 2), 2, "expected HOST:PORT of node 0"),
    ],
)
def test_nodes_that_do_not_fit(node: commands.Node, ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        commands.service_command("learner", "recipe.yaml", ranks=ranks, node=node)


def test_the_ranks_of_a_node() -> None:
    node = commands.Node(1, 2, "host:1")
    found = " ".join(commands.service_command("learner", "recipe.yaml", ranks=4, node=node))
    assert "launch --ranks 2 --nodes 2 --node 1 --meet host:1 --recipe recipe.yaml" in found
