"""Runs in this process leave out what takes longer than they do, and is tested for itself."""

import pytest

from shardrt.train import job, metrics


@pytest.fixture(scope="module", autouse=True)
def plain_runs():
    """The speed of products, measured by every rank at its start, and the picture at the end.

    (test_command starts runs that have both; test_metrics has the picture.)
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "product_flops", lambda: 1e10)
        patch.setattr(metrics, "plot_losses", lambda records, path: None)
        yield


@pytest.fixture
def here(folder, monkeypatch):
    """Tests run in the folder of the module's runs."""
    monkeypatch.chdir(folder)
