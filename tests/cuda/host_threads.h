// Runs a kernel on the host with a thread of the host's for every thread of the device.
// Follows the kernels' own text.
#include <thread>
#include <vector>

template <class Kernel>
void run_threads(Kernel kernel, unsigned blocks, unsigned threads) {
  using namespace c10d_custom;
  std::vector<std::unique_ptr<Block>> made;
  std::vector<std::thread> running;
  for (unsigned b = 0; b < blocks; ++b) {
    made.push_back(std::make_unique<Block>(threads));
    for (unsigned t = 0; t < threads; ++t) {
      running.emplace_back([=, own = made.back().get()] {
        gridDim.x = blocks, blockDim.x = threads, blockIdx.x = b, threadIdx.x = t;
        block = own;
        kernel();
      });
    }
  }
  for (std::thread& thread : running) thread.join();
}
