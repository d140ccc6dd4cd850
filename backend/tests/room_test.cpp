// How much memory is left, by folders made to look like cgroups of both versions; and pages, taken under signals, by
// two at once, and where fallocate is refused.
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "../shm/pages.h"
#include "../shm/room.h"
#include "require.h"

using namespace c10d_custom;

extern "C" int __real_fallocate(int, int, off_t, off_t);

static int refused_with = 0;

// As of Linux before 6.11: undone where a signal is pending, which is looked for after each 64 KiB.
extern "C" int __wrap_fallocate(int fd, int mode, off_t from, off_t bytes) {
  if (refused_with) return errno = refused_with, -1;
  if (mode) return __real_fallocate(fd, mode, from, bytes);
  sigset_t all, before, pending;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int failed = 0, error = 0;
  for (off_t done = 0; done < bytes && !failed; done += 65536) {
    failed = __real_fallocate(fd, 0, from + done, std::min<off_t>(65536, bytes - done));
    error = errno;
    sigpending(&pending);
    if (!failed && sigismember(&pending, SIGALRM) && !sigismember(&before, SIGALRM)) {
      __real_fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, from, done + 65536);
      failed = -1, error = EINTR;
    }
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return errno = error, failed;
}

namespace {

struct Folder {
  std::string path = "/tmp/room_test.XXXXXX";
  Folder() { require(mkdtemp(path.data()), "no folder"); }
  ~Folder() { std::filesystem::remove_all(path); }
  void write(const std::string& name, const std::string& text) const {
    const std::filesystem::path file = path + "/" + name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text << "\n";
  }
};

constexpr uint64_t kAll = ~0ull, kMiB = 1 << 20;
std::string mib(uint64_t count) { return std::to_string(count * kMiB); }

void version_2() {
  const Folder f;
  auto group = [&](const std::string& name, const std::string& most, uint64_t taken, uint64_t cached) {
    f.write(name + "/memory.max", most);
    f.write(name + "/memory.current", mib(taken));
    f.write(name + "/memory.stat", "anon 5\ninactive_file " + mib(cached));
  };
  f.write("cgroup", "0::/job/step");
  f.write("meminfo", "MemTotal: 9999 kB\nMemAvailable:    5120000 kB");
  group("job/step", "max", 300, 7);
  group("job", mib(1000), 400, 50);
  const std::string cgroups = f.path + "/cgroup", machine = f.path + "/meminfo";
  const Room room(f.path, cgroups.c_str(), machine.c_str());
  auto left = [](const Room& r, uint64_t enough) { return (r.left(enough) + kSpare) / kMiB; };
  require(left(room, kAll) == 650 && room.whose() == "the cgroup " + f.path + "/job", "tightest", left(room, kAll));
  require(room.shared_by() == f.path + "/job", "whose lock");
  require(left(room, 600 * kMiB - kSpare) == 600, "caches are not asked for", left(room, 600 * kMiB - kSpare));
  require(left(room, 601 * kMiB - kSpare) == 650, "caches are", left(room, 601 * kMiB - kSpare));
  f.write("job/memory.current", mib(2000));
  require(left(room, kAll) == 50, "more taken than there may be", left(room, kAll));
  f.write("job/memory.stat", "inactive_file 0");
  require(room.left(kAll) == 0, "less than nothing", room.left(kAll));
  group("job/step", mib(100000), 300, 7);
  group("job", mib(90000), 400, 50);
  const Room both(f.path, cgroups.c_str(), machine.c_str());
  require(left(both, kAll) == 5000 && both.whose() == "the machine", "the machine's", left(both, kAll));
  require(both.shared_by() == f.path + "/job", "the outermost has the lock");
}

void version_1() {
  const Folder f;
  f.write("cgroup", "9:name=systemd:/x\n4:cpu,memory:/a/b\n3:cpuset:/\n0::/");
  f.write("meminfo", "MemAvailable: 5120000 kB");
  for (const char* name : {"memory", "memory/a", "memory/a/b"}) {
    f.write(std::string(name) + "/memory.limit_in_bytes", "9223372036854771712");
    f.write(std::string(name) + "/memory.usage_in_bytes", mib(100));
  }
  f.write("memory/a/memory.limit_in_bytes", mib(4096));
  f.write("memory/a/memory.stat", "inactive_file 1\ntotal_inactive_file " + mib(4));
  const Room room(f.path, (f.path + "/cgroup").c_str(), (f.path + "/meminfo").c_str());
  require(room.left(kAll) == 4000 * kMiB - kSpare, "of version 1", room.left(kAll));
  // In a container the path is one outside: what is seen of it is its own.
  f.write("cgroup", "4:memory:/elsewhere/b");
  f.write("memory/memory.limit_in_bytes", mib(2048));
  f.write("memory/memory.stat", "total_inactive_file 0");
  const Room inside(f.path, (f.path + "/cgroup").c_str(), (f.path + "/meminfo").c_str());
  require(inside.left(kAll) == 1948 * kMiB - kSpare, "in a container", inside.left(kAll));
}

struct File {
  const int fd = memfd_create("room_test", MFD_CLOEXEC);
  char* at;
  const uint64_t bytes;
  explicit File(uint64_t wanted) : bytes(wanted) {
    require(fd >= 0 && !ftruncate(fd, off_t(bytes)), "no memfd");
    at = static_cast<char*>(map_pages(fd, 0, bytes));
    require(at != MAP_FAILED, "no mapping");
  }
  ~File() { munmap(at, bytes), close(fd); }
  uint64_t memory() const {
    struct stat s;
    require(!fstat(fd, &s), "no stat");
    return uint64_t(s.st_blocks) * 512;
  }
};

void pages() {
  File file(32 * kMiB);
  file.at[5 * kMiB] = 3;
  require(!take_pages(file.fd, 4096, file.at + 4096, 9 * kMiB) && file.memory() == 9 * kMiB, "taken", file.memory());
  require(file.at[5 * kMiB] == 3, "contents are gone");
  uint64_t asked = 0;
  const int error = take_pages(file.fd, 10 * kMiB, file.at + 10 * kMiB, 20 * kMiB, [&] { return ++asked < 3; });
  require(error == ECANCELED && file.memory() == 17 * kMiB, "in pieces, until that is enough", file.memory());
  give_back_pages(file.fd, 0, file.at, 16 * kMiB);
  require(file.memory() <= 3 * kMiB && file.at[5 * kMiB] == 0, "given back", file.memory());
  require(take_pages(file.fd, 0, file.at, 1ull << 50) == ENOMEM, "more than any machine has");
  // A timer that is shorter than anything takes.
  static volatile unsigned alarms;
  signal(SIGALRM, [](int) { alarms = alarms + 1; });
  const itimerval often{{0, 50}, {0, 50}}, never{};
  setitimer(ITIMER_REAL, &often, nullptr);
  File large(256 * kMiB);
  require(!take_pages(large.fd, 0, large.at, large.bytes), "under a timer");
  setitimer(ITIMER_REAL, &never, nullptr);
  require(large.memory() == large.bytes && alarms, "under a timer", alarms);
}

// A sandbox that refuses fallocate: pages come, contents stay, and go.
void without_fallocate() {
  for (const int error : {EPERM, ENOSYS, EOPNOTSUPP}) {
    File file(32 * kMiB);
    file.at[5 * kMiB] = 3;
    refused_with = error;
    const int taken = take_pages(file.fd, 4096, file.at + 4096, 9 * kMiB);
    // Before Linux 5.14; and emulators answer 0 to an advice that they do not know.
    if (taken == error || (!taken && file.memory() == 4096)) return void(std::puts("no MADV_POPULATE_WRITE here"));
    require(!taken && file.memory() == 9 * kMiB && file.at[5 * kMiB] == 3, "taken", file.memory());
    give_back_pages(file.fd, 0, file.at, 16 * kMiB);
    require(file.memory() == 0 && file.at[5 * kMiB] == 0, "given back", file.memory());
    refused_with = 0;
  }
  File file(kMiB);
  refused_with = ENOSPC;  // that is an answer
  require(take_pages(file.fd, 0, file.at, kMiB) == ENOSPC && !file.memory(), "no room", file.memory());
  refused_with = 0;
}

void locked() {
  if (mlockall(MCL_FUTURE)) return void(std::puts("no mlockall here"));
  File file(256 * kMiB);
  const uint64_t memory = file.memory();
  file.at[0] = 1;
  munlockall();
  require(memory == 0, "what is only reserved is real", memory);
}

}  // namespace

int main() {
  version_2();
  version_1();
  pages();
  without_fallocate();
  locked();
  std::puts("room_test: ok");
}
