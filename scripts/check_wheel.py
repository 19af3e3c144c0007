"""Build the sdist and the wheel, and try the wheel in a clean environment.

The environment holds the wheel and what it asks for, nothing else: what works here works for a
user who typed `pip install torchfmri`. Run through `make wheel`.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START = time.monotonic()
SMOKE = ROOT / "scripts" / "smoke.py"


def main() -> int:
    """Run the steps one after the other; the first that fails ends the program."""
    with tempfile.TemporaryDirectory(prefix="torchfmri-wheel-") as folder:
        place = Path(folder)
        distributions = place / "dist"
        step("build sdist and wheel")
        run(sys.executable, "-m", "build", "--outdir", str(distributions), str(ROOT))
        (wheel,) = distributions.glob("*.whl")
        (sdist,) = distributions.glob("*.tar.gz")
        step(f"contents of {wheel.name} and {sdist.name}")
        check_contents(wheel, sdist)
        step("clean environment")
        python = make_environment(place / "environment")
        run(
            python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
            "-c", str(ROOT / "constraints.txt"), str(wheel),
        )  # fmt: skip
        step("smoke test of the installed wheel")
        # -I: neither the checkout nor the user's site-packages can stand in for the wheel.
        run(python, "-I", str(SMOKE), cwd=place)
    print("wheel: ok")
    return 0


def check_contents(wheel: Path, sdist: Path) -> None:
    """Stop when a file is missing from the distributions, or in them by mistake."""
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = archive.namelist()
    with tarfile.open(sdist) as archive:
        in_sdist = [name.partition("/")[2] for name in archive.getnames()]
    sources = (ROOT / "src").rglob("*")
    expected = {
        str(path.relative_to(ROOT / "src"))
        for path in sources
        if path.is_file() and "__pycache__" not in path.parts
    }
    problems = [f"missing in the wheel: {name}" for name in sorted(expected - set(in_wheel))]
    problems += [
        f"not part of the package: {name}"
        for name in in_wheel
        if not name.startswith("torchfmri/") and ".dist-info/" not in name
    ]
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in in_wheel):
        problems.append("missing in the wheel: LICENSE")
    problems += [
        f"missing in the sdist: {name}"
        for name in ("LICENSE", "README.md", "pyproject.toml", "src/torchfmri/py.typed")
        if name not in in_sdist
    ]
    if problems:
        sys.exit("\n".join(problems))
    print(f"   {len(in_wheel)} files in the wheel, {len(in_sdist)} in the sdist")


def make_environment(folder: Path) -> str:
    """The Python of a new environment that sees nothing of the one we run in."""
    venv.create(folder, with_pip=True, system_site_packages=False)
    return str(folder / ("Scripts" if os.name == "nt" else "bin") / "python")


def run(*command: str, cwd: Path | None = None) -> None:
    """Run a command; show its output only when it fails."""
    done = subprocess.run(
        command, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\nfailed with {done.returncode}: {' '.join(command)}")
    if str(SMOKE) in command:
        print(done.stdout, end="")


def step(text: str) -> None:
    """Announce a step with the seconds since the program started."""
    print(f"[{time.monotonic() - START:5.1f} s] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
