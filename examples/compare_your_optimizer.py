"""Compare your optimizer with ProxSPS on the paper's problems. Copy this file and put your optimizer into `make`.

Every method starts from the same weights and sees the same batches. Results are kept in `out/compare`: a second call
runs only what is new.

    python examples/compare_your_optimizer.py
"""

import torch

from proxsps import figures
from proxsps.problems import matrix_fac1, matrix_fac2
from proxsps.sweep import Method, grid, run_sweep

# Yours: any torch optimizer. The sweep adds lambda/2 ||x||^2 to the loss, so there is no weight decay here.
mine = Method("adagrad", lambda params, run: torch.optim.Adagrad(params, lr=run.lr), label="Adagrad")
lrs = {mine: [0.03, 0.3], "prox-sps": [1.0, 10.0], "sps": [1.0, 10.0], "sgd": [0.1, 0.5]}

for name, problem in {"matrix-fac1": matrix_fac1(), "matrix-fac2": matrix_fac2()}.items():
    specs = grid(problem, lrs, [1e-4, 1e-2], ["sqrt"], seeds=2, epochs=10)
    runs = run_sweep(specs, f"out/compare/{name}").runs
    last = runs[runs["epoch"] == runs["epoch"].max()]
    print(f"{name}: objective after 10 epochs, by method and step size (rows) and lambda (columns)")
    print(last.pivot_table("objective", ["method", "lr"], "weight_decay").to_string(float_format="%.3g"))
    figures.save(figures.per_lambda(runs, "objective"), f"out/compare/{name}/objective.svg")
