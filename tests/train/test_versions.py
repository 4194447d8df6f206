"""The digest by which ranks find that one of them runs other code."""

from shardrt.train.versions import code_digest, versions


def test_the_digest_changes_with_every_source_and_with_nothing_else(tmp_path):
    for folder in ("kernels/cuda", "models", "comm"):
        (tmp_path / folder).mkdir(parents=True)
    files = [
        tmp_path / name for name in ("a.py", "comm/b.py", "kernels/k.py", "kernels/cuda/k.cu", "models/m.py")
    ]
    for file in files:
        file.write_text(file.name)
    seen = {code_digest(tmp_path)}
    (tmp_path / "notes.txt").write_text("not code")
    (tmp_path / "comm" / "__pycache__").mkdir()
    assert code_digest(tmp_path) in seen
    for file in files:
        file.write_text(file.name + "# other")
        seen.add(code_digest(tmp_path))
    files[0].rename(tmp_path / "c.py")
    seen.add(code_digest(tmp_path))
    assert len(seen) == 1 + len(files) + 1


def test_what_ranks_compare_is_the_same_each_time():
    assert versions() == versions()
    assert versions()["numpy"] != "none"
