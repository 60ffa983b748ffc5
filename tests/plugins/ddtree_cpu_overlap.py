"""A test-only SGLang plugin: overlap scheduling on the CPU, with DDTREE_TEST_CPU_OVERLAP=1.

SGLang switches overlap off for speculation on a CPU, where it gains nothing. Its scheduler loop runs there all the
same, one round behind its own results, so everything but the concurrency of streams can be tested without a GPU:
lengths and bonus tokens that only the device knows, requests that end while their next round is under way.
"""

import os


def load() -> None:
    if os.environ.get("DDTREE_TEST_CPU_OVERLAP") != "1":
        return
    import torch
    from sglang_ddtree import requirements

    requirements.can_overlap = lambda fields: True
    # With TRITON_INTERPRET=1 SGLang's Triton kernels run on a CPU as well, slowly.
    requirements.CPU_BACKENDS = (*requirements.CPU_BACKENDS, "triton")
    requirements._check_device = lambda fields: None
    # Streams mean nothing on a CPU, and PyTorch refuses to record one.
    torch.Tensor.record_stream = lambda tensor, stream: None
