// How many threads a rank has where nobody has said: by made-up affinity masks, by folders made to look like cgroups,
// and by what else runs on the machine.
#include "../shm/team_size.h"

#include <stdlib.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "../shm/team.h"
#include "../shm/topology.h"
#include "require.h"

using namespace c10d_custom;

namespace {

using Cpus = std::vector<uint32_t>;

Cpus range(uint32_t from, uint32_t to) {
  Cpus cpus;
  for (; from < to; ++from) cpus.push_back(from);
  return cpus;
}

void is(const char* what, TeamSize made, uint32_t threads, uint32_t sharers) {
  require(made.threads == threads, what, made.threads);
  require(made.sharers == sharers, what, made.sharers);
}

void masks() {
  const std::vector<Cpus> none;
  is("alone on 4 cores", team_size({range(0, 4)}, none), 4, 1);
  is("alone on 3", team_size({range(0, 3)}, none), 1, 1);
  is("alone on 64", team_size({range(0, 64)}, none), 4, 1);
  is("each bound to 4 of its own", team_size({range(4, 8)}, {range(0, 4), range(8, 12)}), 4, 1);
  is("each bound to one", team_size({{5}}, {{4}, {6}}), 1, 1);
  is("4 on 16 cores", team_size({range(0, 16)}, {3, range(0, 16)}), 4, 4);
  is("5 on 16 cores", team_size({range(0, 16)}, {4, range(0, 16)}), 1, 5);
  is("some share", team_size({range(0, 8)}, {range(7, 9), range(8, 16)}), 4, 2);
  is("more share", team_size({range(0, 8)}, {range(7, 9), range(0, 2), range(8, 16)}), 1, 3);
  is("where others are is not known", team_size({range(0, 8)}, {{}, {}}), 1, 3);
  is("nor where this one is", team_size({{}}, none), 1, 1);
  is("two threads of each core", team_size({range(0, 6), 2}, none), 1, 1);
  is("of 4 cores", team_size({range(0, 8), 2}, none), 4, 1);
  is("time of 3 cpus", team_size({range(0, 64), 1, 3999}, none), 1, 1);
  is("time of 4", team_size({range(0, 64), 1, 4000}, none), 4, 1);
  is("time of 4 for two", team_size({range(0, 4), 1, 4000}, {range(4, 8)}), 1, 1);
}

struct Folder {
  std::string path = "/tmp/team_size_test.XXXXXX";
  Folder() { require(mkdtemp(path.data()), "no folder"); }
  ~Folder() { std::filesystem::remove_all(path); }
  void write(const std::string& name, const std::string& text) const {
    const std::filesystem::path at = path + "/" + name;
    std::filesystem::create_directories(at.parent_path());
    std::ofstream(at) << text << "\n";
  }
  uint64_t thousandths() const { return thousandths_of_cpu(path, (path + "/cgroup").c_str()); }
};

void quotas() {
  const Folder two;
  two.write("cgroup", "0::/a/b");
  require(two.thousandths() == UINT64_MAX, "no file", two.thousandths());
  two.write("a/b/cpu.max", "max 100000");
  require(two.thousandths() == UINT64_MAX, "no limit", two.thousandths());
  two.write("a/cpu.max", "250000 100000");
  require(two.thousandths() == 2500, "of the one it is in", two.thousandths());
  two.write("a/b/cpu.max", "50000 100000");
  require(two.thousandths() == 500, "the tighter one", two.thousandths());

  const Folder one;
  one.write("cgroup", "5:cpu,cpuacct:/c\n4:memory:/d\n0::/");
  one.write("cpu/c/cpu.cfs_period_us", "50000");
  one.write("cpu/c/cpu.cfs_quota_us", "-1");
  require(one.thousandths() == UINT64_MAX, "no limit, version 1", one.thousandths());
  one.write("cpu/c/cpu.cfs_quota_us", "400000");
  require(one.thousandths() == 8000, "version 1", one.thousandths());
}

long g_idle;

void load() {
  auto size = [&](TeamSize allowed, long idle) {
    Team team;
    g_idle = idle;
    team.set_by_load([=] { return allowed; }, [] { return g_idle; });
    team.begin(1000);
    require(team.size() == 1, "a small call", team.size());
    team.begin(2 << 20);
    return team.size();
  };
  require(size({1, 1}, 8) == 1, "it may not");
  require(size({4, 1}, 2) == 3, "two cores are idle");
  require(size({4, 1}, 9) == 4, "no more than allowed");
  require(size({4, 4}, 9) == 3, "nine idle cores for four ranks");
  require(size({4, 1}, 0) == 1, "none is idle");
  require(size({4, 1}, -100) == 1, "others wait for one");

  // The team's own helpers, awake after a call, are not what keeps it from the next.
  Team team;
  int asked = 0;
  team.set_by_load([&] { return ++asked, TeamSize{4, 1}; }, [] { return g_idle; });
  const int64_t until = now_ns() + 20ll * 1000 * 1000 * 1000;
  do {  // until one begins before they sleep
    require(now_ns() < until, "helpers that are awake take the team's cores");
    g_idle = 3;
    team.begin(2 << 20);
    require(team.size() == 4, "three idle cores", team.size());
    std::atomic<uint32_t> parts{0};
    team.share(2 << 20, [&](uint64_t, uint64_t) { ++parts; });
    require(parts == 4, "parts", parts);
    g_idle = 0;
    team.begin(2 << 20);
  } while (team.size() < 2);
  // Once they sleep, others are on these cores.
  for (; team.begin(2 << 20), team.size() > 1; usleep(1000)) require(now_ns() < until, "helpers do not sleep");
  require(asked == 1, "masks are asked for once", uint64_t(asked));
}

void here() {
  require(!allowed_cpus().empty() && allowed_cpus() == allowed_cpus(uint32_t(getpid())), "this process's mask");
  require(allowed_cpus(1u << 30).empty(), "of no process");
}

}  // namespace

int main() {
  masks();
  quotas();
  load();
  here();
  std::puts("team_size_test: ok");
}
