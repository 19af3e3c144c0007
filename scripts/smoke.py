"""Try an installed torchfmri that has nothing but its own dependencies. No pytest, no extras."""

import importlib.metadata
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import torchfmri


def check_installation() -> None:
    """The package is the installed one, typed, complete, and brought no extras along."""
    package = Path(torchfmri.__file__).parent
    assert "site-packages" in package.parts, f"imported from {package}"
    for name in ("py.typed", "agents.md"):
        assert (package / name).exists(), f"{name} is missing"
    assert torchfmri.__version__ == importlib.metadata.version("torchfmri")
    absent = [name for name in torchfmri.__all__ if not hasattr(torchfmri, name)]
    assert not absent, f"in __all__ but not there: {absent}"
    extras = [
        name
        for name in ("matplotlib", "transformers", "starlette", "pytest")
        if importlib.util.find_spec(name)
    ]
    assert not extras, f"the core must not need {extras}"


def check_inspection() -> None:
    """One inspection gives the right numbers and leaves nothing behind."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x, target = torch.randn(5, 4), torch.randn(5, 2)
    inspector = torchfmri.Inspector(model)
    inspector.watch("*", what=["activations", "gradients"])
    inspection = inspector.run_inspection(x, target=target, loss=nn.MSELoss(), keep="tensors")
    assert torch.equal(inspection["0"].activations, model[0](x))
    mean = inspector.get_statistics("0", "activations")["mean"]
    assert abs(mean - model[0](x).mean().item()) < 1e-6, mean
    assert inspection.table()
    assert not any(module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    try:
        inspector.watch("nothing.*")
    except torchfmri.LayerNotFoundError:
        pass
    else:
        raise AssertionError("a pattern that matches nothing must raise")


def check_scan() -> None:
    """A module from ids to logits is scanned, saved and loaded, without transformers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 30))
    scan = torchfmri.scan(model, None, [3, 4, 5], max_new_tokens=2)
    assert scan.only.checks["gradient_residual"] < 1e-4, scan.only.checks
    with tempfile.TemporaryDirectory() as folder:
        scan.save(Path(folder) / "x.fmri")
        assert torchfmri.load(Path(folder) / "x.fmri").text == scan.text
    try:
        torchfmri.load_model("tiny")
    except torchfmri.InspectionError as error:
        assert "torchfmri[scan]" in str(error), error
    else:
        raise AssertionError("tiny was loaded without transformers")


def check_missing_extra() -> None:
    """A plot without matplotlib says which extra to install."""
    inspector = torchfmri.Inspector(nn.Linear(2, 2))
    inspector.run_inspection(torch.randn(3, 2))
    try:
        inspector.plot_histogram(inspector.layers()[0])
    except ImportError as error:
        assert "torchfmri[plots]" in str(error), error
    else:
        raise AssertionError("plot_histogram worked without matplotlib")


def check_command_line() -> None:
    """Both ways to the command line answer."""
    script = Path(sys.executable).with_name("torchfmri")
    for command in ([str(script)], [sys.executable, "-m", "torchfmri"]):
        subprocess.run([*command, "--help"], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Run the checks, printing one line each."""
    checks = (
        *(check_installation, check_inspection, check_scan, check_missing_extra),
        check_command_line,
    )
    for check in checks:
        check()
        print(f"   {check.__doc__}")


if __name__ == "__main__":
    main()
