#include "cgroups.h"

#include <algorithm>

#include "os.h"

namespace c10d_custom {

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
