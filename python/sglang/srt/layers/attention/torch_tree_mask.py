"""Ancestor-mask attention in plain PyTorch: the reference of the Triton kernel, and the CPU's backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    depths: torch.Tensor,
    *,
    scaling: float,
    sliding_window: int = -1,
    logit_cap: float = 0.0,
) -> torch.Tensor:
    """Attention of one request's N tree tokens over its committed prefix and themselves.

    Args:
        query: [N, query heads, head_dim].
        key: [S + N, KV heads, head_dim], the prefix of S tokens in order, then the tree's.
        value: [S + N, KV heads, value head_dim].
        visible: bool [N, N]; True: the row may attend the column. The whole prefix is visible.
        depths: int64 [N]; a token's position is S + its depth.
        scaling: factor of the logits.
        sliding_window: a key at a position of at least (query's position - window) is seen; -1: no window. It
            counts positions, so siblings see the same prefix.
        logit_cap: soft cap c * tanh(logits / c), 0: none.
    Returns:
        [N, query heads, value head_dim], the query's dtype.
    """
    nodes = query.shape[0]
    prefix = key.shape[0] - nodes
    mask = torch.cat([visible.new_ones((nodes, prefix)), visible], dim=1)
    if sliding_window >= 0:
        key_positions = torch.cat([torch.arange(prefix, device=depths.device), prefix + depths])
        mask = mask & (key_positions[None, :] >= (prefix + depths)[:, None] - sliding_window)
    q, k, v = (t.movedim(0, 1) for t in (query, key.to(query.dtype), value.to(query.dtype)))
    grouped = q.shape[0] != k.shape[0]
    if logit_cap <= 0:
        out = scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask[None, None], enable_gqa=grouped, scale=scaling
        )[0]
    else:
        repeat = q.shape[0] // k.shape[0]
        k, v = (t.repeat_interleave(repeat, dim=0) for t in (k, v))
        logits = torch.matmul(q.float(), k.float().transpose(1, 2)) * scaling
        logits = logit_cap * torch.tanh(logits / logit_cap)
        weights = torch.softmax(logits.masked_fill(~mask, float("-inf")), dim=-1)
        out = torch.matmul(weights, v.float()).to(query.dtype)
    return out.movedim(0, 1)


def bits_to_mask(ancestor_bits: torch.Tensor) -> torch.Tensor:
    """bool [N, N] of one request's ancestor bits, int64 [N, W]; True: the row may attend the column."""
    nodes = ancestor_bits.shape[0]
    column = torch.arange(nodes, device=ancestor_bits.device)
    return (ancestor_bits[:, column // 64] >> (column % 64)) & 1 > 0


class TorchTreeMaskAttnBackend(TorchNativeAttnBackend):
    """SGLang's ``torch_native`` backend, with a verify that honours a tree.

    ``spec_info.custom_mask`` holds the tree part only, bool [bs * N * N]; None means causal over the block.
    A drafter's bidirectional layers (``ENCODER_ONLY``) see their whole block.

    With a ``spec_info.qo_indptr``, int32 [bs + 1], the round is packed: request b's nodes are the rows from
    qo_indptr[b] to [b + 1] of ``ancestor_bits`` int64 [T, W] and ``depths`` int64 [T], and no mask is read. Rows behind
    the last request's get zeros.
    """

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan a round once for all layers: each request's slots, tree mask and depths."""
        super().init_forward_metadata(forward_batch)
        self._plan = None
        if not forward_batch.forward_mode.is_target_verify():
            return
        spec_info = forward_batch.spec_info
        seq_lens = forward_batch.seq_lens.tolist()
        visible: torch.Tensor | list[torch.Tensor]
        depths: torch.Tensor | list[torch.Tensor]
        if getattr(spec_info, "qo_indptr", None) is not None:
            bounds = spec_info.qo_indptr.tolist()
            parts = [slice(begin, end) for begin, end in zip(bounds, bounds[1:], strict=False)]
            visible = [bits_to_mask(spec_info.ancestor_bits[part]) for part in parts]
            depths = [spec_info.depths[part] for part in parts]
        else:
            nodes = int(spec_info.draft_token_num)
            parts = [slice(b * nodes, (b + 1) * nodes) for b in range(len(seq_lens))]
            offsets = torch.arange(nodes, device=forward_batch.seq_lens.device)
            if spec_info.custom_mask is None:
                visible = (offsets[:, None] >= offsets[None, :]).expand(len(seq_lens), -1, -1)
                depths = offsets.expand(len(seq_lens), -1)
            else:
                visible = spec_info.custom_mask.view(len(seq_lens), nodes, nodes)
                depths = spec_info.positions.view(len(seq_lens), nodes) - forward_batch.seq_lens[:, None]
        rows = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices]
        slots = [
            rows[b, : length + part.stop - part.start].to(torch.int64)
            for b, (length, part) in enumerate(zip(seq_lens, parts, strict=True))
        ]
        self._plan = list(zip(parts, slots, visible, depths, strict=True))

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        if not forward_batch.forward_mode.is_target_verify():
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        assert self._plan is not None, "tree verify without init_forward_metadata"
        if save_kv_cache and k is not None and v is not None:
            location = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_zeros((query.shape[0], layer.tp_q_head_num, layer.v_head_dim))
        bidirectional = layer.attn_type == AttentionType.ENCODER_ONLY
        window = layer.sliding_window_size
        for part, used, visible, depths in self._plan:
            out[part] = tree_attention(
                query[part],
                keys[used],
                values[used],
                torch.ones_like(visible) if bidirectional else visible,
                depths,
                scaling=layer.scaling,
                sliding_window=-1 if window is None or bidirectional else window,
                logit_cap=layer.logit_cap,
            )
        return out.view(query.shape[0], -1)
