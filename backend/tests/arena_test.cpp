// Arenas alone: blocks that never overlap and keep their bytes, memory that goes back, what peers see of a block until
// it is cut off, and what a forked child sees.
#include <errno.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "../shm/arena.h"
#include "../shm/layout.h"
#include "require.h"

using namespace c10d_custom;

// Private mappings that the system refuses: of fewer bytes than `refused_below`, as where there are too many, and with
// `refuse_writable`, as where so much memory may not be promised.
static uint64_t refused_below = 0;
static bool refuse_writable = false;

extern "C" void* __real_mmap(void*, size_t, int, int, int, off_t);
extern "C" void* __wrap_mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) {
  const bool refused = bytes < refused_below || (refuse_writable && (protection & PROT_WRITE));
  if (fd < 0 || !(flags & MAP_PRIVATE) || !refused) return __real_mmap(at, bytes, protection, flags, fd, offset);
  errno = ENOMEM;
  return MAP_FAILED;
}

namespace {

constexpr uint64_t kMiB = 1 << 20;

struct File {
  const int fd = memfd_create("arena_test", MFD_CLOEXEC);
  explicit File(uint64_t bytes) { require(fd >= 0 && !ftruncate(fd, off_t(bytes)), "no memfd", 0); }
  ~File() { close(fd); }
  uint64_t memory() const {
    struct stat s;
    require(!fstat(fd, &s), "no stat", 0);
    return uint64_t(s.st_blocks) * 512;
  }
};

Arena* open_arena(int fd, uint64_t at, uint64_t bytes) {
  int error = 0;
  Arena* a = Arena::open(fd, at, bytes, &error);
  require(a, "no arena", uint64_t(error));
  return a;
}

char* take(Arena* a, uint64_t bytes, bool kept = false) {
  int error = 0;
  return static_cast<char*>(a->take(bytes, kept, nullptr, &error));
}

// Blocks come and go; each keeps what its owner wrote at its ends.
void blocks(uint64_t steps) {
  const File file(kMiB);
  Arena* const a = open_arena(file.fd, 0, kMiB);
  struct Held {
    char* at;
    uint64_t bytes;
    uint8_t mark;
  };
  std::vector<Held> held;
  std::mt19937_64 random(7);
  uint64_t refused = 0, largest_left = 0;
  for (uint64_t step = 0; step < steps; ++step) {
    if (held.empty() || random() % 2) {
      const uint64_t bytes = 1 + random() % (random() % 4 ? 5000 : 200 * 1024);
      int error = 0;
      char* p = static_cast<char*>(a->take(bytes, random() % 4 == 0, nullptr, &error));
      if (!p) {
        require(error == ENOMEM || error == ENODATA, "an odd reason", step);
        refused += error == ENOMEM;
      } else {
        require(uint64_t(p) % 4096 == 0, "a block off a page", step);
        held.push_back({p, bytes, uint8_t(step)});
        p[0] = p[bytes - 1] = char(step);
        require(a->place(p + bytes / 2, bytes - bytes / 2) != kNever, "a block that is nowhere", step);
        require(a->place(p, bytes + 4096) == kNever, "bytes beyond a block", step);
      }
    } else {
      const uint64_t i = random() % held.size();
      const Held h = held[i];
      require(uint8_t(h.at[0]) == h.mark && uint8_t(h.at[h.bytes - 1]) == h.mark, "a block was written to", step);
      held[i] = held.back(), held.pop_back();
      a->give_back(h.at);
      require(a->place(h.at, 1) == kNever, "a block given back is still one", step);
    }
  }
  require(steps < 1000 || refused, "the arena was never full", 0);
  for (const Held& h : held) a->give_back(h.at);
  char* const whole = take(a, kMiB);  // what was left is one range again
  require(whole, "the arena does not become whole again", largest_left);
  int error = 0;
  require(!a->take(1, false, nullptr, &error) && error == ENOMEM, "more than there is", 0);
  a->give_back(whole);
  char on_stack = 0;
  require(a->place(&on_stack, 1) == kNever, "memory from elsewhere", 0);
  a->drop();
}

// What blocks leave is used again; beyond some of it, the system has it back.
void memory() {
  const File file(1024 * kMiB);
  Arena* const a = open_arena(file.fd, 512 * kMiB, 512 * kMiB);
  require(file.memory() == 0, "memory before there is a block", 0);
  require(!take(a, 1, true), "kept memory from nowhere", 0);
  char* small = take(a, 3 * kMiB);
  require(file.memory() == 3 * kMiB, "a block's memory", 0);
  a->give_back(small);
  require(take(a, 2 * kMiB, true) == small && file.memory() == 3 * kMiB, "what was left was not used again", 0);
  char* large = take(a, 200 * kMiB);
  memset(large, 1, 200 * kMiB);
  a->give_back(large);
  // Kept as long as some of it is needed now and then, and what is not goes back.
  for (int i = 0; i < 5; ++i) {
    usleep(600 * 1000);
    char* const half = take(a, 100 * kMiB, true);
    require(half, "what was left was not kept", uint64_t(i));
    a->give_back(half);
  }
  require(file.memory() >= 100 * kMiB && file.memory() <= 110 * kMiB, "what nobody needed was kept", file.memory());
  for (int i = 0; i < 6; ++i) usleep(600 * 1000), a->place(small, 1);
  require(file.memory() <= 3 * kMiB, "memory was not given back", file.memory());
  large = take(a, 200 * kMiB);
  require(large[0] == 0 && large[200 * kMiB - 1] == 0, "a hole that holds something", 0);
  a->drop();  // the blocks keep it
  large[5] = 1;
  a->give_back(large);
  small[5] = 1;
  a->give_back(small);
}

// A peer's window, which shares each block until it is cut off.
void cut_off() {
  constexpr uint64_t kBlock = 10 * kMiB;
  const File file(64 * kMiB);
  Arena* const a = open_arena(file.fd, 0, 64 * kMiB);
  char* const window = static_cast<char*>(mmap(nullptr, 64 * kMiB, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd, 0));
  char *p = take(a, kBlock), *other = take(a, 10000);
  const uint64_t at = a->place(p, kBlock);
  p[0] = p[9 * kMiB] = 1;
  require(window[at] == 1, "the window shows something else", 0);
  window[at + 1] = 2;
  require(p[1] == 2, "a peer's write is not seen", 0);
  a->cut_off(p + 5000);
  require(a->place(p, 1) == kNever && a->place(other, 1) != kNever, "cut off", 0);
  require(p[0] == 1 && p[1] == 2 && p[9 * kMiB] == 1, "contents were lost", 0);
  require(file.memory() <= kMiB, "it is there twice", file.memory());
  p[0] = 5;
  require(window[at] != 5, "a peer sees what was written since", 0);
  // Also to pages that the owner has not touched since.
  for (uint64_t i = 0; i < kBlock; i += 4096) window[at + i + 2] = 7;
  for (uint64_t i = 0; i < kBlock; i += 4096) require(p[i + 2] == 0, "a peer writes to it still", i);
  a->cut_off(p);  // once more
  a->give_back(p);
  char* next = take(a, kBlock);
  require(next != p, "cut off, and used again", 0);
  require(a->place(next, 1) != kNever, "the next block", 0);
  munmap(window, 64 * kMiB);
  a->give_back(next);
  a->give_back(other);
  a->drop();
}

// A child has the contents of the fork; neither writes to the other.
void fork_of_it() {
  const File file(kMiB);
  Arena* const a = open_arena(file.fd, 0, kMiB);
  char *p = take(a, 8192), *cut = take(a, 8192);
  p[0] = p[5000] = 1;
  cut[0] = 1;
  a->cut_off(cut);
  cut[0] = 2;
  const pid_t child = fork();
  require(child >= 0, "no fork", 0);
  if (!child) {
    const bool same = p[0] == 1 && p[5000] == 1 && cut[0] == 2;
    p[0] = p[5000] = 9;
    a->give_back(p);  // the parent's
    _exit(same && p[0] == 9 ? 0 : 1);
  }
  int status = 0;
  require(waitpid(child, &status, 0) == child && !status, "the child saw something else", 0);
  require(p[0] == 1 && p[5000] == 1, "the child wrote to the parent's", 0);
  require(a->place(p, 8192) != kNever, "the child gave it back", 0);
  a->give_back(p);
  a->give_back(cut);
  a->drop();
}

struct Refusal {
  Refusal(uint64_t below, bool writable) { refused_below = below, refuse_writable = writable; }
  ~Refusal() { refused_below = 0, refuse_writable = false; }
};

// A private mapping that is refused never leaves a shared one: what is left to be had can be read, or not even that.
void refused() {
  for (const bool mappings : {false, true})
    for (const bool promises : {false, true}) {
      if (!mappings && !promises) continue;
      const File file(8 * kMiB);
      Arena* const a = open_arena(file.fd, 0, 8 * kMiB);
      char *before = take(a, 8192), *p = take(a, 8192), *other = take(a, 8192);
      char* const window = static_cast<char*>(mmap(nullptr, 8 * kMiB, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd, 0));
      const uint64_t at = a->place(p, 8192), at_other = a->place(other, 8192);
      p[0] = other[0] = 1;
      a->cut_off(before);
      before[0] = 4;
      int status = 0;
      // The child's writes are its own, or end it.
      for (char* block : {p, other}) {
        const Refusal refusal(mappings ? 7 * kMiB : 0, promises);
        const pid_t writer = fork();
        require(writer >= 0, "no fork", 0);
        if (!writer) {
          signal(SIGSEGV, SIG_DFL);
          if (before[0] != 4) _exit(2);
          block[0] = 9;
          _exit(0);
        }
        require(waitpid(writer, &status, 0) == writer, "no child", 0);
        const bool ended = WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV;
        require(promises ? ended : !status, "what became of the child", uint64_t(status));
        require(block[0] == 1, "the child wrote to the parent's", mappings);
      }
      {
        const Refusal refusal(mappings ? 7 * kMiB : 0, promises);
        a->cut_off(p);
      }
      require(before[0] == 4, "another block's contents were lost", 0);
      require(a->place(p, 1) == kNever, "cut off", 0);
      if (promises) {
        require(p[0] == 1, "cannot be read", 0);
      } else {
        window[at] = window[at + 5000] = 7;
        require(p[0] == 1 && p[5000] == 0, "a peer writes to it still", 0);
        p[0] = other[0] = 3;
        require(window[at] == 7 && other[0] == 3 && window[at_other] == 1, "a peer sees what was written", 0);
      }
      munmap(window, 8 * kMiB);
      for (char* block : {before, p, other}) a->give_back(block);
      a->drop();
    }
}

}  // namespace

int main(int argc, char** argv) {
  blocks(argc > 1 ? 100 * strtoull(argv[1], nullptr, 10) : 30000);
  memory();
  cut_off();
  fork_of_it();
  refused();
  std::puts("arena_test: ok");
}
