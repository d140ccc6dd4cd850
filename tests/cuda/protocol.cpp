// The protocol of backend/cuda/p2p.h under load: ranks and device threads are threads of the host, late at
// random. Follows the kernels' text and host_threads.h. Exits with 1 where something is wrong.
//
//   protocol RANKS BLOCKS THREADS CALLS SEED SECONDS    (SECONDS: the kernels' time-out)
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

using namespace c10d_custom;

namespace {

using Kernel = void (*)(const p2p::Arguments&);

thread_local std::minstd_rand random_numbers;

void be_late() {
  switch (random_numbers() % 64) {
    case 0: usleep(random_numbers() % 300); break;
    case 1:
    case 2:
    case 3:
    case 4: sched_yield(); break;
    default: break;
  }
}

constexpr u64 kHalf = 4096, kMost = 1000;  // bytes; elements

struct Rank {
  p2p::Pad pad = {};
  u64 word[2 * p2p::kMaxRanks * p2p::kWords] = {};
  alignas(16) u8 staging[2 * kHalf] = {};
  p2p::Record record = {};
  std::vector<u32> data = std::vector<u32>(kMost);
  std::vector<u32> parts = std::vector<u32>(p2p::kMaxRanks * kMost);

  u32* part(unsigned rank) { return parts.data() + rank * kMost; }
};

enum Kind { kAllReduce, kAllGather, kReduceScatter, kBroadcast };

// What all ranks call in turn: the same arguments again and again, as a CUDA graph does.
struct Plan {
  Kernel kernel;
  size_t count;
  unsigned blocks;
  bool scales;
  Kind kind = kAllReduce;
  bool lie = false;  // what ranks give is read there
};

u32 input(unsigned call, unsigned rank, size_t i) { return (call * 31 + rank * 7 + i) % 1000 + 1; }
u32 coded(const Plan& plan, u32 value) { return plan.scales ? as_bits((float)value) : value; }

}  // namespace

