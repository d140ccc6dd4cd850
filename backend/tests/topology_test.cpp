// What is read of machines that are not here, made up as folders that look like /sys; and of this one.
#include "../shm/topology.h"
#include "require.h"

#include <stdlib.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

using namespace c10d_custom;

namespace {

using Cpus = std::vector<uint32_t>;

Cpus range(uint32_t from, uint32_t to) {
  Cpus cpus;
  for (; from < to; ++from) cpus.push_back(from);
  return cpus;
}

std::string list(uint32_t from, uint32_t to) { return std::to_string(from) + "-" + std::to_string(to - 1); }

struct Machine {
  std::string sys = "/tmp/topology_test.XXXXXX";

  Machine() { require(mkdtemp(sys.data()), "no folder"); }
  ~Machine() { std::filesystem::remove_all(sys); }

  void write(const std::string& name, const std::string& text) const {
    const std::filesystem::path path = sys + "/devices/system/" + name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text << "\n";
  }

  void cache(uint32_t cpu, uint32_t index, const char* level, const char* type, const std::string& size,
             const std::string& shared) const {
    const std::string folder = "cpu/cpu" + std::to_string(cpu) + "/cache/index" + std::to_string(index) + "/";
    write(folder + "level", level), write(folder + "type", type);
    write(folder + "size", size), write(folder + "shared_cpu_list", shared);
  }

  // The caches that each core has to itself.
  void own_caches(uint32_t cpu) const {
    const std::string itself = std::to_string(cpu);
    cache(cpu, 0, "1", "Data", "32K", itself), cache(cpu, 1, "1", "Instruction", "32K", itself);
    cache(cpu, 2, "2", "Unified", "2048K", itself);
  }

