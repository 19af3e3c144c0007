"""Let a model write, with its own `generate`, the user's loop, or a plain loop: `Decoding.run`.

`Scanner` makes a `Decoding` for each batch and `BatchRun` runs it; `description` puts its options
into the meta of a scan. The tokens must be those that the model would write without a scan, so
options are passed on, and `Endings` asks the user's own stopping criteria in their place. Methods
in which the model runs on tokens that are later rejected (beams, assisted decoding) are named by
`pass_only`: their activations can only come from a pass afterwards. A new option of `generate` that
may choose another token than the likeliest belongs in `_NEUTRAL`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from traceback import extract_tb
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torchfmri._arguments import is_whole, require, shown
from torchfmri._model import unwrap
from torchfmri._scan.run.endings import Endings
from torchfmri._scan.run.model_call import call_model, logits_of
from torchfmri._scan.run.prompt import EncodedPrompt
from torchfmri.exceptions import InspectionError

Decode: TypeAlias = Callable[[nn.Module, Tensor], Tensor]
"""A user's own loop: model and (b, s) ids -> (b, s + n) ids."""
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "do_sample": (None, False),
    "num_beams": (None, 1),
    **dict.fromkeys(
        ("repetition_penalty", "encoder_repetition_penalty", "guidance_scale"), (None, 1.0)
    ),
    **dict.fromkeys(
        (
            *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "penalty_alpha"),
            *("min_new_tokens", "min_length"),
        ),
        (None, 0),
    ),
    **dict.fromkeys(
        (
            *("bad_words_ids", "sequence_bias", "forced_bos_token_id", "forced_eos_token_id"),
            *("suppress_tokens", "begin_suppress_tokens", "watermarking_config", "dola_layers"),
            "exponential_decay_length_penalty",
        ),
        (None,),
    ),
}
"""Settings of `generate` that may choose another token than the likeliest -> where they do not."""
_HARMLESS = frozenset(
    {"eos_token_id", "pad_token_id", "bos_token_id", "use_cache", "past_key_values"}
    | {"return_dict_in_generate", "generation_config", "num_return_sequences"}
    | {"output_scores", "output_logits", "output_attentions", "output_hidden_states"}
    | {"cache_implementation", "prefill_chunk_size", "compile_config", "disable_compile"}
    | {"max_time", "stop_strings", "stopping_criteria", "tokenizer", "streamer"}
    # What these leave out or scale matters to samples alone.
    | {"temperature", "top_k", "top_p", "top_h", "min_p", "typical_p"}
    | {"epsilon_cutoff", "eta_cutoff", "renormalize_logits"}
)
_READ_HERE: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_beams": (is_whole, "give a whole number, such as 4"),
    "eos_token_id": (
        lambda value: isinstance(value, Tensor) or all(map(is_whole, _several(value))),
        "give the id of a token, or a list of ids",
    ),
    "stop_strings": (
        lambda value: all(isinstance(each, str) for each in _several(value)),
        "give a text, or a list of texts",
    ),
    "stopping_criteria": (
        lambda value: all(map(callable, _several(value))),
        "give a StoppingCriteriaList, or a list of functions of ids and scores",
    ),
}
"""Options of `generate` that are read before it is called: what they may be, in code and words."""
_OWN_CODE = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer")
"""Options of `generate` that are code of the user's, which runs between the steps."""
_OWN_OPTIONS = ("do_sample", "temperature", "eos_token_id")


