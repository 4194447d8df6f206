"""bench.cpu_products: every library computes the product that it is timed at."""

import json
from itertools import product

import numpy as np
import pytest

from bench import cpu_products
from shardrt.kernels import onednn


@pytest.mark.parametrize("kind", cpu_products.KINDS)
def test_contestants_compute_the_products_of_a_linear_layer(kind):
    libraries = ["oneDNN"] if onednn.library() is not None else []
    names = set()
    for name, work, result, exact in cpu_products.contestants(kind, (12, 9, 6)):
        names.add(name)
        assert exact.shape == {"forward": (12, 6), "input": (12, 9), "weight": (6, 9)}[kind]
        work()
        limit = 2**-8 if name == "PyTorch bfloat16" else 1e-6
        np.testing.assert_allclose(result(), exact, rtol=limit, atol=limit * np.abs(exact).max())
    assert {f"{a} {b}" for a, b in product(libraries, ("float32", "bfloat16"))} < names


def test_a_table_and_one_json_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["cpu_products", "--shapes", "8x8x8,9x5x7", "--seconds", "0.001"])
    cpu_products.main()
    *table, line = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    assert len(table) == 1 + 6 and len(told["products"]) == 6 and told["ranks"] == 1


def test_a_wrong_product_is_no_figure(monkeypatch):
    monkeypatch.setattr(cpu_products, "_by_blas", lambda a, b, bias, out, add: out.fill(7.0))
    monkeypatch.setattr("sys.argv", ["cpu_products", "--shapes", "8x8x8", "--seconds", "0.001"])
    with pytest.raises(RuntimeError, match="BLAS float32, forward of 8x8x8: off by"):
        cpu_products.main()
