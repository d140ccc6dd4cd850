#include "api.h"

#include <errno.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>

#include "cpu_relax.h"
#include "group.h"
#include "p2p.h"
#include "queue.h"
#include "reduce.h"
#include "room.h"
#include "window.h"

using namespace c10d_custom;

int c10d_abi_version() { return 22; }

uint64_t c10d_memory_left(uint64_t enough, char* whose, uint32_t characters) {
  const Room room;
  const uint64_t left = room.left(enough);
  snprintf(whose, characters, "%s", room.whose().c_str());
  return left;
}

uint32_t c10d_topology(const char* sys, const uint32_t* cpus, uint32_t count, CpuPlace* places, uint32_t room) {
  const Topology made =
      Topology::read(sys ? sys : "/sys", cpus ? std::vector<uint32_t>(cpus, cpus + count) : allowed_cpus());
  const uint32_t all = uint32_t(made.cpus().size());
  std::copy_n(made.cpus().begin(), std::min(all, room), places);
  return all;
}

uint64_t c10d_group_cache_bytes(uint32_t ranks) { return group_cache_bytes(ranks); }
void c10d_stay_cool(int stays) { stay_cool(stays); }

int c10d_segment_create(const void* geometry, uint64_t* total) {
  return create_segment(*static_cast<const Geometry*>(geometry), total);
}

namespace c10d_custom {

// Keeps a group mapped while any thread is inside it, and answers for it once it is closed.
struct Handle {
  explicit Handle(Group* g) : group(g) {}
  Group* group;
  std::atomic<int64_t> users{0};
  std::atomic<bool> closed{false};
  const unsigned fork_generation = g_fork_generation;
};

namespace {

class Use {
 public:
  explicit Use(Handle* h) : again(t_innermost && inside(h)), handle_(h), outer_(t_innermost) {
    t_innermost = this;
    if (h->fork_generation != g_fork_generation) {
      status = kForked;
      return;
    }
    h->users.fetch_add(1, std::memory_order_seq_cst);
    if (h->closed.load(std::memory_order_seq_cst)) status = kAborted;
  }
  ~Use() {
    t_innermost = outer_;
    if (status != kForked) handle_->users.fetch_sub(1, std::memory_order_seq_cst);
  }
  explicit operator bool() const { return !status; }  // the group is there
  Group* operator->() const { return handle_->group; }
  const bool again;  // this thread is inside a call of the group already
  Status status = kOk;

  // Whether this thread is inside a call of `h`, which has called back.
  static bool inside(const Handle* h) {
    for (const Use* u = t_innermost; u; u = u->outer_)
      if (u->handle_ == h) return true;
    return false;
  }

 private:
  static thread_local const Use* t_innermost;
  Handle* const handle_;
  const Use* const outer_;
};
thread_local const Use* Use::t_innermost = nullptr;

thread_local Failure t_failure;

int refuse(Status st, Failure* f) {
  *f = Failure{};
  f->status = st;
  f->peer = f->by = -1;
  return st;
}

}  // namespace
}  // namespace c10d_custom

int c10d_open(int fd, uint32_t rank, int64_t spin_ns, int (*interrupted)(), c10d_handle** handle) {
  int error = 0;
  if (Group* g = Group::open(fd, rank, spin_ns, interrupted, &error)) *handle = new Handle(g);
  return error;
}

void c10d_leave(c10d_handle* h) {
  if (const Use g{h}) g->leave();
}

void c10d_close(c10d_handle* h) {
  if (h->fork_generation != g_fork_generation || h->closed.exchange(true)) return;
  h->group->leave();
  while (h->users.load(std::memory_order_seq_cst)) rest_between_rare_looks();
  delete h->group;
  h->group = nullptr;
}

void c10d_free(c10d_handle* h) {
  c10d_close(h);
  delete h;
}

int c10d_inside(c10d_handle* h) { return Use::inside(h); }

