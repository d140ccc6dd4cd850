#include "queue.h"

#include <algorithm>
#include <chrono>

namespace c10d_custom {

Status Ticket::wait(int64_t timeout_ns) {
  const int64_t until = deadline_after(now_ns(), timeout_ns);
  for (int i = 0; i < 200; ++i) {
    if (state() != kPending) return state();
    cpu_relax();
  }
  while (state() == kPending) {
    const int64_t left = until - now_ns();
    if (left <= 0) return kPending;
    futex_wait(&status_, kPending, left);
  }
  return state();
}

void Ticket::finish(Status st, const Failure& f, CompletionQueue& completed) {
  failure = f;
  status_.store(uint32_t(st), std::memory_order_seq_cst);
  futex_wake_all(&status_);
  if (const uint64_t token = token_.exchange(0, std::memory_order_seq_cst)) completed.push(token);
}

Status Ticket::watch(uint64_t token) {
  token_.store(token, std::memory_order_seq_cst);
  const Status st = Status(status_.load(std::memory_order_seq_cst));
  if (st == kPending || token_.exchange(0, std::memory_order_seq_cst) == 0) return kPending;
  return st;
}

void CompletionQueue::push(uint64_t token) {
  std::lock_guard<std::mutex> hold(mutex_);
  done_.push_back(token);
  changed_.notify_one();
}

Status CompletionQueue::pop(int64_t timeout_ns, uint64_t* token) {
  std::unique_lock<std::mutex> hold(mutex_);
  const auto until = std::chrono::steady_clock::now() + std::chrono::nanoseconds(timeout_ns);
  while (done_.empty()) {
    if (closed_) return kAborted;
    if (changed_.wait_until(hold, until) == std::cv_status::timeout && done_.empty()) return kPending;
  }
  *token = done_.front();
  done_.pop_front();
  return kOk;
}

void CompletionQueue::close() {
  std::lock_guard<std::mutex> hold(mutex_);
  closed_ = true;
  changed_.notify_all();
}

CollectiveQueue::~CollectiveQueue() {
  {
    std::lock_guard<std::mutex> hold(mutex_);
    closing_ = true;
    changed_.notify_all();
  }
  if (worker_.joinable()) worker_.join();
}

void CollectiveQueue::drain() {
  std::unique_lock<std::mutex> hold(mutex_);
  changed_.wait(hold, [&] { return !busy_ && jobs_.empty(); });
  completed.close();
}

uint64_t CollectiveQueue::next_seq() {
  std::lock_guard<std::mutex> hold(mutex_);
  return seq_ + 1;
}

void CollectiveQueue::keep_trace(uint32_t calls) {
  std::lock_guard<std::mutex> hold(mutex_);
  trace_.keep(calls);
}

void CollectiveQueue::trace(std::vector<TraceRecord>& out) {
  std::lock_guard<std::mutex> hold(mutex_);
  trace_.read(out);
  for (const Job& job : jobs_) {
    CallArgs a = job.args;
    a.in = job.spans.data(), a.out = a.in + a.nin;
    out.push_back(trace_record(a, job.ticket->seq, job.ticket->started, 0));
  }
}

uint64_t CollectiveQueue::overdue() {
  const int64_t now = now_ns();
  if (now < due_.load(std::memory_order_relaxed)) return 0;
  std::lock_guard<std::mutex> hold(mutex_);
  int64_t due = INT64_MAX;
  uint64_t first = 0;
  for (const Job& job : jobs_) {
    due = std::min(due, job.deadline);
    if (!first && now >= job.deadline) first = job.args.number ? job.args.number : job.ticket->seq;
  }
  due_.store(due, std::memory_order_relaxed);
  return first;
}

Status CollectiveQueue::run(const CallArgs& args, Failure* failure) {
  std::unique_lock<std::mutex> hold(mutex_);
  if (busy_ || !jobs_.empty()) {
    Ticket* t = enqueue(args, hold);
    hold.unlock();
    Status st;
    bool interrupted = false;
    while ((st = wait(t, interrupted ? INT64_MAX : kPollInterrupt, true)) == kPending)
      if (g_.interrupted && main_thread() && g_.interrupted()) {
        interrupted = true;
        g_.abort();  // ends it: the caller's buffers must not be touched after we return
      }
    if (st != kOk) *failure = t->failure;
    if (interrupted) failure->status = st = kInterrupted;
    t->drop();
    return st;
  }
  busy_ = true;
  const uint64_t seq = ++seq_;
  const int64_t now = now_ns();
  TraceRecord* record = trace_.begin(trace_record(args, seq, now, now));
  hold.unlock();
  const Status st = execute(g_, seq, args, now, failure);
  hold.lock();
  TraceRing::end(record, st);
  busy_ = false;
  if (!jobs_.empty() || g_.aborted()) changed_.notify_all();
  return st;
}

Ticket* CollectiveQueue::submit(const CallArgs& args) {
  std::unique_lock<std::mutex> hold(mutex_);
  return enqueue(args, hold);
}

Ticket* CollectiveQueue::enqueue(const CallArgs& args, std::unique_lock<std::mutex>&) {
  auto* t = new Ticket(now_ns());
  t->seq = ++seq_;
  Job job{args, {}, t, deadline_after(t->started, args.timeout_ns)};
  job.spans.assign(args.in, args.in + args.nin);
  job.spans.insert(job.spans.end(), args.out, args.out + args.nout);
  due_.store(std::min(due_.load(std::memory_order_relaxed), job.deadline), std::memory_order_relaxed);
  jobs_.push_back(std::move(job));
  if (const int error = worker_.joinable() ? 0 : start_thread(worker_, [this] { work(); })) {
    jobs_.pop_back();
    Failure f{};
    f.status = kExhausted, f.peer = f.by = -1, f.call = f.seq = t->seq, f.actual = uint64_t(error);
    g_.poison(kExhausted, int32_t(g_.rank), t->seq);  // the others would wait for us
    t->finish(kExhausted, f, completed);
    t->drop();
    return t;
  }
  changed_.notify_all();
  return t;
}

Status CollectiveQueue::wait(Ticket* t, int64_t timeout_ns, bool may_run) {
  if (may_run && t->state() == kPending) {
    std::unique_lock<std::mutex> hold(mutex_);
    while (t->state() == kPending && !busy_ && !jobs_.empty()) run_next(hold);
  }
  return t->wait(timeout_ns);
}

void CollectiveQueue::run_next(std::unique_lock<std::mutex>& hold) {
  Job job = std::move(jobs_.front());
  jobs_.pop_front();
  busy_ = true;
  job.args.in = job.spans.data();
  job.args.out = job.spans.data() + job.args.nin;
  TraceRecord* record = trace_.begin(trace_record(job.args, job.ticket->seq, job.ticket->started, now_ns()));
  hold.unlock();
  Failure failure{};
  const Status st = execute(g_, job.ticket->seq, job.args, job.ticket->started, &failure);
  hold.lock();
  TraceRing::end(record, st);  // before anyone can report the failure
  job.ticket->finish(st, failure, completed);
  job.ticket->drop();
  busy_ = false;
  if (!jobs_.empty() || g_.aborted()) changed_.notify_all();
}

void CollectiveQueue::work() {
  std::unique_lock<std::mutex> hold(mutex_);
  for (;;) {
    changed_.wait(hold, [&] { return !busy_ && (closing_ || !jobs_.empty()); });
    if (jobs_.empty()) return;  // closing
    run_next(hold);
  }
}

}  // namespace c10d_custom
