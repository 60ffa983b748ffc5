"""A test-only SGLang plugin: Qwen3.5 in float32 on a GPU, with DDTREE_TEST_TORCH_RECURRENT=1.

Two of SGLang's kernels know 16-bit numbers alone: the chunked gated delta rule, which reads prompts and refuses
float32, and the fused norm and rotation of queries and keys, which rounds to bfloat16. Here a prompt is read by the
plain recurrence in PyTorch, and queries and keys take the model's own unfused way. The kernels that verify stay
SGLang's.
"""

import os

CHUNK = 64


def gated_delta_rule(q, k, v, g, beta, scale, states, slots, bounds):
    """One token after another.

    Args:
        q, k: float32 [1, T, H, K], normalised. v: [1, T, HV, V]. g, beta: [1, T, HV], log decay and step size.
        scale: of the queries.
        states: [slots, HV, V, K], read and written at ``slots`` [N]; negative: a request that is not there.
        bounds: list of N + 1, where each request's tokens begin and end.
    Returns:
        outputs [1, T, HV, V], and the states before every 64 tokens of each request [1, chunks, HV, V, K].
    """
    import torch

    share = v.shape[2] // k.shape[2]
    q, k = (x[0].repeat_interleave(share, dim=1) for x in (q, k))
    out, before = torch.empty_like(v), []
    for request, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        slot = int(slots[request])
        h = states[slot].float() if slot >= 0 else torch.zeros_like(states[0], dtype=torch.float32)
        for t in range(start, end):
            if (t - start) % CHUNK == 0:
                before.append(h)
            h = h * g[0, t].exp()[:, None, None]
            delta = (v[0, t] - (h * k[t, :, None]).sum(-1)) * beta[0, t, :, None]
            h = h + delta[:, :, None] * k[t, :, None]
            out[0, t] = (h * (q[t] * scale)[:, None]).sum(-1)
        if slot >= 0:
            states[slot] = h.to(states.dtype)
    return out, torch.stack(before)[None]


def _chunked(original, q, k, v, g, beta, scale=None, initial_state=None, initial_state_indices=None, **options):
    import torch

    if q.dtype != torch.float32:
        indices = dict(initial_state=initial_state, initial_state_indices=initial_state_indices)
        return original(q, k, v, g, beta, scale=scale, **indices, **options)
    assert options.get("use_qk_l2norm_in_kernel") and not options.get("head_first")
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    bounds, slots = options["cu_seqlens"].tolist(), initial_state_indices.tolist()
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    out, states = gated_delta_rule(q, k, v, g, beta, scale, initial_state, slots, bounds)
    return out, None, states


def _unfused(original, self, positions, hidden_states):
    import torch

    if hidden_states.dtype != torch.float32:
        return original(self, positions, hidden_states)
    return self.forward_prepare_native(positions, hidden_states)


def load() -> None:
    import torch

    if os.environ.get("DDTREE_TEST_TORCH_RECURRENT") != "1" or not torch.cuda.is_available():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    fused = "sglang.srt.models.qwen3_5.Qwen3_5AttentionDecoderLayer.forward_prepare_cuda_fused"
    HookRegistry.register("sglang.kernels.ops.attention.fla.chunk.chunk_gated_delta_rule", _chunked, HookType.AROUND)
    HookRegistry.register(fused, _unfused, HookType.AROUND)
