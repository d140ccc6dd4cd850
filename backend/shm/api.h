// The C ABI of the shared-memory data plane. Nothing here knows Python or torch.
//
// Threads: every function may be called from any thread. Blocking ones (run, wait, next_completed,
// close) never hold a lock while they sleep that another function needs in order to return.
// Buffers: those named by a call belong to the caller and must stay valid until its ticket is done.
#pragma once
#include <cstdint>

#include "topology.h"

#define C10D_API extern "C" __attribute__((visibility("default")))

namespace c10d_custom {

// What became of a call. Python maps each to an exception.
enum Status : int32_t {
  kOk = 0,
  kPending = 1,      // wait, test: not done yet
  kTimeout = 2,      // the call's deadline passed
  kPeerLost = 3,     // a rank it depends on is gone
  kMismatch = 4,     // ranks asked for different things
  kAborted = 5,      // abort() or close() on some rank
  kUsage = 6,        // the arguments make no sense (a bug above this layer)
  kBroken = 7,       // the group failed, in this call or before: `seq`, `peer`, `by`, `cause` tell
  kInterrupted = 8,  // `interrupted` of c10d_open said so; the group is aborted
  kForked = 9,       // this process is a fork of the one that opened the group
  kExhausted = 10,   // the machine did not give memory: `actual` is errno
  kReentered = 11,   // the calling thread is amid a collective of this group, which cannot end before this call returns
};

enum Op : uint32_t {
  kBarrier = 0,
  kBroadcast,
  kAllReduce,
  kReduce,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kGather,
  kScatter,
  kMonitoredBarrier,  // of a rank that waits in a monitored barrier, which is made of messages, while others are in a
                      // collective: tells them so
  kRejected,          // the caller's arguments were refused; tells the other ranks so, waits for nobody
  kOps,
};

// Whose bytes the spans of a call are. The ranks must agree on host or not, and on which of a rank's devices.
enum Memory : uint32_t {
  kHost = 0,
  kStaged,  // a device's, copied into host memory: moved as kHost
  kDevice,  // a device's: the call agrees on the fingerprint and the sizes, waits for all ranks, and moves nothing
  // A device's: nothing is moved here, and nobody waited for but ranks that are many calls behind. Whoever comes later
  // compares the fingerprints. Not for calls whose parts may differ.
  kDeviceAhead,
  kMemories,
};

struct PipelinedReduce;

struct Span {
  void* data;
  uint64_t bytes;
};

inline uint64_t total_bytes(const Span* spans, uint32_t n) {
  uint64_t sum = 0;
  for (uint32_t i = 0; i < n; ++i) sum += spans[i].bytes;
  return sum;
}

// One collective. Spans: broadcast in[1] at the root, out[1] elsewhere; all_reduce in[1] out[1];
// reduce in[1], out[1] at the root; all_gather in[1] out[n]; reduce_scatter in[n] out[1];
// all_to_all in[n] out[n]; gather in[1], out[n] at the root; scatter in[n] at the root, out[1].
// In gather and scatter, where parts differ, the root's count is kNever, and every other rank's that of its own part.
struct CallArgs {
  uint32_t op, redop, dtype;
  int32_t root;
  uint64_t count;  // goes into the fingerprint; kNever where parts may differ
  uint32_t item_bytes;
  uint32_t device;     // Memory + kMemories * the ordinal of the device among the rank's own in this group
  double factor;       // PREMUL_SUM: this rank's; AVG: what to divide by, 0: the number of ranks
  uint64_t number;     // what failures call this collective by; 0: its sequence number
  uint64_t outer;      // compared between the ranks, and nothing else
  int64_t timeout_ns;  // from its turn
  uint32_t nin, nout;
  const Span* in;
  const Span* out;
  PipelinedReduce* pipelined;  // not null: the reduction goes on to other hosts (pipelined_reduce.h); a reduce has
                               // out[1] at the root, if it is on this host
};

inline Memory memory_of(const CallArgs& args) { return Memory(args.device % kMemories); }

struct MessageArgs {
  uint32_t is_recv, dtype;
  int32_t peer;  // -1: any source
  uint32_t reserved;
  int64_t tag;
  Span data;
  int64_t timeout_ns;  // from the first c10d_wait, c10d_settle or wait_ns for it
};

// What went wrong, in numbers; the caller makes the sentence.
struct Failure {
  int32_t status;
  int32_t peer;   // the rank it is about, -1 if none
  int32_t by;     // the rank that found out, -1: this one; kTimeout of a message: the sender, if it gave up
  int32_t cause;  // Status of the first failure, where status is kBroken
  uint64_t call;  // number of the collective that this is the failure of; 0: a message
  uint64_t seq;   // number of the collective that failed, first if kBroken
  int64_t elapsed_ns;
  uint64_t expected, actual;              // kMismatch of a message: bytes
  uint32_t expected_dtype, actual_dtype;  // kMismatch of a message
};

// Where one rank stands, for error messages and traces.
struct PeerState {
  uint64_t arrived;  // seq of the last collective it entered
  uint64_t in, red, out;
  uint32_t state;  // RankState
  uint32_t pid;
  int32_t alive;
  uint32_t mark;            // of c10d_set_mark
  uint64_t fingerprint[8];  // the Fingerprint it published for the sequence asked for, or zeros
};

// One call of this rank, as c10d_trace tells it. Times are of CLOCK_MONOTONIC, in ns; 0: not yet.
enum TraceOp : uint32_t { kTraceSend = 64, kTraceRecv = 65 };  // beside Op
struct TraceRecord {
  uint64_t number;  // of collectives: the sequence number; of messages: this rank's own count
  uint32_t op, redop, dtype;
  int32_t peer;    // root; of messages: the other rank, -1 for any source
  uint64_t count;  // as in CallArgs
  uint64_t in_bytes, out_bytes;
  int64_t tag;
  int64_t issued;
  int64_t began;  // of messages: both sides are in, and the data moves (0 for short ones)
  int64_t ended;
  int32_t status;  // Status; kPending: under way, or not begun
  uint32_t reserved;
};

// What one rank has registered with a window (window.h): so many items of its arena, and where the signals to it lie,
// those of each rank: places (1 + where it begins in the rank's arena).
struct WindowPart {
  uint64_t data, items, signals;
  uint32_t dtype, item_bytes;
};

// Calls of the system that make a segment.
enum SegmentCall : uint64_t { kMemfdCreate = 0, kFchmod, kFtruncate, kFallocate, kAddSeals, kMmap };

struct Handle;
class Ticket;
class Arena;
struct WindowHandle;

}  // namespace c10d_custom

