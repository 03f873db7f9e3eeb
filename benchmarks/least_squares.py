"""Time least squares and causal linear attention against the usual ways; print a table and write records.

Run with ``make bench``. All methods of one comparison see the same data in the same process, take turns, and are
compared by medians; before anything is timed, their answers must agree. Records go to ``results/``.
"""

import argparse
from collections.abc import Callable

import numpy as np
import scipy.linalg
import torch
from measuring import counted, take_turns
from sklearn.linear_model import LinearRegression, Ridge

from gbattn.conventions import Record
from gbattn.least_squares import LeastSquares, OLSAttention, linear_attention

SHAPES = ((10_000, 50), (1_000_000, 50), (100_000, 500))
QUERY_ROWS = 1000


def cholesky_refined(X: torch.Tensor, Y: torch.Tensor, rows: int = 8192) -> torch.Tensor:
    """The plain fast way: a Cholesky factor of XᵀX, read block by block, and one step of iterative refinement."""
    blocks = [(X[i : i + rows], Y[i : i + rows]) for i in range(0, len(X), rows)]
    L = torch.linalg.cholesky(sum(x.mT @ x for x, _ in blocks))
    beta = torch.cholesky_solve(sum(x.mT @ y for x, y in blocks), L)
    return beta + torch.cholesky_solve(sum(x.mT @ (y - x @ beta) for x, y in blocks), L)


def regression_methods(n: int, d: int) -> dict[str, dict[str, Callable]]:
    """Fitting, and fitting then predicting new rows, without an intercept: the same problem for every method."""
    rng = np.random.default_rng(0)
    X = rng.standard_normal((n, d))
    y = X @ rng.standard_normal(d) + rng.standard_normal(n)
    X_query = rng.standard_normal((QUERY_ROWS, d))
    context = [torch.from_numpy(a) for a in (X, y[:, None], X_query)]
    ridge = Ridge(alpha=0.0, fit_intercept=False, solver="cholesky")
    return {
        "fit": {
            "numpy lstsq": lambda: np.linalg.lstsq(X, y)[0],
            "scipy lstsq gelsy": lambda: scipy.linalg.lstsq(X, y, lapack_driver="gelsy", check_finite=False)[0],
            "torch lstsq gels": lambda: torch.linalg.lstsq(*context[:2], driver="gels").solution[:, 0],
            "torch Cholesky refined": lambda: cholesky_refined(*context[:2])[:, 0],
            "sklearn Ridge cholesky": lambda: ridge.fit(X, y).coef_,
            "sklearn LinearRegression": lambda: LinearRegression(fit_intercept=False).fit(X, y).coef_,
            "LeastSquares accurate": lambda: LeastSquares(fit_intercept=False).fit(X, y).coef_,
            "LeastSquares fast": lambda: LeastSquares(fit_intercept=False, mode="fast").fit(X, y).coef_,
        },
        "predict in context": {
            "numpy lstsq": lambda: X_query @ np.linalg.lstsq(X, y)[0],
            "sklearn LinearRegression": lambda: LinearRegression(fit_intercept=False).fit(X, y).predict(X_query),
            "OLSAttention accurate": lambda: OLSAttention.in_context(*context).numpy()[:, 0],
            "OLSAttention fast": lambda: OLSAttention.in_context(*context, mode="fast").numpy()[:, 0],
        },
    }


def causal_methods(T: int, largest_quadratic: int, K: int = 64) -> dict[str, Callable]:
    """Causal linear attention of one head in float32: chunked, and with the T × T matrix while it fits."""
    q, k, v = (torch.randn(1, 1, T, K, generator=torch.Generator().manual_seed(i)) for i in range(3))
    methods = {"chunked": lambda: linear_attention(q, k, v, causal=True)}
    if T <= largest_quadratic:
        methods["quadratic"] = lambda: (q @ k.mT).tril() @ v
    return methods


def demand_agreement(methods: dict[str, Callable], tolerance: float) -> None:
    """Stop unless all methods give the same answer, relative to its largest entry."""
    answers = {name: np.asarray(method()) for name, method in methods.items()}
    first, *others = answers
    for name in others:
        gap = abs(answers[name] - answers[first]).max() / abs(answers[first]).max()
        if not gap <= tolerance:
            raise SystemExit(f"{name} and {first} differ by a relative {gap:.1e}; wanted at most {tolerance:.0e}")


def report(
    experiment: str, settings: dict, methods: dict[str, Callable], runs: int, tolerance: float, varying: str
) -> None:
    """Time the methods, print a row for each and save a record for each."""
    demand_agreement(methods, tolerance)
    timed = take_turns(methods, runs)
    slowest = max(times.median for times in timed.values())
    problem = " ".join(map(str, settings.values()))
    for name, times in timed.items():
        cells = "".join(f"{seconds:11.5f}" for seconds in times.spread.values())
        print(f"{problem:32} {name:26}{cells} {slowest / times.median:8.1f}×")
        record = Record(experiment, settings | {varying: name, "runs": runs}, times.spread)
        record.save(f"{problem} {name}".replace(" ", "-").lower())


def benchmark_regression(runs: int) -> None:
    for n, d in SHAPES:
        for task, methods in regression_methods(n, d).items():
            report("benchmark-least-squares", {"task": task, "n": n, "d": d}, methods, runs, 1e-9, "method")


def benchmark_causal_attention(runs: int, largest_quadratic: int) -> None:
    for T in (2**e for e in range(10, 17)):
        methods = causal_methods(T, largest_quadratic)
        report("benchmark-causal-attention", {"T": T, "K": 64}, methods, runs, 1e-4, "form")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=counted, default=7, help="timed runs of each method (default 7)")
    parser.add_argument(
        "--largest-quadratic", type=int, default=16_384, help="longest T for the form with a T × T matrix"
    )
    options = parser.parse_args()
    print(f"{'problem':32} {'method':26} {'median s':>10} {'min s':>10} {'max s':>10} {'vs slowest':>9}")
    benchmark_regression(options.runs)
    benchmark_causal_attention(options.runs, options.largest_quadratic)


if __name__ == "__main__":
    main()
