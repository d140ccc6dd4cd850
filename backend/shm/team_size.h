// How many threads share a rank's large copies and reductions where nobody has said how many (C10D_CUSTOM_THREADS).
//
// 4 where a rank has 4 cores or more of its own, else 1: by what it may run on, who of its group may run there, too,
// and what its cgroups give it of the processors' time. Of these, each call uses so many as find an idle core at that
// moment (team.h): the program's own threads keep theirs.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace c10d_custom {

class Group;

struct TeamSize {
  uint32_t threads;
  uint32_t sharers;  // ranks of the group that may run on the same cores, this one among them
};

struct OwnCores {
  std::vector<uint32_t> cpus;         // that it may run on; empty: not known
  uint32_t threads_of_a_core = 1;     // of these
  uint64_t thousandths = UINT64_MAX;  // of one cpu's time, for all ranks
};

// others: what the group's other ranks may run on; empty: not known, and then they may run anywhere.
TeamSize team_size(const OwnCores& mine, const std::vector<std::vector<uint32_t>>& others);

// Asks the kernel. For the thread that runs a collective, once all ranks have joined.
TeamSize team_size(const Group&);

// Of one cpu's time, what the tightest cgroup allows. Arguments as of own_cgroups.
uint64_t thousandths_of_cpu(const std::string& root = "/sys/fs/cgroup", const char* own = "/proc/self/cgroup");

}  // namespace c10d_custom
