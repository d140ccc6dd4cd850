// Which way a collective goes on one host. The answers are in algorithm.cpp, which `run` of collective.cpp asks in
// order; the numbers come with the segment's geometry (transport/shm/segment.py), so that all ranks choose alike.
#pragma once
#include <cstdint>

namespace c10d_custom {

// One may be forced, for tests: then calls go by it which can, and others as if it were not.
enum class Algorithm : uint32_t {
  kBest = 0,  // what is fastest
  kSlots,     // small.cpp: input with the announcement, and each rank reads what it needs
  kTwoSteps,  // small.cpp: the same, and the ranks share out a sum that all need
  kRings,     // pipeline.h, all_to_all.cpp
  kInPlace,   // in_place.cpp: where inputs lie in arenas, however small
  kCount,
};

}  // namespace c10d_custom
