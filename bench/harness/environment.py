"""What a measurement belongs to: command, date, processor, versions. Goes with every result; and its file."""

import datetime
import json
import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("shardrt", "numpy", "numba", "mpi4py", "cupy-cuda12x", "cupy-cuda13x")


def facts(command: str) -> dict[str, str]:
    """By name, as text. Of the command, FILE stands for paths of this machine."""
    return {
        "command": re.sub(r"(?<![^\s='\"])/[^\s'\"]+", "FILE", command),
        "date": datetime.date.today().isoformat(),
        "processor": f"{processor()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "commit": _commit(),
        "versions": ", ".join(f"{name} {version}" for name in PACKAGES if (version := _version(name))),
        **({"mpi": _mpi()} if "mpi4py.MPI" in sys.modules else {}),
    }


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result as JSON with an entry a line, and a row a line in those that are lists of rows."""
    entries = []
    for name, value in result.items():
        rows = isinstance(value, list) and any(isinstance(row, dict | list) for row in value)
        text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]" if rows else json.dumps(value)
        entries.append(f" {json.dumps(name)}: {text}")
    path.write_text("{\n" + ",\n".join(entries) + "\n}\n")


def processor() -> str:
    """The processor's name where the system says it, else its architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def _commit() -> str:
    """Of this checkout, with "-dirty" where files differ from it; "none" where shardrt comes from a wheel."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return "none"
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _mpi() -> str:
    """The library that mpi4py has loaded."""
    lines = sys.modules["mpi4py.MPI"].Get_library_version().split("\n")
    return " ".join(" ".join(lines[:1]).replace("\0", "").split())