void c10d_abort(c10d_handle* h) {
  if (const Use g{h}) g->abort();
}

uint64_t c10d_next_seq(c10d_handle* h) {
  Use g(h);
  return g.status ? 0 : g->queue().next_seq();
}

int c10d_run(c10d_handle* h, const CallArgs* a) {
  Use g(h);
  if (g.status || g.again) return refuse(g.status ? g.status : kReentered, &t_failure);
  return g->queue().run(*a, &t_failure);
}

void c10d_last_failure(Failure* f) { *f = t_failure; }

void c10d_submit(c10d_handle* h, const CallArgs* a, c10d_ticket** ticket) {
  Use g(h);
  *ticket = g.status || g.again ? nullptr : g->queue().submit(*a);
  if (!*ticket) refuse(g.status ? g.status : kReentered, &t_failure);
}

namespace c10d_custom {
namespace {

// The call that c10d_fast_collective describes.
class FastCall {
 public:
  FastCall(const Group& g, uint64_t kind, int32_t root, void* in, void* out, uint64_t count, int64_t timeout_ns)
      : op_(kind >> 24 & 0xff), rank_(g.rank) {
    const uint32_t item_bytes = kind >> 16 & 0xff, n = g.n;
    const bool in_each = op_ == kReduceScatter || op_ == kAllToAll || op_ == kScatter;
    const bool out_each = op_ == kAllGather || op_ == kAllToAll || op_ == kGather;
    const uint32_t nin = !in ? 0 : in_each ? n : 1, nout = !out ? 0 : out_each ? n : 1;
    if (nin + nout > 64) many_ = std::make_unique<Span[]>(nin + nout), spans_ = many_.get();
    const uint64_t bytes = count * item_bytes;
    auto place = [&](Span* to, uint32_t parts, void* first, bool listed) {
      for (uint32_t i = 0; i < parts; ++i)
        to[i] = {listed ? static_cast<void* const*>(first)[i] : static_cast<char*>(first) + i * bytes, bytes};
    };
    place(spans_, nin, in, kind & kListedInputs);
    place(spans_ + nin, nout, out, kind & kListedOutputs);
    args.op = op_, args.redop = uint32_t(kind >> 8 & 0xff), args.dtype = uint32_t(kind & 0xff);
    args.root = root, args.count = op_ == kAllToAll ? kNever : count, args.item_bytes = item_bytes;
    args.timeout_ns = timeout_ns;
    args.nin = nin, args.nout = nout, args.in = spans_, args.out = spans_ + nin;
  }

  // Whether a part would be written before it is read. The one overlap that every operation but all_to_all allows: a
  // part that goes to the very place it comes from.
  bool overlaps() const {
    auto at = [](const Span& s) { return static_cast<char*>(s.data); };
    for (uint32_t i = 0; i < args.nin; ++i)
      for (uint32_t o = 0; o < args.nout; ++o) {
        const Span &from = args.in[i], &to = args.out[o];
        const bool own =
            at(from) == at(to) && op_ != kAllToAll && (args.nin == 1 || i == rank_) && (args.nout == 1 || o == rank_);
        if (!own && at(from) < at(to) + to.bytes && at(to) < at(from) + from.bytes) return true;
      }
    return false;
  }

  CallArgs args{};  // of tensors of the host

 private:
  const uint32_t op_, rank_;
  Span few_[64];
  std::unique_ptr<Span[]> many_;
  Span* spans_ = few_;
};

}  // namespace
}  // namespace c10d_custom

int c10d_fast_collective(c10d_handle* h, uint64_t kind, int32_t root, void* in, void* out, uint64_t count,
                         int64_t timeout_ns) {
  Use g(h);
  if (g.status || g.again) return refuse(g.status ? g.status : kReentered, &t_failure);
  const FastCall call(*g.operator->(), kind, root, in, out, count, timeout_ns);
  return call.overlaps() ? kSlowPath : g->queue().run(call.args, &t_failure);
}

