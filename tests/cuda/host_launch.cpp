// Runs kernels on the host. Follows their own text and host_threads.h.
#define EXPORT extern "C" __attribute__((visibility("default")))

// Thread after thread: for kernels whose threads do not wait for each other.
EXPORT void launch(void (*kernel)(const void*), unsigned blocks, unsigned threads, const void* arguments) {
  using namespace c10d_custom;
  gridDim.x = blocks;
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel(arguments);
  }
}

EXPORT void launch_threads(void (*kernel)(const void*), unsigned blocks, unsigned threads, const void* arguments) {
  run_threads([=] { kernel(arguments); }, blocks, threads);
}

// What Python has too.
EXPORT unsigned long long size_of(int what) {
  using namespace c10d_custom;
  const unsigned long long sizes[] = {sizeof(Reduce::Arguments), sizeof(p2p::Arguments), sizeof(p2p::Pad),
                                      sizeof(p2p::Record), 4 * p2p::kWords};
  return sizes[what];
}
