"""Which calls of `generate` are served, judged by what transformers makes of their arguments.

transformers fills a call's settings from several places and infers masks and positions. Nothing of that is repeated
here: it prepares the call and then hands over what it would run (`custom_generate`), with the settings, the mask and
all inputs in effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from transformers import DynamicCache, LogitsProcessor
from transformers.generation import GenerationMode

APART = ("assistant_model", "assistant_tokenizer", "custom_generate", "synced_gpus", "tokenizer", "trust_remote_code")
"""Arguments with which transformers takes another way than ours, or which it does not hand over."""
OURS = {"inputs", "input_ids", "attention_mask", "position_ids"}
"""Tensors that may be given: all others are inputs that token ids do not name."""
MODES = {GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE}
SHOWN = ("output_attentions", "output_hidden_states")
"""Settings that show states of tokens that a restored prefix leaves out."""

Restore = Callable[[torch.Tensor, "torch.Tensor | None"], DynamicCache]
"""From ids and mask, both [row, token], a cache of some of the leading tokens. Without padding the mask may be None."""
Done = Callable[[DynamicCache, torch.Tensor, "torch.Tensor | None"], object]
"""Given the filled cache, the ids of prompt and answer, and the mask of the prompt."""


class Unserved(Exception):
    """The cache cannot serve a call; the text says why. Nothing has been computed or streamed."""


def generate(model: Any, given: tuple[Any, ...], options: dict[str, Any], restore: Restore, done: Done) -> Any:
    """`model.generate(*given, **options)` that goes on from what `restore` returns, and hands what is filled to `done`.

    Raises Unserved, and what `model.generate`, `restore` and `done` raise.
    """
    for name in APART:
        if options.get(name) is not None:
            raise Unserved(f"{name} is set")
    if options.get("cache_implementation") == "paged":
        raise Unserved("cache_implementation is set")
    if len(given) > 2:
        raise Unserved("it has more than two positional arguments")
    for name, value in options.items():  # before they are encoded
        if isinstance(value, torch.Tensor) and name not in OURS:
            raise Unserved(f"{name} is an input that token ids do not name")
    refused: list[Unserved] = []
    streamer = options.get("streamer")  # transformers gives it no prompt before it is clear that the call is served

    def sample(
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        mask = model_kwargs.get("attention_mask")
        try:
            _check(input_ids, generation_config, model_kwargs)
            _check_mask(input_ids, generation_config, (mask, options.get("attention_mask")))
            cache = restore(input_ids, mask)
        except Unserved as error:
            refused.append(error)
            raise
        fed, inputs = _Fed(input_ids, mask), model_kwargs
        if streamer is not None:
            streamer.put(input_ids.cpu())
        served = streamer is None or fed.is_prompt(input_ids, mask)  # on the CPU it may have written into them
        if served:
            cache._is_user_defined = True  # as transformers marks those that outlive the call
            logits_processor = type(logits_processor)([fed, *logits_processor])
            inputs = {**model_kwargs, "past_key_values": cache}
        output = model._sample(
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **inputs,
        )
        if served and fed.are_leading(getattr(output, "sequences", output)):
            done(cache, fed.tokens(), fed.mask)
        return output

    try:
        return model.generate(*given, **{**options, "streamer": None, "custom_generate": sample})
    except Exception:
        if refused:  # a model may make another error of it
            raise refused.pop() from None
        raise
    finally:
        refused.clear()  # an error refers to the frames it came through, and these to the list and to all inputs


class _Fed(LogitsProcessor):  # type: ignore[misc]
    """The tokens and the mask that a model was given, as they were then: a processor may write to both."""

    def __init__(self, prompt: torch.Tensor, mask: torch.Tensor | None) -> None:
        self._parts = [prompt.clone()]
        self.mask = None if mask is None else mask.clone()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > self._parts[0].shape[1]:  # not the first time
            self._parts.append(input_ids[:, -1:].clone())
        return scores

    def tokens(self) -> torch.Tensor:
        """[row, token]"""
        return torch.cat(self._parts, 1)

    def is_prompt(self, ids: torch.Tensor, mask: torch.Tensor | None) -> bool:
        """True if ids and mask of the prompt are as they were. Waits for the device."""
        kept = self.mask
        return torch.equal(self._parts[0], ids) and (mask is None or kept is None or torch.equal(kept, mask))

    def are_leading(self, sequences: torch.Tensor) -> bool:
        """True if the tokens of an answer begin with them. Waits for the device."""
        fed = self.tokens()
        return sequences.shape[1] >= fed.shape[1] and bool((sequences[:, : fed.shape[1]] == fed).all())


def _check(ids: torch.Tensor, config: Any, inputs: dict[str, Any]) -> None:
    """Raise Unserved unless these token ids and their mask alone decide what is computed.

    Args:
        ids: [row, token].
        config: the settings in effect.
        inputs: what `forward` is given besides the ids.
    """
    mode = config.get_generation_mode()
    if mode not in MODES or config.is_assistant:
        raise Unserved(f"its generation mode is {mode.value}")
    if inputs.get("use_cache") is False:
        raise Unserved("use_cache is off")
    if config.cache_implementation not in (None, "dynamic"):
        raise Unserved("cache_implementation is set")
    if getattr(config, "prefill_chunk_size", None):  # some versions begin at the first token whatever the cache has
        raise Unserved("prefill_chunk_size is set")
    cache = inputs.get("past_key_values")
    if cache is not None and (type(cache) is not DynamicCache or getattr(cache, "_is_user_defined", False)):
        raise Unserved("it has a cache of its own")
    if ids.ndim != 2 or ids.shape[0] < 1 or ids.shape[1] < 2:
        raise Unserved("it has no input_ids of at least two tokens")
    for name in SHOWN:
        if inputs.get(name) or getattr(config, name, None):
            raise Unserved(f"{name} is set")
    own = {"attention_mask", "position_ids", "past_key_values", "use_cache"}
    for name in inputs.keys() - own:
        value = inputs[name]
        nothing = value is None or (isinstance(value, dict) and not value)
        if not nothing and not (name == "logits_to_keep" and value == 1):
            raise Unserved(f"{name} is an input that token ids do not name")
    if not _counts(ids, inputs.get("attention_mask"), inputs.get("position_ids")):
        raise Unserved("its position_ids are not the places of its tokens")


def _check_mask(ids: torch.Tensor, config: Any, masks: tuple[Any, ...]) -> None:
    """Raise Unserved unless the mask is one of these ids.

    transformers drops a mask without padding and keeps its length: with another one it would not cut off what the cache
    has.

    Args:
        masks: the one in effect, and the one that was given; each may be None.
    """
    lengths = {getattr(config, "_mask_length", ids.shape[1])}
    lengths |= {mask.shape[-1] for mask in masks if hasattr(mask, "shape")}
    if lengths != {ids.shape[1]}:
        raise Unserved("its attention_mask has another shape than its input_ids")
    if reason := unserved_mask(ids, masks[0]):
        raise Unserved(reason)


def _counts(ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None) -> bool:
    """True if the position of each token is the number of tokens before it, without padding."""
    if positions is None:
        return True
    if positions.is_floating_point():  # half types round large ones, and so do comparisons with these
        return False
    seen = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to(ids.device) == 1
    if positions.ndim != 2 or seen.shape != ids.shape or positions.shape[1] != ids.shape[1]:
        return False
    expected = seen.long().cumsum(-1) - 1
    return bool((positions.to(ids.device) == expected)[seen].all())


def unserved_mask(tokens: torch.Tensor, mask: torch.Tensor | None) -> str:
    """Why tokens alone cannot name what is computed under a mask, or nothing. The mask may be the prompt's."""
    if mask is None:
        return ""
    if mask.ndim != 2 or len(mask) != len(tokens) or mask.shape[1] > tokens.shape[1]:
        return "its attention_mask is not one of these tokens"
    seen = mask == 1
    if not bool((seen | (mask == 0)).all()):
        return "its attention_mask has values besides 0 and 1"
    if bool((seen[:, :-1] & ~seen[:, 1:]).any()):
        return "its padding is not on the left"
    if not bool(seen.any(-1).all()):
        return "a row of it is nothing but padding, which has places as if it were one token"
    return ""


def has_padding(mask: torch.Tensor | None) -> bool:
    return mask is not None and bool((mask == 0).any())


def unserved_by_hand(tokens: torch.Tensor, mask: torch.Tensor | None) -> str:
    """Why a cache of these tokens cannot be filled by a plain `forward`, or nothing.

    `generate` infers the places of tokens from the mask. A plain `forward` counts padding too, and so shifts the K of
    the tokens behind it.
    """
    if has_padding(mask):
        return "its attention_mask has a 0: pass rows without padding, each alone, or call PrefixCache.generate"
    return unserved_mask(tokens, mask)