int c10d_fast_submit(c10d_handle* h, uint64_t kind, int32_t root, void* in, void* out, uint64_t count,
                     int64_t timeout_ns, c10d_ticket** ticket) {
  *ticket = nullptr;
  Use g(h);
  if (g.status || g.again) return kSlowPath;  // which says so
  const FastCall call(*g.operator->(), kind, root, in, out, count, timeout_ns);
  if (call.overlaps()) return kSlowPath;
  *ticket = g->queue().submit(call.args);
  return kOk;
}

void c10d_post(c10d_handle* h, const MessageArgs* a, c10d_ticket** ticket) {
  Use g(h);
  *ticket = g.status ? nullptr : g->messenger().post(*a);
  if (!*ticket) refuse(g.status, &t_failure);
}

int c10d_message(c10d_handle* h, uint64_t kind, int32_t peer, int64_t tag, void* data, uint64_t count,
                 int64_t timeout_ns, int64_t wait_ns, c10d_ticket** ticket) {
  const uint64_t bytes = count * (kind >> 16 & 0xff);
  const MessageArgs a{(kind & kReceived) != 0, uint32_t(kind & 0xff), peer, 0, tag, {data, bytes}, timeout_ns};
  *ticket = nullptr;
  Use g(h);
  if (g.status) return refuse(g.status, &t_failure), kPending;
  *ticket = g->messenger().post(a);
  if ((wait_ns ? g->messenger().wait(*ticket, wait_ns) : (*ticket)->state()) != kOk) return kPending;
  (*ticket)->drop();
  *ticket = nullptr;
  return kOk;
}

int c10d_ticket_source(c10d_ticket* t) { return t->state() == kPending ? -1 : t->source; }
uint64_t c10d_ticket_number(c10d_ticket* t) { return t->message ? 0 : t->seq; }
int c10d_test(c10d_ticket* t) { return t->state(); }

int c10d_watch(c10d_handle* h, c10d_ticket* t, uint64_t token) {
  Use g(h);
  return t->message || g.status ? t->watch(token) : g->queue().watch(t, token);
}

int c10d_wait(c10d_handle* h, c10d_ticket* t, int64_t timeout_ns, int may_run, Failure* f) {
  Use g(h);
  if (g.status == kForked) return refuse(kForked, f);
  Status st = t->state();
  if (st == kPending && !g.status)
    st = t->message ? g->messenger().wait(t, timeout_ns) : g->queue().wait(t, timeout_ns, may_run);
  if (st != kOk && st != kPending) *f = t->failure;
  return st;
}

int c10d_settle(c10d_handle* h, c10d_ticket* t, int64_t timeout_ns, int may_run) {
  Failure f;
  return c10d_wait(h, t, timeout_ns, may_run, &f);
}

int c10d_withdraw(c10d_handle* h, c10d_ticket* t) {
  Use g(h);
  return g.status ? g.status : g->messenger().withdraw(t);
}

void c10d_release(c10d_ticket* t) { t->drop(); }

int c10d_next_completed(c10d_handle* h, int64_t timeout_ns, uint64_t* token) {
  Use g(h);
  return g.status ? g.status : g->queue().completed.pop(timeout_ns, token);
}

static_assert(sizeof PeerState::fingerprint == sizeof(Fingerprint));

int c10d_peer_state(c10d_handle* h, uint32_t rank, uint64_t seq, PeerState* out) {
  *out = PeerState{};
  Use g(h);
  if (g.status) return g.status;
  if (rank >= g->n) return kUsage;
  RankCtl& c = g->ctl(rank);
  out->arrived = c.arrive.value.load(std::memory_order_acquire);
  out->in = c.in.value.load(std::memory_order_relaxed);
  out->red = c.red.value.load(std::memory_order_relaxed);
  out->out = c.out.value.load(std::memory_order_relaxed);
  out->state = c.state.load(std::memory_order_acquire);
  out->pid = c.pid;
  out->alive = g->alive(rank);
  out->mark = c.mark.load(std::memory_order_acquire);
  for (const Fingerprint& f : {c.fingerprint[seq & 1], c.ahead[seq % kCallsAhead]})
    if (f.seq == seq) memcpy(out->fingerprint, &f, sizeof f);
  return kOk;
}

