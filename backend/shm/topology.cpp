#include "topology.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <map>
#include <memory>

#include "os.h"

namespace c10d_custom {
namespace {

constexpr uint32_t kMost = 1 << 14;  // cpus; what names more is not a list of the kernel's
constexpr uint32_t kUnknown = ~0u;

// The first line of a file.
std::string line_of(const std::string& path) {
  const std::string text = file_text(path);
  return text.substr(0, text.find('\n'));
}

// "32768K", "32M" or plain bytes.
uint64_t parse_size(const std::string& text) {
  char* end = nullptr;
  const uint64_t number = strtoull(text.c_str(), &end, 10);
  return *end == 'K' ? number << 10 : *end == 'M' ? number << 20 : number;
}

struct Cache {
  std::vector<uint32_t> cpus;
  uint64_t bytes = 0;
};

// The last-level cache of a cpu. One of a single core does not count: a virtual machine that shows no more hides the
// real last level.
Cache last_cache(const std::string& cpu) {
  Cache last;
  unsigned long highest = 0;
  for (uint32_t i = 0; i < 16; ++i) {
    const std::string index = cpu + "/cache/index" + std::to_string(i);
    const std::string level_text = line_of(index + "/level");
    if (level_text.empty()) break;
    const unsigned long level = strtoul(level_text.c_str(), nullptr, 10);
    if (level <= highest || line_of(index + "/type") == "Instruction") continue;
    Cache found{parse_cpu_list(line_of(index + "/shared_cpu_list")), parse_size(line_of(index + "/size"))};
    if (level < 3 && found.cpus.size() <= 2) continue;
    highest = level;
    last = std::move(found);
  }
  return last;
}

}  // namespace

std::vector<uint32_t> parse_cpu_list(const std::string& text) {
  std::vector<uint32_t> numbers;
  const char* at = text.c_str();
  auto number = [&](unsigned long* value) {
    if (*at < '0' || *at > '9') return false;
    char* end;
    *value = strtoul(at, &end, 10);
    at = end;
    return *value < kMost;
  };
  for (unsigned long first, last; number(&first); ++at) {
    last = first;
    if (*at == '-' && (++at, !number(&last))) break;
    for (unsigned long n = first; n <= last; ++n) numbers.push_back(uint32_t(n));
    if (*at != ',') break;
  }
  std::sort(numbers.begin(), numbers.end());
  numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
  return numbers;
}

std::vector<uint32_t> allowed_cpus(uint32_t pid) {
  std::vector<uint32_t> cpus;
  for (uint32_t room = 1024; room <= kMost; room *= 2) {  // the kernel refuses a mask shorter than its own
    const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> mask(CPU_ALLOC(room), [](cpu_set_t* m) { CPU_FREE(m); });
    const size_t bytes = CPU_ALLOC_SIZE(room);
    if (!mask) break;
    if (sched_getaffinity(pid_t(pid), bytes, mask.get())) {
      if (errno == EINVAL) continue;
      break;
    }
    for (uint32_t cpu = 0; cpu < room; ++cpu)
      if (CPU_ISSET_S(cpu, bytes, mask.get())) cpus.push_back(cpu);
    break;
  }
  return cpus;
}

const Topology& Topology::here() {
  static const Topology topology = read("/sys", allowed_cpus());
  return topology;
}

uint64_t group_cache_bytes(uint32_t ranks) {
  const Topology& here = Topology::here();
  return here.cpus().size() < ranks ? Topology::read("/sys", {}).cache_bytes(ranks) : here.cache_bytes(ranks);
}

Topology Topology::read(const std::string& sys, std::vector<uint32_t> cpus) {
  const std::string system = sys + "/devices/system";
  if (cpus.empty()) cpus = parse_cpu_list(line_of(system + "/cpu/online"));
  if (cpus.empty()) cpus = {0};
  const uint32_t end = cpus.back() + 1;

  // Of each cpu by number: the lowest cpu that has the same; files are read for one cpu of each set.
  std::vector<uint32_t> socket(end, kUnknown), node(end, kUnknown), cache(end, kUnknown);
  std::vector<uint64_t> bytes(end, 0);
  auto all_have = [end](std::vector<uint32_t>& of, const std::vector<uint32_t>& set, uint32_t value) {
    for (const uint32_t c : set)
      if (c < end) of[c] = value;
  };
  for (const uint32_t number : parse_cpu_list(line_of(system + "/node/online")))
    all_have(node, parse_cpu_list(line_of(system + "/node/node" + std::to_string(number) + "/cpulist")), number);
  for (const uint32_t c : cpus) {
    const std::string cpu = system + "/cpu/cpu" + std::to_string(c);
    if (socket[c] == kUnknown) {
      socket[c] = c;
      std::string siblings = line_of(cpu + "/topology/package_cpus_list");
      if (siblings.empty()) siblings = line_of(cpu + "/topology/core_siblings_list");  // before Linux 5.3
      const std::vector<uint32_t> set = parse_cpu_list(siblings);
      all_have(socket, set, c);
      if (set.empty()) socket[c] = kUnknown;
    }
    if (cache[c] == kUnknown) {
      const Cache last = last_cache(cpu);
      all_have(cache, last.cpus, c);
      for (const uint32_t other : last.cpus)
        if (other < end) bytes[other] = last.bytes;
    }
  }

  // A cpu of which a cache is not known has one with all others of its node.
  Topology made;
  std::map<uint64_t, uint32_t> sockets, nodes, caches;
  auto number = [](auto& known, uint64_t key) { return known.emplace(key, uint32_t(known.size())).first->second; };
  for (const uint32_t c : cpus) {
    const uint64_t key = cache[c] == kUnknown ? uint64_t(1) << 32 | node[c] : cache[c];
    made.cpus_.push_back({c, number(caches, key), number(nodes, node[c]), number(sockets, socket[c]), bytes[c]});
  }
  made.caches_ = uint32_t(caches.size()), made.nodes_ = uint32_t(nodes.size()),
  made.sockets_ = uint32_t(sockets.size());
  return made;
}

uint64_t Topology::cache_bytes(uint32_t ranks) const {
  struct Last {
    uint32_t cpus = 0;
    uint64_t bytes = 0;
  };
  std::vector<Last> each(caches_);
  for (const CpuPlace& place : cpus_) ++each[place.cache].cpus, each[place.cache].bytes = place.cache_bytes;
  std::sort(each.begin(), each.end(), [](const Last& a, const Last& b) { return a.cpus > b.cpus; });
  uint64_t sum = 0, seated = 0;
  for (const Last& one : each) {
    if (!one.bytes) return 0;
    sum += one.bytes, seated += one.cpus;
    if (seated >= ranks) break;
  }
  return sum;
}

}  // namespace c10d_custom
