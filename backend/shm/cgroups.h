// Which cgroups this process is in, and what short files of the kernel say.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace c10d_custom {

// A file's contents; "" where it cannot be read.
std::string file_text(const std::string& path);

// The number after `key` where a line begins with it; false: there is none.
bool number_after(const std::string& text, const char* key, uint64_t* value);

struct Cgroup {
  std::string folder;
  bool version_1;
};

// Those that may limit this process, from the innermost outwards: of version 2, and of version 1 those of `controller`.
// Inside a container, what is to be seen of them; some may not exist. `root`: where cgroups are mounted; `own`: which
// are this process's, as /proc tells it.
std::vector<Cgroup> own_cgroups(const std::string& root, const char* own, const std::string& controller);

}  // namespace c10d_custom