int c10d_peer_stopped(c10d_handle* h, uint32_t rank) {
  Use g(h);
  return !g.status && rank < g->n && g->stopped(rank);
}

int c10d_peer_sizes(c10d_handle* h, uint32_t rank, uint64_t seq, uint64_t* sizes) {
  Use g(h);
  if (g.status) return g.status;
  const Fingerprint& f = g->ctl(rank).fingerprint[seq & 1];
  if (f.seq != seq || f.count != kNever) return kUsage;
  memcpy(sizes, g->table(rank, seq), 2 * sizeof(uint64_t) * g->n);
  return kOk;
}

void c10d_set_mark(c10d_handle* h, uint32_t mark) {
  if (const Use g{h}) g->ctl(g->rank).mark.store(mark, std::memory_order_release);
}

void c10d_enter_monitored_barrier(c10d_handle* h, uint32_t number) {
  if (const Use g{h}) g->ctl(g->rank).monitored_barriers.store(number, std::memory_order_release);
}

uint32_t c10d_monitored_barriers(c10d_handle* h, uint32_t rank) {
  Use g(h);
  return g.status || rank >= g->n ? 0 : g->ctl(rank).monitored_barriers.load(std::memory_order_acquire);
}

void c10d_keep_trace(c10d_handle* h, uint32_t calls) {
  Use g(h);
  if (g.status) return;
  g->queue().keep_trace(calls);
  g->messenger().keep_trace(calls);
}

void c10d_set_threads(c10d_handle* h, uint32_t threads) {
  Use g(h);
  if (g.status) return;
  if (threads)
    g->team.set_size(threads);
  else
    g->team.set_by_load([&group = *g.operator->()] { return team_size(group); });
}

uint64_t c10d_trace(c10d_handle* h, TraceRecord* out, uint64_t room) {
  Use g(h);
  if (g.status) return 0;
  std::vector<TraceRecord> all;
  g->queue().trace(all);
  g->messenger().trace(all);
  std::copy(all.end() - int64_t(std::min<uint64_t>(room, all.size())), all.end(), out);
  return all.size();
}

void c10d_poison(c10d_handle* h, int32_t cause, int32_t peer, int32_t by, uint64_t number) {
  if (const Use g{h}) g->poison(Status(cause), peer, by, number);
}

int c10d_health(c10d_handle* h, uint64_t number, Failure* f) {
  Use g(h);
  if (g.status) return refuse(g.status, f);
  refuse(g->health(number), f);
  if (f->status == kBroken) g->poisoned(f, number);
  for (uint32_t r = 0; f->status == kOk && r < g->n; ++r)
    if (!g->left(r) && !g->alive(r)) f->status = kPeerLost, f->peer = int32_t(r);
  return f->status;
}

void c10d_set_elsewhere(c10d_handle* h, void (*elsewhere)(void*), void* context) {
  Use g(h);
  if (g.status) return;
  g->elsewhere_context = context;
  g->elsewhere = elsewhere;
}

void c10d_complete(c10d_handle* h, uint64_t token) {
  if (const Use g{h}) g->queue().completed.push(token);
}

void* c10d_call_slots(c10d_handle* h) {
  Use g(h);
  return g.status ? nullptr : g->call_slots();
}

void* c10d_take(c10d_handle* h, uint64_t bytes, int kept, c10d_arena** arena, int* error) {
  Use g(h);
  if (g.status) return *error = -g.status, nullptr;
  int64_t next_poll = g->interrupted && main_thread() ? now_ns() + kPollInterrupt : INT64_MAX;
  auto goes_on = [&] {
    if (now_ns() < next_poll) return true;
    next_poll = now_ns() + kPollInterrupt;
    return !g->interrupted();
  };
  return g->arenas.take(bytes, kept, goes_on, arena, error);
}

