"""Recipes of models/configs, proved as `make prove` does, on few ranks; and what it says if one is wrong."""

from shardrt.fsdp.whole_gradient import WholeGradient
from tests import prove_recipes


def test_recipes_are_proved(capsys):
    assert prove_recipes.main(["--only", "digits-vit,finetune,moe-small", "--ranks", "1,64"]) == 0
    head, *rows, _, last = capsys.readouterr().out.splitlines()
    assert head.split() == ["recipe", "ranks", *prove_recipes.CHECKS, "seconds", "with"]
    assert [row.split()[:2] for row in rows] == [
        [recipe, ranks] for recipe in ("digits-vit", "finetune", "moe-small") for ranks in ("1", "64")
    ]
    assert all(row.split()[2:5] == ["proved"] * 3 for row in rows) and last == "6 of 6 are proved"
    assert rows[-1].endswith("--batch-size 64") and rows[0].endswith("--each")


def test_a_recipe_that_leaves_a_sum_out_is_reported_with_its_command(capsys, monkeypatch):
    monkeypatch.setattr(WholeGradient, "send", lambda self, slot, out, accumulate: None)
    assert prove_recipes.main(["--only", "digits-vit", "--ranks", "2"]) == 1
    printed = capsys.readouterr().out
    assert "digits-vit on 2 ranks is not proved\nshardrt prove --ranks 2 --each -- train " in printed
    assert "\ngradients: NOT PROVED\n" in printed
    assert printed.endswith("0 of 1 are proved\n")
