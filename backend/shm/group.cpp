#include "group.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "p2p.h"
#include "queue.h"
#include "topology.h"

namespace c10d_custom {
namespace {

// The liveness lock of a rank: byte `rank` of the memfd, write-locked by its process. The kernel
// drops it when the process is gone and never gives it to a forked child, so neither a recycled
// pid, nor a zombie, nor a data-loader worker that outlives its parent can pass for the rank.
struct flock byte_lock(uint32_t rank) {
  struct flock l{};
  l.l_type = F_WRLCK;
  l.l_whence = SEEK_SET;
  l.l_start = rank;
  l.l_len = 1;
  return l;
}

// 0 for none. FNV-1a.
uint64_t digest(const std::vector<uint32_t>& numbers) {
  uint64_t made = numbers.empty() ? 0 : 14695981039346656037ull;
  for (const uint32_t each : numbers) made = (made ^ each) * 1099511628211ull;
  return made;
}

uint64_t pid_namespace() {
  struct stat s;
  return stat("/proc/self/ns/pid", &s) == 0 ? s.st_ino : 0;
}

// A process's state as /proc tells it, and when it started; 0 where there is no such process, or no /proc.
struct ProcessInfo {
  char state = 0;
  uint64_t started = 0;
};

ProcessInfo process_info(uint32_t pid) {
  const std::string text = file_text("/proc/" + std::to_string(pid) + "/stat");
  const char* at = strrchr(text.c_str(), ')');  // of "pid (name) state ...": the name may hold anything
  if (!at || !at[1]) return {};
  ProcessInfo info;
  info.state = at[2];
  at += 2;
  for (int field = 3; field < 22 && at; ++field) at = strchr(at + 1, ' ');
  if (at) info.started = strtoull(at, nullptr, 10);
  return info;
}

// Whether a process has this file mapped; true where that cannot be seen.
bool maps(uint32_t pid, const struct stat& file) {
  char path[32], line[512];
  snprintf(path, sizeof path, "/proc/%u/maps", pid);
  FILE* const maps = fopen(path, "re");
  if (!maps) return true;
  bool found = false;
  while (!found && fgets(line, sizeof line, maps)) {
    unsigned major_number, minor_number;
    unsigned long long inode;
    found = sscanf(line, "%*s %*s %*s %x:%x %llu", &major_number, &minor_number, &inode) == 3 && inode == file.st_ino &&
            makedev(major_number, minor_number) == file.st_dev;
  }
  fclose(maps);
  return found;
}

bool sane(const Geometry& g) {
  return g.ranks >= 1 && g.ranks <= 4096 && g.window >= 2 && g.window <= 4096 && g.block_bytes >= 4096 &&
         g.block_bytes <= (1u << 26) && g.block_bytes % 4096 == 0 &&
         g.block_bytes / g.ranks >= 64 &&  // operations cut a block among the ranks, at cache lines
         g.small_bytes >= 64 && g.small_bytes <= (1u << 24) && g.cell_bytes >= 64 && g.cell_bytes <= (1u << 26) &&
         g.cells >= 2 && g.cells <= 65536 && g.call_slot_bytes <= (1u << 24) && g.call_slot_bytes % kLine == 0 &&
         (g.fan_in == 0 || (g.fan_in >= 2 && g.fan_in <= 1024)) && g.arena_bytes % page_bytes() == 0 &&
         g.arena_bytes <= (1ull << 46) / g.ranks &&
         // The lengths below must not overflow: of the other parts none comes near.
         Layout(g).pair_bytes < (1ull << 60) / g.ranks / g.ranks;
}

}  // namespace

unsigned g_fork_generation = 0;
static const int fork_watch = pthread_atfork(nullptr, nullptr, [] { ++g_fork_generation; });

int create_segment(const Geometry& g, uint64_t* total) {
  if (!sane(g)) return -EINVAL;
  const Layout layout(g);
  *total = kMemfdCreate;  // while it fails, the call
  int fd = int(syscall(SYS_memfd_create, "c10d_custom", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const bool sealed = fd >= 0;
  if (const int refused = errno; !sealed) {
    // A file without a name, nor ever one: nothing is left behind, whoever is killed when. It cannot be sealed; only
    // this user's processes could shrink it, and of those, who is given it.
    fd = open("/dev/shm", O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0) return -refused;
  }
  const size_t touched = layout.tables;  // a prefix of it
  void* at = MAP_FAILED;
  auto fail = [&](int error) {
    if (at != MAP_FAILED) munmap(at, touched);
    ::close(fd);
    return -error;
  };
  *total = kFchmod;
  if (fchmod(fd, 0600)) return fail(errno);
  *total = kFtruncate;
  // Beyond it the kernel sends SIGXFSZ, which ends a process that does not ignore it.
  rlimit longest;
  if (!getrlimit(RLIMIT_FSIZE, &longest) && longest.rlim_cur < layout.total) return fail(EFBIG);
  if (ftruncate(fd, off_t(layout.total))) return fail(errno);
  *total = kMmap;
  at = map_pages(fd, 0, touched);
  if (at == MAP_FAILED) return fail(errno);
  *total = kFallocate;
  auto take = [&](size_t from, size_t to) { return take_pages(fd, from, static_cast<char*>(at) + from, to - from); };
  const bool apart = g.ranks >= kManyRanks;  // each rank takes its own RankCtl
  int error = take(0, apart ? layout.ctl : touched);
  if (apart && !error) error = take(layout.has_cells, touched);
  if (error) return fail(error);
  *total = kAddSeals;
  // No rank can shrink it under the others' feet (SIGBUS).
  if (sealed && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) return fail(errno);
  auto* h = static_cast<SegmentHeader*>(at);
  h->magic = kMagic;
  h->bytes = layout.total;
  h->geometry = g;
  munmap(at, touched);
  *total = layout.total;
  return fd;
}

Group* Group::open(int fd, uint32_t rank, int64_t spin_ns, int (*interrupted)(), int* error) {
  auto fail = [&](int e) {
    ::close(fd);
    *error = e;
    return nullptr;
  };
  struct stat st;
  off_t bytes = lseek(fd, 0, SEEK_END);
  if (bytes < 0 && !fstat(fd, &st)) bytes = st.st_size;  // a sandbox may refuse either
  if (bytes < 0) return fail(errno);
  if (bytes < 4096) return fail(EPROTO);
  void* first = mmap(nullptr, 4096, PROT_READ, MAP_SHARED, fd, 0);
  if (first == MAP_FAILED) return fail(errno);
  const uint64_t magic = static_cast<SegmentHeader*>(first)->magic;
  const Geometry geometry = static_cast<SegmentHeader*>(first)->geometry;
  munmap(first, 4096);
  if (magic != kMagic || !sane(geometry) || rank >= geometry.ranks || Layout(geometry).total != uint64_t(bytes))
    return fail(EPROTO);
  struct flock l = byte_lock(rank);
  if (fcntl(fd, F_SETLK, &l)) return fail(errno);
  const size_t mapped = Layout(geometry).arenas;
  void* base = map_pages(fd, 0, mapped);
  if (base == MAP_FAILED) return fail(errno);
  madvise(base, mapped, MADV_DONTDUMP);
  if (const Layout layout(geometry); geometry.ranks >= kManyRanks) {
    const size_t own = layout.ctl + rank * layout.ctl_bytes;
    if (const int e = take_pages(fd, own, static_cast<char*>(base) + own, layout.ctl_bytes)) {
      munmap(base, mapped);
      return fail(e);
    }
  }
  return new Group(fd, static_cast<char*>(base), rank, geometry, spin_ns, interrupted);
}

Group::Group(int fd, char* base, uint32_t rank_, const Geometry& g, int64_t spin, int (*poll)())
    : rank(rank_),
      n(g.ranks),
      geometry(g),
      layout(g),
      spinner(spin),
      arenas(fd, rank_, g, layout.arenas),
      tree(base + layout.tree, rank_, g),
      interrupted(poll),
      taken(g.ranks),
      fd_(fd),
      base_(base) {
  RankCtl& me = ctl(rank);
  for (Signal* s : {&me.arrive, &me.in, &me.red, &me.out, &me.took}) s->wake_at.store(kNever);
  me.pid = pid_ = uint32_t(getpid());
  me.pid_namespace = pid_namespace_ = pid_namespace();
  me.started = process_info(pid_).started;
  const std::vector<uint32_t> cpus = allowed_cpus();
  cpus_ = uint32_t(cpus.size());
  me.cpus = digest(cpus);
  me.state.store(kJoined, std::memory_order_release);
  queue_ = std::make_unique<CollectiveQueue>(*this);
  messenger_ = std::make_unique<Messenger>(*this);
}

Group::~Group() {
  if (outnumbers_cores_) --Spinner::groups_larger_than_their_cores;
  leave();
  messenger_.reset();
  queue_.reset();
  munmap(base_, layout.arenas);
  ::close(fd_);  // drops the liveness lock
}

void Group::count_who_shares_cores() {
  counted_ = true;
  uint32_t sharers = 0;
  for (uint32_t r = 0; r < n; ++r) sharers += ctl(r).cpus == ctl(rank).cpus;
  outnumbers_cores_ = cpus_ && sharers > cpus_;
  if (outnumbers_cores_) ++Spinner::groups_larger_than_their_cores;
}

void Group::advance(Signal& mine, uint64_t value) {
  // Pairs with wait(): either the sleeper sees the value, or we see its wake_at.
  mine.value.store(value, std::memory_order_seq_cst);
  if (mine.wake_at.load(std::memory_order_seq_cst) <= value) {
    mine.wake_at.store(kNever, std::memory_order_seq_cst);
    mine.wakes.fetch_add(1, std::memory_order_seq_cst);
    futex_wake_all(&mine.wakes);
  }
}

void Group::wake(Doorbell& doorbell) {
  if (!doorbell.sleeping.load(std::memory_order_seq_cst) || !doorbell.sleeping.exchange(0, std::memory_order_seq_cst))
    return;
  doorbell.rings.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(&doorbell.rings);
}

Status Group::wait(Signal& s, uint64_t need, uint64_t worth, uint32_t* peer, int64_t deadline, const Absent& absent,
                   uint64_t number) {
  if (s.value.load(std::memory_order_acquire) >= need) return kOk;
  const int64_t began = now_ns();
  if (spinner.spin(
          began, deadline, [&] { return s.value.load(std::memory_order_acquire) >= need; },
          [&] {
            if (elsewhere) elsewhere(elsewhere_context);
          },
          [&](int64_t now) { return leaves_core(*peer, now); }, &s.value))
    return kOk;

  struct Reaches final : Wait {
    Group& g;
    Signal& s;
    const uint64_t need, worth;
    const Absent absent;
    Reaches(Group& group, Signal& signal, uint64_t n, uint64_t w, Absent a)
        : g(group), s(signal), need(n), worth(w), absent(a) {}
    bool ready() override { return s.value.load(std::memory_order_seq_cst) >= need; }
    const void* ask(uint32_t* seen) override {
      // Read before we ask: what clears our asking counts after this.
      *seen = s.wakes.load(std::memory_order_seq_cst);
      uint64_t asked = s.wake_at.load(std::memory_order_relaxed);
      while (asked > worth && !s.wake_at.compare_exchange_weak(asked, worth, std::memory_order_seq_cst)) {
      }
      return &s.wakes;
    }
    bool lost(uint32_t* peer) override {
      if (g.gone(*peer)) return true;
      auto awaited = [&](uint32_t r) {
        const RankCtl& its = g.ctl(r);
        return its.arrive.value.load(std::memory_order_acquire) < absent.seq ||
               its.rounds.load(std::memory_order_acquire) < absent.round;
      };
      return ((absent.seq || absent.round) && g.any_gone(awaited, peer)) ||
             (absent.in_vain && absent.in_vain(absent.context, peer));
    }
  } reaches(*this, s, need, worth, absent);
  return sleep(reaches, began, peer, deadline, number);
}

Status Group::wait(Wait& w, bool yields, uint32_t* peer, int64_t deadline) {
  const int64_t began = now_ns();
  if (yields && spinner.spin(
                    began, deadline, [&] { return w.ready(); },
                    [&] {
                      if (elsewhere) elsewhere(elsewhere_context);
                    },
                    [&](int64_t now) { return leaves_core(*peer, now); }))
    return kOk;
  return sleep(w, began, peer, deadline, call);
}

Status Group::sleep(Wait& w, int64_t began, uint32_t* peer, int64_t deadline, uint64_t number) {
  int64_t next_poll = interrupted && main_thread() ? began + kPollInterrupt : INT64_MAX;
  for (;;) {
    uint32_t seen;
    const void* const word = w.ask(&seen);
    if (w.ready()) return kOk;
    const int64_t now = now_ns(), left_ns = deadline - now;
    if (left_ns <= 0) {
      // Who was stopped itself learns what became of the group: the others need not be late.
      const Status st = health(number);
      return st != kOk ? st : kTimeout;
    }
    if (elsewhere) elsewhere(elsewhere_context);
    const bool aids = messenger_->aid();
    const int64_t slice = std::clamp((now - began) / 10, kSlice, kLongSlice);
    futex_wait(word, seen, std::min(left_ns, elsewhere || aids ? kElsewhere : slice));
    if (w.ready()) return kOk;
    if (Status st = health(number); st != kOk) return st;
    if (now_ns() >= next_poll) {
      if (interrupted()) return kInterrupted;
      next_poll = now_ns() + kPollInterrupt;
    }
    // It may have done its part and then gone.
    if (w.lost(peer)) return w.ready() ? kOk : kPeerLost;
  }
}

int Group::reserve(size_t from, size_t bytes, const GoesOn& goes_on) const {
  return take_pages(fd_, from, base_ + from, bytes, goes_on);
}

int Group::reserve_cells(uint32_t peer, const GoesOn& goes_on) const {
  for (const auto& [src, dst] : {std::pair(rank, peer), std::pair(peer, rank)}) {
    if (const int error = reserve(at_pair(src, dst), layout.pair_bytes, goes_on)) return error;
    // Before anything is written there: who is about to sleep looks at it, and we then at whether it sleeps.
    has_cells(src, dst).store(1, std::memory_order_seq_cst);
  }
  return 0;
}

int Group::reserve_slots(const GoesOn& goes_on) {
  int error = reserve(layout.tables + rank * layout.table_bytes, layout.table_bytes, goes_on);
  if (!error) error = reserve(layout.small + rank * 2 * layout.small_bytes, 2 * layout.small_bytes, goes_on);
  has_slots_ = !error;
  return error;
}

int Group::reserve_ring(const GoesOn& goes_on) {
  if (has_ring_) return 0;
  const int error = reserve(layout.rings + rank * layout.ring_bytes, layout.ring_bytes, goes_on);
  has_ring_ = !error;
  return error;
}

int Group::reserve_pair_rings(const GoesOn& goes_on) {
  std::atomic<uint32_t>& there = ctl(rank).has_pair_rings;
  if (there.load(std::memory_order_relaxed)) return 0;
  const size_t from = size_t(row_of_flows(rank) - base_);
  const int error = reserve(from, layout.flow_bytes + layout.pair_rings_bytes, goes_on);
  if (!error) there.store(1, std::memory_order_seq_cst);
  return error;
}

// seq_cst: a rank stores `in_place` and then loads `poison` here; one that fails stores `poison` and then loads
// `in_place` (Collective::part_from_peers). At least one of the two must see what the other has stored. An acquire may
// be done before the store, on an aarch64 that has LDAPR.
Status Group::health(uint64_t number) const {
  if (aborted()) return kAborted;
  if (disagreed(number)) return kBroken;
  return header().poison.state.load(std::memory_order_seq_cst) ? kBroken : kOk;
}

bool Group::disagreed(uint64_t number) const {
  const Poison& p = header().disagreement;
  return p.state.load(std::memory_order_acquire) == 2 && p.seq <= number;
}

bool Group::alive(uint32_t peer) const {
  const RankCtl& c = ctl(peer);
  if (c.state.load(std::memory_order_acquire) == kAbsent) return true;  // not here yet
  if (c.pid == pid_ && c.pid_namespace == pid_namespace_) return true;  // our own process
  struct flock l = byte_lock(peer);
  if (fcntl(fd_, F_GETLK, &l) || l.l_type != F_UNLCK) return true;
  // A process that opens and closes the memfd once more (/proc/self/fd) loses its lock, and lives. One that has become
  // another program (exec) has lost the mapping, too.
  if (c.pid_namespace != pid_namespace_ || !c.started) return false;
  const ProcessInfo now = process_info(c.pid);
  struct stat own;
  return now.started == c.started && now.state != 'Z' && now.state != 'X' && !fstat(fd_, &own) && maps(c.pid, own);
}

bool Group::stopped(uint32_t peer) const {
  struct flock l = byte_lock(peer);
  // The kernel tells the pid as it is in our namespace: 0 or less where it has none.
  if (peer == rank || fcntl(fd_, F_GETLK, &l) || l.l_type == F_UNLCK || l.l_pid <= 0) return false;
  const char state = process_info(uint32_t(l.l_pid)).state;
  return state == 'T' || state == 't';
}

void Group::poison(Status kind, int32_t peer, int32_t by, uint64_t seq, int error) {
  if (header().poison.state.load(std::memory_order_acquire)) return;
  Poison& p = kind == kMismatch ? header().disagreement : header().poison;
  uint32_t free = 0;
  if (!p.state.compare_exchange_strong(free, 1)) return;
  p.kind = kind;
  p.by = by;
  p.peer = peer;
  p.seq = seq;
  p.error = error;
  p.state.store(2, std::memory_order_release);
}

bool Group::poisoned(Failure* why, uint64_t number) const {
  const Poison& p = disagreed(number) ? header().disagreement : header().poison;
  if (!p.state.load(std::memory_order_acquire)) return false;
  // A rank that dies between 1 and 2 leaves no reason behind.
  for (int i = 0; i < 1000 && p.state.load(std::memory_order_acquire) != 2; ++i) sched_yield();
  const bool valid = p.state.load(std::memory_order_acquire) == 2;
  why->cause = valid ? int32_t(p.kind) : kPeerLost;
  why->by = valid ? p.by : -1;
  why->peer = valid ? p.peer : -1;
  why->seq = valid ? p.seq : 0;
  if (valid && p.kind == kExhausted) why->actual = uint64_t(p.error);
  return true;
}

void Group::leave() {
  aborted_.store(true, std::memory_order_release);
  ctl(rank).state.store(kLeft, std::memory_order_release);
  messenger_->interrupt();
  queue_->drain();
}

void Group::abort(Status why) {
  poison(why, int32_t(rank), 0);
  aborted_.store(true, std::memory_order_release);
  messenger_->interrupt();
}

}  // namespace c10d_custom