int main(int, char** argv) {
  const unsigned ranks = atoi(argv[1]), blocks = atoi(argv[2]), threads = atoi(argv[3]), calls = atoi(argv[4]);
  const unsigned seed = atoi(argv[5]), seconds = atoi(argv[6]);
  delay = be_late;
  // Sizes that cut the blocks' shares differently, so that a half is written and read by different blocks in
  // neighbouring calls. Of kernels with flags, one runs while words are cleaned, and two meet those below.
  const Plan plans[] = {
      {c10d_OneShot_int32_SUM, 37, 1, false},
      {c10d_TwoShot_int32_SUM, 200, blocks, false},
      {c10d_OneShot_int32_SUM, 90, blocks, false},
      {c10d_TwoShot_float32_PREMUL_SUM, 151, blocks, true},
      {c10d_TwoShot_int32_SUM, 61, 1, false},
      {c10d_OneShot_float32_PREMUL_SUM, 90, blocks, true},
      {c10d_TwoShot_int32_SUM, 1000, blocks, false},
      {c10d_Flagged_int32_SUM, 70, blocks, false},
      {c10d_Flagged_int32_SUM, 90, blocks, false},
      {c10d_Flagged_int32_SUM, 75, blocks, false},
      {c10d_OneShot_int32_SUM, 80, blocks, false},
      {c10d_Flagged_int32_SUM, 90, blocks, false},
      {c10d_OneShot_int32_SUM, 60, blocks, false},
      {c10d_AllGather_uint8_BOR, 100, blocks, false, kAllGather},
      {c10d_ReduceScatter_float32_PREMUL_SUM, 77, blocks, true, kReduceScatter},
      {c10d_Broadcast_uint8_BOR, 300, blocks, false, kBroadcast},
      {c10d_TwoShot_int32_SUM, 201, blocks, false, kAllReduce, true},
      {c10d_AllGather_uint8_BOR, 101, blocks, false, kAllGather, true},
      {c10d_ReduceScatter_float32_PREMUL_SUM, 77, blocks, true, kReduceScatter, true},
      {c10d_Broadcast_uint8_BOR, 300, blocks, false, kBroadcast, true},
  };
  constexpr unsigned kPlans = sizeof(plans) / sizeof(plans[0]);
  std::vector<std::unique_ptr<Rank>> all;
  for (unsigned r = 0; r < ranks; ++r) all.push_back(std::make_unique<Rank>());
  std::vector<std::vector<p2p::Arguments>> arguments(ranks);
  for (unsigned r = 0; r < ranks; ++r) {
    // Numbers begin anew in the middle: words of calls long ago have the flags of the third and fourth after that.
    all[r]->pad.calls = -6u;
    const u64 each = (u64)ranks * p2p::kWords;
    for (u64 i = 0; i < 2 * each; ++i) all[r]->word[i] = (u64)(p2p::kFlag | 2 | (i >= each)) << 32 | 7;
    for (const Plan& plan : plans) {
      p2p::Arguments a = {};
      for (unsigned j = 0; j < ranks; ++j) {
        a.pad[j] = &all[j]->pad;
        u32* const given = plan.kind == kReduceScatter ? all[j]->part(0) : all[j]->data.data();
        a.staging[j] = plan.lie ? (u8*)given : all[j]->staging;
      }
      a.input = a.output = (u8*)all[r]->data.data();
      a.bytes = plan.count * 4;
      a.half = plan.lie ? 0 : kHalf;
      a.slice = (a.bytes / (plan.kind == kReduceScatter ? 1 : ranks) + 16) / 16 * 16;
      if (plan.lie && plan.kind == kReduceScatter) a.slice = 4 * kMost;
      for (unsigned j = 0; j < ranks; ++j) a.part[j] = (u8*)all[r]->part(j);
      a.root = 1 % ranks;
      a.record = &all[r]->record;
      a.timeout_ns = seconds * 1000000000ull;
      a.factor = r + 1;
      a.rank = r, a.ranks = ranks;
      a.fingerprint = 77 + (u32)(&plan - plans);
      a.unit = 16 >> (&plan - plans) % 3;
      a.token = 1 + (u32)(&plan - plans);
      arguments[r].push_back(a);
    }
  }

  // The device threads of a rank run from call to call; between two calls all of them stand at `between`,
  // as kernels of a stream follow each other.
  std::vector<std::thread> running;
  unsigned wrong = 0;
  for (unsigned r = 0; r < ranks; ++r) {
    running.emplace_back([&, r] {
      std::vector<std::unique_ptr<Block>> made;
      for (unsigned b = 0; b < blocks; ++b) made.push_back(std::make_unique<Block>(threads));
      Block between(blocks * threads + 1);
      std::vector<std::thread> device;
      for (unsigned b = 0; b < blocks; ++b) {
        for (unsigned t = 0; t < threads; ++t) {
          device.emplace_back([&, b, t] {
            random_numbers.seed(seed * 7919 + (r * blocks + b) * threads + t + 1);
            blockDim.x = threads, blockIdx.x = b, threadIdx.x = t;
            block = made[b].get();
            for (unsigned call = 0; call < calls; ++call) {
              const Plan& plan = plans[call % kPlans];
              gridDim.x = plan.blocks;
              between.sync();
              if (b < plan.blocks) plan.kernel(arguments[r][call % kPlans]);
              between.sync();
            }
          });
        }
      }
      for (unsigned call = 0; call < calls; ++call) {
        const Plan& plan = plans[call % kPlans];
        std::vector<u32>& data = all[r]->data;
        for (size_t i = 0; i < plan.count; ++i) {
          data[i] = coded(plan, input(call, r, i));
          for (unsigned j = 0; j < ranks; ++j) all[r]->part(j)[i] = coded(plan, input(call, r, i) + j);
        }
        between.sync();
        between.sync();
        for (size_t i = 0; i < plan.count; ++i) {
          u32 want = 0;
          const unsigned own = plan.kind == kReduceScatter ? r : 0;  // what its part has more than the first
          for (unsigned j = 0; j < ranks; ++j) want += (input(call, j, i) + own) * (plan.scales ? j + 1 : 1);
          want = coded(plan, want);
          if (plan.kind == kBroadcast) want = input(call, 1 % ranks, i);
          bool right = data[i] == want || plan.kind == kAllGather;
          for (unsigned j = 0; plan.kind == kAllGather && j < ranks; ++j) {
            right = right && all[r]->part(j)[i] == input(call, j, i);
          }
          if (!right && __atomic_fetch_add(&wrong, 1, __ATOMIC_RELAXED) == 0) {
            fprintf(stderr, "call %u rank %u element %zu: %u instead of %u\n", call, r, i, data[i], want);
          }
        }
      }
      for (std::thread& thread : device) thread.join();
    });
  }
  for (std::thread& thread : running) thread.join();
  for (unsigned r = 0; r < ranks; ++r) {
    if (all[r]->record.failure == 0) continue;
    fprintf(stderr, "rank %u gave up: %llx\n", r, all[r]->record.failure);
    ++wrong;
  }
  return wrong != 0;
}
