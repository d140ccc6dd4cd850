// The kernels for any machine of the architecture: SSE2 on x86-64, NEON on aarch64.
#define KERNEL_NS reduce_baseline
#define KERNEL_VECTOR_BYTES 16
#include "reduce_impl.inc"
