"""Libraries are loaded only from a folder that no other user can have made or filled."""

import os

from shardrt.untrusted import private
from tests.cuda.emulator import ROOT
from tests.cuda.libraries import library_folder


def test_libraries_are_not_loaded_from_where_others_can_put_them(tmp_path):
    own = library_folder(tmp_path / "build" / "own")
    assert own == tmp_path / "build" / "own" and own.stat().st_mode & 0o777 == 0o700
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(own)
    (tmp_path / "file").write_text("")
    for foreign in ("open", "open/inside", "link", "file", "file/inside"):
        found = library_folder(tmp_path / foreign)
        assert found.stat().st_uid == os.getuid() and found.stat().st_mode & 0o777 == 0o700
        assert tmp_path not in found.parents and private(found) == ""
    assert library_folder(ROOT / "build" / "shim").name.startswith("shim") or private(ROOT)