using c10d_handle = c10d_custom::Handle;
using c10d_ticket = c10d_custom::Ticket;
using c10d_arena = c10d_custom::Arena;
using c10d_window = c10d_custom::WindowHandle;

// How many bytes this process can still get, as room.h's Room::left; whose limit that is, in `whose`, which has room
// for so many characters.
C10D_API uint64_t c10d_memory_left(uint64_t enough, char* whose, uint32_t characters);

// The cores that this process may run on, and what they share (topology.h): writes the first `room` of them, returns
// how many there are. sys: where /sys is mounted; cpus: those that count instead, so many, as in tests; null: the
// machine's own.
C10D_API uint32_t c10d_topology(const char* sys, const uint32_t* cpus, uint32_t count, c10d_custom::CpuPlace* places,
                                uint32_t room);

// Bytes of last-level cache that so many ranks can count on (topology.h); 0: not known.
C10D_API uint64_t c10d_group_cache_bytes(uint32_t ranks);

// Of this process, from now on: whether its waits use the deeper of the processor's states (cpu_relax.h).
C10D_API void c10d_stay_cool(int);

// Creates the segment (a memfd, mode 0600, no name in any file system). Returns its descriptor, or
// -errno. Bytes in *total; of a failure, the SegmentCall that failed.
C10D_API int c10d_segment_create(const void* geometry, uint64_t* total);

// Maps the segment as `rank` and takes its liveness lock. Owns fd from here on, also on failure. Returns 0, with the
// group in *handle, where an exception that a signal handler raises in the caller does not lose it; or an errno.
// `interrupted` (may be null) is asked now and then by the process's main thread while it sleeps in a collective; if
// not 0 the call gives up.
C10D_API int c10d_open(int fd, uint32_t rank, int64_t spin_ns, int (*interrupted)(), c10d_handle** handle);
// Tells the peers and fails what is in flight; when it returns, every ticket is done.
C10D_API void c10d_leave(c10d_handle*);
// 1 if the calling thread is inside a call of this handle, that is, in `interrupted`. Such a thread
// must not leave or close: it would wait for itself.
C10D_API int c10d_inside(c10d_handle*);
// Leaves, joins the threads, unmaps. Calls on a closed handle return kAborted; free comes when nobody can make any. In
// a forked child both do nothing.
C10D_API void c10d_close(c10d_handle*);
C10D_API void c10d_free(c10d_handle*);
C10D_API void c10d_abort(c10d_handle*);  // fail everything, here and on the peers

