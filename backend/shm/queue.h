// Tickets, and the order of a group's collectives.
//
// Collectives run in the order they were issued, one at a time: in the caller's thread when nothing
// is under way (run), else in a worker thread (crew.h), which the group has while there is something to do, or in a
// thread that waits for one before the worker has come to it. Waking the worker takes longer than many a collective: it
// is woken for large ones and for those that somebody is to be told of (watch). Small ones it leaves for a moment to
// who issued them: once a small one is the next, its input is announced, and the other ranks need no more of this one.
//
// The time-out of each runs from its turn: what waits behind others is no later for it. Nothing waits for ever, since
// the first that fails ends the group, and with it all behind.
#pragma once
#include <deque>
#include <mutex>
#include <vector>

#include "condition.h"
#include "group.h"
#include "trace.h"

namespace c10d_custom {

// Tokens of watched tickets that are done, for the thread that completes futures.
class CompletionQueue {
 public:
  void push(uint64_t token);
  Status pop(int64_t timeout_ns, uint64_t* token);
  void close();

 private:
  std::mutex mutex_;
  Condition changed_;
  std::deque<uint64_t> done_;
  bool closed_ = false;
};

// One asynchronous operation, owned by whoever runs it and by the caller until c10d_release.
class Ticket {
 public:
  explicit Ticket(int64_t started_) : started(started_) {}

  // Status, or kPending.
  Status state() const { return Status(status_.load(std::memory_order_acquire)); }
  // kPending after timeout_ns.
  Status wait(int64_t timeout_ns);
  void finish(Status, const Failure&, CompletionQueue&);
  Status watch(uint64_t token);
  void drop() {
    if (owners_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

  const int64_t started;
  bool message = false;     // of the Messenger, else of the CollectiveQueue
  void* request = nullptr;  // the Messenger's own, until done; it alone looks at it
  uint64_t seq = 0;
  int32_t source = -1;  // valid once done
  Failure failure{};    // valid once done and not kOk

 private:
  std::atomic<uint32_t> status_{kPending};
  std::atomic<uint32_t> sleepers_{0};  // on status_
  std::atomic<uint32_t> owners_{2};
  std::atomic<uint64_t> token_{0};  // taken out by whoever hands it on: finish() or watch()
};

class CollectiveQueue {
 public:
  explicit CollectiveQueue(Group& g) : g_(g) {}
  ~CollectiveQueue();

  Status run(const CallArgs&, Failure*);
  Ticket* submit(const CallArgs&);
  // kPending after timeout_ns. may_run: the calling thread may run what is queued meanwhile, and then
  // returns when that is over, however long it takes.
  Status wait(Ticket*, int64_t timeout_ns, bool may_run);
  // Has `completed` told of `token` once the collective is over. Its caller may never wait for it; so if the collective
  // is small and its peers have come, or nearly, the calling thread carries it out before this returns.
  Status watch(Ticket*, uint64_t token);
  uint64_t next_seq();
  void keep_trace(uint32_t calls);
  void trace(std::vector<TraceRecord>& out);
  // Returns once everything issued has ended, as it soon does when the group has aborted or left.
  void drain();
  CompletionQueue completed;

 private:
  struct Job {
    CallArgs args;
    std::vector<Span> spans;
    Ticket* ticket;
    bool small, announced;
  };
  // Whether the worker is to be woken for the next: the group ends, or somebody is to be told of its end (watch).
  bool urgent() const { return !jobs_.empty() && (closing_ || jobs_.front().ticket->seq <= urgent_); }
  void tell_after_a_call();
  void announce_next();
  // Whether the next is small, and nobody would wait in it.
  bool next_is_ready() const;
  Ticket* enqueue(const CallArgs&, std::unique_lock<std::mutex>&);
  void run_next(std::unique_lock<std::mutex>&);
  // Runs what is queued, up to a ticket, as long as hardly anybody has to be waited for.
  void run_ready(Ticket*);
  void work();

  Group& g_;
  std::mutex mutex_;
  Condition changed_;
  std::deque<Job> jobs_;
  TraceRing trace_;      // of what has begun
  uint64_t seq_ = 0;     // of the last collective issued
  uint64_t urgent_ = 0;  // up to that one, the worker is to run them at once
  int64_t last_submit_ = 0;
  int64_t looks_until_ = 0;  // the worker, without being told, for a small one
  bool has_worker_ = false, worker_sleeps_ = false;
  bool busy_ = false;  // some thread is carrying out a collective
  bool closing_ = false;
};

}  // namespace c10d_custom
