// Runs a kernel on the host, thread after thread: for kernels whose threads do not wait for each other.
// Follows the kernels' own text.
extern "C" __attribute__((visibility("default"))) void launch(void (*kernel)(const void*), unsigned blocks,
                                                              unsigned threads, const void* arguments) {
  using namespace c10d_custom;
  gridDim.x = blocks;
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel(arguments);
  }
}

extern "C" __attribute__((visibility("default"))) unsigned long long arguments_size() {
  return sizeof(c10d_custom::Reduce::Arguments);
}
