"""Say in words how a contrast is judged: which threshold, what is outlined, what came out.

`ContrastBoard` writes these sentences above the map. They are read by people who do not know the
statistics, so each says what its error rate means. Wording may change freely, but "at most 5 % of
these are chance" (FDR) and "5 % risk that any is" (family-wise) must not be mixed up.
"""

from __future__ import annotations

import numpy as np

from torchfmri._contrast.record import Contrast
from torchfmri._text import plural, printable

_CONTROLS = {
    "fdr": "FDR",
    "bonferroni": "Bonferroni",
    "max": "the largest statistic",
    "fpr": "uncorrected",
}
_RISKS = {
    "fdr": "and at most {percent} of these are expected to be chance",
    "bonferroni": "with a risk of {percent} that any of these is chance",
    "max": "with a risk of {percent} that any of these is chance",
    "fpr": "though {percent} of all would do so by chance",
}


def threshold_title(contrast: Contrast) -> str:
    """Return the threshold of a contrast in a word or two."""
    if contrast.height_control is None:
        return "none"
    return f"{_CONTROLS[contrast.height_control]} {contrast.alpha:g}"


def outline_meaning(contrast: Contrast) -> str:
    """Return in words what it means that a cell is outlined."""
    if np.isnan(contrast.p).all():
        return "nothing is tested: effects only"
    if contrast.height_control is None:
        return "no threshold: nothing is outlined"
    risk = _RISKS[contrast.height_control].format(percent=f"{100 * contrast.alpha:g} %")
    return f"outlined: differs, {risk} ({threshold_title(contrast)})"


def count_sentence(contrast: Contrast) -> str:
    """Return a sentence: how many differ between what, by which threshold, over which prompts."""
    tested, kept = int((~np.isnan(contrast.p)).sum()), int(contrast.survives.sum())
    sides = [printable(str(each)) for each in contrast.conditions]
    grouped = len(sides) > 1 and not contrast.test.startswith("GLM")
    between = "between" if len(sides) == 2 else "among"
    asked = f" {between} {' and '.join(sides)}" if grouped else f": {printable(contrast.question)}"
    sizes = [len(each) for each in contrast.prompts.values()]
    prompts = f"{' and '.join(map(str, sizes[:-1]))} and {plural(sizes[-1], 'prompt')}"
    prompts = prompts if len(sizes) > 1 else plural(sum(sizes), "prompt")
    many = plural(tested, contrast.level)
    if not tested:
        return f"Effect sizes only{asked}: {prompts} are too few for a test."
    if contrast.height_control is None:
        return f"{many} compared{asked}, without a threshold ({prompts})."
    found = f"{asked} ({threshold_title(contrast)}; {prompts})."
    if not kept:
        return f"None of {many} differs{found} What you see may be chance."
    return f"{kept:,} of {many} {'differs' if kept == 1 else 'differ'}{found}"