C10D_API uint64_t c10d_next_seq(c10d_handle*);  // of the next collective
C10D_API int c10d_run(c10d_handle*, const c10d_custom::CallArgs*);
// In *ticket, where a caller does not lose it (to a signal handler that raises).
C10D_API void c10d_submit(c10d_handle*, const c10d_custom::CallArgs*, c10d_ticket** ticket);
// A collective whose parts are all of `count` items, at least one. kind: dtype | redop << 8 | bytes of an item << 16 |
// Op << 24. in, out: null where the operation has none; where it has one for each rank, the first of `ranks` that lie
// one after the other, or with kListedInputs and kListedOutputs in kind, an array of their addresses. kSlowPath where
// parts overlap such that one would be written before it is read.
constexpr uint64_t kListedInputs = 1ull << 32, kListedOutputs = 1ull << 33;
constexpr int kSlowPath = 32;  // beside a Status: nothing was begun, and the call is to be made by the slow path
C10D_API int c10d_fast_collective(c10d_handle*, uint64_t kind, int32_t root, void* in, void* out, uint64_t count,
                                  int64_t timeout_ns);
// The same without waiting: kOk and a ticket, or kSlowPath.
C10D_API int c10d_fast_submit(c10d_handle*, uint64_t kind, int32_t root, void* in, void* out, uint64_t count,
                              int64_t timeout_ns, c10d_ticket** ticket);
// Why the last c10d_run or c10d_fast_collective of this thread failed, or c10d_submit or c10d_post
// gave no ticket.
C10D_API void c10d_last_failure(c10d_custom::Failure*);
C10D_API void c10d_post(c10d_handle*, const c10d_custom::MessageArgs*, c10d_ticket** ticket);
// A message of `count` items to (kReceived in kind: from) a rank. kind: dtype | bytes of an item << 16. kOk: it is
// over, at once or in wait_ns; else *ticket is what c10d_post would give. Null if it is over.
constexpr uint64_t kReceived = 1ull << 32;
C10D_API int c10d_message(c10d_handle*, uint64_t kind, int32_t peer, int64_t tag, void* data, uint64_t count,
                          int64_t timeout_ns, int64_t wait_ns, c10d_ticket** ticket);

C10D_API int c10d_ticket_source(c10d_ticket*);       // rank a message came from, -1 unknown
C10D_API uint64_t c10d_ticket_number(c10d_ticket*);  // a collective's sequence number; 0: a message
C10D_API int c10d_test(c10d_ticket*);                // Status; kPending while under way
// kPending after timeout_ns. may_run: the calling thread may run queued collectives itself, and then
// returns once they are over.
C10D_API int c10d_wait(c10d_handle*, c10d_ticket*, int64_t timeout_ns, int may_run, c10d_custom::Failure*);
// The same, where it is enough to know that it failed; c10d_wait then tells why.
C10D_API int c10d_settle(c10d_handle*, c10d_ticket*, int64_t timeout_ns, int may_run);
// Asks for `token` (not 0) to come out of next_completed when the ticket is done: kPending. Any other
// status: it is done, perhaps by this thread just now, and the token will not come.
C10D_API int c10d_watch(c10d_handle*, c10d_ticket*, uint64_t token);
// Takes a message back: once this returns, it is over, and nothing touches its bytes. The peer is told. kAborted: some
// of them had moved, and the group is aborted for it.
C10D_API int c10d_withdraw(c10d_handle*, c10d_ticket*);
C10D_API void c10d_release(c10d_ticket*);  // the caller's reference; any time
// Blocks until a watched ticket is done; kAborted once the group closes.
C10D_API int c10d_next_completed(c10d_handle*, int64_t timeout_ns, uint64_t* token);

