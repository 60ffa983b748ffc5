"""A test-only SGLang plugin: DDTREE with a fault put in, chosen by DDTREE_TEST_MUTATION. See tests/mutations.py."""

import os


def slots_are_not_moved(worker, activation) -> None:
    """An accepted node's keys and values stay where they were verified."""
    worker.DDTreeWorker._move_kv = lambda self, plan: None


def siblings_see_each_other(worker, activation) -> None:
    """The tree is verified causally, as a CUDA graph captured without a mask would."""
    import torch
    from sglang.srt.speculative.ddtree_round import TorchRound

    def causal(self, tree):
        return torch.ones_like(tree.tree.visible).tril().flatten()

    TorchRound.tree_mask = causal


def rows_have_no_headroom(worker, activation) -> None:
    """A row of slots is as long as the context."""
    del activation._HOOKS["sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len"]


def the_grammar_is_ignored(worker, activation) -> None:
    worker.build_grammar_vocab_mask = lambda **options: None


def a_run_ends_where_it_ends(worker, activation) -> None:
    """Stops are looked for as SGLang does after a whole accepted run."""
    del activation._HOOKS["sglang.srt.managers.schedule_batch.Req.update_finish_state"]


def everyone_is_greedy(worker, activation) -> None:
    def argmax(*, logits_output, num_nodes, **options):
        return logits_output.next_token_logits.argmax(-1).view(-1, num_nodes)

    worker.choose_tokens = argmax


def the_pool_is_not_bounded(worker, activation) -> None:
    """A request may become as long as SGLang lets it, with one slot per step."""
    del activation._HOOKS["sglang.srt.managers.scheduler.Scheduler.init_req_max_new_tokens"]


MUTATIONS = {
    mutation.__name__: mutation
    for mutation in (
        slots_are_not_moved,
        siblings_see_each_other,
        rows_have_no_headroom,
        the_grammar_is_ignored,
        a_run_ends_where_it_ends,
        everyone_is_greedy,
        the_pool_is_not_bounded,
    )
}


def load() -> None:
    name = os.environ.get("DDTREE_TEST_MUTATION")
    if not name:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def mutate(original, *args, **kwargs):
        from sglang_ddtree import activation, overlay

        overlay.lay()
        from sglang.srt.speculative import ddtree_worker

        if not activation._active:
            MUTATIONS[name](ddtree_worker, activation)
            print(f"mutation: {name}", flush=True)
        return original(*args, **kwargs)

    HookRegistry.register("sglang_ddtree.activation.activate", mutate, HookType.AROUND)
