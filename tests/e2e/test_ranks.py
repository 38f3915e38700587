"""A run on two ranks, resumed on one, and back: checkpoints belong to no number of ranks."""

import pytest

from tests.harness.whole_run import resume, start, write_recipe


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_ranks_may_change_at_a_checkpoint(tmp_path, zero_stage):
    recipe = write_recipe(tmp_path, schedule={"steps": 15}, learner={"zero_stage": zero_stage})
    with start(recipe, "learner.ranks=2") as run:
        run.wait_for_step(4)
        run.kill_all()
        folder = run.folder
    with resume(recipe, folder, "learner.ranks=1") as run:
        run.wait_for_step(9)
        run.kill_all()
    with resume(recipe, folder, "learner.ranks=2") as run:
        run.succeed()
        audit = run.audit()
        assert (audit.trained, audit.terms) == (15 * 8, 3)