C10D_API int c10d_peer_state(c10d_handle*, uint32_t rank, uint64_t seq, c10d_custom::PeerState*);
// 1 if a rank's process is stopped (SIGSTOP, a debugger).
C10D_API int c10d_peer_stopped(c10d_handle*, uint32_t rank);
// The sizes that a rank gave for its last call but at most one, if that was `seq` and its count kNever: bytes for
// (or from) each rank, `ranks` inputs and then as many outputs. Valid until this rank enters its next call.
C10D_API int c10d_peer_sizes(c10d_handle*, uint32_t rank, uint64_t seq, uint64_t* sizes);
// A word of this rank's that the others see in PeerState, also once it has left, until it closes.
C10D_API void c10d_set_mark(c10d_handle*, uint32_t mark);
// How many monitored barriers a rank has entered: this one says so, or any rank of the group is asked.
C10D_API void c10d_enter_monitored_barrier(c10d_handle*, uint32_t number);
C10D_API uint32_t c10d_monitored_barriers(c10d_handle*, uint32_t rank);
// Keeps the last `calls` collectives, and as many messages; asked for once, before the first call.
C10D_API void c10d_keep_trace(c10d_handle*, uint32_t calls);
// How many threads share the copies and reductions of a large collective, the one that runs it among them: 1, unless
// asked for before the first call. 0: as many as this rank has idle cores for, up to 4 (team_size.h).
C10D_API void c10d_set_threads(c10d_handle*, uint32_t threads);
// What is kept, under way and queued: collectives, then messages, each in order. Writes the last `room` of
// them, and returns how many there are (0 once the group is closed).
C10D_API uint64_t c10d_trace(c10d_handle*, c10d_custom::TraceRecord* out, uint64_t room);
// For a caller whose collectives go beyond this group. poison: the group is of no more use, why, and who found out
// (ranks, or what the caller takes for ranks of others); health: kOk, kBroken (and why), or kPeerLost (the first rank
// found dead; one that has left is not); for the collective `number`, to which a disagreement about a later one is
// nothing; kNever: for whatever comes.
C10D_API void c10d_poison(c10d_handle*, int32_t cause, int32_t peer, int32_t by, uint64_t number);
C10D_API int c10d_health(c10d_handle*, uint64_t number, c10d_custom::Failure*);
// `elsewhere(context)` is called often while a collective of this group waits: for what makes progress
// outside it only when asked.
C10D_API void c10d_set_elsewhere(c10d_handle*, void (*elsewhere)(void*), void* context);
// Lets `token` come out of next_completed.
C10D_API void c10d_complete(c10d_handle*, uint64_t token);
// The call slots (hosts/call_slots.h): `ranks` + 1 of the geometry's size, zeros at first. Valid until the group is
// closed.
C10D_API void* c10d_call_slots(c10d_handle*);
// A block of so many bytes of this rank's arena, page-aligned, whatever its contents: collectives whose inputs lie in
// blocks on all ranks read and write them there. Null, and *error: errno, or -Status. `kept`: only of memory that
// blocks have left which were given back; ENODATA where there is none. It is the caller's until c10d_give_back, any
// time, also once the group is closed; in a forked child a copy, made page by page as it is written to. ENOTSUP: this
// process gets none, for want of addresses; ECANCELED: `interrupted` said so meanwhile.
C10D_API void* c10d_take(c10d_handle*, uint64_t bytes, int kept, c10d_arena** arena, int* error);
C10D_API void c10d_give_back(c10d_arena*, void* block);
// Windows (window.h). c10d_place: 1 + where so many bytes lie in this rank's arena; 0: elsewhere, or this process
// cannot reach into the others' arenas. c10d_clear_signals: makes the signals to a rank, which it does before the
// others open the window; returns their bytes, also with null.
C10D_API uint64_t c10d_place(c10d_handle*, const void* p, uint64_t bytes);
C10D_API uint64_t c10d_clear_signals(void* at, uint32_t ranks);
// parts: one of each rank, alike on all. Null where one makes no sense, or the group is closed. The window may outlive
// the group's close, not its handle's; calls on it are then kAborted. Its waits end as those of collectives do, but for
// kTimeout, with which the group goes on.
C10D_API c10d_window* c10d_window_open(c10d_handle*, const c10d_custom::WindowPart* parts);
C10D_API void c10d_window_free(c10d_window*);
// kUsage, with nothing done: no such rank, another dtype than that of its part, or it would go beyond it.
C10D_API int c10d_window_put(c10d_window*, uint32_t peer, uint32_t dtype, const void* from, uint64_t count,
                             uint64_t offset);
C10D_API int c10d_window_signal(c10d_window*, uint32_t peer);
// Waits for one signal of that rank. The same in steps, for a wait that goes on elsewhere: takes the number of the next
// one that nobody waits for (0: no such rank); waits for it; gives the number back after a failure.
C10D_API int c10d_window_wait(c10d_window*, uint32_t peer, int64_t timeout_ns);
C10D_API uint64_t c10d_window_claim(c10d_window*, uint32_t peer);
C10D_API int c10d_window_await(c10d_window*, uint32_t peer, uint64_t number, int64_t timeout_ns);
C10D_API void c10d_window_give_back(c10d_window*, uint32_t peer, uint64_t number);
// Maps so many bytes of a rank's arena, for as long as the caller likes. Null, and *error: errno, or -Status.
C10D_API void* c10d_map(c10d_handle*, uint32_t rank, uint64_t place, uint64_t bytes, int* error);
C10D_API void c10d_unmap(void* mapped, uint64_t bytes);
// The rank whose message with this tag has been here longest without a receive; -1 if there is none.
C10D_API int c10d_probe(c10d_handle*, int64_t tag);
// reduce.h's kernel: dst = src[0] op src[1] op ...; kUsage where the pair has no meaning.
C10D_API int c10d_reduce(uint32_t dtype, uint32_t redop, void* dst, const void* const* src, uint32_t nsrc,
                         uint64_t count, const double* factor);
// Which build of the kernels this processor gets: "x86-64-v4", "x86-64-v3" or "baseline".
C10D_API const char* c10d_reduce_variant();
C10D_API int c10d_abi_version();
