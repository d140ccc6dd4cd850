#include "team_size.h"

#include <algorithm>
#include <cstdlib>

#include "cgroups.h"
#include "group.h"
#include "topology.h"

namespace c10d_custom {
namespace {

constexpr uint32_t kThreads = 4;

bool overlap(const std::vector<uint32_t>& a, const std::vector<uint32_t>& b) {
  return std::any_of(a.begin(), a.end(), [&](uint32_t cpu) { return std::binary_search(b.begin(), b.end(), cpu); });
}

// Hardware threads of the first core that this rank may run on. Cores of one machine are taken to have as many, or
// fewer.
uint32_t threads_of_a_core(const std::vector<uint32_t>& cpus) {
  if (cpus.empty()) return 1;
  const std::string cpu = "/sys/devices/system/cpu/cpu" + std::to_string(cpus[0]);
  const std::vector<uint32_t> siblings = parse_cpu_list(file_text(cpu + "/topology/thread_siblings_list"));
  const auto ours = std::count_if(siblings.begin(), siblings.end(),
                                  [&](uint32_t c) { return std::binary_search(cpus.begin(), cpus.end(), c); });
  return uint32_t(std::max<long>(1, ours));
}

}  // namespace

TeamSize team_size(const OwnCores& mine, const std::vector<std::vector<uint32_t>>& others) {
  uint32_t sharers = 1;
  for (const auto& other : others) sharers += other.empty() || overlap(mine.cpus, other);
  const uint64_t cores = mine.cpus.size() / mine.threads_of_a_core / sharers;
  const uint64_t time = mine.thousandths / 1000 / (others.size() + 1);
  return {std::min(cores, time) >= kThreads ? kThreads : 1, sharers};
}

TeamSize team_size(const Group& g) {
  OwnCores mine;
  mine.cpus = allowed_cpus();
  mine.threads_of_a_core = threads_of_a_core(mine.cpus);
  if (mine.cpus.size() / mine.threads_of_a_core < kThreads) return {1, g.n};
  mine.thousandths = thousandths_of_cpu();
  std::vector<std::vector<uint32_t>> others;
  for (uint32_t r = 0; r < g.n; ++r) {
    const RankCtl& peer = g.ctl(r);
    if (r != g.rank)
      others.push_back(peer.pid_namespace == g.ctl(g.rank).pid_namespace ? allowed_cpus(peer.pid)
                                                                         : std::vector<uint32_t>{});
  }
  return team_size(mine, others);
}

uint64_t thousandths_of_cpu(const std::string& root, const char* own) {
  uint64_t least = UINT64_MAX;
  for (const Cgroup& each : own_cgroups(root, own, "cpu")) {
    uint64_t quota, period = 0;  // microseconds
    if (each.version_1) {
      if (!number_after(file_text(each.folder + "/cpu.cfs_quota_us"), "", &quota) || quota > INT64_MAX) continue;  // -1
      number_after(file_text(each.folder + "/cpu.cfs_period_us"), "", &period);
    } else {
      const std::string text = file_text(each.folder + "/cpu.max");  // "max 100000": none
      if (!number_after(text, "", &quota)) continue;
      if (const size_t space = text.find(' '); space != std::string::npos)
        period = strtoull(text.c_str() + space, nullptr, 10);
    }
    if (period) least = std::min(least, quota * 1000 / period);
  }
  return least;
}

}  // namespace c10d_custom
