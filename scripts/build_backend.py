"""Builds Chronik's wheels: hatchling, and mypyc for the modules that `[tool.chronik]` in pyproject.toml lists.

`pip install .` compiles these modules if a C compiler and Python's headers are there. Otherwise the wheel is pure, and
`chronik version` gives the reason, because pip does not show what a build prints. CHRONIK_COMPILE=no builds a pure
wheel, CHRONIK_COMPILE=yes fails instead of building one. Editable installs are always pure.

A compiled library never lies beside its source in a checkout: it is built in a temporary folder, from a copy. The wheel
has both, because tracebacks show lines of the source, and `build.json`, which `chronik.observe.build` reads.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.build import (  # noqa: F401 - the frontend calls them
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
)
from hatchling.build import get_requires_for_build_wheel as hatchling_requires
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).resolve().parents[1]
MODE = "CHRONIK_COMPILE"
MODES = ("auto", "yes", "no")
COMPILER = ("mypy[mypyc]>=1.13", "setuptools>=65")
RECORD = "chronik/build.json"
OUTPUT_LINES_MAX = 20
OPTIMIZATION = "1"
MYPY = ("--config-file=", "--no-site-packages", "--follow-imports=silent", "--ignore-missing-imports")
"""mypy reads Chronik's own sources only, so that the result does not depend on what else is installed. `make check`
checks types, with all libraries."""


class BuildFailed(Exception):
    """The reason, for a person."""


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """Only a wheel that will be compiled needs mypyc; an editable install never does."""
    return [*hatchling_requires(config_settings), *(COMPILER if reason_for_pure() is None else ())]


def reason_for_pure() -> str | None:
    """Return why nothing can or shall be compiled here; None if it can."""
    mode = os.environ.get(MODE, "auto")
    if mode not in MODES:
        raise BuildFailed(f"{MODE}={mode}: it is one of {', '.join(MODES)}")
    if mode == "no":
        return f"it was built with {MODE}=no"
    reason = _obstacle()
    if reason is not None and mode == "yes":
        raise BuildFailed(f"{MODE}=yes, but {reason}: install gcc and Python's headers (Debian: gcc, python3-dev)")
    return reason


def _obstacle() -> str | None:
    if platform.python_implementation() != "CPython":
        return f"mypyc does not support {platform.python_implementation()}"
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        return f"there was no C compiler ({compiler[0]}) when it was built"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "headers.c")
        source.write_text("#include <Python.h>\n")
        command = [*compiler, "-I", sysconfig.get_path("include"), "-c", str(source), "-o", str(source) + ".o"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    if "Python.h" in done.stderr:
        return f"Python's headers (python{sysconfig.get_python_version()}-dev) were missing when it was built"
    return f"the C compiler ({compiler[0]}) failed when it was built"


class CompilingHook(BuildHookInterface):
    """Adds the compiled modules to a wheel, and the record of how it was built."""

    PLUGIN_NAME = "custom"
    _folder: Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        reason = reason_for_pure()
        self._folder = Path(tempfile.mkdtemp(prefix="chronik-build-"))
        names: list[str] = []
        if reason is None:
            names = listed_modules()
            try:
                libraries = self._compile(self._folder, names)
            except BuildFailed as error:
                if os.environ.get(MODE) == "yes":
                    shutil.rmtree(self._folder)
                    raise
                names, libraries, reason = [], [], "mypyc failed when it was built"
                print(error, file=sys.stderr)
        if reason is None:
            build_data["pure_python"], build_data["infer_tag"] = False, True
            for library in libraries:
                build_data["force_include"][str(library)] = str(library.relative_to(self._folder / "libraries"))
        else:
            print(f"chronik: not compiled, because {reason}", file=sys.stderr)
        # Of what was compiled: an edit during the build is found like any other.
        copy = self._folder / "src"
        sources = {name: hashlib.sha256((copy / name).read_bytes()).hexdigest() for name in names}
        record = self._folder / "build.json"
        record.write_text(json.dumps({"reason": reason, "compiled": sources}, indent=0))
        build_data["force_include"][str(record)] = RECORD

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @staticmethod
    def _compile(folder: Path, names: list[str]) -> list[Path]:
        """Compile a copy of the sources in a process of its own; return the libraries, below folder/libraries."""
        copy = folder / "src"
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        done = subprocess.run([sys.executable, __file__, str(folder), *names], cwd=copy, capture_output=True, text=True)
        if done.returncode != 0:
            lines = (done.stdout + done.stderr).splitlines()
            raise BuildFailed("\n".join(["chronik: mypyc failed:", *lines[-OUTPUT_LINES_MAX:]]))
        return sorted((folder / "libraries").rglob("*" + sysconfig.get_config_var("EXT_SUFFIX")))


def listed_modules() -> list[str]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return [f"chronik/{name}.py" for name in settings["tool"]["chronik"]["compiled"]]


def main(folder: str, names: list[str]) -> None:
    """Compile modules of the working folder into folder/libraries. Their tracebacks name the files as given here."""
    from setuptools import Distribution  # isort: skip - it provides distutils
    from distutils import ccompiler

    from mypyc.build import mypycify

    threads = ThreadPoolExecutor(os.cpu_count() or 1)

    def compile_in_parallel(
        self: Any, sources: Any, output_dir: Any = None, macros: Any = None, include_dirs: Any = None,
        debug: Any = 0, extra_preargs: Any = None, extra_postargs: Any = None, depends: Any = None,
    ) -> Any:  # fmt: skip
        """Compile as distutils does, but the files of a library at the same time."""
        macros, objects, extra_postargs, options, build = self._setup_compile(
            output_dir, macros, include_dirs, sources, depends, extra_postargs
        )
        arguments = self._get_cc_args(options, debug, extra_preargs)
        jobs = [
            threads.submit(self._compile, each, *build[each], arguments, extra_postargs, options) for each in objects
        ]
        for job in jobs:
            job.result()
        return objects

    ccompiler.CCompiler.compile = compile_in_parallel
    extensions = mypycify(
        [*MYPY, f"--cache-dir={folder}/mypy", *names],
        opt_level=OPTIMIZATION,
        debug_level="0",
        multi_file=True,
        target_dir=f"{folder}/c",
        group_name="chronik",
    )
    distribution = Distribution({"name": "chronik", "ext_modules": extensions})
    build = distribution.get_command_obj("build_ext")
    build.build_lib, build.build_temp = f"{folder}/libraries", f"{folder}/objects"
    distribution.run_command("build_ext")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
