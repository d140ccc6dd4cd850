// Which cgroups this process is in.
#pragma once
#include <string>
#include <vector>

namespace c10d_custom {

struct Cgroup {
  std::string folder;
  bool version_1;
};

// Those that may limit this process, from the innermost outwards: of version 2, and of version 1 those of `controller`.
// Inside a container, what is to be seen of them; some may not exist. `root`: where cgroups are mounted; `own`: which
// are this process's, as /proc tells it.
std::vector<Cgroup> own_cgroups(const std::string& root, const char* own, const std::string& controller);

}  // namespace c10d_custom
