"""What vLLM's CPU build lacks of Mamba layers, in plain torch. The child of an engine installs it as its patch.

vLLM has kernels for a CPU for the convolution, and for the scan and the single steps of Mamba-2, and uses them here.
What it lacks `install` replaces with functions of the same arguments:

- Mamba-2: the state in the middle of a step. With `mamba_cache_mode` align vLLM does not end the last step of a prompt
  where the last full block ends, but has the layer write two states: that there, its *checkpoint*, into the block
  before the last one, and that at the end of the step. A chunk of the scan ends at the checkpoint. The scan for a CPU
  does not return the states of chunks, and what writes the checkpoint is a Triton kernel.
- Mamba-1: the scan of prompts, which only CUDA has, and steps of one token, for which the kernel returns other numbers.
  Steps end where blocks do: there are no checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["PATCH", "install"]

PATCH = "import mamba_on_cpu; mamba_on_cpu.install()"
"""The `patch` of an Engine."""


def install() -> None:
    """Replace the functions where vLLM's layers look for them. Call it before there is an engine."""
    from vllm.model_executor.layers.mamba import mamba_mixer, mamba_mixer2
    from vllm.model_executor.layers.mamba.ops import ssd_combined

    ssd_combined._mamba_chunk_scan_combined_fwd = _with_states_of_chunks(ssd_combined._mamba_chunk_scan_combined_fwd)
    mamba_mixer2.store_prefill_checkpoint = store_prefill_checkpoint
    mamba_mixer.selective_scan_fn = selective_scan_fn
    mamba_mixer.selective_state_update = selective_state_update
    mamba_mixer.MambaMixer.forward_impl = _with_rows(mamba_mixer.MambaMixer.forward_impl)


def _with_states_of_chunks(scan: Any) -> Any:
    """vLLM's scan for a CPU, that also returns the state at the end of each chunk if it is asked for them."""

    def scan_chunks(
        x: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: int,
        out: torch.Tensor,
        *,
        return_intermediate_states: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        """x, out: (tokens, heads, head_dim); dt: (tokens, heads); B, C: (tokens, groups, state).

        `cu_chunk_seqlens` (chunks + 1): where chunks begin and end; `seq_idx` (chunks): the sequence of each, in
        order; `initial_states` (sequences, heads, head_dim, state). Returns (chunks, heads, head_dim, state).
        """
        if not return_intermediate_states:
            final: torch.Tensor = scan(x, dt, A, B, C, chunk_size, out, **options)
            return final
        initial, ends = options.pop("initial_states"), options["cu_chunk_seqlens"].tolist()
        sequences: list[int] = options["seq_idx"].tolist()
        states: list[torch.Tensor] = []
        for chunk, sequence in enumerate(sequences):
            first = not chunk or sequences[chunk - 1] != sequence
            before = states[-1] if not first else initial[sequence : sequence + 1] if initial is not None else None
            part = slice(ends[chunk], ends[chunk + 1])
            options["cu_seqlens"] = torch.tensor([0, ends[chunk + 1] - ends[chunk]], dtype=torch.int32)
            after = scan(
                x[part], dt[part], A, B[part], C[part], chunk_size, out[part], initial_states=before, **options
            )
            states.append(after)
        return torch.cat(states)

    return scan_chunks


def _with_rows(forward: Any) -> Any:
    """Mamba-1's layer, that gives contiguous rows to what multiplies matrices, which on a CPU takes no others."""

    def forward_impl(self: Any, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
        self.is_lora_enabled = True  # kernels of adapters want such rows too
        forward(self, hidden_states, output)

    return forward_impl


def store_prefill_checkpoint(
    checkpoint: Any,
    chunk_idx: torch.Tensor,
    x: torch.Tensor,
    conv_state: torch.Tensor,
    chunk_states: torch.Tensor,
    ssm_state: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    state_len: int,
) -> None:
    """Write the state in the middle of each sequence that has a checkpoint there into the block for it.

    x: (channels, tokens), before the convolution; conv_state: (blocks, channels, state_len); chunk_states: (chunks,
    heads, head_dim, state), of which `chunk_idx` (sequences) names one each; ssm_state: (blocks, heads, head_dim,
    state). `checkpoint`: offsets in tokens from the start of the step, 0 for none, and block numbers.
    """
    rows = zip(checkpoint.checkpoint_offsets.tolist(), checkpoint.state_indices.tolist(), strict=True)
    for row, (offset, block) in enumerate(rows):
        if offset > 0:
            end = int(query_start_loc[row]) + offset
            conv_state[block, :, :state_len] = x[:, end - state_len : end]
            ssm_state[block] = chunk_states[chunk_idx[row]]


def selective_scan_fn(
    u: torch.Tensor,
    ssm_states: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    z: torch.Tensor,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    *,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    **_: Any,
) -> torch.Tensor:
    """Mamba-1 over sequences one after another; each goes on from its block of `ssm_states`, and ends there.

    u, delta, z: (channels, tokens); A: (channels, state); B, C: (state, tokens); D, delta_bias: (channels);
    ssm_states: (blocks, channels, state), modified; query_start_loc: (sequences + 1); cache_indices and
    has_initial_state: (sequences). Returns (channels, tokens).
    """
    steps = delta.float() + (delta_bias[:, None] if delta_bias is not None else 0)
    if delta_softplus:
        steps = torch.nn.functional.softplus(steps)
    kept, added = torch.exp(steps.T[:, :, None] * A), (steps * u.float()).T[:, :, None] * B.float().T[:, None]
    out, starts = torch.empty_like(u, dtype=torch.float32), query_start_loc.tolist()
    for sequence, block in enumerate(cache_indices.tolist()):
        state = ssm_states[block].float() * has_initial_state[sequence]
        for token in range(starts[sequence], starts[sequence + 1]):
            state = state * kept[token] + added[token]
            out[:, token] = state @ C[:, token].float()
        ssm_states[block] = state.to(ssm_states.dtype)
    out += D[:, None] * u.float()
    return (out * torch.nn.functional.silu(z.float())).to(u.dtype)


def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor | None,
    z: torch.Tensor,
    dt_softplus: bool = False,
    *,
    state_batch_indices: torch.Tensor,
    out: torch.Tensor,
    **_: Any,
) -> None:
    """Mamba-1 for one token of each sequence, whose block of `state` is `state_batch_indices` (sequences, 1).

    state: (blocks, channels, state), modified; x, dt, z, out: (sequences, channels); B, C: (sequences, state).
    """
    blocks, steps = state_batch_indices.flatten(), dt.float() + (dt_bias if dt_bias is not None else 0)
    if dt_softplus:
        steps = torch.nn.functional.softplus(steps)
    added = (steps * x.float())[:, :, None] * B.float()[:, None]
    after = state[blocks].float() * torch.exp(steps[:, :, None] * A) + added
    state[blocks] = after.to(state.dtype)
    read = (after @ C.float()[:, :, None])[:, :, 0] + D.float() * x.float()
    out.copy_(read * torch.nn.functional.silu(z.float()))