@dataclass(frozen=True)
class Decoding:
    """How the tokens are chosen.

    Attributes:
        max_new_tokens: How many at most.
        options: For the model's `generate`.
        decode: A loop of the user's own instead.
        tokenizer: That of the model, for `stop_strings`.
    """

    max_new_tokens: int
    options: Mapping[str, Any]
    decode: Decode | None = None
    tokenizer: Any = None

    def __post_init__(self) -> None:
        """Raise for values of options that are read here and that cannot be meant.

        Raises:
            InspectionError: There is one.
        """
        for name, (is_right, meaning) in _READ_HERE.items():
            value = self.options.get(name)
            require(value is None or is_right(value), name, value, meaning)

    def pass_only(self, model: nn.Module) -> str:
        """Why the activations cannot be taken while it generates, or "": by the method's name."""
        if self.decode is not None or not _generates(model):
            return ""

        def value(name: str) -> Any:
            return self.setting(model, name)

        if (value("num_beams") or 1) > 1:
            return "beam search runs several candidates for each sequence"
        if value("guidance_scale") not in (None, 1, 1.0):
            return "classifier-free guidance runs the model on a second, unconditional sequence"
        if value("assistant_model") is not None or value("prompt_lookup_num_tokens"):
            return "assisted decoding runs tokens that are then rejected"
        if value("custom_generate") is not None or value("penalty_alpha"):
            return "a custom decoding method may run the model in its own way"
        return ""

    def takes_the_likeliest(self, model: nn.Module) -> bool:
        """Whether each token is the one with the largest logit, and nothing else decides."""
        if self.decode is not None or self.pass_only(model):
            return False
        names = set(_NEUTRAL) | (set(self.options) - _HARMLESS)
        return all(self.setting(model, name) in _NEUTRAL.get(name, (None,)) for name in names)

    @property
    def runs_own_code(self) -> bool:
        """Whether code of the user's runs between the steps of the model."""
        own = (self.options.get(name) is not None for name in _OWN_CODE)
        return self.decode is not None or any(own)

    def setting(self, model: nn.Module, name: str) -> Any:
        """What `generate` will use for an option.

        As transformers do: the option itself, else a configuration that was given, and what this
        leaves open is taken from the model's own.
        """
        if name in self.options:
            return self.options[name]
        own = getattr(unwrap(model), "generation_config", None)
        given = getattr(self.options.get("generation_config"), name, None)
        return getattr(own, name, None) if given is None else given

    def ends(self, model: nn.Module) -> frozenset[int]:
        """The tokens that end a sequence."""
        found = self.setting(model, "eos_token_id")
        return (
            frozenset()
            if found is None
            else frozenset(torch.as_tensor(found, device="cpu").reshape(-1).tolist())
        )

    def endings(self, model: nn.Module, prompt: EncodedPrompt) -> Endings:
        """What notes where each sequence ends, with the user's own criteria."""
        criteria = self.options.get("stopping_criteria")
        strings = self.setting(model, "stop_strings")
        if strings is not None:
            from transformers import StoppingCriteriaList, StopStringCriteria

            own = StopStringCriteria(self.options.get("tokenizer") or self.tokenizer, strings)
            criteria = StoppingCriteriaList([*(criteria or ()), own])
        elif isinstance(criteria, list) and not callable(criteria):
            from transformers import StoppingCriteriaList

            criteria = StoppingCriteriaList(criteria)
        return Endings(prompt.ids.shape[1], self.ends(model), criteria)

    def tells_endings(self, model: nn.Module) -> bool:
        """Whether `endings` is told of each token while it is generated: not by a user's code."""
        own = self.decode is not None or (_generates(model) and not _takes_criteria(model))
        return not own

    def run(self, model: nn.Module, prompt: EncodedPrompt, endings: Endings) -> Tensor:
        """The ids of prompt and answer, (b, s).

        Raises:
            InspectionError: What was generated does not begin with the prompt.
        """
        if self.decode is not None:
            found = _run_own(self.decode, model, prompt.ids)
        elif _generates(model):
            found = self._generate(model, prompt, endings)
        else:
            found = self._plain(model, prompt, endings)
        if not isinstance(found, Tensor) or found.ndim != 2:
            raise InspectionError(f"Decoding gave {type(found).__name__}, not token ids (b, s).")
        start = prompt.ids.shape[1]
        copies = len(found) // max(len(prompt.ids), 1)
        if found.shape[1] < start or not torch.equal(
            found[:, :start], prompt.ids.repeat_interleave(max(copies, 1), 0)
        ):
            raise InspectionError(
                f"Decoding gave ids of shape {tuple(found.shape)} that do not begin with the "
                f"prompt's {tuple(prompt.ids.shape)}."
            )
        return found

    def _generate(self, model: nn.Module, prompt: EncodedPrompt, endings: Endings) -> Tensor:
        generate = _generate_of(model)
        assert generate is not None
        options = {**self.options, "max_new_tokens": self.max_new_tokens}
        if options.get("past_key_values") is not None:  # it would be written into
            options["past_key_values"] = copy.deepcopy(options["past_key_values"])
        if takes_option(generate, "attention_mask"):
            options["attention_mask"] = prompt.mask
        if _takes_criteria(model):
            if self.setting(model, "pad_token_id") is None and self.ends(model):
                options["pad_token_id"] = min(self.ends(model))  # as transformers, with a warning
            if not self.pass_only(model):
                if self.setting(model, "stop_strings") is not None:
                    options["stop_strings"] = None  # `endings` looks for them, with the tokenizer
                options["stopping_criteria"] = [endings]
        try:
            found = generate(prompt.ids, **options)
        except Exception as error:
            self._explain(error)
            raise
        return found if isinstance(found, Tensor) else found.sequences

    def _explain(self, error: Exception) -> None:
        """Raise with the options where transformers' own code failed, and not the model's.

        Raises:
            InspectionError: It did.
        """
        files = [Path(each.filename).parts for each in extract_tb(error.__traceback__)]
        while len(files) > 1 and "torch" in files[-1]:  # a folder of the user's may be called so
            files.pop()
        # Models are in transformers/models/NAME/, and everything else no deeper than this.
        if self.options and "transformers" in files[-1][-3:]:
            given = ", ".join(f"{name}={shown(value)}" for name, value in self.options.items())
            raise InspectionError(
                f"generate() cannot work with {given}: {type(error).__name__}: "
                f"{shorten(str(error), 300)} Correct the option, or leave it out."
            ) from error

    def _plain(self, model: nn.Module, prompt: EncodedPrompt, endings: Endings) -> Tensor:
        """Greedy or sampled, the whole sequence fed at each step: the module has no cache."""
        unknown = sorted(set(self.options) - set(_OWN_OPTIONS))
        if unknown:
            raise InspectionError(
                f"{type(model).__name__} has no generate(), so torchfmri's own loop decodes it, "
                f"which does not know {', '.join(unknown)}. It knows {', '.join(_OWN_OPTIONS)}; "
                "for anything else give decode=function(model, ids)."
            )
        ids, mask = prompt.ids, prompt.mask
        ends = torch.tensor(sorted(self.ends(model)), dtype=ids.dtype, device=ids.device)
        over = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        for _ in range(self.max_new_tokens):
            with torch.no_grad():
                logits = logits_of(call_model(model, ids, mask))
            if logits is None:
                raise InspectionError(
                    f"{type(model).__name__} returned no logits (b, s, vocabulary) for token ids."
                )
            token = self._choose(logits[:, -1])
            token = torch.where(over, ids.new_zeros(()) if not len(ends) else ends[0], token)
            ids = torch.cat([ids, token[:, None]], 1)
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            over = over | torch.isin(token, ends)
            endings(ids)
            if bool(over.all()):
                break
        return ids

    def _choose(self, logits: Tensor) -> Tensor:
        if not self.options.get("do_sample"):
            return logits.argmax(-1)
        scaled = logits.float() / float(self.options.get("temperature") or 1.0)
        return torch.multinomial(scaled.softmax(-1), 1)[:, 0]


def _run_own(decode: Decode, model: nn.Module, ids: Tensor) -> Any:
    """What a loop of the user's own returns."""
    try:
        return decode(model, ids)
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        raise InspectionError(
            f"Your decode= ran a backward pass ({error}), and a scan runs it without gradients, as "
            "generate() does. Write `with torch.enable_grad():` around what you differentiate; the "
            "model's .grad is put back afterwards."
        ) from error


def _several(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple, set)) else [value]


def _generates(model: nn.Module) -> bool:
    return _generate_of(model) is not None


def _takes_criteria(model: nn.Module) -> bool:
    """Whether `generate` is that of transformers, with its settings and stopping criteria."""
    return hasattr(unwrap(model), "generation_config")


def _generate_of(model: nn.Module) -> Callable[..., Any] | None:
    """`generate` of the model, or of the wrapper around it: that of PEFT prepares adapters."""
    found = (getattr(each, "generate", None) for each in (model, unwrap(model)))
    return next((each for each in found if callable(each)), None)


def takes_option(function: Callable[..., Any], name: str) -> bool:
    """Whether a function takes a keyword of this name."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(
        each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()
    )
