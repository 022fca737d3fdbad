"""The default path on handwritten digits: most weights and hidden units go, the accuracy stays.

`benchmarks/sparsity.py digits` goes along the whole path, for several seeds.
"""

from __future__ import annotations

import pytest

from proxsps import ProxSPSAdam
from proxsps.sparsity import shrink, strength_path
from proxsps.training.tasks import accuracy, digits_task, fit


def test_the_default_path_removes_nine_of_ten_weights_and_half_of_the_units():
    pytest.importorskip("sklearn")
    task, epochs, seed = digits_task(), 20, 1  # with seed 0, a single validation digit decides, and so does rounding
    model = task.network(seed)
    scores = []

    def train(network, optimizer):
        fit(task, network, optimizer, epochs, seed=seed)
        scores.append(accuracy(network, task.test()))

    def judge(network):
        return accuracy(network, task.validation())

    # Chosen by the validation digits alone; the test digits only score what was chosen.
    path = strength_path(model, train, judge, task.example_inputs(), optimizer=ProxSPSAdam, keep=0.09)
    assert path.best.zeros >= 0.9
    assert path.best.dead_units >= path.best.units / 2
    small = shrink(model, task.example_inputs(), timing_seconds=0)
    assert small.report.after.parameters <= 0.1 * small.report.before.parameters
    dense = scores[0]
    assert dense > 0.95
    assert accuracy(small.model, task.test()) >= dense - 0.01
    fit(task, small.model, ProxSPSAdam(small.model.parameters()), epochs, seed=seed, first_epoch=epochs)
    assert accuracy(small.model, task.test()) >= dense - 0.01
