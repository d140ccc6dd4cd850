#include "cgroups.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace c10d_custom {

std::string file_text(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  std::string all;
  char part[4096];
  for (ssize_t got; (got = read(fd, part, sizeof part)) > 0;) all.append(part, size_t(got));
  ::close(fd);
  return all;
}

bool number_after(const std::string& text, const char* key, uint64_t* value) {
  const size_t length = strlen(key);
  for (size_t line = 0; line < text.size(); line = text.find('\n', line) + 1) {
    if (!text.compare(line, length, key)) {
      const char* const at = text.c_str() + line + length;
      char* end;
      *value = strtoull(at, &end, 10);
      return end != at;
    }
    if (text.find('\n', line) == std::string::npos) break;
  }
  return false;
}

std::vector<Cgroup> own_cgroups(const std::string& root, const char* own, const std::string& controller) {
  std::vector<Cgroup> found;
  auto on_the_way = [&](const std::string& mounted, std::string path, bool version_1) {
    while (!path.empty() && path.back() == '/') path.pop_back();
    for (;;) {
      found.push_back({mounted + path, version_1});
      const size_t up = path.rfind('/');
      if (up == std::string::npos) return;
      path.resize(up);
    }
  };
  const std::string text = file_text(own);  // lines "number:controllers:path"
  for (size_t line = 0; line < text.size();) {
    const size_t end = std::min(text.find('\n', line), text.size());
    const size_t first = text.find(':', line), second = text.find(':', first + 1);
    if (second < end) {
      const std::string controllers = "," + text.substr(first + 1, second - first - 1) + ",";
      const std::string path = text.substr(second + 1, end - second - 1);
      if (!text.compare(line, first - line, "0"))
        on_the_way(root, path, false);
      else if (controllers.find("," + controller + ",") != std::string::npos)
        on_the_way(root + "/" + controller, path, true);
    }
    line = end + 1;
  }
  return found;
}

}  // namespace c10d_custom