  // Cores 0 to cores - 1 in sockets, nodes and caches of so many each.
  void like(uint32_t cores, uint32_t socket, uint32_t node, uint32_t shared, const std::string& size) const {
    write("cpu/online", list(0, cores));
    write("node/online", list(0, cores / node));
    for (uint32_t i = 0; i < cores / node; ++i)
      write("node/node" + std::to_string(i) + "/cpulist", list(i * node, (i + 1) * node));
    for (uint32_t c = 0; c < cores; ++c) {
      const uint32_t s = c / socket * socket, l = c / shared * shared;
      write("cpu/cpu" + std::to_string(c) + "/topology/package_cpus_list", list(s, s + socket));
      own_caches(c);
      cache(c, 3, "3", "Unified", size, list(l, l + shared));
    }
  }
};

void check(const Topology& made, uint32_t cpus, uint32_t caches, uint32_t nodes, uint32_t sockets) {
  require(made.cpus().size() == cpus, "cpus", made.cpus().size());
  require(made.caches() == caches, "caches", made.caches());
  require(made.nodes() == nodes, "nodes", made.nodes());
  require(made.sockets() == sockets, "sockets", made.sockets());
}

uint32_t cache_of(const Topology& made, uint32_t cpu) {
  for (const CpuPlace& place : made.cpus())
    if (place.cpu == cpu) return place.cache;
  return ~0u;
}

constexpr uint64_t kMiB = 1 << 20;

void two_sockets() {
  Machine machine;
  machine.like(112, 56, 56, 56, "107520K");  // 2 x 56 cores, 105 MiB each
  const Topology all = Topology::read(machine.sys, {});
  check(all, 112, 2, 2, 2);
  require(cache_of(all, 55) == 0 && cache_of(all, 56) == 1, "the second half");
  require(all.cpus()[111].socket == 1 && all.cpus()[111].node == 1, "the last one");
  require(all.cache_bytes(2) == 105 * kMiB, "for 2 ranks", all.cache_bytes(2));
  require(all.cache_bytes(57) == 210 * kMiB, "for 57", all.cache_bytes(57));
  require(all.cache_bytes(500) == 210 * kMiB, "for more than there are", all.cache_bytes(500));
}

void core_complexes() {
  Machine machine;
  machine.like(64, 64, 64, 8, "32768K");  // one socket, 8 complexes of 8
  const Topology all = Topology::read(machine.sys, {});
  check(all, 64, 8, 1, 1);
  for (const CpuPlace& place : all.cpus()) require(place.cache == place.cpu / 8, "cache of", place.cpu);
  require(all.cache_bytes(8) == 32 * kMiB && all.cache_bytes(9) == 64 * kMiB, "for 8 and 9 ranks");
}

void large() {
  Machine machine;
  machine.like(192, 96, 24, 8, "32768K");  // two sockets of 96, four nodes in each
  check(Topology::read(machine.sys, {}), 192, 24, 8, 2);

  // A container's part: two complexes, of which one in half, of the second socket. Numbers begin at 0.
  Cpus part = range(96, 104);
  for (const uint32_t c : range(188, 192)) part.push_back(c);
  const Topology few = Topology::read(machine.sys, part);
  check(few, 12, 2, 2, 1);
  require(cache_of(few, 96) == 0 && cache_of(few, 191) == 1, "caches of a part");
  require(few.cache_bytes(8) == 32 * kMiB && few.cache_bytes(12) == 64 * kMiB, "bytes of a part");

  check(Topology::read(machine.sys, {100}), 1, 1, 1, 1);  // a rank bound to one core
}

void unlike() {
  // Cores with two threads whose numbers lie apart, before Linux 5.3; no nodes.
  Machine threads;
  threads.write("cpu/online", "0-7");
  for (uint32_t c = 0; c < 8; ++c) {
    const std::string pair = c % 4 < 2 ? "0-1,4-5" : "2-3,6-7";
    threads.write("cpu/cpu" + std::to_string(c) + "/topology/core_siblings_list", pair);
    threads.own_caches(c);
    threads.cache(c, 3, "3", "Unified", "16M", pair);
  }
  const Topology two = Topology::read(threads.sys, {});
  check(two, 8, 2, 1, 2);
  require(cache_of(two, 5) == 0 && cache_of(two, 6) == 1, "threads of one core");
  require(two.cache_bytes(4) == 16 * kMiB, "megabytes", two.cache_bytes(4));

  // The last cache is not shown: what each core has to itself says nothing of what they share.
  Machine hidden;
  hidden.write("cpu/online", "0-3");
  hidden.write("node/online", "0-1");
  hidden.write("node/node0/cpulist", "0-1"), hidden.write("node/node1/cpulist", "2-3");
  for (uint32_t c = 0; c < 4; ++c) hidden.own_caches(c);
  const Topology nodes = Topology::read(hidden.sys, {});
  check(nodes, 4, 2, 2, 1);
  require(nodes.cache_bytes(2) == 0, "not known");

  // Clusters of four cores that share what they have of a second level.
  Machine clusters;
  clusters.write("cpu/online", "0-7");
  for (uint32_t c = 0; c < 8; ++c) clusters.cache(c, 0, "2", "Unified", "4096K", c < 4 ? "0-3" : "4-7");
  check(Topology::read(clusters.sys, {}), 8, 2, 1, 1);
}

void nothing() {
  Machine machine;
  const Topology one = Topology::read(machine.sys, {});
  check(one, 1, 1, 1, 1);
  require(one.cache_bytes(1) == 0 && cache_of(one, 0) == 0, "nothing is known");
  check(Topology::read(machine.sys, range(0, 16)), 16, 1, 1, 1);  // and a mask
}

void lists() {
  require(parse_cpu_list("0-3,8,10-11") == Cpus({0, 1, 2, 3, 8, 10, 11}), "a list");
  require(parse_cpu_list("5,1,1-2") == Cpus({1, 2, 5}), "a list in disorder");
  for (const char* empty : {"", "x", "-1", "99999999999999999999", "0-99999999999"})
    require(parse_cpu_list(empty).empty(), "no list");
  require(parse_cpu_list("7,rest") == Cpus({7}), "half a list");
  require(parse_cpu_list("3-1").empty(), "backwards");
}

void this_machine() {
  const Topology& here = Topology::here();
  require(here.cpus().size() == allowed_cpus().size(), "cpus of this process", here.cpus().size());
  require(here.caches() >= 1 && here.caches() <= here.cpus().size(), "caches", here.caches());
  for (const CpuPlace& place : here.cpus()) {
    require(place.cache < here.caches() && place.node < here.nodes() && place.socket < here.sockets(), "ids");
  }
  const uint64_t for_many = group_cache_bytes(1 << 20);
  require(!for_many || group_cache_bytes(1) <= for_many, "more ranks, more caches", for_many);
}

}  // namespace

int main() {
  lists();
  two_sockets();
  core_complexes();
  large();
  unlike();
  nothing();
  this_machine();
  std::puts("topology_test: ok");
}
