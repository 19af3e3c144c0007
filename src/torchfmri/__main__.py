"""`python -m torchfmri` is `torchfmri`."""

from torchfmri.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
