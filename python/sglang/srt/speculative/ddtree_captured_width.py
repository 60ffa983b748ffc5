"""Another width for a model that SGLang has captured at one: forwards of so many tokens per request, from graphs.

SGLang's model runner has one attention backend and one runner of decode graphs, whose buffers are made for one number
of tokens per request, and its forward takes whatever these two attributes hold. So a second width is a second pair of
them, put in place for a forward. Weights and KV cache are the model runner's own. Graph memory and input buffers of
equal size are shared too: forwards run one after another, and every replay begins by filling its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner


@contextmanager
def attributes(of: Any, **values: Any) -> Iterator[None]:
    """Give an object other attributes for a while; one that only its class has gets hidden."""
    own = vars(of)
    before = {name: own[name] for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                own[name] = before[name]
            else:
                del own[name]


@dataclass(frozen=True, eq=False)
class CapturedWidth:
    """A model runner's attention backend and decode graphs of one width.

    Attributes:
        model_runner: SGLang's, which keeps its own pair.
        width: tokens per request.
        backend, graphs: the other pair.
    """

    model_runner: Any
    width: int
    backend: Any
    graphs: DecodeCudaGraphRunner

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """For a while the model runner's attention backend and graphs are these, for all that asks it for them."""
        with attributes(self.model_runner, attn_backend=self.backend, decode_cuda_graph_runner=self.graphs):
            yield

    def forward(self, forward_batch: Any) -> Any:
        """The model runner's forward of ``width`` tokens per request; eager where no graph holds the requests."""
        with self.in_place():
            return self.model_runner.forward(forward_batch)


def capture_width(model_runner: Any, width: int, tail_hooks: Sequence[Callable[..., None]] = ()) -> CapturedWidth:
    """Make and capture another width; behind the model runner's own graphs, and on all ranks together.

    Args:
        model_runner: SGLang's, captured at its own width. It is left as it was.
        width: tokens per request, at most as many as that.
        tail_hooks: captured behind the forward, in place of the model runner's own.

    Raises:
        RuntimeError: the model runner has no decode graphs, they are narrower, or it captured another width.
    """
    own = model_runner.decode_cuda_graph_runner
    if not isinstance(own, DecodeCudaGraphRunner) or own.captured_req_width < width:
        raise RuntimeError(f"DDTREE: no decode graphs of at least {width} tokens per request, but {own!r}.")
    backend = _new_backend(model_runner)
    with attributes(
        model_runner,
        # SGLang asks the first for the graphs it captures, the last for how wide they are.
        attn_backend=backend,
        capture_tail_hooks=list(tail_hooks),
        decode_num_tokens_per_req=lambda *, num_draft_tokens=None: width,
    ):
        graphs = model_runner._decode_cuda_graph_runner_cls()(
            model_runner, attn_backend=backend, speculative_num_draft_tokens=width
        )
    # Graphs of another width would never be replayed, and the model would run eagerly without a word.
    if graphs.captured_req_width != width or graphs.attn_backend is not backend:
        raise RuntimeError(
            f"DDTREE: CUDA graphs were captured {graphs.captured_req_width} tokens wide by "
            f"{type(graphs.attn_backend).__name__}, asked for were {width} by another {type(backend).__name__}."
        )
    return CapturedWidth(model_runner, width, backend, graphs)


def _new_backend(model_runner: Any) -> Any:
    """An attention backend like the model runner's own, with buffers of its own."""
    workspace = model_runner.init_new_workspace
    try:
        backend = model_runner._get_attention_backend(init_new_workspace=True)
    finally:
        model_runner.init_new_workspace = workspace
    backend.prefill_attention_backend_str = model_runner.prefill_attention_backend_str
    backend.decode_attention_backend_str = model_runner.decode_attention_backend_str
    return backend
