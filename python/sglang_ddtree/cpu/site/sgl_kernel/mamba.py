"""The recurrent kernels (``sgl_kernel.mamba``): hybrid targets are not served on the CPU, only importable."""

from .missing import has_no_stand_in

causal_conv1d_fn_cpu = has_no_stand_in("causal_conv1d_fn_cpu")
causal_conv1d_update_cpu = has_no_stand_in("causal_conv1d_update_cpu")
chunk_gated_delta_rule_cpu = has_no_stand_in("chunk_gated_delta_rule_cpu")