void c10d_give_back(c10d_arena* arena, void* block) { arena->give_back(block); }

namespace c10d_custom {

struct WindowHandle {
  Handle* handle;
  std::unique_ptr<Window> window;

  // Calls it if the group is there, and has that rank.
  template <class Do>
  int with(uint32_t peer, Do act) {
    Use g(handle);
    return g.status ? g.status : peer < g->n ? act(*window) : kUsage;
  }
};

}  // namespace c10d_custom

uint64_t c10d_place(c10d_handle* h, const void* p, uint64_t bytes) {
  Use g(h);
  return g.status ? 0 : g->arenas.place(p, bytes);
}

uint64_t c10d_clear_signals(void* at, uint32_t ranks) {
  for (uint32_t r = 0; at && r < ranks; ++r) {
    Signal* const s = new (static_cast<Signal*>(at) + r) Signal{};
    s->wake_at.store(kNever);
  }
  return ranks * sizeof(Signal);
}

c10d_window* c10d_window_open(c10d_handle* h, const WindowPart* parts) {
  Use g(h);
  std::unique_ptr<Window> made = g.status ? nullptr : Window::open(*g.operator->(), parts);
  return made ? new WindowHandle{h, std::move(made)} : nullptr;
}

void c10d_window_free(c10d_window* w) { delete w; }

int c10d_window_put(c10d_window* w, uint32_t peer, uint32_t dtype, const void* from, uint64_t count, uint64_t offset) {
  return w->with(peer, [&](Window& own) { return own.put(peer, dtype, from, count, offset); });
}

int c10d_window_signal(c10d_window* w, uint32_t peer) {
  return w->with(peer, [&](Window& own) { return own.signal(peer); });
}

int c10d_window_wait(c10d_window* w, uint32_t peer, int64_t timeout_ns) {
  return w->with(peer, [&](Window& own) {
    const uint64_t number = own.claim(peer);
    const Status st = own.await(peer, number, deadline_after(now_ns(), timeout_ns));
    if (st != kOk) own.give_back(peer, number);
    return st;
  });
}

uint64_t c10d_window_claim(c10d_window* w, uint32_t peer) {
  uint64_t number = 0;
  w->with(peer, [&](Window& own) { return number = own.claim(peer), kOk; });
  return number;
}

int c10d_window_await(c10d_window* w, uint32_t peer, uint64_t number, int64_t timeout_ns) {
  return w->with(peer, [&](Window& own) { return own.await(peer, number, deadline_after(now_ns(), timeout_ns)); });
}

void c10d_window_give_back(c10d_window* w, uint32_t peer, uint64_t number) {
  w->with(peer, [&](Window& own) { return own.give_back(peer, number), kOk; });
}

void* c10d_map(c10d_handle* h, uint32_t rank, uint64_t place, uint64_t bytes, int* error) {
  Use g(h);
  if (g.status || rank >= g->n) return *error = -(g.status ? g.status : kUsage), nullptr;
  return g->arenas.map(rank, place, bytes, error);
}

void c10d_unmap(void* mapped, uint64_t bytes) { Arenas::unmap(static_cast<char*>(mapped), bytes); }

int c10d_probe(c10d_handle* h, int64_t tag) {
  Use g(h);
  return g.status ? -1 : g->messenger().probe(tag);
}

int c10d_reduce(uint32_t dtype, uint32_t redop, void* dst, const void* const* src, uint32_t nsrc, uint64_t count,
                const double* factor) {
  const ReduceFn f = reduce_kernel(dtype, redop);
  if (!f || !nsrc) return kUsage;
  f(dst, src, nsrc, count, factor);
  return kOk;
}

const char* c10d_reduce_variant() { return reduce_variant(); }
